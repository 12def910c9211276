"""The synchronous engine: `core` runs it, `state` is a context of it, `scorer` feeds the policy."""

from locret_stream.engine.core import MASKS, Engine
from locret_stream.engine.decoding import NextToken
from locret_stream.engine.state import HISTORY, EngineState, Receipts

__all__ = ["HISTORY", "MASKS", "Engine", "EngineState", "NextToken", "Receipts"]
