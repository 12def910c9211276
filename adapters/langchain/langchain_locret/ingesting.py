"""A stream of text that the caller's event loop, or thread, reads is absorbed on the runtime's."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.messages import HumanMessage

from locret_stream import ContextClosed, InputError, SourceError
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.sources import Puller
from locret_stream.conversation.absorbing import Absorption, as_text
from locret_stream.conversation.request import Request, current_task
from locret_stream.conversation.threads import Threads

if TYPE_CHECKING:
    from langchain_locret.runtimes import RuntimeLoop

_BLOCK = 1 << 16  # bytes of a file that are read at once


async def absorb(loop: RuntimeLoop, source: Any, request: Request, label: str,
                 progress: Callable[[int], None] | None) -> HumanMessage:
    """Read all of a source into a thread of that loop's runtime. This runs on the caller's event loop.

    Raises as `LocretChatModel.aingest`.
    """
    if isinstance(source, Path):
        try:
            file = source.open("rb")
        except OSError as error:
            raise SourceError(f"{source} cannot be opened: {error}; expected a file of text") from error
        with file:  # in blocks, as a file may be one long line
            return await absorb(loop, iter(lambda: file.read(_BLOCK), b""), request, label, progress)
    puller, decode, absorption = Puller(source), codecs.getincrementaldecoder("utf-8")(), Absorption(request, label)
    try:
        await loop.acall(absorption.begin)
        while (piece := await puller.next()) is not None:
            if isinstance(piece, list):
                raise InputError("the source gave token ids; expected text")
            text = as_text(decode, piece) if isinstance(piece, bytes) else piece
            if text:
                await loop.acall(partial(_push, absorption, text))
                if progress is not None:
                    progress(absorption.characters)
        as_text(decode, b"", final=True)
        message = await loop.acall(lambda _: absorption.finish())
        absorption.take()
    finally:
        with contextlib.suppress(ContextClosed):  # closing the model releases the thread, too
            try:
                await to_the_end(loop.acall(lambda _: absorption.abort()))
            except asyncio.CancelledError:
                if not absorption.taken:
                    raise
                current_task().uncancel()  # too late: the stream is in memory, and stays
    return HumanMessage(message.content)


async def _push(absorption: Absorption, text: str, threads: Threads) -> None:
    await absorption.push(text)
