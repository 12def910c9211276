"""What a trace of the units that are dropped buys: facts that are answered from the same bytes, with and without one.

A commit keeps the best b units per KV head. Here those that it drops leave a trace in those that stay: their values are
merged into the most similar kept key, or attention is matched (arXiv:2602.16284): a bias per kept unit, so that the
kept units have the attention of all, and new values, so that its output stays, both in closed form from the queries of
the chunk. The bias is added to logits from then on, and a commit goes on from what the one before left.

SmolLM2 with its heads in fp32, `--facts` facts in sentences among the lines of a text of `--tokens` tokens, each begun
again behind the memory and its value told: how likely are its tokens, and those of the stream, and how far attention of
the chunk's queries is from that to all units. With `--task marks` the model of the marker tasks. Each way is paired,
question by question, with plain units in as many bytes (bf16, as `host_tier.py` counts): 4 more a unit for a bias or a
weight.

    python benchmarks/merging.py --facts 48 --asked 48 --whole --keep merging_256
    python benchmarks/merging.py --task marks --facts 48 --asked 48 --chunk 128 --units 40 --keep merging_marks
    python benchmarks/merging.py --check
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from host_tier import facts
from record import record
from torch import Tensor

from locret_stream.cache import Pool, UnitStore
from locret_stream.config import Budget, StreamConfig, unit_bytes
from locret_stream.engine import Engine
from locret_stream.engine.attention import Attention
from locret_stream.engine.scorer import Scorer
from locret_stream.engine.state import EngineState
from locret_stream.evaluation import chat, markers, metrics
from locret_stream.evaluation.haystack import stdlib_lines
from locret_stream.heads import RetainingHeads
from locret_stream.models import Attachment, Attended, LayerCall, RopeTables, attach
from locret_stream.named_models import model_path, named_model
from locret_stream.policies import make_policy
from locret_stream.runtime.loading import load_model, load_tokenizer

MARKS = Path(__file__).resolve().parents[1] / "research" / "models" / "recall"
BIAS_BYTES, LEAST, MOST = 4, 0.05, 20.0  # of a unit; how far one commit may change the weight of a unit


@dataclass(frozen=True, slots=True)
class Way:
    """How dropped units leave a trace.

    Attributes:
        merge: the rule by which values go into the kept unit with the most similar key, of `MERGES`; None: none do.
        bias, values: whether attention is matched by a bias per unit, and by new values.
        ridge: what holds biases and values where they are, in parts of the mean eigenvalue of what is solved.
        old: what holds values: their old ones, or 0, as in the paper.
        lowest: the share of the kept units, those with the lowest scores, that may change; None: all but the sinks.
        ranks: of dropped units in what is matched: "own", as before the eviction; "moved", as of the kept unit before.
        reservoir: queries of older tokens, drawn evenly, that are matched, too; what they take is not counted.
        half: match the even queries of a chunk alone, and tell the error of the odd ones.
        convolution: instead of a rule, what merges keys and values, as `lococo.Convolutions.merged`.
    """

    merge: str | None = None
    bias: bool = False
    values: bool = False
    ridge: float = 0.01
    old: bool = True
    lowest: float | None = None
    ranks: str = "own"
    reservoir: int = 0
    half: bool = False
    convolution: Callable[[int, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def extra_bytes(self) -> int:
        """Of a unit, beside those of a plain one."""
        return BIAS_BYTES if self.bias or self.merge in WEIGHTED else 0


MERGES = "mean", "mean + bias", "attention", "norms", "D2O", "CaM"
WEIGHTED = "mean", "mean + bias", "attention"
WAYS: dict[str, Way] = {
    "plain": Way(),
    "merge, mean": Way("mean"),
    "merge, mean + bias": Way("mean + bias"),
    "merge, by attention": Way("attention"),
    "merge, by norms": Way("norms"),
    "merge, D2O": Way("D2O"),
    "merge, CaM": Way("CaM"),
    "merge, mean into the lowest": Way("mean", lowest=0.125),
    "merge, by norms into the lowest": Way("norms", lowest=0.125),
    **{f"match, {name}, ridge {ridge:g}": Way(bias="bias" in name, values="values" in name, ridge=ridge)
       for name in ("bias", "values", "bias + values") for ridge in (0.01, 1.0, 10.0, 100.0)},
    **{f"match, bias + values, moved, ridge {ridge:g}": Way(bias=True, values=True, ranks="moved", ridge=ridge)
       for ridge in (1.0, 100.0)},
    "match, bias + values, as the paper": Way(bias=True, values=True, ridge=1e-6, old=False),
    **{f"match, {name} of the lowest, ridge {ridge:g}": Way(bias="bias" in name, values=True, lowest=0.125, ridge=ridge)
       for name in ("values", "bias + values") for ridge in (0.01, 1.0)},
    "match, bias + values, with older queries, ridge 1": Way(bias=True, values=True, reservoir=256, ridge=1.0),
}


class Errors(NamedTuple):
    """Of attention at one commit in one layer: |output - output of all units| / |that|, and the mean of |log of the
    mass of the kept units / that of all|; of plain eviction, and with the trace."""

    plain: float
    traced: float
    plain_mass: float
    traced_mass: float


class TracingStore(UnitStore):
    """A slot whose commits leave a trace of what they drop.

    Attributes:
        bias: of each layer, added to the logits of units, [H, C] fp32; None: nothing was dropped yet.
        weights: of each layer, how many units were merged into one, [H, C].
        seen: of each layer, queries [H*G, T, D] of the newest chunk before RoPE, and the scale of logits.
        older: of each layer, those that are matched, too.
    """

    def __init__(self, pool: Pool, slot: int, way: Way, tables: RopeTables, sinks: int):
        super().__init__(pool, slot)
        self.way, self.tables, self.sinks = way, tables, sinks
        layers = range(len(pool.layers))
        self.bias: list[Tensor | None] = [None for _ in layers]
        self.weights = [torch.ones(layer.keys.shape[1:3]) for layer in pool.layers]
        self.seen: list[tuple[Tensor, float] | None] = [None for _ in layers]
        self.older: list[Tensor | None] = [None for _ in layers]
        self.least_similar: list[Tensor | None] = [None for _ in layers]  # D2O's threshold, [H]
        self.drawn = torch.Generator().manual_seed(0)
        self.read = 0
        self.errors: list[list[Errors]] = [[] for _ in layers]

    def commit(self, layer: int, first_position: int, new: int, scores: Tensor, keep: Tensor | None,
               rotate: Any) -> None:
        self.read = first_position + new
        if keep is not None and self.way != WAYS["plain"]:
            self._trace(layer, self.counts[layer] + new, scores[0], keep)
        super().commit(layer, first_position, new, scores, keep, rotate)

    def _trace(self, layer: int, total: int, scores: Tensor, keep: Tensor) -> None:
        """Change the units that stay, [H, B] ranks, before they move to the front."""
        way, buffers = self.way, self.pool.layers[layer]
        keys, values = buffers.keys[self.slot, :, :total], buffers.values[self.slot, :, :total]
        old, room = self.bias[layer], buffers.keys.shape[2]
        bias = torch.zeros(keys.shape[:2]) if old is None else old[:, :total]
        reference = _Reference(self, layer, keys, values, bias, keep)
        may = torch.ones_like(keep, dtype=torch.bool)
        may[:, :self.sinks] = False
        if way.lowest is not None:
            of_kept = scores.gather(1, keep).masked_fill(~may, float("inf"))
            least = of_kept.topk(max(1, int(way.lowest * keep.shape[1])), largest=False).indices
            may = torch.zeros_like(may).scatter_(1, least, True)
        new_keys, new_values, new_bias = (taken(x, keep) for x in (keys, values, bias))
        if way.merge is not None:
            new_keys, new_values, new_bias = self._merged(layer, keys, values, keep, may, reference)
        if way.convolution is not None:
            new_keys, new_values = way.convolution(layer, keys, values, scores, keep)
        if way.bias or way.values:
            new_values, new_bias = reference.matched(way, may)
        self.errors[layer].append(reference.errors(new_values, new_bias))
        self.bias[layer] = torch.zeros(len(keys), room)
        self.bias[layer][:, :keep.shape[1]] = new_bias  # type: ignore[index]
        at = keep[..., None].expand(-1, -1, keys.shape[-1])
        keys.scatter_(1, at, new_keys)
        values.scatter_(1, at, new_values)
        self._sample(layer)

    def _sample(self, layer: int) -> None:
        """Let the newest queries replace older ones, so that those of all tokens are as likely to be there."""
        found, room = self.seen[layer], self.way.reservoir
        if found is None or not room:
            return
        held, queries = self.older[layer], found[0]
        if held is None or held.shape[1] < room:
            self.older[layer] = queries[:, -room:].clone()
            return
        chosen = torch.rand(queries.shape[1], generator=self.drawn) < room / self.read
        at = torch.randperm(room, generator=self.drawn)[:int(chosen.sum())]
        held[:, at] = queries[:, chosen][:, :len(at)]

    def _merged(self, layer: int, keys: Tensor, values: Tensor, keep: Tensor, may: Tensor, reference: _Reference
                ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and biases of the kept units, with those that are dropped merged into them."""
        rule, weights = self.way.merge, self.weights[layer]
        total, units = keys.shape[1], keep.shape[1]
        gone = torch.ones(keys.shape[:2], dtype=torch.bool).scatter_(1, keep, False)
        drop = gone.nonzero()[:, 1].view(len(keys), total - units)
        k, v, bias = taken(keys, keep), taken(values, keep), taken(reference.bias, keep)
        k_gone, v_gone = taken(keys, drop), taken(values, drop)
        unit = torch.nn.functional.normalize
        similar = unit(k_gone, dim=-1) @ unit(k, dim=-1).mT
        best, into = similar.masked_fill(~may[:, None], -2.0).max(-1)

        def summed(of_gone: Tensor) -> Tensor:
            """[H, dropped, ...] -> [H, B, ...], by the unit that each goes into."""
            shape = (*keep.shape, *of_gone.shape[2:])
            at = into if of_gone.dim() == 2 else into[..., None].expand_as(of_gone)
            return of_gone.new_zeros(shape).scatter_add_(1, at, of_gone)

        if rule in ("mean", "mean + bias"):
            have, more = weights[:, :total].gather(1, keep), weights[:, :total].gather(1, drop)
            whole = have + summed(more)
            v = (have[..., None] * v + summed(more[..., None] * v_gone)) / whole[..., None]
            weights.fill_(1.0)
            weights[:, :units] = whole
            return k, v, whole.log() if rule == "mean + bias" else bias
        if rule == "attention":
            mass = reference.received()
            have, more = mass.gather(1, keep), mass.gather(1, drop)
            whole = have + summed(more)
            v = (have[..., None] * v + summed(more[..., None] * v_gone)) / whole[..., None]
            return k, v, bias + (whole / have).clamp(max=MOST).log()
        if rule == "norms":  # as kvpress's MergingPress
            norm, norm_gone = v.norm(dim=-1), v_gone.norm(dim=-1)
            more = best.clamp(min=0) * norm_gone / (norm_gone + norm.gather(1, into) + 1e-6)
            return k, (v + summed(more[..., None] * v_gone)) / (1 + summed(more))[..., None], bias
        if rule == "D2O":  # arXiv:2406.13035: those that are similar enough alone, by exp(similarity), keys as well
            mean, before = best.mean(1), self.least_similar[layer]
            least = mean if before is None else 0.7 * mean + 0.3 * before
            self.least_similar[layer] = least
            more = best.exp() * (best >= least[:, None])
            share = torch.e + summed(more)
            return ((torch.e * k + summed(more[..., None] * k_gone)) / share[..., None],
                    (torch.e * v + summed(more[..., None] * v_gone)) / share[..., None], bias)
        assert rule == "CaM"  # ICML 2024: as likely as it is attended to, evenly into the kept units behind it
        mass, m = reference.received(), 8
        behind = torch.searchsorted(keep, drop)[..., None] + torch.arange(m)
        behind = behind.clamp(max=units - 1)
        likely = mass.gather(1, drop) / mass.gather(1, keep).gather(1, behind.flatten(1)).view(behind.shape).mean(-1)
        chosen = torch.rand(likely.shape, generator=self.drawn) < likely
        share, more = torch.ones_like(v[..., 0]), torch.zeros_like(v)
        for nth in range(m):
            into = behind[..., nth]
            part = (chosen & may.gather(1, into)).float() / m
            share, more = share + summed(part), more + summed(part[..., None] * v_gone)
        return k, (v + more) / share[..., None], bias  # a mean, as the paper's sum grows with every commit


class _Reference:
    """Attention of the newest queries, as if they came next, to all units of a layer and to the kept ones.

    Attributes:
        whole: logits of all units, [H, R, N]; kept: of those that stay, at the ranks that they move to, [H, R, B];
            lse: of `whole`, [H, R, 1]; target: the output of attention to all, [H, R, D]. R are T queries of G heads.
        shown: which of the queries are matched.
    """

    def __init__(self, store: TracingStore, layer: int, keys: Tensor, values: Tensor, bias: Tensor, keep: Tensor):
        found = store.seen[layer]
        assert found is not None, "a forward comes before its commit"
        queries, scale = found
        older = store.older[layer]
        own = queries.shape[1]
        if older is not None:
            queries = torch.cat([queries, older], dim=1)
        (heads, total, dim), units, tables = keys.shape, keep.shape[1], store.tables
        self.bias, self.values, self.keep = bias, taken(values, keep), keep
        count = queries.shape[1]

        def logits(first: int, turned: Tensor) -> Tensor:
            ranks = first + torch.arange(count) % own
            q = tables.rotate_at(layer, queries[None], ranks.expand(1, len(queries), -1))[0]
            return scale * (q.reshape(heads, -1, dim) @ turned.mT)

        if store.way.ranks == "moved":
            stays = torch.zeros(keys.shape[:2], dtype=torch.int64).scatter_(1, keep, 1)
            ranks = (stays.cumsum(1) - 1).clamp(min=0)
            self.whole = logits(units, tables.rotate_at(layer, keys[None], ranks[None])[0]) + bias[:, None]
            self.kept = self.whole.gather(2, keep[:, None].expand(-1, self.whole.shape[1], -1))
        else:
            self.whole = logits(total, tables.rotate(layer, keys[None], 0)[0]) + bias[:, None]
            self.kept = logits(units, tables.rotate(layer, taken(keys, keep)[None], 0)[0])
            self.kept += taken(bias, keep)[:, None]
        self.lse = self.whole.logsumexp(-1, keepdim=True)
        self.target = (self.whole - self.lse).exp() @ values
        even = (torch.arange(count) % 2 == 0).repeat(self.whole.shape[1] // count)
        self.shown = even if store.way.half else torch.ones_like(even)
        self.held_out = ~even if store.way.half else self.shown

    def received(self) -> Tensor:
        """The mean share of attention that each unit gets, [H, N]."""
        return (self.whole - self.lse).exp().mean(1) + 1e-9

    def matched(self, way: Way, may: Tensor) -> tuple[Tensor, Tensor]:
        """Values and biases of the kept units that match attention to all. Solved in fp64."""
        kept, bias, values = self.kept[:, self.shown], taken(self.bias, self.keep), self.values
        if way.bias:
            shares = (kept - self.lse[:, self.shown]).exp().double()
            factors = torch.stack([nonnegative(each, of_head, way.ridge)
                                   for each, of_head in zip(shares, may, strict=True)])
            kept, bias = kept + factors.log().float()[:, None], bias + factors.log().float()
        if way.values:
            weights, target = kept.softmax(-1).double(), self.target[:, self.shown].double()
            start = values.double() if way.old else values.double() * ~may[..., None]
            changes = [ridged(each * of_head, gap, way.ridge) for each, of_head, gap in zip(
                weights, may, target - weights @ start, strict=True)]
            values = (start + torch.stack(changes)).float()
        return values, bias

    def errors(self, values: Tensor, bias: Tensor) -> Errors:
        rows, plain = self.held_out, self.kept[:, self.held_out]
        traced = plain + (bias - taken(self.bias, self.keep))[:, None]
        target = self.target[:, rows]

        def error(logits: Tensor, of: Tensor) -> float:
            return float((logits.softmax(-1) @ of - target).norm() / target.norm())

        def mass(logits: Tensor) -> float:
            return float((logits.logsumexp(-1, keepdim=True) - self.lse[:, rows]).abs().mean())

        return Errors(error(plain, self.values), error(traced, values), mass(plain), mass(traced))


def ridged(x: Tensor, gap: Tensor, ridge: float) -> Tensor:
    """The d that makes |x d - gap|^2 + r |d|^2 least: x [R, B], gap [R, D] -> [B, D]; r is `ridge` mean eigenvalues."""
    rows, units = x.shape
    r = ridge * x.square().sum() / units
    if rows < units:
        gram = x @ x.T
        gram.diagonal().add_(r)
        return x.T @ torch.cholesky_solve(gap, torch.linalg.cholesky(gram))
    gram = x.T @ x
    gram.diagonal().add_(r)
    return torch.cholesky_solve(x.T @ gap, torch.linalg.cholesky(gram))


def nonnegative(shares: Tensor, may: Tensor, ridge: float, rounds: int = 8) -> Tensor:
    """The factors w in `LEAST` .. `MOST` that make |shares w - 1|^2 + r |w - 1|^2 least; 1 where a unit may not change.
    shares [R, B] -> [B]. Those that would pass a bound stay there, and the others are solved again."""
    change = torch.zeros(shares.shape[1], dtype=shares.dtype)
    free, gap = may.clone(), 1 - shares.sum(1)
    r = ridge * (shares * may).square().sum() / shares.shape[1]
    gram, right = shares.T @ shares, shares.T @ gap
    for _ in range(rounds):
        at = free.nonzero()[:, 0]
        fixed = torch.where(free, 0.0, change)
        own = gram[at][:, at]
        own.diagonal().add_(r)
        found = torch.cholesky_solve((right - gram @ fixed)[at, None], torch.linalg.cholesky(own))[:, 0]
        change[at] = found.clamp(LEAST - 1, MOST - 1)
        if bool((change[at] == found).all()):
            break
        free[at[change[at] != found]] = False
    return 1 + change


def taken(x: Tensor, at: Tensor) -> Tensor:
    """x [H, N, ...] at the ranks [H, B]."""
    return x.gather(1, at if x.dim() == 2 else at[..., None].expand(-1, -1, x.shape[-1]))


class _Attention(Attention):
    """Attention that adds the biases of the store that a forward is of, and shows it the queries."""

    store: TracingStore | None = None

    def attend(self, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, position: int) -> tuple[Attended, Tensor | None]:
        assert self.store is not None, "a forward sets it"
        self.store.seen[call.layer] = call.q[0], call.scale
        bias = self.store.bias[call.layer]
        if bias is not None:
            groups, total = q.shape[1] // len(bias), k.shape[2]
            of_heads = bias[:, :total].repeat_interleave(groups, 0)
            call.bias = of_heads[None, :, None].expand(1, -1, q.shape[2], -1)
        return super().attend(call, q, k, v, position)


class TracingEngine(Engine):
    """An engine whose commits leave a trace of what they drop. It reads; it does not decode.

    Attributes:
        losses: of each commit, the mean negative log-likelihood of its tokens but the first.
    """

    def __init__(self, attachment: Attachment, config: StreamConfig, heads: RetainingHeads, own: Any, way: Way):
        super().__init__(attachment, config, make_policy("locret", {}, own), slots=1,
                         shares=heads.config.budget_shares)
        self.way, self.losses = way, list[float]()
        self.attention: _Attention = _Attention(self.layout, attachment)
        self.further = attachment.tables(max(self.budgets) + 2 * self.chunk_size)

    def open(self, slot: int) -> EngineState:
        store = TracingStore(self.pool, slot, self.way, self.further, self.config.budget.sinks)
        return EngineState(store, self.policy.begin(self.shape))

    def _forward(self, state: EngineState, ids: list[int], offset: int, scorer: Scorer | None
                 ) -> tuple[Tensor, list[Tensor]]:
        assert isinstance(state.store, TracingStore), "`open` makes no other"
        self.attention.store = state.store
        hidden, carried = super()._forward(state, ids, offset, scorer)
        if scorer is not None:
            self.losses.append(float(-self.logprobs(hidden[:, :-1], ids[1:]).mean()))
        return hidden, carried

    def logprobs(self, hidden: Tensor, ids: list[int]) -> Tensor:
        """log p of each id, the hidden state before it given."""
        of_vocab = self.attachment.logits(hidden)[0].float().log_softmax(-1)
        return of_vocab.gather(1, torch.tensor(ids)[:, None])[:, 0]

    def told(self, state: EngineState, before: list[int], value: list[int]) -> Tensor:
        """log p of the tokens of a value behind what was read and `before`; what is pending has units."""
        hidden, _ = self._forward(state, before + value, state.provisional, None)
        return self.logprobs(hidden[:, len(before) - 1:-1], value)


class Stream(NamedTuple):
    """Lines, and questions about them: ids that come before a value, and those of the value."""

    lines: Iterable[str]
    questions: list[tuple[list[int], list[int]]]


def stream(options: argparse.Namespace, seed: int, tokenizer: Any) -> Stream:
    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    def measure(text: str) -> int:
        return len(ids_of(text))

    rng = random.Random(f"merging {seed}")
    if options.task == "marks":
        case = markers.recall(rng, options.facts, asked=options.asked)
        return Stream(markers.planted(case, stdlib_lines(seed), options.tokens, measure),
                      [(ids_of(question.ask), ids_of(question.answer)) for question in case.questions])
    told = facts(rng, options.facts)
    lines = chat.in_text([[one] for one in told], rng, (line + "\n" for line in stdlib_lines(seed)), options.tokens,
                         measure)
    asked = []
    for one in told[:options.asked]:
        before, value = one.line.split(" is ")
        asked.append((ids_of(f"\n{before} is"), ids_of(" " + value.rstrip("."))))
    return Stream([line for line, _ in lines], asked)


class Found(NamedTuple):
    """Of each question the loss of a token of its value; the losses of the stream's chunks; errors by layer."""

    losses: list[float]
    text: list[float]
    errors: list[list[Errors]]


@torch.no_grad()
def measured(options: argparse.Namespace, way: Way, units: int, attachment: Attachment, tokenizer: Any,
             heads: RetainingHeads, own: Any, name: str) -> Found:
    found = Found([], [], [[] for _ in range(attachment.shape.layers)])
    for seed in range(options.first_seed, options.first_seed + options.streams):
        began, first = time.perf_counter(), len(found.losses)
        engine = made(options, way, units, attachment, heads, own)
        state = engine.open(0)
        given = stream(options, seed, tokenizer)
        for line in given.lines:
            engine.accept(state, tokenizer(line, add_special_tokens=False).input_ids)
            while engine.ready(state):
                engine.commit(state)
        read = time.perf_counter() - began
        longest = max(len(before) + len(value) for before, value in given.questions)
        if len(state.pending) + longest > engine.chunk_size:
            engine._commit(state, len(state.pending))
        if state.pending:
            engine._read(state, len(state.pending))
        found.losses.extend(-float(engine.told(state, before, value).mean()) for before, value in given.questions)
        found.text.extend(engine.losses)
        assert isinstance(state.store, TracingStore)
        for layer, errors in enumerate(state.store.errors):
            found.errors[layer].extend(errors)
        print(f"{name}, {units} units, stream {seed}: {statistics.mean(found.losses[first:]):.3f}; text "
              f"{statistics.mean(engine.losses):.4f}; {read:.0f} + {time.perf_counter() - began - read:.0f} s",
              file=sys.stderr, flush=True)
    return found


def made(options: argparse.Namespace, way: Way, units: int, attachment: Attachment, heads: RetainingHeads, own: Any,
         *, shared: bool = True) -> TracingEngine:
    sinks, stabilizers = (1, 0) if options.task == "marks" else (4, 32)
    config = StreamConfig(budget=Budget(units=units, sinks=sinks, stabilizers=stabilizers,
                                        allocation="auto" if shared else "uniform"),
                          chunk_size=options.chunk, policy="locret")
    return TracingEngine(attachment, config, heads, own, way)


def fitting(units: int, extra: int, attachment: Attachment) -> int:
    """Plain units in the bytes of so many with `extra` bytes each, in bf16."""
    unit = attachment.shape.one_unit("equal bytes")
    plain = unit_bytes(unit, 2, key_copies=1).kept
    return units * (plain + unit.kv_heads * extra) // plain


def row(found: Found, plain: Found | None) -> dict[str, Any]:
    """What is kept of a way; with `plain` in the same bytes the differences, question by question, chunk by chunk."""

    def mean(values: list[float]) -> dict[str, Any]:
        return {"mean": round(statistics.mean(values), 4),
                "interval": [round(end, 4) for end in metrics.interval([[value] for value in values])]}

    rows: dict[str, Any] = {"nll": mean(found.losses), "text": mean(found.text)}
    if plain is not None:
        for name, own, other in ("nll", found.losses, plain.losses), ("text", found.text, plain.text):
            rows[f"{name}_over_plain"] = mean([a - b for a, b in zip(own, other, strict=True)])
    if any(found.errors):
        each = [Errors(*map(statistics.mean, zip(*layer, strict=True))) for layer in found.errors if layer]
        rows["attention"] = {name: round(statistics.mean(getattr(layer, name) for layer in each), 4)
                             for name in Errors._fields}
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    model_name = str(MARKS) if options.task == "marks" else options.model
    named = named_model(model_name)
    heads = RetainingHeads.load(MARKS / "heads" if options.task == "marks" else options.heads or named.heads)
    model, tokenizer = load_model(model_path(model_name), "float32", "cpu"), load_tokenizer(model_path(model_name))
    attachment = attach(model)
    own = attachment.put_beside(heads, attachment.dtype)
    if options.check:
        return checked(options, attachment, tokenizer, heads, own)
    result: dict[str, Any] = {name: getattr(options, name) for name in ("task", "tokens", "facts", "streams", "chunk")}
    if options.whole:
        result["all units"] = row(measured(options, WAYS["plain"], options.tokens + options.chunk, attachment,
                                           tokenizer, heads, own, "all"), None)
    for units in options.units:
        plain: dict[int, Found] = {}
        rows: dict[str, Any] = {}
        for name in options.ways:
            way = WAYS[name]
            same = fitting(units, way.extra_bytes, attachment)
            if same not in plain:
                plain[same] = measured(options, WAYS["plain"], same, attachment, tokenizer, heads, own, "plain")
                rows[f"plain, {same} units"] = row(plain[same], None)
            if way != WAYS["plain"]:
                found = measured(options, way, units, attachment, tokenizer, heads, own, name)
                rows[name] = {"same_bytes": same, **row(found, plain[same])}
                print(name, rows[name], file=sys.stderr, flush=True)
        result[f"{units} units"] = {"questions": len(next(iter(plain.values())).losses), **rows}
    return result


def read(engine: Engine, ids: list[int]) -> EngineState:
    state = engine.open(0)
    engine.accept(state, ids)
    while engine.ready(state):
        engine.commit(state)
    return state


@torch.no_grad()
def checked(options: argparse.Namespace, attachment: Attachment, tokenizer: Any, heads: RetainingHeads, own: Any
            ) -> dict[str, Any]:
    """What must hold, or the figures mean nothing: of a stream of five chunks, and of numbers."""
    given, chunk = stream(options, options.first_seed, tokenizer), options.chunk
    ids = [token for line in given.lines for token in tokenizer(line, add_special_tokens=False).input_ids][:5 * chunk]
    units, last = options.units[0], ids[-8:]

    def reading(way: Way, budget: int) -> tuple[TracingEngine, EngineState]:
        engine = made(options, way, budget, attachment, heads, own, shared=budget < len(ids))
        return engine, read(engine, ids)

    def logits(engine: TracingEngine, state: EngineState) -> Tensor:
        return engine.attachment.logits(engine._forward(state, last, 0, None)[0])[0]

    result: dict[str, Any] = {}
    exact, of_all = reading(WAYS["plain"], units)
    stock = Engine(attachment, exact.config, make_policy("locret", {}, own), slots=1, shares=heads.config.budget_shares)
    there = read(stock, ids)
    result["plain is the engine, bit for bit"] = all(
        torch.equal(a, b) for a, b in zip(exact.export(of_all).values(), stock.export(there).values(), strict=True))
    plain = logits(exact, of_all)
    store = of_all.store
    assert isinstance(store, TracingStore)
    store.bias = [torch.zeros(layer.keys.shape[1:3]) for layer in exact.pool.layers]
    result["largest difference of a logit with biases of 0"] = float((logits(exact, of_all) - plain).abs().max())
    held, everything = reading(WAYS["plain"], len(ids))
    whole = logits(held, everything)
    result["largest difference of a logit by eviction"] = float((whole - plain).abs().max())
    for name in options.ways:
        if WAYS[name] == WAYS["plain"]:
            continue
        engine, state = reading(WAYS[name], len(ids))
        same = torch.equal(logits(engine, state), whole)
        engine, state = reading(dataclasses.replace(WAYS[name], half=True), units)
        store = state.store
        assert isinstance(store, TracingStore)
        result[name] = {"all units, bit for bit": same, "every other query": row(Found(
            [0.0], [0.0], store.errors), None)["attention"]}
        if WAYS[name].merge == "mean" and WAYS[name].lowest is None:  # values of layer 0 are of their tokens alone
            merged, count = store.values(0, store.counts[0])[0].double(), store.counts[0]
            weights = store.weights[0][:, :count].double()
            told = everything.store.values(0, len(ids))[0].double().sum(1)
            error = ((weights[..., None] * merged).sum(1) - told).norm() / told.norm()
            result[name] |= {"units merged": weights.sum(1).tolist(), "of": len(ids), "error of the sum": float(error)}
        print(name, result[name], file=sys.stderr, flush=True)
    result["nonnegative"] = solved(torch.Generator().manual_seed(1))
    return result


def solved(drawn: torch.Generator) -> dict[str, float]:
    """How far `nonnegative` and `ridged` are from the best: of the first the sum of squares over that of 20,000 steps
    of projected gradients, of the second the largest gradient."""
    shares = (3 * torch.randn(200, 60, generator=drawn, dtype=torch.float64)).softmax(-1) * 0.7
    may, r = torch.ones(60, dtype=torch.bool), 1e-3 * shares.square().sum() / 60

    def squares(w: Tensor) -> float:
        return float((shares @ w - 1).square().sum() + r * (w - 1).square().sum())

    w = torch.ones(60, dtype=torch.float64)
    gram = shares.T @ shares + r * torch.eye(60, dtype=torch.float64)
    right, step = shares.sum(0) + r, 1 / torch.linalg.matrix_norm(gram, 2)
    for _ in range(20_000):
        w = (w - step * (gram @ w - right)).clamp(LEAST, MOST)
    gap = torch.randn(200, 8, generator=drawn, dtype=torch.float64)
    found = ridged(shares, gap, 1e-3)
    return {"over the best": squares(nonnegative(shares, may, 1e-3)) / squares(w),
            "gradient": float((shares.T @ (shares @ found - gap) + r * found).abs().max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("facts", "marks"), default="facts")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--heads")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--facts", type=int, default=32, help="told in each stream")
    parser.add_argument("--asked", type=int, default=32, help="of these")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--units", type=int, nargs="+", default=[256, 512], help="kept per KV head")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--whole", action="store_true", help="also with a unit for every token")
    parser.add_argument("--check", action="store_true", help="that it is right, on five chunks")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record(options.keep or "merging", run(options), keep=options.keep is not None)


if __name__ == "__main__":
    main()
