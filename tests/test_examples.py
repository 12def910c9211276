"""Every example runs as its first line says, is short, and prints what it promises."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
ELSEWHERE = {"__init__.py", "train_bundled_model.py"}  # training takes an hour; test_bundled_recipe tries its parts
RUNS = {
    "quickstart.py": (["3000"], "truth: "),
    "own_text.py": (["{text}", "What is the door code of falcon?", "Again?"], "after the talk: "),
    "sessions.py": (["{store}"], "A new session."),
    "sync_notebook.py": ([], "the memory went from "),
}
CHECKED = {"langchain_chat.py", "langgraph_agent.py", "stream_logs_into_agent.py"}  # a separate test for each


def run(monkeypatch: pytest.MonkeyPatch, name: str, *args: str) -> None:
    """Run `python examples/<name> <args>`, but in this process: importing torch takes longer than the examples do."""
    monkeypatch.setattr(sys, "argv", [name, *args])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_known_and_short():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names - ELSEWHERE == RUNS.keys() | CHECKED
    for name in names - ELSEWHERE:
        assert len((EXAMPLES / name).read_text().splitlines()) < 80, name


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.thorough(but=2)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = tmp_path / "text.txt"
    text.write_text("The door code of falcon is 48213.\n" + "Nothing happened.\n" * 100)
    args, expected = RUNS[name]
    run(monkeypatch, name, *(arg.format(text=text, store=tmp_path / "store") for arg in args))
    assert expected in capsys.readouterr().out


def test_a_session_is_there_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for _ in range(2):
        run(monkeypatch, "sessions.py", str(tmp_path))
    assert "falcon: 48213\n" in (said := capsys.readouterr().out) and "otter: 3390\nRewound: " in said


def receipts(said: str) -> list[tuple[str, str, int]]:
    """(answer, source, tokens fed) of each line that shows them."""
    return [(answer, source, int(fed)) for answer, source, fed in
            re.findall(r"(\S+) +[\[(](\w+)[:,].*?(\d+)(?: tokens)? fed[\])]", said)]


def test_a_chat_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for _ in range(2):  # what an earlier run left is not in the way
        run(monkeypatch, "langchain_chat.py", str(tmp_path))
        told, asked, streamed, regenerated, edited, closed = receipts(capsys.readouterr().out)
        assert told[1:] == ("new", 36)
        assert asked == ("48213", "live", 18)
        assert streamed == ("7755", "live", 17)
        assert regenerated == ("7755", "snapshot", 3)
        assert edited == ("48213", "snapshot", 18)
        assert closed == ("48213", "snapshot", 18)


@pytest.mark.thorough
def test_an_agent_goes_on_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    run(monkeypatch, "langgraph_agent.py", str(tmp_path))
    first, second = capsys.readouterr().out.split("In another process:\n")
    assert "lookup({'key': 'falcon'})" in first and "tool: The door code of falcon is 48213." in first
    (_, began, _), (answer, went_on, fed) = receipts(first)
    assert (began, answer, went_on) == ("new", "48213", "live") and fed < 30
    (answer, source, fed), (after, anew, _) = receipts(second)
    assert (answer, source) == ("48213", "snapshot") and fed < 30
    assert "Deleted: 0 messages and 0 memories are left." in second
    assert anew == "new" and after != "48213"


@pytest.mark.thorough
def test_a_log_grows_and_memory_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    run(monkeypatch, "stream_logs_into_agent.py", str(tmp_path))
    said = capsys.readouterr().out
    asked = dict(re.findall(r"^(\w+): (\d+) \(live", said, re.MULTILINE))
    assert asked == {"falcon": "48213", "heron": "7304", "otter": "3390", "badger": "91764", "lantern": "5528",
                     "copper": "20617"}
    assert [answer for answer, _, _ in receipts(said)].count("48213") == 6  # also when 23,000 tokens lie between
    assert all(fed < 25 for _, _, fed in receipts(said))
    lines = re.findall(r"([\d,]+) tokens read, ([\d,]+) units kept in the largest layer, ([\d.]+) MiB", said)
    assert len(lines) == 6 and int(lines[-1][0].replace(",", "")) > 6 * int(lines[0][0].replace(",", "")) > 20_000
    assert {(units, mib) for _, units, mib in lines} == {("2,784", "6.1")}


def test_own_text_explains_itself_and_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SystemExit, match=re.escape("python examples/own_text.py FILE")):
        run(monkeypatch, "own_text.py")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(SystemExit, match=r"^EmptySource: "):
        run(monkeypatch, "own_text.py", str(empty), "What?")
