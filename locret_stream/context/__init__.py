"""StreamingContext: the async API of one memory. No tensor maths, and no thread of its own but one for each save."""

from locret_stream.context.replaying import Replay, replay
from locret_stream.context.session_index import Recalled
from locret_stream.context.streaming_context import StreamingContext
from locret_stream.context.streams import Feed, FeedReport, Generation, Token
from locret_stream.context.values import Answer, Memory

__all__ = ["Answer", "Feed", "FeedReport", "Generation", "Memory", "Recalled", "Replay", "StreamingContext", "Token",
           "replay"]
