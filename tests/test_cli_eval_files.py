"""`locret-stream eval --file` on small files made here in the form of each benchmark, and a random model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from locret_stream.config import Sampling
from locret_stream.context import StreamingContext
from locret_stream.evaluation import cells as files
from locret_stream.evaluation import published
from locret_stream.evaluation.cells import CellResult
from locret_stream.evaluation.runner import Bench
from tests.cli.command import invoke, mistake
from tests.evaluation.test_published import infinitebench, leval, longbench, ruler, write
from tests.test_cli_eval import make_model

BOOK = "The ferry leaves at nine. Its captain is called Brandt.\n" * 5
NEEDLE = "What is the special magic number for red-fox mentioned in the provided text?"
SCORED = {"longbench/qasper": "longbench/qasper.jsonl", "ruler/niah_single_1": "ruler/niah_single_1/validation.jsonl",
          "infinitebench/longbook_qa_eng": "longbook_qa_eng.jsonl", "leval/tpo": "tpo.jsonl"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file of each benchmark, of 2, 2, 2 (of one book 2 questions) and 1 documents."""
    folder = tmp_path / "data"
    write(folder, SCORED["longbench/qasper"], *(longbench(dataset="qasper", context=BOOK * n, _id=str(n))
                                                for n in (1, 2)))
    write(folder, SCORED["ruler/niah_single_1"], *(ruler(input=f"Some numbers are hidden.\n{BOOK}{n}. {NEEDLE}",
                                                         outputs=["e", "zz"]) for n in range(2)))
    write(folder, SCORED["infinitebench/longbook_qa_eng"], *(infinitebench(id=n, context=BOOK + "!" * (n // 2))
                                                             for n in range(3)))
    write(folder, SCORED["leval/tpo"], leval(input=BOOK))
    return folder


@pytest.fixture
def small(model: Path, tmp_path: Path) -> list[object]:
    return ["eval", "--model", model, "--budget", 64, "--chunk-size", 32, "--stabilizers", 8, "--out", tmp_path / "out"]


@pytest.fixture
def short(monkeypatch) -> list[tuple[str, int]]:
    """Answers of at most 8 tokens; (question, how many the benchmark lets it have) of each."""
    asked, real = [], StreamingContext.ask

    async def ask(self, question, *, max_new_tokens, stop):
        asked.append((question, max_new_tokens))
        assert stop == ()
        return await real(self, question, sampling=Sampling(max_new_tokens=8))

    monkeypatch.setattr(StreamingContext, "ask", ask)
    return asked


def results(folder: Path) -> dict[tuple[str, str], CellResult]:
    """By task and policy."""
    return {(one.cell.task, one.cell.policy): one for one in files.read_all(folder / "out")}


def given(data: Path, *tasks: str) -> list[object]:
    return [word for task in tasks or SCORED for word in ("--file", data / SCORED[task])]


# -- running ------------------------------------------------------------------------------------------------------


def test_files_of_every_benchmark_are_cells_of_one_table(small, data: Path, tmp_path: Path, short):
    here = [*small, *given(data), "--policy", "streaming_llm", "--policy", "full"]
    code, out, err = invoke(*here)
    assert code == 0, err
    assert "8 cells, of which 0 are there already" in err and "8 of 8: leval/tpo, full, all units, 1 document" in err
    assert f"infinitebench/longbook_qa_eng: {data / 'longbook_qa_eng.jsonl'}: 3 questions on 2 documents" in err
    assert "## Files, 64 units per KV head" in out and out.count("## ") == 1, "no stream of a task, no other table"
    assert "Text between the facts" not in out and "tasks version" not in out and "- Tasks version 1" in out
    for task, name in SCORED.items():
        assert f"- File `{task}`: {data / name} (content `" in out and f" {task}" in out
    found = results(tmp_path)
    assert {task for task, _ in found} == set(SCORED)
    for (task, policy), one in found.items():
        documents = list(published.load(data / SCORED[task]))
        assert one.cell.length == 0 and one.cell.file == str(data / SCORED[task]) and one.origin.text == ""
        assert [stream.seed for stream in one.streams] == list(range(len(documents))) == list(range(one.cell.streams))
        for stream, document in zip(one.streams, documents, strict=True):
            assert [(text, expected) for text, expected, _ in stream.answers] == [
                (question.text, " | ".join(question.answers)) for question in document.questions]
            assert stream.scores == [published.score(question, answer) for question, (*_, answer) in zip(
                document.questions, stream.answers, strict=True)]
            assert files.values(stream) == stream.scores
            assert stream.tokens > 100 and (policy == "full") == (one.budgets[0] > stream.tokens)
        values = [value for stream in one.streams for value in stream.scores]
        assert one.score == pytest.approx(sum(values) / len(values)) and one.questions == len(values)
    assert {most for _, most in short} == {128, 40, 512}, "as long as each benchmark lets an answer be"


def test_what_is_there_is_not_run_again_and_another_content_is(small, data: Path, tmp_path: Path, short):
    here = [*small, *given(data, "longbench/qasper", "leval/tpo"), "--policy", "random"]
    code, out, err = invoke(*here)
    assert code == 0, err
    code, again, err = invoke(*here, "--json", "--text", __file__)
    found = json.loads(again)
    assert code == 0 and (found["ran"], found["read"]) == (0, 2), "no text lies between the facts of a file"
    assert found["documents"][str(data / "tpo.jsonl")] == {"task": "leval/tpo", "documents": 1, "questions": 2,
                                                           "unscored": 0}
    assert invoke("eval", "--out", tmp_path / "out", "--report-only")[:2] == (0, out)
    moved = data / "copy" / "tpo.jsonl"
    moved.parent.mkdir()
    (data / "tpo.jsonl").rename(moved)
    code, again, _ = invoke(*small, "--file", moved, "--policy", "random", "--json")
    assert code == 0 and json.loads(again)["read"] == 1, "by content, wherever it lies"
    write(data, SCORED["longbench/qasper"], longbench(dataset="qasper", context=BOOK + "."))
    code, out, err = invoke(*small, *given(data, "longbench/qasper"), "--policy", "random")
    assert code == 0 and "1 cell, of which 0 are there already" in err
    [head] = [line for line in out.splitlines() if line.startswith("| variant")]
    columns = [word for word in head.split("|") if "qasper, content " in word]
    assert len(columns) == 2 and columns[0] != columns[1], "both are shown, and told apart"


def test_files_stand_beside_tasks_in_one_report(small, data: Path, tmp_path: Path, short, monkeypatch):
    monkeypatch.undo()
    text = tmp_path / "prose.txt"
    text.write_text("once upon a time\n" * 50)
    code, out, err = invoke(*small, *given(data, "infinitebench/longbook_qa_eng"), "--task", "passkey", "--text", text,
                            "--length", 300, "--questions", 1, "--policy", "streaming_llm", "--policy", "oracle")
    assert code == 0, err
    assert out.count("# What the memory remembers") == 1 and "prose.txt" in out
    assert out.index("## Streams of 300 tokens, 64 units") < out.index("## Files, 64 units per KV head")
    assert "skipped: oracle on files, which do not say from which lines answers follow (1 cell)" in err
    table = out[out.index("## Files"):]
    assert "oracle" not in table and "passkey" not in table
    assert results(tmp_path)["infinitebench/longbook_qa_eng", "streaming_llm"].questions == 2, "whole documents"


def test_questions_bound_the_documents(small, data: Path, tmp_path: Path, short):
    code, _, err = invoke(*small, *given(data), "--policy", "random", "--questions", 2)
    assert code == 0, err
    assert {task: len(one.streams) for (task, _), one in results(tmp_path).items()} == {
        "longbench/qasper": 2, "ruler/niah_single_1": 2, "infinitebench/longbook_qa_eng": 1, "leval/tpo": 1}


def test_full_is_skipped_where_the_longest_document_does_not_fit(small, data: Path, tmp_path: Path, short):
    write(data, SCORED["longbench/qasper"], *(longbench(dataset="qasper", context=BOOK * n) for n in (1, 20)))
    code, out, err = invoke(*small, *given(data, "longbench/qasper", "leval/tpo"), "--policy", "full", "--policy",
                            "random", "--json")
    assert code == 0, err
    [(reason, count)] = json.loads(out)["skipped"].items()
    assert reason.startswith("full on longbench/qasper: document 1, of ") and count == 1
    assert reason.endswith(" tokens with question and answer, does not fit the model's window of 1,024")
    assert "longbench/qasper ‡" in (tmp_path / "out" / "report.md").read_text()
    assert ("longbench/qasper", "full") not in results(tmp_path) and ("leval/tpo", "full") in results(tmp_path)


def test_questions_that_only_people_judge_are_left_out_and_counted(small, data: Path, tmp_path: Path, short):
    path = write(data, "paper_assistant.jsonl", leval(input=BOOK, evaluation="human"),
                 leval(input=BOOK + "!", evaluation="f1"), leval(input=BOOK + "?", evaluation="LLM"))
    code, out, err = invoke(*small, "--file", path, "--policy", "random", "--json")
    assert code == 0, err
    assert json.loads(out)["documents"] == {str(path): {"task": "leval/paper_assistant", "documents": 1, "questions": 2,
                                                        "unscored": 4}}
    assert "2 questions on 1 document; 4 left out, which only people or a judging model score" in err
    [one] = results(tmp_path).values()
    assert one.questions == 2 and len(one.streams) == 1 and len(short) == 2
    judged = write(data, "review_summ.jsonl", leval(evaluation="human"))
    assert "all of its 2 questions are scored by people" in mistake(*small, "--file", judged, "--policy", "random")


def test_chat_frames_and_raw_files_are_two_tasks(small, data: Path, tmp_path: Path, short, monkeypatch):
    opened = []
    real = Bench.measure
    monkeypatch.setattr(Bench, "measure", lambda self, cell: opened.append(self.task(cell).raw) or real(self, cell))
    here = [*small, *given(data, "leval/tpo"), "--policy", "random", "--policy", "full"]
    assert invoke(*here)[0] == 0
    code, out, err = invoke(*here, "--raw")
    assert code == 0 and "2 cells, of which 0 are there" in err, err
    assert opened == [False, False, True, True] and "| leval/tpo" in out and "| leval/tpo (raw)" in out
    framed, raw = (results(tmp_path)[name, "random"].streams[0].tokens for name in ("leval/tpo", "leval/tpo (raw)"))
    assert framed > raw
    assert "--raw is about files" in mistake(*small, "--policy", "random", "--raw")


def test_a_focus_is_the_first_question_of_each_document(small, data: Path, tmp_path: Path, short):
    code, _, err = invoke(*small, *given(data, "leval/tpo"), "--policy", "random", "--policy", "full", "--focus",
                          "--budget", 96)
    assert code == 0, err
    question = next(published.load(data / "tpo.jsonl")).questions[0].text
    assert {text for text, _ in short} == {question}
    assert all(len(one.streams[0].answers) == len(one.streams[0].scores) == 1 for one in results(tmp_path).values())


def test_a_name_says_what_neither_fields_nor_names_tell(small, data: Path, tmp_path: Path, short):
    path = write(data, "mine/part=1.jsonl", infinitebench(context=BOOK))
    assert "name the task, one of code_debug" in mistake(*small, "--file", path, "--policy", "random")
    code, _, err = invoke(*small, "--file", f"infinitebench/longbook_qa_eng={path}", "--policy", "random")
    assert code == 0 and set(results(tmp_path)) == {("infinitebench/longbook_qa_eng", "random")}, err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra [plots]")
def test_files_have_curves_against_the_budget_and_no_maps(small, data: Path, tmp_path: Path, short):
    code, _, err = invoke(*small, *given(data, "leval/tpo"), "--policy", "random", "--budget", 80, "--plots")
    assert code == 0 and "making maps" not in err, err
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"by_budget_files.png"}


# -- mistakes -----------------------------------------------------------------------------------------------------


def test_mistakes_in_files_are_told_before_anything_runs(small, data: Path, tmp_path: Path, short):
    def line(*words: object) -> str:
        return mistake(*small, *words, "--policy", "random")

    assert "there is no file nowhere.jsonl" in line("--file", "nowhere.jsonl")
    assert "no benchmark 'longbnch'" in line("--file", f"longbnch={data / 'tpo.jsonl'}")
    assert "LongBench has no task 'qaspr'" in line("--file", f"longbench/qaspr={data / 'longbench' / 'qasper.jsonl'}")
    broken = write(data, "qasper.jsonl", *[longbench(dataset="qasper", context=BOOK)] * 3, b"{broken")
    assert f"{broken}, line 4: not an object of JSON" in line(*given(data, "leval/tpo"), "--file", broken)
    v2 = write(data, "v2.jsonl", {"question": "?", "choice_A": ""})
    assert f"{v2}, line 1: found the fields choice_A, question; expected" in line("--file", v2)
    mixed = write(data, "mixed.jsonl", longbench(dataset="qasper"), longbench(dataset="musique"))
    assert "documents of several tasks: longbench/qasper, longbench/musique; expected a file for each" in line(
        "--file", mixed)
    assert "oracle on files, which do not say from which lines" in mistake(*small, *given(data), "--policy", "oracle")
    assert not (tmp_path / "out").exists() and not short, "nothing ran"


def test_a_file_that_changes_meanwhile_is_not_believed(small, data: Path, tmp_path: Path, short, monkeypatch):
    path, real = data / "tpo.jsonl", Bench.measure

    async def measure(self, cell):
        result = await real(self, cell)
        path.write_bytes(path.read_bytes() + b"\n")
        return result

    monkeypatch.setattr(Bench, "measure", measure)
    code, out, err = invoke(*small, "--file", path, "--policy", "random", "--policy", "keydiff")
    assert (code, out) == (2, "") and f"{path} has changed since this run began" in err.splitlines()[-1]
    assert len(files.read_all(tmp_path / "out")) == 1, "what was done is there"


