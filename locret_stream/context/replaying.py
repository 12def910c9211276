"""Whether a stored session holds what its own log gives: both are read, the log is fed again, every bit is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from locret_stream.context import restoring, saving
from locret_stream.context.session import Session

if TYPE_CHECKING:
    from locret_stream.context.services import Services


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Args:
        name: of the session or the fork. tokens: accepted, as the snapshot says.
        differs: names of what is not bit for bit the same ("3.keys": of layer 3), empty where everything is.
    """

    name: str
    tokens: int
    differs: tuple[str, ...] = ()


async def replay(services: Services, name: str) -> Replay:
    """Compare the newest snapshot of a session with its log. Takes one slot and as long as reading it all did; what is
    stored, and a context that has the session open, stay as they are.

    The two are the same on the build, device and number of threads that the session was read with; elsewhere rounding
    differs.

    Raises:
        SnapshotNotFound, SnapshotMismatch, SnapshotCorrupt, StoreError: there is no sound snapshot, or no sound log.
        NoSlot, ContextClosed.
    """
    slot = await services.acquire_slot(scratch=False)
    try:
        branch = await saving.storing(services, services.store.branch, name)
        try:
            stored = await restoring.restore(services, branch, slot)
            held, tokens = await _everything(stored), stored.state.position
            number = branch.base[1]  # the log of this one: its owner may have saved again meanwhile
            chain = await saving.storing(services, lambda: branch.read_stored_log(services.identity, number))
            fed = await restoring.feed_log(services, chain, slot)
            given = await _everything(fed)
        finally:
            branch.close()
    finally:
        services.release_slot(slot, scratch=False)
    return Replay(name=name, tokens=tokens, differs=tuple(
        key for key in sorted(held.keys() | given.keys()) if not _same(held.get(key), given.get(key))))


async def _everything(session: Session) -> dict[str, Tensor]:
    session.branch = None  # what is committed here is written nowhere
    await session.commit()
    engine, state = session.services.engine, session.state
    tensors = await session.step(lambda: {key: tensor.cpu() for key, tensor in engine.export(state).items()})
    return tensors | {"held": saving.buffered_of(session)}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)) if one.dim() else bool(
        one == other)
