"""NaCl: the units that proxy tokens attend to, and a random share of the others (arXiv:2408.03675)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locret_stream.kernels import order_keys
from locret_stream.policies.base import Chunk, Policy
from locret_stream.policies.noise import gumbel

ABOVE = 2.0**22  # all scores with their noise; numbers above it are exact in float32


class NaCl(Policy):
    """Of the units that compete in a layer, C_p stay by score and C_r at random, drawn anew in every head and layer.

    The score of a unit is the softmax attention that the proxy tokens pay to it, summed over them (section 5.1); the
    proxies themselves stay. The random ones are drawn without replacement from softmax(score) of the others (section
    5.2): they are the largest of score + Gumbel noise, a function of (seed, layer, head, position, grid point).

    Args:
        proxies: share of a chunk's tokens that are proxies, one at least (the paper suggests about a tenth of the
            input). If all are, none stays for that: on one chunk, with random=0, that is H2O.
        where: "end" takes the last tokens of a chunk, "both" takes one half of them from its beginning.
        random: C_r / (C_p + C_r); the paper's table divides 12 to 7.
        draw: "fresh" draws anew at every grid point; "reservoir" draws once per unit, so that a unit leaves only for
            units with larger draws (a weighted reservoir).
        lots: "head" draws for every head (the paper), "layer" draws once for all heads of a layer, for comparison.
        chances: the random ones are drawn by "score", or "uniform", all alike (the paper's table 3).
        seed: of the draws.

    Deviations: an input is a chunk, so there is one eviction per grid point, answers included, in place of one for a
    prompt; query heads that share a key share their score (the mean). The proxies take places of the C_p, where
    the paper's algorithm 1 keeps them in addition, because the budget is fixed: with as many proxies as places no other
    unit stays by score, with more of them only the newest stay. So proxies * chunk_size should be well below C_p,
    which is 1 - random of the units that compete.
    With "fresh" a unit that the proxies do not attend to survives every grid point by chance alone, so that its chance
    falls geometrically with the length of the stream: "reservoir" is meant for streams.
    """

    name = "nacl"
    needs = frozenset({"column_sums", "positions"})
    stateful = True

    def __init__(self, proxies: float = 0.1, where: str = "end", random: float = 0.37, draw: str = "fresh",
                 lots: str = "head", chances: str = "score", seed: int = 0):
        self.check_knob(0 <= proxies <= 1, "proxies", proxies, "a share of the chunk in [0, 1]")
        self.check_knob(0 <= random <= 1, "random", random, "a share of the budget in [0, 1]")
        self.check_knob(where in ("end", "both"), "where", where, "'end' or 'both'")
        self.check_knob(draw in ("fresh", "reservoir"), "draw", draw, "'fresh' or 'reservoir'")
        self.check_knob(lots in ("head", "layer"), "lots", lots, "'head' or 'layer'")
        self.proxies, self.where, self.random, self.draw, self.seed = proxies, where, random, draw, seed
        self.check_knob(chances in ("score", "uniform"), "chances", chances, "'score' or 'uniform'")
        self.alike, self.uniform = lots == "layer", chances == "uniform"

    def _rows(self, new: int, device: torch.device) -> Tensor:
        """Indices in the chunk of the proxies, [R]."""
        count = max(1, round(self.proxies * new))
        first = count // 2 if self.where == "both" else 0
        rows = torch.arange(new, device=device)
        return torch.cat([rows[:first], rows[new - (count - first):]])

    def score(self, chunk: Chunk) -> Tensor:
        assert chunk.column_sums is not None and chunk.positions is not None, "declared in needs"
        rows = self._rows(chunk.k.shape[1], chunk.k.device)
        scores = chunk.column_sums(rows) / (chunk.q.shape[0] // chunk.k.shape[0])
        total = scores.shape[1]
        if total <= chunk.budget:
            return scores
        free = chunk.budget - chunk.sinks - chunk.stabilizers
        by_score = free - int(free * self.random)
        new = chunk.k.shape[1]
        keys = order_keys(scores if len(rows) == new > 1 else scores.index_fill(1, total - new + rows, math.inf))
        for protected in (slice(chunk.sinks), slice(total - chunk.stabilizers, total)):
            keys[:, protected] = torch.iinfo(keys.dtype).min  # protected units stay without a place among the C_p
        # Above all others, and among themselves in order, for copies that keep less (`Engine.thin`).
        places = torch.arange(by_score, 0, -1, dtype=torch.float32, device=scores.device) + ABOVE
        best = keys.topk(by_score, dim=1).indices
        step = chunk.start if self.draw == "fresh" else None
        noise = gumbel(self.seed, chunk.layer, chunk.positions, step, self.alike)
        drawn = noise if self.uniform else scores + noise
        return drawn.scatter_(1, best, places.expand(len(best), -1))
