"""Conversations made for training retaining heads: `facts` that are told, `texts` that they lie in, `conversations`
that ask about them, and `answered`, which keeps what the model itself answers right."""

from locret_stream.making.answered import Answered, answered
from locret_stream.making.conversations import Conversation, Making, Question, conversation
from locret_stream.making.texts import Texts

__all__ = ["Answered", "Conversation", "Making", "Question", "Texts", "answered", "conversation"]
