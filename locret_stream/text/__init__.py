"""Text in, token ids out, and back, both incrementally; and the chat template's own tokens around them.

Knows tokenizers and templates. Knows no tensors, no model and no context.

    segmenter   text or UTF-8 bytes, in any pieces -> segments that depend on the text alone
    codec       a segment -> ids that are never control; ids -> text, a whole character at a time
    frames      the ids a chat template writes before, between and after what is fed, asked and answered
"""

from locret_stream.text.codec import Detokenizer, TextCodec
from locret_stream.text.frames import ChatFrame, FrameState
from locret_stream.text.segmenter import HARD_LIMIT, SOFT_LIMIT, Segmenter, SegmenterState

__all__ = ["HARD_LIMIT", "SOFT_LIMIT", "ChatFrame", "Detokenizer", "FrameState", "Segmenter", "SegmenterState",
           "TextCodec"]
