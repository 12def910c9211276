"""Mistakes of the user: one line on stderr and exit status 2."""

from __future__ import annotations

from pathlib import Path

from tests.cli.command import mistake


def test_mistakes_are_one_line_and_two(small: list[str], tiny: Path, tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("The door code of falcon is 48213.\n")
    ask = ["--ask", "What?"]
    assert "dmo" in mistake("dmo")
    assert "--tokns" in mistake("demo", "--tokns", 3)
    assert "--tokens" in mistake("demo", "--tokens", "many")
    assert "missing.txt" in mistake("run", tmp_path / "missing.txt", *ask, *small)
    assert "folder" in mistake("run", tmp_path, *ask, *small)
    assert "more than once" in mistake("run", "-", "-", *ask, *small)
    assert "--ask" in mistake("run", note, "--json", *small)
    assert "temperature" in mistake("run", note, *ask, *small, "--temperature", -1)
    assert "the focus has" in mistake("run", note, *ask, *small, "--focus", "which one? " * 500)
    assert "keydiff" in mistake("run", note, *ask, "--model", tiny, "--policy", "keydif", "--budget", 96,
                                "--chunk-size", 32)
    assert "positions" in mistake("run", note, *ask, "--model", tiny, "--policy", "keydiff", "--budget", 6000)
    assert "heads" in mistake("run", note, *ask, "--model", tiny, "--policy", "locret", "--budget", 96,
                              "--chunk-size", 32)
    assert "no-such-model" in mistake("run", note, *ask, "--model", tmp_path / "no-such-model", "--policy", "keydiff")
    assert "budget" in mistake("run", note, *ask, "--model", tiny, "--policy", "keydiff", "--budget", "96 parsecs")
    assert "number of 5,000 digits" in mistake("run", note, *ask, "--model", tiny, "--policy", "keydiff", "--budget",
                                               "9" * 5000)
    assert "--ask is empty" in mistake("run", note, "--ask", "", *small)
    assert "--ask is empty" in mistake("run", note, *ask, "--ask", "", "--session", "a", "--store", tmp_path, *small)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"], "told before anything is read"


def test_text_that_is_not_utf8_is_named(small: list[str], tmp_path: Path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine so far\n" + b"\xff\xfe")
    assert "bad.txt: byte 12 is not UTF-8" in mistake("run", bad, "--ask", "What?", *small)
