"""A stream of text that the caller's event loop, or thread, reads is absorbed on the runtime's."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.messages import HumanMessage

from langchain_locret.messages import RECEIPT
from langchain_locret.warned import NoTextWarning
from locret_stream import ContextClosed, InputError, SourceError
from locret_stream.charsets import Charset, Decoder
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.sources import Puller
from locret_stream.conversation.absorbing import Absorption
from locret_stream.conversation.request import Request, current_task
from locret_stream.conversation.threads import Threads

if TYPE_CHECKING:
    from langchain_locret.runtimes import RuntimeLoop

_BLOCK = 1 << 16  # bytes of a file that are read at once


async def absorb(loop: RuntimeLoop, source: Any, request: Request, label: str, charset: Charset,
                 progress: Callable[[int], None] | None) -> HumanMessage:
    """Read all of a source into a thread of that loop's runtime. This runs on the caller's event loop.

    Args:
        charset: of the bytes that the source gives.

    Raises as `LocretChatModel.aingest`.
    """
    if isinstance(source, Path):
        try:
            file = source.open("rb")
        except OSError as error:
            raise SourceError(f"{source} cannot be opened: {error}; expected a file of text") from error
        with file:  # in blocks, as a file may be one long line
            return await absorb(loop, iter(lambda: file.read(_BLOCK), b""), request, label, charset, progress)
    puller, absorption = Puller(source), Absorption(request, label)
    decoder = Decoder(charset, option="{}={!r}")

    async def feed(text: str) -> None:
        if text:
            await loop.acall(partial(_push, absorption, text))
            if progress is not None:
                progress(absorption.characters)

    try:
        await loop.acall(absorption.begin)
        while (piece := await puller.next()) is not None:
            if isinstance(piece, list):
                raise InputError("the source gave token ids; expected text")
            await feed(decoder.push(piece) if isinstance(piece, bytes) else decoder.end() + piece)
        await feed(decoder.end())
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
    for warning in decoder.warnings:
        warnings.warn(warning, NoTextWarning, stacklevel=2)
    return HumanMessage(message.content, response_metadata={RECEIPT: decoder.receipt} if decoder.receipt else {})


async def _push(absorption: Absorption, text: str, threads: Threads) -> None:
    await absorption.push(text)
