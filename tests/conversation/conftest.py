"""The model of these tests: what it says is a script."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.langchain.support import Script, scripted


@pytest.fixture
def script() -> Iterator[Script]:
    """It says what it was given to say, in order, and ends each reply with `<|im_end|>`, whatever the template closes
    it with."""
    with scripted() as script:
        script.replies = []  # type: ignore[attr-defined]
        script._begin = lambda recent: (script.replies.pop(0) if script.replies else "Noted.")  # type: ignore
        yield script
