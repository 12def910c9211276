"""What the verbs print: the two consoles, JSON on stdout, and numbers in words. Knows no model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from locret_stream.budgets import in_bytes

if TYPE_CHECKING:
    from locret_stream.charsets import Decoder
    from locret_stream.context import Memory
    from locret_stream.runtime import Runtime

# Nothing printed is markup: file names, questions and answers are data.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def make_printable() -> None:
    """Let stdout and stderr print every text: what their encoding lacks, and half of a surrogate pair, which none has,
    is printed as an escape. Names of files and questions hold such halves where their bytes are no UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        whole = _carries("\U0010fffd\ud800\udcff", stream, getattr(stream, "errors", None))
        if not whole and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line of stdout: in ASCII where its encoding lacks characters, or this text has halves of
    surrogate pairs, so that a reader gets back what was printed."""
    line = json.dumps(value, ensure_ascii=False)
    if not _carries(f"\U0010fffd{line}", sys.stdout):
        line = json.dumps(value)
    print(line, flush=True)


def _carries(text: str, stream: TextIO, errors: str | None = "strict") -> bool:
    """Whether the encoding of `stream` can write this text, handling errors so."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8", errors or "strict")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def describe_runtime(runtime: Runtime) -> str:
    """What a runtime runs with, in one line."""
    engine = runtime.engine
    dtype = str(runtime.attachment.dtype).removeprefix("torch.")
    return (f"{dtype} on {runtime.attachment.device}, policy {engine.policy.name}, budget "
            f"{fmean(engine.budgets):,.0f} + chunk {engine.chunk_size:,} units per KV head in "
            f"{in_bytes(engine.pool.slot_bytes)}")


def describe(memory: Memory) -> str:
    """The state of a context in one sentence."""
    among = f", a focus of {memory.focus:,} tokens among them," if memory.focus else ""
    among += f" and the newest {memory.pending:,} tokens" if memory.pending else ""
    recall = f"; {in_bytes(memory.bytes_recall)} of an index for recall" if memory.bytes_recall else ""
    buffered = f"; {memory.buffered:,} more buffered" if memory.buffered else ""
    return (f"{memory.tokens:,} tokens read, {fmean(memory.units):,.0f} units per KV head (mean over layers){among} "
            f"kept in {in_bytes(memory.bytes_resident)}; a full cache would need {in_bytes(memory.bytes_full_cache)}"
            f"{recall}{buffered}")


def say_of_bytes(decoders: Iterable[Decoder]) -> None:
    """Print what of the texts is not as its bytes were."""
    for decoder in decoders:
        if decoder.replaced:
            err.print(f"{decoder.name}: {decoder.bytes_replaced:,} bytes are not {decoder.charset.shown} and were read "
                      f"as {decoder.replaced:,} U+FFFD.", soft_wrap=True)
        for warning in decoder.warnings:
            err.print(f"Beware: {warning}.", soft_wrap=True)
