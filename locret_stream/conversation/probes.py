"""Texts are hidden from a chat template behind probes, and found again in what it writes.

A template cannot be changed by what is said, and no text becomes a control token. Two things are not hidden, as
templates ask for them: white space at the ends of a text, which many of them trim, and the words that this template
looks for in texts (a flag such as `/no_think`), unless they could be a part of a control token. Where the template
leaves these as they are they belong to the text again.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from locret_stream.errors import ConfigError

# The quotation mark shows whether the template wrote the text as it is or as JSON.
PROBE = re.compile(r'(\ue000|\\ue000)(\d+)(\\?")(?:\ue001|\\ue001)')
MOST_KEPT = 128  # of one text: a template looks for few, and each is a probe more
_PART = re.compile(r"[\ue000\ue001]|\\ue00[01]")


@dataclass(frozen=True)
class Piece:
    """A part of a rendering: text of a message (`data` True), or the template's own.

    Attributes:
        width: the number of characters of the rendering that it stands for; None: as many as its text has.
    """

    text: str
    data: bool
    width: int | None = None

    @property
    def covers(self) -> int:
        return len(self.text) if self.width is None else self.width


class _Hidden(NamedTuple):
    """A text behind a probe, or a part of one: `whole` is the number of the first part. What is not hidden stands ahead
    of it and behind it, up to the next part."""

    text: str
    whole: int
    ahead: str = ""
    behind: str = ""


class Probes:
    """Replaces texts by numbered probes, and finds these in a rendering.

    Args:
        shown: texts that are not hidden where others contain them.
    """

    def __init__(self, shown: Sequence[str] = ()) -> None:
        self.hidden: list[_Hidden] = []
        self._same: dict[str, str] = {}
        self._shown = re.compile("|".join(map(re.escape, shown))) if shown else None

    @property
    def texts(self) -> list[str]:
        """What stands behind each probe."""
        return [hidden.text for hidden in self.hidden]

    def hide(self, text: str) -> str:
        """A probe for a text. One of nothing but white space stays, as templates ask whether a text is empty."""
        if not text or text.isspace():
            return text
        self.hidden.append(_Hidden(text, len(self.hidden)))
        # Of one length and in the order of the texts, whatever the number: a template may measure or sort them.
        return f'\ue000{len(self.hidden) - 1:08d}"\ue001'

    def stand_in(self, ahead: str = "") -> str:
        """A probe for no text at all, behind what is not hidden of a text."""
        self.hidden.append(_Hidden("", len(self.hidden), ahead))
        return f'\ue000{len(self.hidden) - 1:08d}"\ue001'

    def hide_content(self, text: str) -> str:
        """The same for what a message says, of which white space at its ends and `shown` are not hidden."""
        if not text or text.isspace():
            return text
        parts = self._parts(text)
        if not any(parts[::2]):
            return text + self.stand_in(text)
        out, whole = "", len(self.hidden)
        for part, ahead, behind in zip(parts[::2], ["", *parts[1::2]], [*parts[1::2], ""], strict=True):
            out += ahead
            if part:
                out += self.hide(part)
                self.hidden[-1] = _Hidden(part, whole, ahead, behind)
        return out

    def _parts(self, text: str) -> list[str]:
        """The text in parts that are hidden and kept in turn, hidden ones first and last."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        parts, at = ["", text[:begin]], begin
        found = [] if self._shown is None else list(itertools.islice(
            self._shown.finditer(text, begin, end), MOST_KEPT + 1))
        for word in found if len(found) <= MOST_KEPT else ():
            if word.start() < at:  # it stands in white space that the word before has
                continue
            first, last = word.span()
            first = at + len(text[at:first].rstrip())
            last = end - len(text[last:end].lstrip())
            parts += [text[at:first], text[first:last]]
            at = last
        return [*parts, text[at:end], text[end:], ""]

    def hide_same(self, text: str) -> str:
        """As `hide`, with the same probe for equal texts: a template may look one up in a list of others."""
        if text not in self._same:
            self._same[text] = self.hide(text)
        return self._same[text]

    def hide_all(self, value: Any) -> Any:
        """The same structure with a probe for every string in it, keys included."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide(str(key)): self.hide_all(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide_all(inner) for inner in value]
        return value

    def behind(self, rendered: str, probe: re.Match[str]) -> str:
        """What follows a probe in a rendering and is of the same text."""
        text = _as_written(self.hidden[int(probe[2])].behind, probe)
        return text if rendered.startswith(text, probe.end()) else ""

    def pieces(self, rendered: str) -> list[Piece]:
        """The rendering with the texts in place of their probes. Raises ConfigError if a probe was changed."""
        out, at, whole = list[Piece](), 0, -1
        for match in PROBE.finditer(rendered):
            hidden = self.hidden[int(match[2])]
            begin, end = match.span()
            ahead = _as_written(hidden.ahead, match)
            begin -= len(ahead) if rendered.endswith(ahead, at, begin) else 0
            end += len(self.behind(rendered, match))
            if begin > at:
                out.append(Piece(rendered[at:begin], False))
            text = rendered[begin:match.start()] + _as_written(hidden.text, match) + rendered[match.end():end]
            joined = out.pop() if begin == at and hidden.whole == whole else Piece("", True)
            out.append(Piece(joined.text + text, True, joined.covers + end - begin))
            at, whole = end, hidden.whole
        out += [Piece(rendered[at:], False)] if at < len(rendered) else []
        if any(_PART.search(piece.text) for piece in out if not piece.data):
            raise ConfigError("the chat template changes what is said in a way that cannot be followed (it escapes it, "
                              "or takes a part of it); expected a template that writes it as it is, or as JSON")
        return out


def _as_written(text: str, probe: re.Match[str]) -> str:
    """The text as the template wrote this probe: as it is, or as JSON."""
    return text if probe[3] == '"' else json.dumps(text, ensure_ascii=probe[1] != "\ue000")[1:-1]
