"""The synchronous engine: `core` runs contexts, each of which is a `state`; `layout` is all that is fixed; `attention`,
`scorer` (asks the policy), `decoding` (steps of several contexts), `focus`, `occupancy` and `serialisation` are its
parts; `trial` tries a model on it."""

from locret_stream.engine.core import Engine
from locret_stream.engine.decoding import NextToken
from locret_stream.engine.occupancy import Occupancy, occupancy
from locret_stream.engine.state import EngineState, Receipts
from locret_stream.engine.trial import try_out

__all__ = ["Engine", "EngineState", "NextToken", "Occupancy", "Receipts", "occupancy", "try_out"]
