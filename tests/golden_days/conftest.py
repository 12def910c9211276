"""A clock of the tests' own, which chat templates read."""

from __future__ import annotations

from datetime import datetime

import pytest


class Clock:
    """What templates take for `datetime`: `now` is what the test sets `day` to."""

    def __init__(self) -> None:
        self.day = 28, 11, 2026

    def now(self) -> datetime:
        day, month, year = self.day
        return datetime(year, month, day, 12)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
    monkeypatch.setattr("locret_stream.text.dated.datetime", clock)
    return clock
