"""What is read again for a question: passages of what the session has read that have its words."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from locret_stream.config import Recall
from locret_stream.context import saving
from locret_stream.context.session_index import Recalled, SessionIndex
from locret_stream.context.sources import as_piece
from locret_stream.context.tokenizing import encode_text
from locret_stream.errors import ConfigError, StoreError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from locret_stream.context.services import Services
    from locret_stream.context.session import Session


class ReadAgain(NamedTuple):
    """Passages that a question finds, the ids that are read for them before it, and the share of the budget that the
    copy which reads them keeps of its memory."""

    passages: tuple[Recalled, ...] = ()
    ids: tuple[int, ...] = ()
    memory: float = 1.0


NOTHING = ReadAgain()
REPLY = 32  # tokens of a reply that still see all passages, where the budget is so small that its commits evict some
AROUND = "\n\n"  # what is read, where no template sets it off
LEAST = 64  # tokens of passages that are read whether they have room or not: one of the longest


async def read_again(session: Session, question: str | list[int] | None, recall: bool | Recall | None) -> ReadAgain:
    """What is read again before a question; nothing where there is none, nor where the policy never evicts, as all
    that was read is in the memory then. Raises as `recalled`."""
    bounded = session.services.engine.policy.bounded
    passages = [] if question is None or not bounded else await recalled(session, question, recall, to_read=True)
    if not passages:
        return NOTHING
    around = AROUND if session.raw else ""
    text = around + "\n".join(passage.text for passage in passages) + around
    ids = await encode_text(session.services, text)
    return ReadAgain(tuple(passages), tuple(ids), settings_of(session.services, recall).memory)


def settings_of(services: Services, recall: bool | Recall | None) -> Recall:
    """How much is recalled, and what stays beside it, where `recall` is what a call says."""
    return recall if isinstance(recall, Recall) else services.recall or Recall()


def begin(session: Session) -> None:
    """Keep an index from now on, where the runtime recalls."""
    services, branch = session.services, session.branch
    if services.recall is not None:
        stored_in = services.store if branch is None else branch  # a context without a name is as private as the others
        private = stored_in is not None and stored_in.encrypts
        session.keep_index(SessionIndex(services, session, private=private, complete=session.state.seen == 0))


def fork(index: SessionIndex | None, session: Session) -> None:
    """Keep a copy of that index in a fork of its session. It takes long, so it runs on a thread."""
    if index is not None:
        session.keep_index(index.copy(session, session.state.seen))


async def recalled(session: Session, question: str | list[int], recall: bool | Recall | None, *,
                   to_read: bool = False) -> list[Recalled]:
    """What was read that has the words of a question, in the order in which it was read; of committed ids alone, as
    what is pending stands before the question anyway. Nothing where `recall` is False, or None and the runtime recalls
    nothing. With `to_read` no more than a copy has room for beside the question and the beginning of a reply.

    Raises:
        ConfigError: the session keeps nothing for recall, or was opened from a store that keeps no log.
        SnapshotCorrupt, StoreError: the log cannot be read. InvalidTokens: no ids of a question.
    """
    services, index = session.services, session.index
    if recall is False or (recall is None and services.recall is None):
        return []
    if index is None:
        raise ConfigError("this context keeps nothing for recall; expected Runtime(..., recall=True)")
    codec, settings = services.codec, settings_of(services, recall)
    text = as_piece(question)  # what cannot be read as a prompt is refused there
    if isinstance(text, list):
        text = codec.decode(codec.validate_ids(text))
    elif isinstance(text, bytes):
        text = text.decode(errors="replace")
    most = settings.tokens
    if to_read:
        tokens = len(await encode_text(services, text))
        session.check_open()
        room = services.engine.room_to_read(session.state, settings.memory)
        most = min(most, max(LEAST, room - tokens - session.frame_room() - REPLY))
    most -= 2 * len(codec.encode_text(AROUND)) * session.raw
    while True:
        await complete(session)
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                services.recalling, lambda: index.search(text, most, lambda text: len(codec.encode_text(text))))
        except StoreError:
            session.check_open()  # closing it meanwhile is no fault of the index
            raise
        if found is not None:
            return found
        session.check_open()


async def complete(session: Session) -> None:
    """Let the index of a session hold all that is committed, out of the log if need be; nothing where it has none.
    Raises as `recalled`."""
    index = session.index
    if index is not None and not index.complete:
        async with session.frozen():
            await asyncio.wrap_future(session.barrier())  # a commit that runs already is in the log behind it
            if not index.complete:
                await saving.storing_on(session.services.recalling, lambda: index.follow(session, _log_of(session)))


def _log_of(session: Session) -> NDArray[np.int32]:
    branch = session.branch
    if branch is None:
        raise ConfigError("what this context read cannot be recalled any more: its index was lost, and a context "
                          "without a name has no log; expected recall=False")
    if not branch.keeps_log:
        raise ConfigError("what this session read before cannot be recalled, as its store keeps no log; expected "
                          "Store(..., log=True), or recall=False")
    return branch.committed_ids(session.state.seen)
