"""Templates that write the date: what they ask the clock, what they write at another time, and what identifies them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from locret_stream.snapshot.identity import digest_text
from locret_stream.text import ChatFrame, TextCodec
from locret_stream.text.codec import _settled
from locret_stream.text.dated import date_formats, is_of_days, writer_at
from tests.golden_days.scripted import DATED, MARKS, PLAIN, tokenizer

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
ASKED = [{"role": "user", "content": "Hi"}]
WHEN = datetime(2024, 2, 29, 13, 5, 59)
WAYS = {
    "in words": "{{ 'Today is ' + strftime_now('%d %B %Y') + '.\n' }}",
    "as a variable": "{%- set today = strftime_now('%Y-%m-%d') %}\n{{- today + '\n' }}",
    "unless it is given": "{% if not date_string is defined %}{% if strftime_now is defined %}"
                          "{% set date_string = strftime_now('%d %b %Y') %}{% else %}"
                          "{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}{{ date_string + '\n' }}",
    "in a macro": "{% macro day() %}{{ strftime_now('%A') }}{% endmacro %}{{ day() + '\n' }}",
    "twice": "{{ strftime_now('%d') ~ '.' ~ strftime_now('%m') ~ '.\n' }}",
    "in a loop": "{% for m in messages %}{% if loop.first %}{{ strftime_now('%j') + '\n' }}{% endif %}{% endfor %}",
    "through a filter": "{{ strftime_now('%B') | upper + '\n' }}",
    "as a number": "{{ (strftime_now('%Y') | int) + 1 }}\n",
    "with the time": "{{ strftime_now('%H:%M:%S') + '\n' }}",
    "behind an empty line": "\n\n{{ strftime_now('%d') + '\n' }}",
    "behind spaces": "   {% if true %}\n{{ strftime_now('%d') + '\n' }}{% endif %}",
    "behind a comment": "{#- a comment -#}\n  {{ strftime_now('%d') + '\n' }}",
    "where it stands in the way": "{% generation %}{{ strftime_now('%d') }}{% endgeneration %}\n",
}


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the clock that templates read."""
    def set_to(when: datetime) -> None:
        class Clock:
            @staticmethod
            def now() -> datetime:
                return when

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        monkeypatch.setattr("locret_stream.text.dated.datetime", Clock)

    return set_to


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_template_written_at_another_time_is_what_it_was_then(at: Any, way: str, prompt: bool):
    source = WAYS[way] + TURNS + PROMPT
    known = tokenizer(source)
    at(WHEN)
    then = known.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=prompt)
    at(WHEN + timedelta(days=400, hours=5, minutes=20))
    assert then != known.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=prompt)
    assert writer_at(known, source, WHEN)(ASKED, prompt) == then
    formats = date_formats(source)
    assert formats and is_of_days(formats) == (way != "with the time")


@pytest.mark.parametrize("source", [
    "{{ strftime_now(format) }}", "{{ strftime_now('%d' + '%m') }}", "{% set clock = strftime_now %}{{ clock('%d') }}",
    "{{ strftime_now(format='%d') }}", "{{ strftime_now('%d', 1) }}", "{{ [strftime_now] }}", "{{ strftime_now('%d') ",
    "{% macro strftime_now(format) %}1{% endmacro %}{{ strftime_now('%d') }}"])
def test_where_the_formats_are_not_in_the_text_no_other_time_is_known(source: str):
    assert date_formats(source) is None


def test_a_template_that_asks_no_clock_has_no_formats():
    assert date_formats(PLAIN) == date_formats("{{ 'strftime' }}") == frozenset()
    assert date_formats("{{ 'strftime_now' }}") == frozenset()


# -- what identifies a frame --------------------------------------------------------------------------------------


def frame(template: Any, *, eos: Any = None, acknowledge: str | None = "OK.", **marks: str) -> ChatFrame:
    known = tokenizer(template)
    for name, mark in marks.items():
        setattr(known, name, mark)
    return ChatFrame(TextCodec(known), known, eos=eos, acknowledge=acknowledge)


def test_its_settings_are_the_same_on_every_day(at: Any):
    at(WHEN)
    one = frame(DATED)
    begun = one.begin()[0]
    at(WHEN + timedelta(days=1))
    other = frame(DATED)
    assert one.settings == other.settings and begun != other.begin()[0]
    assert one.begin() == other.begin(), "a session tells the day on which it begins, not that of its process"
    assert "29 February" not in one.settings


def test_all_that_a_frame_is_made_by_is_in_its_settings():
    same = {frame(PLAIN).settings, frame(PLAIN, eos=[]).settings, frame(PLAIN, eos=[258]).settings,
            frame(PLAIN, pad_token=MARKS[0]).settings, frame(PLAIN, bos_token=MARKS[0]).settings}
    others = [frame(DATED), frame(PLAIN + " "), frame(PLAIN, acknowledge=None), frame(PLAIN, acknowledge="Yes."),
              frame(PLAIN, eos=[256]), frame("{{ bos_token }}" + PLAIN, bos_token=MARKS[0]),
              frame("{{ bos_token }}" + PLAIN, bos_token=MARKS[1]), frame(None), frame(None, eos=[256])]
    assert len(same) == 1 and len({*same, *(each.settings for each in others)}) == 1 + len(others)


def test_named_templates_count_in_whatever_order_they_come():
    named = {"default": PLAIN, "tool_use": DATED}
    backwards = dict(reversed(named.items()))
    assert frame(named).settings == frame(backwards).settings != frame(named | {"tool_use": PLAIN}).settings
    assert frame(named).written(digest_text).always == frame(PLAIN).written(digest_text).always


# -- what identified it before ------------------------------------------------------------------------------------


def test_what_was_written_on_any_day_of_the_year_before_a_snapshot_is_recognised(at: Any):
    at(WHEN)
    then = frame(DATED).written(digest_text)._now
    at(datetime(2030, 1, 1))
    written = frame(DATED).written(digest_text)
    for days in (0, 1, 40, 366):
        assert written.is_of(then, (WHEN + timedelta(days)).timestamp())
    assert written.is_of(then, (WHEN - timedelta(1)).timestamp())  # saved in another time zone
    for days in (-2, 367):
        assert not written.is_of(then, (WHEN + timedelta(days)).timestamp())
    other = frame(DATED.replace("Today is", "It is")).written(digest_text)
    assert not other.is_of(then, WHEN.timestamp()) and "whatever day it is" in other.hint
    assert written.always is None and frame(PLAIN).written(digest_text).always


def test_a_time_of_day_is_no_day_and_is_said(at: Any):
    source = WAYS["with the time"] + TURNS + PROMPT
    at(WHEN)
    then = frame(source).written(digest_text)._now
    at(WHEN + timedelta(seconds=1))
    written = frame(source).written(digest_text)
    assert not written.is_of(then, WHEN.timestamp()) and "cannot be told" in written.hint


def test_looking_for_the_day_takes_no_longer_than_it_may(at: Any, monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr("locret_stream.text.earlier.MOST_S", 0.0)
    assert not frame(DATED).written(digest_text).is_of("0" * 32, WHEN.timestamp())
    assert "it takes too long" in caplog.text


def test_earlier_digests_stay_what_they_were():
    """By value: these are in the stores of earlier libraries."""
    for made, digest in ((frame(PLAIN), "e26fb035087d4e1bba019fe86c4fe2ad"),
                         (frame(PLAIN, acknowledge=None), "d8f5f87bfd4abadae043b49e1021da9e"),
                         (frame(None), "fc814c2be0b41bc797b9ff2d6ff513a0"),
                         (frame(PLAIN, eos_token="<|end|>"), "9a3cd6d0e5102027e29f33e9ff324e87"),  # closes otherwise
                         (frame(DATED), "f17889f5c6fcce0addee8b8fe2f22ede")):  # of 28 November 2026
        assert made.written(digest_text).is_of(digest, datetime(2026, 11, 28, 17).timestamp())


# -- tokenizers ---------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_the_same_however_a_version_writes_it():
    codec = TextCodec(tokenizer(None))
    assert codec.fingerprints[0] == codec.fingerprint != codec.fingerprints[1]
    spec = json.loads(tokenizer(None).backend_tokenizer.to_str())
    assert _settled(spec | {"version": "1.1", "model": spec["model"] | {"new": None, "other": False}}) == _settled(spec)
    assert _settled(spec | {"model": spec["model"] | {"new": True}}) != _settled(spec)
    assert _settled({"model": {"merges": ["a b"]}}) == _settled({"model": {"merges": [["a", "b"]]}})
    kept = {"vocab": {"a": 0, "b": 1}, "pieces": [["a", 0.0], None], "dropout": 0.0, "prefix": ""}
    assert _settled(kept) == kept
