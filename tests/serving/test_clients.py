"""Other people's clients, as `examples/clients` shows them, against a server process of the bundled model.

Each needs its package. Where this interpreter has it the example runs here; the others run with the interpreters that
LOCRET_CLIENTS names, separated by colons: their packages hardly agree on versions.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import processes

CLIENTS = Path(__file__).resolve().parents[2] / "examples" / "clients"
EXAMPLES = {  # the package that an example needs, and what it prints
    "openai_client.py": ("openai", ["responses: 48213", "streamed: 7755", "conversation: 8088", "chat: 31337"]),
    "openai_agents.py": ("agents", ["conversation: 8088", "response: 48213",
                                    "items: tool_call_item tool_call_output_item message_output_item"]),
    "pydantic_ai_agent.py": ("pydantic_ai.models.openai", ["answer: 48213"]),
    "langchain_openai_chat.py": ("langchain_openai", ["answer: 48213"]),
    "llama_index_chat.py": ("llama_index.llms.openai_like", ["answer: 48213"])}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = tmp_path_factory.mktemp("clients")
    process = processes.start_python("-m", "locret_stream", "serve", "--port", "0", "--json", "--store", store)
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["url"]
    process.terminate()
    process.communicate(timeout=60)


@cache
def interpreter_with(package: str) -> str | None:
    """An interpreter that has the package; None if none has."""
    for python in filter(None, (sys.executable, *os.environ.get("LOCRET_CLIENTS", "").split(":"))):
        if processes.run(python, "-c", f"import {package}", timeout_s=120).returncode == 0:
            return python
    return None


def test_every_example_is_tested_and_short():
    assert {path.name for path in CLIENTS.glob("*.py")} == EXAMPLES.keys()
    assert all(len(path.read_text().splitlines()) < 80 for path in CLIENTS.iterdir() if path.is_file())


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if package == "openai" else pytest.mark.real)
                                  for name, (package, _) in EXAMPLES.items()])
@pytest.mark.thorough
def test_a_client_finds_its_memory(name: str, url: str):
    package, expected = EXAMPLES[name]
    python = interpreter_with(package)
    if python is None:
        pytest.skip(f"needs {package}: pip install it, or name an interpreter that has it in LOCRET_CLIENTS")
    done = processes.run(python, CLIENTS / name, url, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout for line in expected), done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_sends_a_log_and_asks_about_it(url: str, tmp_path: Path):
    log = tmp_path / "service.log"
    log.write_text("Nothing happened.\n" * 200 + "The port of gateway is 7304.\n" + "Nothing happened.\n" * 200)
    done = processes.run("sh", CLIENTS / "ingest.sh", log, "What is the port of gateway?",
                         env={**os.environ, "LOCRET_URL": url})
    assert done.returncode == 0, done.stderr
    taken, asked = map(json.loads, done.stdout.splitlines())
    assert taken["characters"] == len(log.read_text()) and "7304" in asked["answer"]
