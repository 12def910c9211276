"""What requests mean for sessions and conversations beside their answers: what they are told, hold and keep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from locret_stream.conversation.messages import Message
from locret_stream.conversation.request import Request, ThreadNotFound, within
from locret_stream.serving import chat, names, responses
from locret_stream.serving.any_service import AnyService
from locret_stream.serving.bodies import Json, as_struct, as_whole, ignored
from locret_stream.serving.errors import ApiError
from locret_stream.serving.items import item_json, page_json
from locret_stream.serving.thinking import FIELDS as THINKING
from locret_stream.serving.thinking import read_thinking

if TYPE_CHECKING:  # all but the last load torch
    from locret_stream.conversation.items import Item
    from locret_stream.conversation.threads import Threads
    from locret_stream.serving.uploads import Uploads


class Sessions(AnyService):
    """A part of `Service`, which has these beside it."""

    uploads: Uploads

    @property
    @abstractmethod
    def threads(self) -> Threads: ...

    @asynccontextmanager
    async def _in_time(self, kind: str, timeout_s: float | None = None) -> AsyncIterator[None]:
        """A place among the requests, for as long as a turn may take. Raises as `admitted`; TimeoutError."""
        timeout_s = self.limits.timeout_s if timeout_s is None else timeout_s
        with self.admitted(kind), _known():
            async with within(timeout_s, f"{kind} was not done within {timeout_s} s, waiting for the session included; "
                              "expected a longer timeout, or another try once the session is free"):
                yield

    # -- conversations ----------------------------------------------------------------------------------------

    async def create(self, thread: str) -> bool:
        """Store a conversation that was told nothing; False if there is one of that name."""
        from locret_stream.conversation.standing import create
        async with self._in_time("create"):
            return await create(self.threads, thread)

    async def tell(self, thread: str, items: list[Json]) -> list[Item]:
        """Items that a conversation is told and does not answer, as its log has them then. Raises ApiError 400;
        TimeoutError: nothing of them stays."""
        from locret_stream.conversation.telling import tell
        with self.admitted("tell"):
            said = responses.read_messages(items, field="items")
            return await tell(self.threads, Request(said, thread=thread, mark=names.new_mark(),
                                                    timeout_s=self.limits.timeout_s))

    async def items(self, thread: str, session: str, limit: int, after: str, newest_first: bool) -> Json:
        """A page of the items of a conversation, from its log. Raises ApiError 404."""
        from locret_stream.conversation.items import items
        async with self._in_time("items"):
            found = await items(self.threads, thread, limit=limit, after=after, newest_first=newest_first)
        if found is None:
            raise unknown_session(session)
        return page_json([item_json(each, session) for each in found.items], more=found.more)

    async def item(self, thread: str, session: str, item_id: str) -> Json:
        """One of them. Raises ApiError 404."""
        from locret_stream.conversation.items import item
        async with self._in_time("items"):
            found = await item(self.threads, thread, item_id)
        if found is None:
            raise unknown_session(session)
        return item_json(found, session)

    async def drop_item(self, thread: str, item_id: str) -> None:
        """Undo what a conversation was told last. Raises as `conversation.items.take_item_back`."""
        from locret_stream.conversation.items import take_item_back
        async with self._in_time("items"):
            await take_item_back(self.threads, thread, item_id)

    # -- sessions ---------------------------------------------------------------------------------------------

    async def sessions(self, tenant: str) -> list[Json]:
        """The stored sessions of a tenant."""
        from locret_stream.conversation.thread_memory import stored_threads
        found = await stored_threads(self.threads)
        return [{"id": name.removeprefix(tenant), "object": "session"} for name in found if name.startswith(tenant)]

    async def session(self, thread: str, session: str) -> Json:
        """What is kept of a session. Raises ApiError 404."""
        from locret_stream.conversation.standing import boundaries
        async with self._in_time("session"):
            rows = await boundaries(self.threads, thread)
        if not rows:
            raise unknown_session(session)
        return {"id": session, "object": "session", "boundaries": [
            {"number": number, "tokens": boundary.tokens, "role": boundary.role, "stream": boundary.stream,
             "response": names.response_id(session, boundary.mark) if boundary.mark else None}
            for number, boundary in rows]}

    async def memory(self, thread: str, session: str) -> Json:
        """Figures of a session's memory. Raises ApiError 404."""
        from locret_stream.conversation.thread_memory import memory
        async with self._in_time("memory"):
            found = await memory(self.threads, thread)
        if found is None:
            raise unknown_session(session)
        return {"id": session, "object": "session.memory", **msgspec.to_builtins(found)}

    async def map(self, thread: str, start: int, end: int | None, columns: int) -> Json:
        """Units that a session keeps of each part of what it was told. Raises ApiError 404, InputError."""
        from locret_stream.conversation.standing import occupancy
        async with self._in_time("map"):
            named = self.threads.named(thread)
            if named.open and named.lock.locked():  # a turn runs: as it is at this moment
                found = await named.context.occupancy(start, end, columns)
            else:
                found = await occupancy(self.threads, thread, start, end, columns)
        return {"object": "session.map", "start": found.start, "end": found.end, "tokens": found.position,
                "pending": found.pending, "column": found.column, "kept": found.kept}

    async def text(self, thread: str, session: str, start: int, end: int | None, column: int | None = None) -> Json:
        """What a session was told between two positions, from its log. Raises ApiError 404.

        Args:
            column: also the text cut every so many tokens, as the columns of `map`.
        """
        async with self._in_time("text"):
            found = await _text(self.threads, thread, start, end, column)
            if found is None:
                told = await _told(self.threads, thread, session)
                if start < told and (end is None or start < end):  # told since it was read
                    found = await _text(self.threads, thread, start, end, column)
                elif start == told and (end is None or end >= start):  # all has been read
                    found = {"start": start, "end": start, "text": "", "share": 0.0}
        if found is None:
            raise ApiError(400, f"there is no text from token {start} {'on' if end is None else f'to {end}'}; expected "
                           f"a part of the {told:,} tokens that were told", param="start")
        return {"object": "session.text", **found}

    async def search(self, thread: str, words: str, limit: int) -> Json:
        """Passages of a session's log that have these words, whether its memory keeps them or not."""
        from locret_stream.conversation.thread_memory import recall
        async with self._in_time("search"):
            found = await recall(self.threads, thread, words, None, None, limit)
        return {"object": "list", "data": [msgspec.to_builtins(passage) for passage in found]}

    async def ask(self, thread: str, body: Mapping[str, Any]) -> Json:
        """The answer to a question on a copy of a session's memory. Raises ApiError 400, 404; TimeoutError."""
        from locret_stream.conversation.standing import ask
        self.check_model(body)
        question = body.get("question")
        if not isinstance(question, str) or not question.strip():
            raise ApiError(400, "question is missing or empty; expected a text", param="question")
        given = as_struct(body, chat.Sampled)
        async with self._in_time("ask", self._timeout(given)):
            request = Request([Message("user", question)], thread=thread, recall=given.recall,
                              sampling=self._sampling(given), **read_thinking(body))
            asked = await ask(self.threads, request)
        unused = ignored(body, chat.Sampled, ("question", *THINKING)) + [
            name for name in ("focus", "stream") if body.get(name)]
        unused += given.without_effect() + self.threads.without_effect(request)
        cut = asked.text.finish_reason == "length"
        return {"object": "session.answer", "answer": str(asked.text), "finish_reason": "length" if cut else "stop",
                **({"reasoning_content": asked.reasoning} if asked.reasoning else {}), "recalled": asked.recalled,
                "locret": {"ignored": unused} if unused else {}}

    async def fork(self, thread: str, new: str) -> None:
        """Let a new session go on from where one is. Raises ApiError 404; otherwise as `conversation.forking.fork`;
        TimeoutError: there is no new one."""
        from locret_stream.conversation.forking import fork
        from locret_stream.conversation.standing import boundaries
        async with self._in_time("fork"):
            if not await boundaries(self.threads, thread) and self.threads.named(thread).live is None:
                raise ThreadNotFound
            await fork(self.threads, thread, new)

    async def focus(self, thread: str, session: str, body: Mapping[str, Any]) -> Json:
        """Tell a session what it will be asked about; None: about anything. Raises ApiError 400, 404; otherwise as
        `conversation.standing.refocus`."""
        from locret_stream.conversation.standing import refocus
        text = body.get("focus", body)
        if text is not None and not isinstance(text, str):
            raise ApiError(400, "focus is missing, or no text; expected what the session will be asked about, or null "
                           "for anything", param="focus")
        async with self._in_time("focus"):
            tokens = await refocus(self.threads, thread, text)
        return {"object": "session", "id": session, "focus": text, "tokens": tokens}

    async def rewind(self, thread: str, session: str, to: Any) -> Json:
        """Go back to the end of an earlier response, or to the boundary of a number; what came later is deleted. It may
        be deleted though this raises TimeoutError."""
        from locret_stream.conversation.standing import rewind
        to = as_whole(to)
        if isinstance(to, str):
            owner, mark = names.parse_response_id(to)
            if owner != session:
                raise ApiError(400, "to is a response of another session; expected one of this", param="to")
            chosen: dict[str, Any] = {"mark": mark}
        elif isinstance(to, int) and not isinstance(to, bool):
            chosen = {"generation": to}
        else:
            raise ApiError(400, "to is missing; expected the id of a response, or the number of a boundary", param="to")
        async with self._in_time("rewind"):
            boundary = await rewind(self.threads, thread, **chosen)
        return {"object": "session", "id": session, "tokens": boundary.tokens}

    async def snapshot(self, thread: str, session: str) -> Json:
        """Make a session durable where it rests; `saved` says whether anything of it was at hand."""
        async with self._in_time("snapshot"):
            saved = await self.threads.make_durable(thread)
        return {"object": "session", "id": session, "saved": saved}

    async def forget(self, thread: str, session: str) -> None:
        """Delete a session and its forks, every file of them; streams into them are undone first. Raises ApiError 404;
        TimeoutError: it was in use all the time, and is as it was."""
        await self.uploads.abort(lambda name: self.threads.is_of(name, thread))
        if not await self.threads.forget(thread, timeout_s=self.limits.timeout_s):
            raise unknown_session(session)


async def _text(threads: Threads, thread: str, start: int, end: int | None, column: int | None) -> Json | None:
    """The text from a position on, None where the log has none."""
    from locret_stream.conversation.thread_memory import recall, text_in_columns
    if column is not None:
        cut = await text_in_columns(threads, thread, start, end, column)
        return cut and {**msgspec.to_builtins(cut[0]), "column": column, "pieces": cut[1]}
    found = await recall(threads, thread, "", start, end, 1)
    return msgspec.to_builtins(found[0]) if found else None


async def _told(threads: Threads, thread: str, session: str) -> int:
    """Tokens that a session was told. Raises ApiError 404."""
    from locret_stream.conversation.thread_memory import tokens_told
    told = await tokens_told(threads, thread)
    if told is None:
        raise unknown_session(session)
    return told


@contextmanager
def _known() -> Iterator[None]:
    """A session that was told nothing is refused in the words of this API."""
    try:
        yield
    except ThreadNotFound:
        raise ApiError(404, "there is no such session, or it was told nothing; expected one that was",
                       code="session_not_found") from None


def unknown_session(session: str) -> ApiError:
    return ApiError(404, f"there is no session {session!r}, or it was told nothing", code="session_not_found")
