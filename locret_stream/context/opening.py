"""How the session of a context comes about when the context is entered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from locret_stream.context import restoring
from locret_stream.context.saving import store_of, storing
from locret_stream.context.services import Services
from locret_stream.context.session import Session
from locret_stream.errors import ConfigError
from locret_stream.snapshot.identity import digest_text


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The options of `Runtime.open`, which says what each of them does.

    Args:
        stored: whether the context is a session of the store.
    """

    stored: bool = False
    system: str | None = None
    raw: bool | None = None
    trusted: bool = False
    on_mismatch: Literal["raise", "rebuild"] = "raise"
    at: int | None = None
    focus: str | None = None


async def open_session(services: Services, name: str, opening: Opening, slot: int) -> tuple[Session, bool]:
    """The session in that slot, and whether it goes on from a stored one.

    Raises:
        SnapshotMismatch, SnapshotCorrupt, SnapshotTooNew, SnapshotNotFound, StoreError, ConfigError: nothing is open.
    """
    branch = None
    if opening.stored:
        store = store_of(services)
        branch = await storing(services, store.branch, name)
        if opening.at != 0 and (opening.at or await storing(services, store.has, name)):
            try:
                session = await restoring.resume(services, branch, slot, opening.at,
                                                 rebuild=opening.on_mismatch == "rebuild")
                _check_begun_so(session, name, opening)
                if opening.focus is not None:
                    await session.focus(restoring.focus_ids(services, opening.focus))
            except BaseException:
                branch.close()
                raise
            return session, True
    return await restoring.begin(services, branch, slot, opening.system, raw=opening.raw, trusted=opening.trusted,
                                 focus=opening.focus), False


def _check_begun_so(session: Session, name: str, opening: Opening) -> None:
    """Refuse another system text, or another kind of frame, than the session was begun with.

    Raises:
        ConfigError.
    """
    if opening.system is not None and digest_text(opening.system) != session.system:
        raise ConfigError(f"session {name!r} was begun with {'another' if session.system else 'no'} system text, which "
                          "is in its memory; expected the same one or none, or a new name")
    if opening.raw is not None and opening.raw != session.raw:
        raise ConfigError(f"session {name!r} was begun with raw={session.raw}; expected the same, or a new name")
