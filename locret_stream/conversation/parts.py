"""An answer in parts, as it comes: neutral to whatever face shows it. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Call:
    """One tool call of a reply, whole.

    Attributes:
        name: None for a call that cannot be read; `arguments` is then all that was written of it.
        arguments: a JSON object.
        index: its number in the reply.
    """

    name: str | None
    arguments: str
    id: str
    index: int


@dataclass(frozen=True)
class Part:
    """What came since the part before: text, reasoning, and calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class End:
    """The end of an answer.

    Attributes:
        prompt, cached, sampled: tokens that the memory had accepted when the reply began, those of them that it held
            before the turn, and those of the reply.
        finish: why the reply ended; "length": a limit cut it off, calls or not.
        receipt: what the turn found, read and kept, as JSON holds it.
        warnings: what the caller ought to know, by its kind: "late", "rebuild", "tools" or "held".
        reasoning: tokens of the reply that were thought.
    """

    prompt: int
    cached: int
    sampled: int
    finish: Literal["stop", "length", "tool_calls"]
    receipt: dict[str, Any]
    warnings: dict[str, str] = field(default_factory=dict)
    reasoning: int = 0
