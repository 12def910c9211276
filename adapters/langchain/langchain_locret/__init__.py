"""LangChain on a locret_stream memory: threads of any length, in a fixed amount of memory.

Names resolve on first use. Neither importing the package nor making a model loads torch or transformers, unless the
model is given a `policy` or a `key` to check.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_locret.chat_model import LocretChatModel
    from langchain_locret.warned import LateWarning, NoTextWarning, RebuildWarning, ToolsWarning
    from locret_stream import StateLost

__all__ = ["LateWarning", "LocretChatModel", "NoTextWarning", "RebuildWarning", "StateLost", "ToolsWarning"]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"LocretChatModel": f"{__name__}.chat_model", "StateLost": "locret_stream.errors"}
    value = getattr(importlib.import_module(home.get(name, f"{__name__}.warned")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
