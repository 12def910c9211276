"""The scripted engine, and a model over it with a store of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_locret import LocretChatModel
from locret_stream import Store
from tests.langchain.support import Script, model, scripted


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


@pytest.fixture
def chat(script: Script, tmp_path: Path) -> Iterator[LocretChatModel]:
    with model(Store(tmp_path, keep_last=64)) as chat:
        yield chat
