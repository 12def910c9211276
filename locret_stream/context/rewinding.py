"""Rewinding: another snapshot of a session takes its place, in the same slot."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from locret_stream.context import restoring
from locret_stream.context.opening import Opening
from locret_stream.context.saving import store_of, storing
from locret_stream.context.session import Session
from locret_stream.context.session_state import REWOUND
from locret_stream.errors import ConfigError, ContextBusy
from locret_stream.snapshot import Branch, Restored, Snapshot


def generation_of(snapshot: object, name: str) -> int:
    """The number of a snapshot of session `name`, given as such or as the snapshot itself; 0 is the beginning.

    Raises:
        ConfigError: it is neither.
    """
    number = snapshot.generation if isinstance(snapshot, Snapshot) and snapshot.name == name else snapshot
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigError(f"rewind() was given {number!r}; expected the number of a snapshot of {name!r}, or what "
                          "snapshot() returned")
    return number


@contextlib.asynccontextmanager
async def snapshot_of(session: Session, name: str, number: int) -> AsyncIterator[tuple[Branch, Restored | None]]:
    """For the length of a block, in which the session is frozen in its slot: a branch to go on in, and the verified
    snapshot of that number, None for 0. The block closes the branch unless it ends the session.

    Raises:
        SnapshotNotFound, SnapshotCorrupt, SnapshotMismatch, StoreError. StaleOwner: another owner saved meanwhile.
        ContextBusy: the session was saved under another name meanwhile.
    """
    services = session.services
    async with session.frozen_in_slot():  # nor is it saved: the new branch knows the newest snapshot
        old = session.stored_branch
        if old.name != name:
            raise ContextBusy(f"rewind() was called while save_as({old.name!r}) ran, and {number} is the number of a "
                              f"snapshot of {name!r}; expected the number of a snapshot of {old.name!r}")
        branch = await storing(services, store_of(services).branch, name)
        branch.session_folder.needs = old.session_folder.needs  # manifests never change, and reading them takes long
        try:
            await storing(services, old.expect_newest)
            yield branch, None if number == 0 else await storing(services, lambda: branch.load(
                services.identity, services.geometry, services.engine.budgets, number))
        finally:
            if session.closed != REWOUND:
                branch.close()


async def overwrite(session: Session, branch: Branch, restored: Restored | None, opening: Opening) -> Session:
    """The restored session, None for one from nothing, in the slot of this one, which ends once nothing can fail any
    more. Forks, questions and receipts that come meanwhile are refused: they would read a mixture."""
    slot = session.state.store.slot
    async with session.overwritten():
        if restored is None:
            past = await restoring.begin(session.services, branch, slot, opening.system if session.system else None,
                                         raw=session.raw, trusted=session.trusted, focus=opening.focus, over=session)
        else:
            past = await restoring.revive(session.services, branch, restored, slot)
        session.check_open()  # it may have been closed while this one was read
        session.end(REWOUND)
    session.close_branch()
    past.succeed(session)
    return past
