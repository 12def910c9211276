"""StreamingContext: the async face of one memory. No tensor maths, no thread of its own."""

from locret_stream.context.replaying import Replay, replay
from locret_stream.context.streaming_context import StreamingContext
from locret_stream.context.streams import Feed, FeedReport, Generation, Token
from locret_stream.context.values import Memory

__all__ = ["Feed", "FeedReport", "Generation", "Memory", "Replay", "StreamingContext", "Token", "replay"]
