"""Whether a stored session is what its log gives: both are read, the log is fed again, and every bit is compared."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from locret_stream.context import restoring, saving
from locret_stream.context.session import Session

if TYPE_CHECKING:
    from locret_stream.context.services import Services


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay.

    Args:
        name: of the session or the fork. tokens: accepted, as the snapshot says.
        differs: names of the tensors that are not bit for bit the same ("3.keys": of layer 3); empty if all are.
    """

    name: str
    tokens: int
    differs: tuple[str, ...] = ()


async def replay(services: Services, name: str) -> Replay:
    """Compare the newest snapshot of a session with its log. It takes one slot, and as long as reading the stream did.
    The stored files, and a context in which the session is open, stay as they are.

    The two are equal on the build, device and number of threads with which the stream was read; elsewhere rounding
    differs.

    Raises:
        SnapshotNotFound, SnapshotMismatch, SnapshotCorrupt, StoreError: there is no sound snapshot, or no sound log.
        NoSlot, ContextClosed.
    """
    slot = await services.slots.acquire(scratch=False)
    try:
        with contextlib.closing(await saving.storing(services, saving.store_of(services).branch, name)) as branch:
            session = await restoring.restore(services, branch, slot)
            stored, tokens = await _tensors(session), session.state.position
            assert branch.base is not None  # it was restored
            generation = branch.base[1]  # its owner may have saved again meanwhile
            log = await saving.storing(services, lambda: branch.read_stored_log(services.accepted, generation))
            fed = await _tensors(await restoring.feed_log(services, log, slot))
    finally:
        services.slots.release(slot, scratch=False)
    return Replay(name=name, tokens=tokens, differs=tuple(
        key for key in sorted(stored.keys() | fed.keys()) if not _same(stored.get(key), fed.get(key))))


async def _tensors(session: Session) -> dict[str, Tensor]:
    session.bind(None)  # what is committed here is written nowhere
    await session.commit()
    engine, state = session.services.engine, session.state
    tensors = await session.step(lambda: {key: tensor.cpu() for key, tensor in engine.export(state).items()})
    return tensors | {"held": saving.buffered_of(session)}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)) if one.dim() else bool(
        one == other)
