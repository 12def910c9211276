"""Decoding over codes with exact units fetched from the host's memory. Knows no sampling.

By the query (`HostTier.chosen_by`) each layer of a step attends to codes, fetches the units to which it attends most,
and attends again with those exact in place of their codes.

By a guess (SpeCache, arXiv:2503.16163) a step runs two tokens of each context: the newest one, and a guess at the one
after it, which was the likeliest behind the guess of the step before. Both attend to codes, with the *hot* units exact
in their place; what the guess attends to most is fetched, and is hot in the next step. Only the newest token's unit is
kept. The first token of a reply is run once alone, which finds the first guess and the first hot units, and is then run
again with them. By the last token it is the same with one token.

The tokens of a reply attend to codes, those of a prompt to exact units. So that a reply is a function of the committed
state, the prompt and its own tokens, these are always decoded one by one from where it began
(`EngineState.reply_from`), whatever forgets their units meanwhile; and the next prompt reads them again, all together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from locret_stream.cache import HeadwiseTier, TieredStore
from locret_stream.engine.decoding import Decoder, turn_heads
from locret_stream.engine.state import EngineState
from locret_stream.kernels import decode_attention, reduced_attention
from locret_stream.kernels.reference import log_sum
from locret_stream.models import Attended, LayerCall


class FetchingDecoder(Decoder):
    """`Decoder` of a pool whose exact units are in the host's memory."""

    def to_read(self, state: EngineState) -> int:
        """All but the tokens of a reply, which are decoded one by one."""
        return len(state.pending) if state.reply_from is None else max(state.provisional, state.reply_from)

    def can_run(self, state: EngineState) -> bool:
        """As of `Decoder`, and whether the next token is one of a reply."""
        return state.reply_from is not None and state.provisional >= state.reply_from and super().can_run(state)

    def _took(self, state: EngineState, logits: Tensor, provisional: int) -> None:
        if state.reply_from is not None:  # else ids were accepted meanwhile, with which the reply is read again
            super()._took(state, logits, provisional)

    def _step(self, states: Sequence[EngineState], counts: Sequence[int]) -> Tensor:
        tier = self.layout.config.exact
        assert tier is not None, "a pool with exact units in the host's memory"
        try:
            fresh = [(state, count) for state, count in zip(states, counts, strict=True) if state.guess is None]
            if fresh and tier.hot:
                for state, _ in fresh:
                    self._store(state).cool()
                self._run([state for state, _ in fresh], [count for _, count in fresh], 1, keep=False)
            logits = self._run(states, counts, tier.rows, keep=True)
        except BaseException:
            for state in states:
                state.forget_reply(stateful=bool(self.pool.states.forms))
            raise
        return logits[:, 0]

    @staticmethod
    def _store(state: EngineState) -> TieredStore:
        assert isinstance(state.store, TieredStore), "a pool with a tier has no others"
        return state.store

    def _run(self, states: Sequence[EngineState], counts: Sequence[int], rows: int, *, keep: bool) -> Tensor:
        """Logits [A, T, vocab] fp32 of `rows` tokens T of each context: the id behind its first `counts` pending ones,
        then the guess. What the last one attends to most is hot afterwards, and what follows it likeliest is the guess.

        Args:
            keep: whether recurrent states go on.
        """
        ids = [[state.pending[count], state.guess][:rows] for state, count in zip(states, counts, strict=True)]
        ranks = torch.tensor([[[held + count + row for row in range(rows)]
                               for held, count in zip(of_layer, counts, strict=True)]
                              for of_layer in zip(*(state.store.counts for state in states), strict=True)])
        positions = [state.seen + count for state, count in zip(states, counts, strict=True)]
        layers, device = _Layers(self, states, ranks, positions), self.attachment.device
        logits = self._logits_of(torch.tensor(ids, device=device), ranks.amax(0)[:, :1].to(device),
                                 torch.tensor([state.store.slot for state in states]), layers, keep=keep)
        layers.choose()
        tier = self.layout.config.exact
        if tier is not None and tier.hot:
            for state, guess in zip(states, logits[:, -1].argmax(-1).tolist(), strict=True):
                state.guess = guess
        return logits


class _Layers:
    """What attends in one forward, for `Attachment.hidden`: one layer after another, each context by itself.

    ranks: [L, A, T] of the new tokens; positions: of the first of each context in its stream, [A].
    """

    def __init__(self, decoder: FetchingDecoder, states: Sequence[EngineState], ranks: Tensor,
                 positions: Sequence[int]):
        self._layout, self._kinds, self._zeros = decoder.layout, decoder.kinds, decoder.zeros
        self._stores, self._ranks, self._positions = [decoder._store(state) for state in states], ranks, positions
        self._first: list[list[int]] = ranks[..., 0].tolist()
        self._turns: dict[int, tuple[Tensor, ...] | None] = {}
        self._written: dict[int, list[tuple[Tensor, Tensor]]] = {}  # V and turned K of the new units, by layer
        tier = decoder.layout.config.exact
        assert tier is not None, "a pool with exact units in the host's memory"
        self._tier = tier
        self._weights: list[tuple[TieredStore, int, Tensor]] = []

    def __call__(self, call: LayerCall) -> Attended:
        if self._layout.headwise[call.layer]:
            return self._of_heads(call)
        layer, tables, device = call.layer, self._layout.tables, call.q.device
        contexts, heads, rows = call.q.shape[:3]
        kind = self._kinds[layer]
        if kind not in self._turns:
            self._turns[kind] = tables.turns(layer, self._ranks[layer].flatten().to(device))
        both = torch.cat([call.q, call.k], dim=1)
        if rows > 1:
            both = both.transpose(1, 2).reshape(contexts * rows, -1, 1, call.q.shape[-1])
        both = tables.rotate_each(layer, both, self._turns[kind])
        if rows > 1:
            both = both.view(contexts, rows, *both.shape[1:2], -1).transpose(1, 2)
        q, turned, written = both[:, :heads], both[:, heads:], self._written.setdefault(layer, [])
        parts, out = (q, call.k, call.v, turned), []
        each = zip(*(part.split(1) for part in parts), strict=True) if contexts > 1 else (parts,)
        for context, (store, rank, (q, k, v, turned)) in enumerate(zip(self._stores, self._first[layer], each,
                                                                       strict=True)):
            if call.keeps:
                written.append((v, turned))
                found = store.step(layer, rank, k, v, turned, tables.rotate)
            else:
                found = store.step_again(layer, rank, *written[context], tables.rotate)
            out.append(self._attend(call, q, found, store, context, rank))
        return torch.cat(out) if contexts > 1 else out[0]

    def _attend(self, call: LayerCall, q: Tensor, found: tuple[Tensor, Tensor], store: TieredStore, context: int,
                rank: int) -> Tensor:
        """Output [1, H*G, T, D] of one context, whose queries after RoPE are q [1, H*G, T, D]."""
        unit, (keys, values), out, rows = self._layout.shape.units[call.layer], found, [], q.shape[2]
        by_query = self._tier.units > self._tier.hot
        for row in range(rows):
            length, position = rank + row + 1, self._positions[context] + row
            window = unit.reach(position) if unit.blocks else unit.sliding
            query, sinks = q[:, :, row:row + 1], call.sink_logits
            if sinks is not None and sinks.dim() == 3:
                sinks = sinks[context, :, row]
            first = max(0, length - window) if window else 0
            if by_query:
                out.append(self._by_query(call, query, keys[0, :, first:length], values[0, :, first:length], store,
                                          first, sinks))
                continue
            out.append(decode_attention(query, keys, values, self._zeros[q.device],
                                        torch.tensor([length], device=q.device), call.scale, window=window,
                                        softcap=call.softcap, sink_logits=sinks))
            if row == rows - 1 and call.keeps and self._tier.hot:
                weights = reduced_attention(
                    query[0], keys[0, :, first:length], call.scale, torch.tensor([length - 1 - first], device=q.device),
                    softcap=call.softcap, sink_logits=sinks)
                self._weights.append((store, call.layer, F.pad(weights, (first, 0))))
        return torch.cat(out, dim=2) if rows > 1 else out[0]

    def _by_query(self, call: LayerCall, q: Tensor, keys: Tensor, values: Tensor, store: TieredStore, first: int,
                  sinks: Tensor | None) -> Tensor:
        """Output [1, H*G, 1, D] of one query, which attends to codes, and to those most that are exact then.

        Args:
            q: [1, H*G, 1, D]; keys, values: [H, n, D] of the units from rank `first` on.
        """
        grouped, count = q.view(len(keys), -1, q.shape[-1]).float() * call.scale, keys.shape[1]
        logits = _logits(call, grouped, keys)
        weights = _weights(logits, sinks)
        fetched = store.fetch(call.layer, weights.sum(1), first, self._tier.units, self._layout.tables.rotate_rows)
        if fetched is None:
            return torch.bmm(weights.to(values.dtype), values).view(1, -1, 1, values.shape[-1])
        ranks, exact_keys, exact_values = fetched
        at = (ranks - first if first else ranks)[:, None].expand(-1, grouped.shape[1], -1)
        # Beside the codes, rather than at their places: then nothing has to be moved to V of the same units and back.
        exact = _logits(call, grouped, exact_keys)
        weights = _weights(torch.cat([logits.scatter_(-1, at, float("-inf")), exact], dim=-1), sinks).to(values.dtype)
        out = torch.baddbmm(torch.bmm(weights[..., count:], exact_values), weights[..., :count], values)
        return out.view(1, -1, 1, values.shape[-1])

    def _of_heads(self, call: LayerCall) -> Tensor:
        """`__call__` in a layer whose heads share a budget."""
        layer, heads, rotate, out = call.layer, call.k.shape[1], self._layout.tables.rotate, []
        firsts, stores = self._first[layer], [store for store in self._stores if isinstance(store, HeadwiseTier)]
        assert len(stores) == len(self._stores), "heads share a budget in no other"
        ranks = [[held + rank - store.counts[layer] for held in store.of_heads[layer]]
                 for store, rank in zip(stores, firsts, strict=True)]
        q, turned = turn_heads(self._layout, call, torch.tensor(ranks, device=call.q.device).flatten())
        written = self._written.setdefault(layer, [])
        for context, (store, rank) in enumerate(zip(stores, firsts, strict=True)):
            own, here = slice(context * heads, (context + 1) * heads), slice(context, context + 1)
            k, v, turned_here = call.k[here], call.v[here], turned[own].transpose(0, 1)
            if call.keeps:
                written.append((v, turned_here))
                found = store.step(layer, rank, k, v, turned_here, rotate)
            else:
                found = store.step_again(layer, rank, *written[context], rotate)
            out.append(self._by_query_of_heads(call, q[own, :, 0], found, store, [1 + at for at in ranks[context]]))
        return torch.cat(out) if len(out) > 1 else out[0]

    def _by_query_of_heads(self, call: LayerCall, q: Tensor, found: tuple[Tensor, Tensor], store: HeadwiseTier,
                           lengths: Sequence[int]) -> Tensor:
        """`_by_query` in a layer whose heads have different numbers of units.

        Args:
            q: [H, G, D]. found: rotated keys and values of all heads, one after another, [1, 1, R, D]. lengths: [H].
        """
        if not self._tier.units:
            attended = decode_attention(
                q[:, :, None], *found, self._zeros[q.device].expand(len(q)), torch.tensor(lengths, device=q.device),
                call.scale, firsts=torch.tensor(store.firsts(call.layer), device=q.device), softcap=call.softcap,
                sink_logits=None if call.sink_logits is None else call.sink_logits.view(len(q), -1))
            return attended.reshape(1, -1, 1, attended.shape[-1])
        grouped = (q.float() * call.scale)[:, None]
        rows = [slice(first, first + length) for first, length in zip(store.firsts(call.layer), lengths, strict=True)]
        keys, values = ([part[0, 0, of_head] for of_head in rows] for part in found)
        sinks: Sequence[Tensor | None] = [None] * len(rows)
        if call.sink_logits is not None:
            sinks = call.sink_logits.view(len(rows), -1).unbind()
        logits = [_logits(call, of_query, of_head[None]) for of_query, of_head in zip(grouped, keys, strict=True)]
        weights = [_weights(of_head, sink) for of_head, sink in zip(logits, sinks, strict=True)]
        fetched = store.fetch_of_heads(call.layer, [of_head[0].sum(0) for of_head in weights], self._tier.units,
                                       self._layout.tables.rotate_rows)
        out = []
        for head, (of_head, units) in enumerate(zip(weights, values, strict=True)):
            if fetched is not None:
                ranks, exact_keys, exact_values = fetched[head]
                exact = _logits(call, grouped[head], exact_keys[None])
                coded = logits[head].index_fill_(-1, ranks, float("-inf"))
                of_head = _weights(torch.cat([coded, exact], dim=-1), sinks[head])
                units = torch.cat([units, exact_values])
            out.append(of_head[0].to(units.dtype) @ units)
        return torch.cat(out).view(1, -1, 1, out[0].shape[-1])

    def choose(self) -> None:
        """Fetch what the last token attended to most, behind the forward: a layer may read the units of an earlier one,
        and find those hot that were so for that one."""
        for store, layer, weights in self._weights:
            store.choose(layer, weights, self._layout.tables.rotate_rows)


def _logits(call: LayerCall, grouped: Tensor, units: Tensor) -> Tensor:
    """Logits [H, G, n] of scaled queries [H, G, D] with keys [H, n, D]."""
    logits = torch.bmm(grouped, units.float().mT)
    return logits if call.softcap is None else call.softcap * torch.tanh(logits / call.softcap)


def _weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """What logits [H, G, n] weigh, beside sink logits [H * G]."""
    if sinks is None:
        return logits.softmax(-1)
    return (logits - log_sum(logits[:, :, None], sinks)).exp()
