"""An endless stream of tokens goes in, a fixed amount of memory keeps what matters; ask, save, fork or resume.

    async with Runtime.from_pretrained("bundled", budget=512, chunk_size=256) as runtime:
        async with runtime.open("logs") as ctx:
            await ctx.feed(stream)
            print(await ctx.ask("What broke the build?"))

Names resolve on first use: importing the package loads neither torch nor transformers, touches no device, and
knows nothing of Triton or LangChain.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from locret_stream.version import __version__

if TYPE_CHECKING:
    from locret_stream.config import Budget, Recall, Sampling, StreamConfig
    from locret_stream.context import (
        Answer,
        Feed,
        FeedReport,
        Generation,
        Memory,
        Recalled,
        Replay,
        StreamingContext,
        Token,
    )
    from locret_stream.engine import Receipts
    from locret_stream.errors import (
        BudgetExceeded,
        ConfigError,
        ContextBusy,
        ContextClosed,
        ContextError,
        EmptySource,
        HeadsMismatch,
        InputError,
        InvalidText,
        InvalidTokens,
        LocretError,
        ModelError,
        NoSlot,
        SnapshotCorrupt,
        SnapshotError,
        SnapshotMismatch,
        SnapshotNotFound,
        SnapshotTooNew,
        SourceError,
        StaleOwner,
        StateLost,
        StoreError,
        UnknownPolicy,
        UnsupportedModel,
        WindowExceeded,
    )
    from locret_stream.host_tier import HostTier
    from locret_stream.runtime import Runtime, RuntimeMemory
    from locret_stream.shorthand import SyncContext, SyncGeneration, open_context
    from locret_stream.snapshot import Collected, Snapshot, Store, Verified


__all__ = [
    "Answer",
    "Budget",
    "BudgetExceeded",
    "Collected",
    "ConfigError",
    "ContextBusy",
    "ContextClosed",
    "ContextError",
    "EmptySource",
    "Feed",
    "FeedReport",
    "Generation",
    "HeadsMismatch",
    "HostTier",
    "InputError",
    "InvalidText",
    "InvalidTokens",
    "LocretError",
    "Memory",
    "ModelError",
    "NoSlot",
    "Recall",
    "Recalled",
    "Receipts",
    "Replay",
    "Runtime",
    "RuntimeMemory",
    "Sampling",
    "Snapshot",
    "SnapshotCorrupt",
    "SnapshotError",
    "SnapshotMismatch",
    "SnapshotNotFound",
    "SnapshotTooNew",
    "SourceError",
    "StaleOwner",
    "StateLost",
    "Store",
    "StoreError",
    "StreamConfig",
    "StreamingContext",
    "SyncContext",
    "SyncGeneration",
    "Token",
    "UnknownPolicy",
    "UnsupportedModel",
    "Verified",
    "WindowExceeded",
    "__version__",
    "open_context",
]

_HOME = {
    **dict.fromkeys(("Budget", "Recall", "Sampling", "StreamConfig"), "config"),
    **dict.fromkeys(("Answer", "Feed", "FeedReport", "Generation", "Memory", "Recalled", "Replay", "StreamingContext",
                     "Token"), "context"),
    **dict.fromkeys(("SyncContext", "SyncGeneration", "open_context"), "shorthand"),
    **dict.fromkeys(("Collected", "Snapshot", "Store", "Verified"), "snapshot"),
    "HostTier": "host_tier",
    **dict.fromkeys(("Runtime", "RuntimeMemory"), "runtime"),
    "Receipts": "engine",
}


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
