"""`locret-stream demo`: its JSON, own facts and text, and the parts that it is made of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from locret_stream.cli.demo import is_right
from locret_stream.cli.demo_stream import blocks, count, cut_lines, read_facts
from locret_stream.errors import InputError
from tests.cli.command import invoke, mistake

DEMO_KEYS = [
    "tokens_fed", "budget_units", "chunk_size", "peak_units", "bytes_resident", "bytes_full_cache", "recall",
    "recall_rereading", "recall_recent", "tok_per_s", "answers", "restored",
]  # fmt: skip


@pytest.mark.parametrize(("lines", "complaint"), [
    ("", "no facts"),
    ('{"fact": "a", "question": "b"}\n', "line 1"),
    ('{"fact": "a", "question": "b", "answer": "c"}\nnonsense\n', "line 2"),
    ('{"fact": " ", "question": "b", "answer": "c"}\n', "empty"),
    ('{"fact": "a", "question": "b\\u0000", "answer": "c"}\n', "line 1: a NUL character in the question"),
])
def test_facts_files_are_checked(tmp_path: Path, lines: str, complaint: str):
    path = tmp_path / "facts.jsonl"
    path.write_text(lines)
    with pytest.raises(InputError, match=complaint):
        read_facts(path)
    assert complaint in mistake("demo", "--facts", path)


def test_facts_may_hold_other_line_ends_and_begin_with_a_mark(tmp_path: Path):
    path = tmp_path / "facts.jsonl"
    said = "The note says a\u2028b\u2029c\x85d."
    line = json.dumps({"fact": said, "question": "What?", "answer": "b"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n\r\n{line}".encode())
    assert [fact.sentence for fact in read_facts(path)] == [said, said]


def test_demo_json_is_the_contract(small: list[str]):
    code, out, err = invoke("demo", "--json", "--tokens", 1000, *small)
    assert code == 0, err
    found = json.loads(out)
    assert list(found) == DEMO_KEYS
    assert found["tokens_fed"] >= 1000 and found["budget_units"] == 96 and found["chunk_size"] == 32
    assert 96 <= found["peak_units"] <= 96 + 32
    assert found["bytes_resident"] > 0 and found["bytes_full_cache"] > 0 and found["tok_per_s"] > 0
    assert all(0 <= found[name] <= 1 for name in ("recall", "recall_rereading", "recall_recent"))
    assert len(found["answers"]) == 6
    for answer in found["answers"]:
        assert list(answer) == ["question", "expected", "answer", "recalled", "position"]
        assert 0 <= answer["position"] <= found["tokens_fed"]
    assert "6 facts in 1,000 tokens" in err, "as of any model but the bundled one"
    again = found["restored"]
    assert again["answers"] == [one["recalled"] for one in found["answers"]] and again["same"] == 6
    assert again["snapshot_bytes"] > 2 * 2 * 2 * 96 * 8 * 4  # layers, K and V, KV heads, units, dimensions, fp32


def test_demo_takes_own_facts_and_text(small: list[str], tmp_path: Path):
    facts, text = tmp_path / "facts.jsonl", tmp_path / "text.txt"
    facts.write_text('{"fact": "The moon is made of rock.", "question": "What is it made of?", "answer": "rock"}\n')
    text.write_text("Nothing to see here.\n" * 60)
    code, out, err = invoke("demo", "--json", "--facts", facts, "--stream", text, "--no-compare",
                            "--no-restart", *small)
    assert code == 0, err
    found = json.loads(out)
    assert found["recall_recent"] is None and found["restored"] is None
    assert [a["expected"] for a in found["answers"]] == ["rock"]
    assert found["tokens_fed"] > 60 * 21  # bytes are tokens here: the text and the fact


def test_demo_asks_several_questions_about_one_fact(small: list[str], tmp_path: Path):
    facts, text = tmp_path / "facts.jsonl", tmp_path / "text.txt"
    fact = "The moon is made of rock."
    facts.write_text("".join(json.dumps({"fact": f"{fact}{end}", "question": f"{word} is it?", "answer": "rock"}) + "\n"
                             for word, end in (("What", ""), ("Which", "\n"))))
    text.write_text("Nothing to see here.\n" * 60)
    code, out, err = invoke("demo", "--json", "--facts", facts, "--stream", text, "--no-compare", "--no-restart",
                            "--seed", 3, *small)
    assert code == 0 and "1 facts in " in err, err
    first, second = json.loads(out)["answers"]
    assert (first["question"], second["question"]) == ("What is it?", "Which is it?")
    assert first["position"] == second["position"] > 0


def test_demo_takes_no_stream_that_can_be_read_only_once(small: list[str], tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is a pipe or a device" in mistake("demo", "--stream", tmp_path / "pipe", *small)


@pytest.mark.thorough
def test_demo_starts_its_new_process_without_another_stores_key(small: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCRET_KEY", "5a" * 32)
    monkeypatch.setenv("LOCRET_STORE", "s3://nowhere/memories")
    code, out, err = invoke("demo", "--json", "--tokens", 1000, "--no-compare", *small)
    assert code == 0 and json.loads(out)["restored"]["same"] == 6, err


def test_demo_refuses_a_budget_without_room_for_a_fact(small: list[str], tmp_path: Path):
    facts = tmp_path / "facts.jsonl"
    lines = [json.dumps({"fact": "o" * size, "question": "What?", "answer": "o"}) for size in (90, 30)]
    facts.write_text("\n".join(lines))
    for budget in (2, 20, 37):
        complaint = mistake("demo", "--tokens", 1000, "--facts", facts, *small, "--budget", budget)
        assert f"of a budget of {budget} units" in complaint and "expected --budget 40 or more" in complaint
    code, _, err = invoke("demo", "--tokens", 1000, "--facts", facts, "--no-restart", *small, "--budget", 40)
    assert code == 0, err
    assert "fact has" in mistake("demo", "--budget", 2)


@pytest.mark.thorough
def test_demo_prints_answers_beside_the_truth(small: list[str]):
    code, out, err = invoke("demo", "--tokens", 2000, *small)
    assert code == 0, err
    assert "truth" in out and "sinks + recent at the same budget" in out and "with recall, from an index of " in out
    assert "a new process gave 6 of 6 answers with recall the same" in out


@pytest.mark.thorough
def test_demo_without_recall_asks_the_memory_alone(small: list[str]):
    code, out, err = invoke("demo", "--json", "--tokens", 1000, "--no-compare", "--no-recall", *small)
    assert code == 0, err
    found = json.loads(out)
    assert found["recall_rereading"] is None and found["restored"]["same"] == 6
    assert all(list(answer) == ["question", "expected", "answer", "position"] for answer in found["answers"])


def test_own_answers_count_as_words():
    assert is_right(" 48213.\n", "48213") and is_right("Rock", "rock")
    assert not is_right("It is 48213.", "48213") and is_right("It is 48213, I think", "48213", whole=False)
    for whole in (True, False):
        assert not is_right("148213", "48213", whole) and not is_right("", "48213", whole)
        assert not is_right(None, "1", whole)


def test_blocks_begin_with_facts_and_lose_nothing():
    pieces = ["a\n", "b\n", "FACT\n", "c\n" * 20_000, "d\n", "\nOTHER\n", "e"]
    found = list(blocks(pieces, ["OTHER", "FACT"]))
    assert "".join(text for text, _ in found) == "".join(pieces)
    assert [(text.strip().split("\n")[0], begins) for text, begins in found if begins is not None] == [
        ("FACT", 1), ("OTHER", 0)]


def test_lines_are_cut_without_loss():
    text = "one\r\ntwo\n" + "x" * 10_000 + "\n\nlast"
    for size in (1, 3, 4096):
        lines = list(cut_lines(text[i : i + size] for i in range(0, len(text), size)))
        assert "".join(lines) == text and max(map(len, lines)) <= 4096
        assert lines[-1] == "last"
    for text in ("one\rtwo\x0cthree\n", "a\u2028b\u2029c\x85d\x1ce\vf", "\r", "\n\r\n\r", "x" * 4096 + "\r\n"):
        for size in (1, 2, 9):
            lines = list(cut_lines(text[i : i + size] for i in range(0, len(text), size)))
            assert "".join(lines) == text and all("\n" not in line[:-1] for line in lines)
    assert count(["aa", "b"], len, None) == 3 and count(iter(["aa", "b", "c"]), len, 2) == 2
