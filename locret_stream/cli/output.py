"""What the verbs print: the two consoles, JSON on stdout, and numbers in words. Knows no model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from locret_stream.budgets import in_bytes

if TYPE_CHECKING:
    from locret_stream.charsets import Decoder
    from locret_stream.context import Memory
    from locret_stream.runtime import Runtime

# Nothing printed is markup: file names, questions and answers are data.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def writes_everything(stream: IO[str]) -> bool:
    """Whether the encoding of `stream` has every Unicode character."""
    try:
        "\U0010fffd".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line of stdout."""
    print(json.dumps(value, ensure_ascii=not writes_everything(sys.stdout)), flush=True)


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
