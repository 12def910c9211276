"""A second implementation of the commit rule with Locret scores, written to be obviously right, not fast.

Knows the weights of a Llama model and of retaining heads, and nothing of the library: units are plain Python objects
in plain lists, one list per layer and KV head; attention is one softmax per query, in float64.

The rule (design, laws 2, 4, 7 and 8): when `chunk` tokens are pending they run over the kept units; every
unit stands at its rank, the new ones behind the old; each new unit gets its score; then every list keeps its budget:
the first `sinks` and last `stabilizers` units, and of the others those with the highest (score, newest first).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Unit:
    """One token of one KV head."""

    position: int
    key: Tensor  # [D], before RoPE
    value: Tensor  # [D]
    score: float


class NaiveLlama:
    """The arithmetic of Llama in float64, one query at a time."""

    def __init__(self, model: torch.nn.Module, heads: torch.nn.Module):
        self.w = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.heads = {name: tensor.double() for name, tensor in heads.state_dict().items()}
        config = model.config
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.q_heads, self.eps = config.num_attention_heads, config.rms_norm_eps
        self.dim, self.theta = config.head_dim, config.rope_parameters["rope_theta"]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def rotate(self, x: Tensor, rank: int) -> Tensor:
        """x [D] at that rank: the pairs (i, i + D/2) turn by rank * theta^(-2i/D)."""
        half = self.dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = rank * self.theta ** (-2 * i / self.dim)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def silu(self, x: Tensor) -> Tensor:
        return x / (1 + (-x).exp())

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One query [D] over rotated keys and values [N, D]: (output [D], weights [N])."""
        logits = keys @ query / math.sqrt(self.dim)
        weights = (logits - logits.max()).exp()
        weights = weights / weights.sum()
        return weights @ values, weights

    def forward(self, ids: list[int], first_position: int,
                kept: list[list[list[Unit]]]) -> tuple[Tensor, list[list[list[Unit]]]]:
        """Run ids over kept[layer][head]; returns hidden states [T, hidden] and the new units, scored by the heads."""
        made: list[list[list[Unit]]] = []
        x = self.w["model.embed_tokens.weight"][ids]
        for layer in range(self.layers):
            w = {name: self.w[f"model.layers.{layer}.{name}.weight"] for name in (
                "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
            h = self.norm(x, w["input_layernorm"])
            q, k, v = (h @ w[f"self_attn.{name}_proj"].T for name in "qkv")
            inner = self.silu(torch.cat([q, k, v], -1) @ self.heads[f"fc1.{layer}.weight"].T
                              + self.heads.get(f"fc1.{layer}.bias", 0))
            scores = inner @ self.heads[f"fc2.{layer}.weight"].T + self.heads.get(f"fc2.{layer}.bias", 0)

            of_head = lambda x, head: x[:, head * self.dim:(head + 1) * self.dim]  # noqa: E731
            new = [[Unit(first_position + t, of_head(k, j)[t], of_head(v, j)[t], scores[t, j].item())
                    for t in range(len(ids))] for j in range(self.kv_heads)]
            columns = []
            group = self.q_heads // self.kv_heads
            for query_head in range(self.q_heads):
                kv_head = query_head // group
                units = kept[layer][kv_head] + new[kv_head]
                old = len(kept[layer][kv_head])
                keys = torch.stack([self.rotate(unit.key, rank) for rank, unit in enumerate(units)])
                values = torch.stack([unit.value for unit in units])
                rows = []
                for t in range(len(ids)):
                    rank = old + t
                    query = self.rotate(of_head(q, query_head)[t], rank)
                    out, weights = self.attend(query, keys[:rank + 1], values[:rank + 1])
                    rows.append(out)
                    self.saw(layer, kv_head, units, weights)
                columns.append(torch.stack(rows))
            x = x + torch.cat(columns, -1) @ w["self_attn.o_proj"].T
            h = self.norm(x, w["post_attention_layernorm"])
            gated = self.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)
            x = x + gated @ w["mlp.down_proj"].T
            made.append(new)
        return self.norm(x, self.w["model.norm.weight"]), made

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.w["lm_head.weight"].T

    def saw(self, layer: int, head: int, units: list[Unit], weights: Tensor) -> None:
        """Called with the attention of every query; Locret does not look at it."""

    def empty(self) -> list[list[list[Unit]]]:
        return [[[] for _ in range(self.kv_heads)] for _ in range(self.layers)]


class NaiveStream(NaiveLlama):
    """The commit rule of the design."""

    def __init__(self, model: torch.nn.Module, heads: torch.nn.Module, budgets: list[int], chunk: int, sinks: int,
                 stabilizers: int):
        super().__init__(model, heads)
        self.budgets, self.chunk, self.sinks, self.stabilizers = budgets, chunk, sinks, stabilizers
        self.kept = self.empty()
        self.seen, self.pending = 0, []
        self.last: Tensor | None = None

    def feed(self, ids: list[int]) -> None:
        for token in ids:
            self.pending.append(token)
            if len(self.pending) == self.chunk:
                self.commit()

    def commit(self) -> None:
        hidden, new = self.forward(self.pending, self.seen, self.kept)
        for layer in range(self.layers):
            self.kept[layer] = self.keep_of_heads(
                [old + of_head for old, of_head in zip(self.kept[layer], new[layer], strict=True)], self.budgets[layer])
        self.seen += self.chunk
        self.pending, self.last = [], hidden[-1]

    def keep_of_heads(self, heads: list[list[Unit]], budget: int) -> list[list[Unit]]:
        return [self.keep(units, budget) for units in heads]

    def keep(self, units: list[Unit], budget: int) -> list[Unit]:
        if len(units) <= budget:
            return units
        first, last = units[:self.sinks], units[len(units) - self.stabilizers:]
        others = units[self.sinks:len(units) - self.stabilizers]

        def better_first(unit: Unit) -> tuple[bool, float, int]:
            is_nan = math.isnan(unit.score)
            return is_nan, 0.0 if is_nan else -unit.score, -unit.position

        chosen = sorted(others, key=better_first)[:budget - len(first) - len(last)]
        return first + sorted(chosen, key=lambda unit: unit.position) + last

    def next_logits(self) -> Tensor:
        """Logits [vocab] of the next token; pending tokens run over the kept units, and nothing is stored."""
        if not self.pending:
            return self.logits(self.last)
        return self.logits(self.forward(self.pending, self.seen, self.kept)[0][-1])

    def positions(self, layer: int) -> list[list[int]]:
        return [[unit.position for unit in units] for units in self.kept[layer]]

    def scores(self, layer: int) -> list[list[float]]:
        return [[unit.score for unit in units] for units in self.kept[layer]]


class NaiveByHead(NaiveStream):
    """The heads of a layer share its units: a floor for each, and the best scores of all of them."""

    def keep_of_heads(self, heads: list[list[Unit]], budget: int) -> list[list[Unit]]:
        if sum(map(len, heads)) <= budget * len(heads):
            return heads
        floor, sure, rivals = max(self.sinks + self.stabilizers, int(0.2 * budget)), set(), []
        for head, units in enumerate(heads):
            protected = {*range(self.sinks), *range(len(units) - self.stabilizers, len(units))}
            ranked = sorted(range(len(units)), key=lambda i: (i not in protected, -units[i].score, -i))
            sure |= {(head, i) for i in ranked[:floor]}
            rivals += [(head, i) for i in ranked[floor:]]
        rivals.sort(key=lambda at: (-heads[at[0]][at[1]].score, -at[1], at[0]))
        sure |= set(rivals[:budget * len(heads) - len(sure)])
        return [[unit for i, unit in enumerate(units) if (head, i) in sure] for head, units in enumerate(heads)]


def algorithm_1(llama: NaiveLlama, prompt: list[int], n_loc: int, n_s: int, b: int, size: int, *,
                protect_last_chunk: bool = False) -> tuple[list[list[list[list[int]]]], Tensor, list[list[list[Unit]]]]:
    """Algorithm 1 of arXiv:2410.01805, line by line: chunked prefill with eviction, then the local tokens.

    The infinite scores of the stabilizers are given to a clone, as in the released code: raw scores persist. n_s = 0
    protects nothing (the released code protects everything then: defect 1 of reference/locret.md).

    Returns:
        The kept positions [layer][head] after each chunk; logits [n_loc, vocab] of the local tokens; and the cache
        that generation goes on with, the local tokens appended un-evicted.
    """
    chunk_positions = [(begin, min(begin + size, len(prompt) - n_loc)) for begin in range(0, len(prompt) - n_loc, size)]
    cache, kept = llama.empty(), []
    for number, (begin_pos, end_pos) in enumerate(chunk_positions):
        _, chunk = llama.forward(prompt[begin_pos:end_pos], begin_pos, cache)
        for layer in range(llama.layers):
            for head in range(llama.kv_heads):
                units = cache[layer][head] + chunk[layer][head]  # Concat
                score_cache = [unit.score for unit in units]
                if number < len(chunk_positions) - 1 or protect_last_chunk:
                    for i in range(len(score_cache) - n_s, len(score_cache)):
                        score_cache[i] = math.inf
                ranked = sorted(range(len(units)), key=lambda i: -score_cache[i])
                indices = sorted(ranked[:b])  # top-b, then back into time order
                cache[layer][head] = [units[i] for i in indices]
        kept.append([[[unit.position for unit in head] for head in layer] for layer in cache])
    hidden, local = llama.forward(prompt[len(prompt) - n_loc:], len(prompt) - n_loc, cache)
    cache = [[old + new for old, new in zip(*pair, strict=True)] for pair in zip(cache, local, strict=True)]
    return kept, llama.logits(hidden), cache
