"""The synchronous engine: `core` runs it, `layout` is what is fixed of it, `state` is a context of it, `scorer` feeds
the policy."""

from locret_stream.engine.attention import MASKS
from locret_stream.engine.core import Engine
from locret_stream.engine.decoding import NextToken
from locret_stream.engine.state import HISTORY, EngineState, Receipts

__all__ = ["HISTORY", "MASKS", "Engine", "EngineState", "NextToken", "Receipts"]
