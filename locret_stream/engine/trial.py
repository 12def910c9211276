"""Tries a model on an engine's own path before it is used: units in a pool, a commit that evicts, a fork, a step."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from locret_stream.config import Budget, StreamConfig
from locret_stream.engine.core import Engine
from locret_stream.engine.decoding import NextToken
from locret_stream.engine.state import EngineState
from locret_stream.errors import LocretError, UnsupportedModel
from locret_stream.models import Attachment, Attended, LayerCall, RopeTables, visible
from locret_stream.policies import make_policy

CHUNK = 8  # tokens of a chunk, or fewer, as two chunks of units and a third one fit the model's window
CLOSE, OF_ROUNDING = 1e-2, 0.5  # gaps in fp32, where layers may sum in other orders, and in fewer bits
POLICY = "keydiff"  # which scores keys, so that it reads what a unit is
_lock = threading.Lock()


@torch.no_grad()
def try_out(attachment: Attachment) -> None:
    """Read 19 tokens in chunks of 8 with all units kept, and compare the next token's logits with those of one forward;
    then keep 16 units of 24, fork, and decode both together. Fewer where the model's window is shorter. Once per
    attachment: the self-test at attaching compares what attention computes with the stock model, in tensors; this one
    holds that to what keeps units in use.

    Raises:
        UnsupportedModel: something fails, or differs.
    """
    with _lock:
        if attachment.tried:
            return
        try:
            _try(attachment)
        except (LocretError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise _refused(attachment, f"{type(error).__name__}: {error}") from error
        attachment.tried = True


def _try(attachment: Attachment) -> None:
    chunk = min(CHUNK, attachment.shape.window // 3)
    kept, pending = 2 * chunk, chunk // 2 - 1
    if pending < 1:
        return  # a window of fewer than 12 positions, as no model has that anybody runs
    config = StreamConfig(budget=Budget(units=kept, sinks=1, stabilizers=2), chunk_size=chunk, policy=POLICY)
    engine = Engine(attachment, config, make_policy(POLICY, {}, None), slots=2)
    engine.decoder.graphed = False  # a graph takes longer to record than all of this
    ids = [(place * 7919 + 11) % min(attachment.shape.vocab, 50_000) for place in range(kept + chunk + pending)]
    state, text = engine.open(0), ids[:kept + pending]
    _feed(engine, state, text)
    found, expected = engine.logits(state), _of_one_forward(
        attachment, attachment.tables(max(engine.layout.tables.capacity, len(text))), text)
    gap = ((found - expected).square().mean().sqrt() / expected.std().clamp(min=1e-6)).item()
    if not gap <= (CLOSE if attachment.dtype.itemsize >= 4 and not attachment.quantised else OF_ROUNDING):
        raise _refused(attachment, f"its logits behind {len(text)} tokens in chunks of {chunk} differ from those of "
                                   f"one forward by {gap:.3g} standard deviations (root mean square)")
    _feed(engine, state, ids[len(text):])
    if max(state.store.counts) > kept:
        raise _refused(attachment, f"a layer kept {max(state.store.counts)} units of {kept}")
    fork = engine.fork(state, 1)
    engine.accept(state, ids[:1])
    engine.accept(fork, ids[:1])
    seen: list[Tensor] = []

    def choose(logits: Tensor) -> int:
        seen.append(logits)
        return 0

    for answer in engine.decode([NextToken(each, choose) for each in (state, fork)]):
        if isinstance(answer, BaseException):
            raise answer
    if not all(torch.isfinite(logits).all() for logits in seen):
        raise _refused(attachment, "its logits behind a commit that evicted are not finite")


def _feed(engine: Engine, state: EngineState, ids: list[int]) -> None:
    engine.accept(state, ids)
    while engine.ready(state):
        engine.commit(state)


def _of_one_forward(attachment: Attachment, tables: RopeTables, ids: list[int]) -> Tensor:
    """Logits [vocab] fp32 of the token behind the ids."""
    places, units = torch.arange(len(ids), device=attachment.device), attachment.shape.units

    def step(call: LayerCall) -> Attended:
        ranks = places.to(call.q.device)
        return call.to_itself(tables, visible(units[call.layer], ranks, ranks))

    hidden = attachment.hidden(torch.tensor([ids], device=attachment.device), step,
                               attachment.carry((), [0] * attachment.shape.layers))
    return attachment.logits(hidden[:, -1:])[0, -1].float()


def _refused(attachment: Attachment, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{attachment.name}: {what}; expected what one forward computes. It is a fault of this "
                            "library, so the model is refused: please report it")
