"""Cuts a stream of token ids into passages, by a pure function of the ids, however they arrive.

A passage ends

    behind a run of newlines or the end of a sentence, which "etc." and other abbreviations are not, once it has `least`
    tokens,
    where a chat template begins another message, if it has `least` tokens; otherwise the next message is part of it,
    before it has more than `most` tokens, what a template writes around messages aside: behind the last semicolon or
    dash once it has `least` tokens, else behind the last comma or bracket, else between two words but behind no colon
    or equals sign, so that what belongs together is less often cut in two; else behind `most` tokens, or up to three
    more to end a character.

What a template writes around messages is no part of the text of a passage, on whatever day it was written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from locret_stream.text import Detokenizer, TextCodec

_SENTENCE = re.compile(r"[.!?…][\"'”’»)\]]*$")  # where white space follows
_WIDE_SENTENCE = re.compile(r"[。！？][」』”’]*$")  # where none does
_CLOSING, _WIDE_CLOSING = ".!?…\"'”’»)]", "。！？」』”’"  # what these end with
# What no sentence ends behind. "etc." and its like may end one: then the passage goes on to the end of the next, which
# divides nothing. A small letter that follows would tell less: many people write no capitals.
_ABBREVIATED = re.compile(
    r"\b(?:[A-Za-z]|Mr|Mrs|Ms|Mx|Dr|Prof|St|Rev|Hon|Gen|Col|Maj|Capt|Lt|Sgt|Messrs|Mt|Jr|Sr|Nos?|[Nn]r|[Vv]ol|[Ff]ig|"
    r"[Ee]q|pp|eds?|vs|cf|ca|al|[Aa]pprox|etc|incl|excl|viz|resp|[Tt]el|[Ee]xt|bzw|usw)\.$")
_ENDS_OF_PARTS = {**dict.fromkeys(";—–；", 3), **dict.fromkeys(",)]}，、", 2), ":": 0, "=": 0}
Headers = Mapping[int, frozenset[tuple[int, ...]]]
"""Of each control token what a chat template may write behind it, as ids: the role and a newline."""


GAP, SHORT_GAP, GAP_MOST = -1, -2, 64
"""In a header the place of a date, which is another one on every day, and the most tokens that it has. What follows a
short one ends the header where it comes first, as a message may follow; after another one, a control token does."""


def headers(literals: Sequence[Sequence[int]], control: frozenset[int],
            others: Sequence[Sequence[Sequence[int]]] = ()) -> Headers:
    """What follows each control token in a template's literals, up to the next control token.

    Args:
        others: the same literals as they are at other times.
    """
    found: dict[int, set[tuple[int, ...]]] = {}
    for number, literal in enumerate(literals):
        parts = _parts(literal, control)
        same = [each for other in others if number < len(other) and len(each := _parts(other[number], control))
                == len(parts)]
        for place, (token, tail) in enumerate(parts):
            gap = SHORT_GAP if place == len(parts) - 1 else GAP
            found.setdefault(token, set()).add(_with_gap(tail, [each[place][1] for each in same], gap))
    return {token: frozenset(tail for tail in tails if tail) for token, tails in found.items()}


def _parts(literal: Sequence[int], control: frozenset[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Each control token, and what follows it."""
    ends = [at for at, token in enumerate(literal) if token in control] + [len(literal)]
    return [(literal[at], tuple(literal[at + 1:end])) for at, end in itertools.pairwise(ends)]


def _with_gap(tail: tuple[int, ...], others: Sequence[tuple[int, ...]], gap: int) -> tuple[int, ...]:
    """The header with a gap in place of all that is not the same in the others. A short gap ends with something: where
    nothing follows the date, a message cannot be told from it."""
    ahead = min((_shared(tail, other) for other in others), default=len(tail))
    if ahead == len(tail) and all(len(other) == ahead for other in others):
        return tail
    behind = min(_shared(tail[ahead:][::-1], other[ahead:][::-1]) for other in others)
    return (*tail[:ahead], gap, *tail[len(tail) - behind:]) if behind or gap == GAP else tail


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _fits(tail: tuple[int, ...], ids: Sequence[int], *, whole: bool) -> bool:
    """Whether a header is these ids, or, unless `whole`, may begin with them."""
    at = next((at for at, token in enumerate(tail) if token < 0), len(tail))
    if len(ids) <= at or at == len(tail) or tuple(ids[:at]) != tail[:at]:
        return tuple(ids) == (tail if whole else tail[:len(ids)])
    rest, end = tuple(ids[at:]), tail[at + 1:]
    if whole:
        return len(end) <= len(rest) <= len(end) + GAP_MOST and rest[len(rest) - len(end):] == end
    ended = tail[at] == SHORT_GAP and any(rest[n:n + len(end)] == end for n in range(len(rest) - len(end)))
    return len(rest) <= len(end) + GAP_MOST and not ended


class Cut(NamedTuple):
    """A passage: its first position, its ids, what the template wrote between its messages included, its text, and the
    position behind the last id that its end depends on."""

    start: int
    ids: list[int]
    text: str
    seen: int


class Cutter:
    """Takes ids in any pieces and gives whole passages.

    Args:
        headers: of the chat template. start: position of the first id.
        least, most: tokens of a passage. The text of one has up to 64: a character may be ended, and it is tokenised
            without what stood before it.
    """

    def __init__(self, codec: TextCodec, headers: Headers | None = None, start: int = 0, *, least: int = 24,
                 most: int = 60):
        self._codec, self._headers, self._least, self._most = codec, headers or {}, least, most
        self._begin(start)

    def _begin(self, start: int) -> None:
        self.start, self.ids = start, list[int]()
        self._text, self._read = "", 0  # tokens of the text alone
        self._part = (0, 0, 0)  # where it may be cut: how well, ids and characters before
        self._header: tuple[int, list[int]] | None = None  # a control token, and what came behind it so far
        self._detokenizer = Detokenizer(self._codec, skip_special=False, start=False)

    def push(self, ids: Iterable[int]) -> list[Cut]:
        """The passages that these ids complete."""
        done: list[Cut] = []
        for token in ids:
            if self._header is not None:
                control, behind = self._header
                tails = self._headers.get(control, frozenset())
                longer = (*behind, token)
                if token not in self._codec.control_ids and any(_fits(tail, longer, whole=False) for tail in tails):
                    behind.append(token)
                    self.ids.append(token)
                    continue
                self._header = None
                self._again(behind, tails)
                if self._read >= self._least:
                    done += self._end()
            if token in self._codec.control_ids and token != self._codec.unk_id:
                if len(self.ids) >= 4 * self._most:  # control tokens alone
                    done += self._end()
                self._text += self._detokenizer.flush()
                self._header = (token, [])
                self.ids.append(token)
                continue
            piece = self._codec.piece(token).decode(errors="replace")
            if self._ends_before(piece):
                done += self._end()
            elif self._is_full():
                done += [*self._end_part(), *self.push([token])]
                continue
            self.ids.append(token)
            self._text += self._detokenizer.push(token)
            self._read += 1
        return done

    def _ends_before(self, piece: str) -> bool:
        """Whether a line or a sentence ends before this piece, of a passage that may end. Notes where parts end."""
        if self._read < self._least or not piece or not self._text or not self._detokenizer.whole:
            return False
        last, spaced = self._text[-1], piece[0].isspace()
        if last == "\n":
            return piece[0] != "\n"
        if spaced and last in _CLOSING and _SENTENCE.search(self._text) and not _ABBREVIATED.search(self._text):
            return True
        if not spaced and last in _WIDE_CLOSING and piece[0] not in "」』”’" and _WIDE_SENTENCE.search(self._text):
            return True
        well = _ENDS_OF_PARTS.get(last, 1) if spaced or last in "；，、" else 0
        if well and well >= self._part[0]:
            self._part = well, len(self.ids), len(self._text)
        return False

    def _is_full(self) -> bool:
        if self._read >= self._most:
            return self._part[0] > 0 or self._detokenizer.whole or self._read >= self._most + 3  # a character has four
        return False

    def _end_part(self) -> list[Cut]:
        """End the passage where its last part does, and go on with what is left of it."""
        well, count, characters = self._part
        if not well:
            return self._end()
        seen, left = self.start + len(self.ids) + 1, self.ids[count:]
        cut = Cut(self.start, self.ids[:count], self._text[:characters].strip(), seen)
        self._begin(self.start + count)
        return [cut, *self.push(left)]

    def _again(self, behind: list[int], tails: frozenset[tuple[int, ...]]) -> None:
        """What stood behind a control token: the template's own part of it is dropped, and the rest is text."""
        own = next((count for count in range(len(behind), 0, -1)
                    if any(_fits(tail, behind[:count], whole=True) for tail in tails)), 0)
        if self._text and not self._text.endswith("\n"):
            self._text += "\n"
        for token in behind[own:]:
            self._text += self._detokenizer.push(token)
            self._read += 1

    def _end(self) -> list[Cut]:
        """End the passage here."""
        cut = Cut(self.start, self.ids, self._text.strip(), self.start + len(self.ids) + 1)
        self._begin(self.start + len(self.ids))
        return [cut]
