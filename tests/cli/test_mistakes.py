"""Mistakes of the user: one line on stderr and exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_options_without_what_they_need_are_refused(small: list[str], tmp_path: Path):
    note, ask, elsewhere = tmp_path / "note.txt", ["--ask", "What?"], ["--host", "0.0.0.0"]  # it needs a key, too
    note.write_text("The door code of falcon is 48213.\n")
    for option, value in (("--replicas", 4), ("--max-replicas", 4), ("--ray-address", "here:6379")):
        assert f"found {option} and no --ray; expected --ray" in mistake("serve", option, value, *elsewhere)
    assert "found --grace and --ray, " in mistake("serve", "--ray", "--grace", 5, *elsewhere)
    for option, value in (("--on-mismatch", "rebuild"), ("--save-every", 5), ("--store", tmp_path),
                          ("--key", "5a" * 32)):
        assert f"found {option} and no --session; expected" in mistake("run", note, *ask, option, value, *small)
    for verb in (["run", note, *ask], ["serve", *elsewhere], ["inspect"]):
        for bits in ([], ["--store-bits", "16"], ["--store-bits", "16, 16"]):
            assert "found --decode-copy and no --store-bits" in mistake(*verb, "--decode-copy", *bits, *small)
    nowhere = ["--model", tmp_path / "no-such-model", "--policy", "keydiff"]
    assert "no-such-model" in mistake("inspect", "--decode-copy", "--store-bits", "16,8", *nowhere)


def test_variables_that_a_command_does_not_need_are_no_mistake(small: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCRET_API_KEY", raising=False)
    for name, value in (("RAY_ADDRESS", "nowhere:6379"), ("LOCRET_STORE", "s3://nowhere/memories"),
                        ("LOCRET_KEY", "5a" * 32)):
        monkeypatch.setenv(name, value)
    assert "there is no key; expected --api-key" in mistake("serve", "--host", "0.0.0.0")
    assert "--ask is empty" in mistake("run", "--ask", "", *small)


def test_the_noise_of_an_answer_needs_a_temperature(small: list[str], tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("The door code of falcon is 48213.\n")
    here = ["run", note, "--ask", "What?"]
    nowhere = [*here, "--model", tmp_path / "no-such-model", "--policy", "keydiff"]
    for option, value in (("--top-p", 0.9), ("--top-k", 5), ("--min-p", 0.1), ("--seed", 3)):
        for greedy in ([], ["--temperature", 0]):
            assert f"found {option} and no --temperature above 0; " in mistake(*here, option, value, *greedy, *small)
        assert "no-such-model" in mistake(*nowhere, option, value, "--temperature", 0.5)
    assert "no-such-model" in mistake(*nowhere, "--top-p", 1, "--seed", 0), "these say nothing of noise"
