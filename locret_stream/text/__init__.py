"""Text to token ids and back, both incrementally, and the tokens that a chat template puts around them.

Knows tokenizers and templates. Knows no tensors, no model and no context.

    segmenter   text or UTF-8 bytes, in any pieces -> segments that depend on the text alone
    codec       a segment -> ids without control tokens; ids -> text, in whole characters
    template    a tokenizer's chat template: its source, and the one way to let it write
    traits      what a chat template does with messages
    held_options which options of a chat template change what a memory holds
    frames      the ids that a chat template writes before, between and after the contents of messages
"""

from locret_stream.text.codec import Detokenizer, TextCodec
from locret_stream.text.frames import ChatFrame, FrameState
from locret_stream.text.segmenter import HARD_LIMIT, SOFT_LIMIT, Segmenter, SegmenterState
from locret_stream.text.template import Template
from locret_stream.text.traits import Traits

__all__ = ["HARD_LIMIT", "SOFT_LIMIT", "ChatFrame", "Detokenizer", "FrameState", "Segmenter", "SegmenterState",
           "Template", "TextCodec", "Traits"]
