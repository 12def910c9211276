"""Scores of one commit: collects what the policy needs while the forward runs, and asks it. Writes into no slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from locret_stream.cache import HeadwiseStore
from locret_stream.engine.layout import Layout
from locret_stream.engine.state import EngineState
from locret_stream.kernels import reduced_attention
from locret_stream.models import LayerCall
from locret_stream.policies import Chunk, ColumnSums


class Scorer:
    """The scores of one commit of a context; `logits` makes [1, T, vocab] of hidden states [1, T, hidden]."""

    def __init__(self, layout: Layout, logits: Callable[[Tensor], Tensor], state: EngineState):
        self.layout, self.logits, self.state = layout, logits, state
        self.needs = layout.policy.needs
        self.policy_state = dict(state.policy_state)
        self.scores: list[Tensor] = []
        self.chunks: list[Chunk] = []

    def see(self, call: LayerCall, q: Tensor, keys: Tensor, k: Tensor, lse: Tensor | None) -> None:
        """The forward calls this for every layer, in order, after it wrote the new units behind the committed ones.

        q [1, H*G, T, D] and k [1, H, n+T, D] after RoPE, keys [H, n+T, D] before it; lse [H*G, T], the rows'
        log-sum-exp, if attention returned it.
        """
        store, layer = self.state.store, call.layer
        if call.asked is not None:  # index keys lie behind
            keys, k = keys[..., :q.shape[-1]], k[..., :q.shape[-1]]
        total = store.counts[layer] + call.k.shape[2]
        chunk = self._chunk(call, slice(None), slice(None), keys, store.scores(layer), store.positions(layer))
        if self.layout.shape.units[layer].sliding:
            planes, heads = chunk.scores.shape[:2]
            self.scores.append(chunk.scores.new_zeros(planes, heads, total))
            return
        if self.layout.config.quantised and "token_logprob" in self.needs:
            # `finish` reads what is declared, and the next layer is read into the same memory.
            chunk.keys = keys.clone() if "keys" in self.needs else keys[:, :0]
            k = k.clone() if "column_sums" in self.needs else k
        if "column_sums" in self.needs:
            chunk.column_sums = _column_sums(call, q[0], k[0], lse, call.sink_logits)
        if "token_logprob" in self.needs:
            self.chunks.append(chunk)
            self.scores.append(chunk.scores)  # replaced by `finish`
        else:
            self.scores.append(self._all_units(chunk))

    def see_heads(self, call: LayerCall, store: HeadwiseStore, heads: Sequence[tuple[Tensor, Tensor, Tensor | None]]
                  ) -> None:
        """`see` in a layer whose heads share a budget; `heads`: as `Attention.attend_headwise` gives them."""
        layer, new, policy = call.layer, call.k.shape[2], self.layout.policy
        kept, positions = store.scores(layer), store.positions(layer)
        if not policy.stateful:
            self.scores.append(self._all_units(self._chunk(call, slice(None), slice(None), call.own_k[0, :, :0], kept,
                                                           positions)))
            return
        group, most = call.q.shape[1] // len(heads), store.counts[layer]
        scores = kept.new_zeros(*kept.shape[:2], most + new)
        for head, ((q, k, lse), count) in enumerate(zip(heads, store.of_heads[layer], strict=True)):
            of_head, of_queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
            keys = store.head_keys(layer, head, new) if "keys" in self.needs else call.own_k[0, of_head, :0]
            chunk = self._chunk(call, of_queries, of_head, keys, kept[:, of_head, :count],
                                positions[of_head, :count])
            if "column_sums" in self.needs:
                sinks = call.sink_logits
                chunk.column_sums = _column_sums(call, q, k, lse, sinks if sinks is None else sinks[of_queries])
            of_units = self._all_units(chunk)
            scores[:, of_head, :count], scores[:, of_head, most:] = of_units[..., :count], of_units[..., count:]
        self.scores.append(scores)

    def _chunk(self, call: LayerCall, of_queries: slice, of_heads: slice, keys: Tensor, scores: Tensor,
               positions: Tensor) -> Chunk:
        """What the policy finds of these heads of a layer, without what attention gave."""
        sinks, stabilizers = self.layout.protection_of(call.layer, len(self.state.focus))
        chunk = Chunk(layer=call.layer, start=self.state.seen, q=call.q[0, of_queries], k=call.k[0, of_heads],
                      v=call.own_v[0, of_heads], keys=keys, scores=scores, budget=self.layout.budgets[call.layer],
                      sinks=sinks, stabilizers=stabilizers, state=self.policy_state)
        if "hidden" in self.needs:
            chunk.hidden = call.hidden[0]
        if "positions" in self.needs:
            new = torch.arange(chunk.start, chunk.start + call.k.shape[2], device=positions.device)
            chunk.positions = torch.cat([positions, new.expand(len(positions), -1)], dim=1)
        return chunk

    def finish(self, ids: list[int], hidden: Tensor) -> list[Tensor]:
        """Scores [P, H, n + T] of every layer, once the whole forward succeeded; those of the focus are always 0."""
        if self.chunks:
            logprobs = self._logprobs(ids, hidden)
            for chunk in self.chunks:
                chunk.logprobs = logprobs.to(chunk.k.device)
                self.scores[chunk.layer] = self._all_units(chunk)
        if not self.state.focus:
            return self.scores
        count = len(self.state.focus)
        return [scores if window else scores.index_fill(-1, torch.arange(count, device=scores.device), 0.0)
                for scores, window in zip(self.scores, self.layout.shape.sliding, strict=True)]

    def _all_units(self, chunk: Chunk) -> Tensor:
        planes, heads, old = chunk.scores.shape
        new, policy = chunk.k.shape[1], self.layout.policy
        count = old + new if policy.stateful else new
        scores = policy.expect_scores(policy.score(chunk).float(), heads, count).expand(planes, heads, count)
        return scores if policy.stateful else torch.cat([chunk.scores, scores], dim=-1)

    def _logprobs(self, ids: list[int], hidden: Tensor, block: int = 128) -> Tensor:
        """log p(id | everything before it), [T]; nan for the first token of a stream. Computed in blocks of tokens."""
        before = self.state.last_hidden
        rows = torch.cat([hidden[:, :1] if before is None else before, hidden[:, :-1]], dim=1)
        out = []
        for i in range(0, len(ids), block):
            of_vocab = self.logits(rows[:, i:i + block])[0].float().log_softmax(-1)
            target = torch.tensor(ids[i:i + block], device=of_vocab.device)
            out.append(of_vocab.gather(1, target[:, None])[:, 0])
        logprobs = torch.cat(out)
        if before is None:
            logprobs[0] = float("nan")
        return logprobs


def _column_sums(call: LayerCall, q: Tensor, k: Tensor, lse: Tensor | None, sinks: Tensor | None) -> ColumnSums:
    """`Chunk.column_sums`, of q [H*G, T, D] and k [H, n+T, D] after RoPE; lse [H*G, T] if attention returned it; the
    sink logits of these heads, if the model has any."""

    def sums(rows: slice | Tensor | None = None, *, above_mean: bool = False) -> Tensor:
        rows = slice(None) if rows is None else rows
        ranks = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=k.device)[rows]
        more = {} if call.bias is None else {"bias": call.bias[0, :, rows]}
        return reduced_attention(q[:, rows], k, call.scale, ranks, None if lse is None else lse[:, rows],
                                 above_mean=above_mean, softcap=call.softcap,
                                 sink_logits=sinks if sinks is None or sinks.dim() == 1 else sinks[0, :, rows], **more)

    return sums
