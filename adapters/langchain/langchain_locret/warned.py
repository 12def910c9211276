"""What a call of the model may warn of."""

from __future__ import annotations


class RebuildWarning(UserWarning):
    """A thread was read again from the messages given: what its memory held beyond them is lost."""


class ToolsWarning(UserWarning):
    """Tools were bound to a model whose chat template shows none, or a call was demanded of one whose calls cannot be
    held to a schema."""


class NoTextWarning(UserWarning):
    """The bytes of a stream could be read as text, and what came out hardly is any."""


class LateWarning(UserWarning):
    """Another system text, or other tools, were read behind what a thread's memory holds."""
