"""Every example runs as its first line says, is short, and says something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
ELSEWHERE = {"train_bundled_model.py"}  # takes most of an hour; its parts have tests of their own
RUNS = {
    "quickstart.py": (["3000"], "truth: "),
    "own_text.py": (["{text}", "What is the door code of falcon?", "Again?"], "after the talk: "),
    "sync_notebook.py": ([], "the memory went from "),
}


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_every_example_is_known_and_short():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names - ELSEWHERE == RUNS.keys()
    for name in RUNS:
        assert len((EXAMPLES / name).read_text().splitlines()) < 80, name


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("The door code of falcon is 48213.\n" + "Nothing happened.\n" * 100)
    args, expected = RUNS[name]
    done = run(name, *(arg.format(text=text) for arg in args))
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_own_text_explains_itself_and_its_errors(tmp_path: Path):
    assert "python examples/own_text.py" in run("own_text.py").stderr
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    done = run("own_text.py", str(empty), "What?")
    assert done.returncode == 1 and "\nEmptySource: " in "\n" + done.stderr, done.stderr
