"""What identified a template before its settings did: all that it wrote, the date included. Stores of that time are
recognised by it, so nothing here may ever change; it follows no change of `frames`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from datetime import time as clock
from time import monotonic
from typing import Any

from locret_stream.text.codec import TextCodec
from locret_stream.text.dated import Write, date_formats, is_of_days, writer_at

_log = logging.getLogger(__name__)
DAYS = 366  # before a snapshot was saved, on which the process that saved it may have been started
MOST_S = 2.0  # for all of them
_SEPARATOR = "\n\n"
# Of which no two have a year, a month, a day, a name of one, or an hour in common.
_OTHER_TIMES = (datetime(1984, 9, 9, 7, 41, 5), datetime(2003, 2, 22, 18, 16, 33), datetime(2031, 6, 16, 23, 59, 48),
                datetime(1997, 12, 30, 0, 2, 17))


class WrittenTemplate:
    """A template as earlier libraries told it from others.

    Args:
        template: the one that was given, None for the tokenizer's own. raw: whether there is none.
        ends: ids that end a reply, the one by which the template closes replies not among them.
        digest: of a text.
    """

    def __init__(self, codec: TextCodec, tokenizer: Any, *, template: str | None, raw: bool, acknowledge: str | None,
                 ends: Iterable[int], digest: Callable[[str], str]):
        self._codec, self._tokenizer, self._template, self._raw = codec, tokenizer, template, raw
        self._acknowledge, self._ends, self._digest = acknowledge, frozenset(ends), digest
        self._of_day = functools.lru_cache(maxsize=2 * DAYS)(self._written_on)

    @functools.cached_property
    def _source(self) -> str:
        """The template that conversations without tools have; "" where it is not known."""
        source = self._template or self._tokenizer.chat_template
        if isinstance(source, Mapping):
            source = source.get("default")
        return source if isinstance(source, str) else ""

    @functools.cached_property
    def _formats(self) -> frozenset[str] | None:
        return frozenset() if self._raw else date_formats(self._source)

    @property
    def hint(self) -> str:
        """What to say of a digest that is no day's."""
        if self._formats == frozenset():
            return ""
        if self._formats is None or not is_of_days(self._formats):
            return ("the template here writes the time, and of a snapshot that an earlier library made, whose mark was "
                    "what it wrote, it cannot be told whether it is the same")
        return (f"the template here writes something else whatever day it is, of the {DAYS} before the snapshot was "
                "saved")

    @property
    def always(self) -> str | None:
        """The digest of a template that writes the same at all times; None for another."""
        return self._now if self._formats == frozenset() else None

    def runs_at_other_times(self) -> list[tuple[tuple[int, ...], ...]]:
        """The literals of `ChatFrame.literal_runs` as they are at other times; [] for a template that always writes the
        same, or cannot be written at another time."""
        if not self._formats:
            return []
        found = []
        for when in _OTHER_TIMES:
            try:
                _, _, begin, system, opened, prompt, close, *_ = self._literals(
                    writer_at(self._tokenizer, self._source, when))
            except Exception:  # a template may raise anything
                return []
            found.append((begin, *system, prompt, close, opened))
        return found

    def is_of(self, digest: str, saved: float) -> bool:
        """Whether a library of that time gave the template that digest.

        Args:
            saved: when the snapshot was, in seconds since 1970: the template may have been written long before.
        """
        if digest == self._now:
            return True
        if not self._formats or not is_of_days(self._formats):
            return False
        until = monotonic() + MOST_S
        for day in _days_before(saved):
            if self._of_day(day) == digest:
                return True
            if monotonic() > until:
                _log.warning("the days before %s were not tried: it takes too long", day)
                return False
        return False

    @functools.cached_property
    def _now(self) -> str | None:
        def write(messages: Sequence[Mapping[str, str]], prompt: bool) -> str:
            return str(self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, chat_template=self._template))

        return self._of(write)

    def _written_on(self, day: date) -> str | None:
        return self._of(writer_at(self._tokenizer, self._source, datetime.combine(day, clock(12))))

    def _of(self, write: Write) -> str | None:
        """The digest of what the template writes so; None for one that earlier libraries refused."""
        try:
            return self._digest(repr(self._literals(write)))
        except Exception:  # a template may raise anything
            return None

    def _literals(self, write: Write) -> tuple[Any, ...]:
        """The literals, and the ids that end a reply."""
        ends = set(self._ends)
        if self._raw:
            return True, "raw", (), (), (), (), (), (), sorted(ends)
        literal = self._codec.literal
        turns = ("user", "assistant") * 2 + ("user",)
        talk, once, done = _cut(write, turns, True), _cut(write, turns[:1], True), _cut(write, turns[:2], False)
        begin, prompt = tuple(literal(talk[0], start=True)), tuple(literal(talk[5]))
        after, last = tuple(literal(talk[2])), tuple(literal(done[2]))
        shared = next((n for n, (a, b) in enumerate(zip(after, last, strict=False)) if a != b),
                      min(len(after), len(last)))
        close, opened = after[:shared], after[shared:]
        between = tuple(literal(_SEPARATOR)) if self._acknowledge is None else (
            *prompt, *self._codec.encode_text(self._acknowledge), *close, *opened)
        style, system = "merged", tuple[tuple[int, ...], ...]()
        try:
            first, long = _cut(write, ("system", *turns[:1]), True), _cut(write, ("system", *turns), True)
        except Exception:  # no system role, or no fixed place for it
            first = long = []
        if first and first[:2] == long[:2] and first[2] == once[1] and long[2:] == talk[1:]:
            style, system = "turn", (tuple(literal(long[0], start=True)), tuple(literal(long[1])))
        if close and close[0] in self._codec.added_ids:
            ends.add(close[0])
        return False, style, begin, system, opened, prompt, close, between, sorted(ends)


def _cut(write: Write, roles: Sequence[str], prompt: bool) -> list[str]:
    """What is written before, between and after messages of these roles, [len(roles) + 1]. Raises ValueError."""
    contents = [f"Probe{n}eborP" for n in range(len(roles))]
    text = write([{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)], prompt)
    literals, end = [], 0
    for content in contents:
        if text.count(content) != 1:
            raise ValueError(f"{text.count(content)} times")
        at = text.index(content, end)
        literals.append(text[end:at])
        end = at + len(content)
    return [*literals, text[end:]]


def _days_before(saved: float) -> Iterator[date]:
    """The day on which a snapshot was saved, its neighbours, as it may have been saved in another time zone, and the
    days before."""
    day = datetime.fromtimestamp(saved).date()
    yield day
    for days in (1, *range(-1, -DAYS - 1, -1)):
        try:
            yield day + timedelta(days)
        except OverflowError:
            return
