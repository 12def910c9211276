"""What a client has of an answer: an answer that is begun again goes on behind it, or is found to be another one."""

from __future__ import annotations

from dataclasses import replace

from locret_serve.replicas import died
from locret_stream.conversation.parts import Call, End, Part
from locret_stream.serving.errors import ApiError


class Sent:
    """The parts of one answer, over any number of beginnings."""

    def __init__(self) -> None:
        self._text = self._reasoning = ""
        self._calls: list[Call] = []
        self._at = [0, 0, 0]  # characters of text and of reasoning, and calls, that this beginning has given

    @property
    def size(self) -> int:
        """Characters and calls that were sent."""
        return len(self._text) + len(self._reasoning) + len(self._calls)

    def begin_again(self) -> None:
        self._at = [0, 0, 0]

    def new_of(self, part: Part | End) -> Part | End | None:
        """What of a part was not sent yet; it counts as sent now. None: all of it was.

        Raises:
            ApiError 503: the answer is not the one that was begun.
        """
        if isinstance(part, End):
            if self._at != [len(self._text), len(self._reasoning), len(self._calls)]:
                raise _another()
            return part
        text, self._text = self._behind(0, self._text, part.text)
        reasoning, self._reasoning = self._behind(1, self._reasoning, part.reasoning)
        calls = []
        for call in part.calls:
            if self._at[2] == len(self._calls):
                self._calls.append(call)
                calls.append(call)
            elif (known := self._calls[self._at[2]]).name != call.name or known.arguments != call.arguments:
                raise _another()
            self._at[2] += 1
        if part != Part() and not text and not reasoning and not calls:
            return None
        return replace(part, text=text, reasoning=reasoning, calls=tuple(calls))

    def _behind(self, kind: int, sent: str, came: str) -> tuple[str, str]:
        """(what is new, all that is sent then)."""
        at = self._at[kind]
        known = sent[at:at + len(came)]
        if not came.startswith(known):
            raise _another()
        new = came[len(known):]
        self._at[kind] = at + len(came)
        return new, sent + new


def _another() -> ApiError:
    return died("the replica died that gave this answer, and another one answers differently, so that it cannot be "
                "gone on with; the session is as it was before. Expected the request again")
