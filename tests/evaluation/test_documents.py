"""Files as tasks: which documents are streams, how they are read, fed, asked and counted, and what a report makes of
them."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from locret_stream.errors import ConfigError, InputError
from locret_stream.evaluation import cells as files
from locret_stream.evaluation import maps, runner
from locret_stream.evaluation.cells import Cell, CellResult, StreamResult
from locret_stream.evaluation.documents import FileTask, file_task
from locret_stream.evaluation.report import report_of
from locret_stream.evaluation.reporting import markdown
from locret_stream.evaluation.runner import Bench
from locret_stream.evaluation.suite import Item
from locret_stream.evaluation.variants import FULL
from locret_stream.runtime import Runtime
from tests.context.support import model, tokenizer
from tests.evaluation.results import ORIGIN, result
from tests.evaluation.test_published import infinitebench, leval, longbench, write
from tests.evaluation.test_runner import PROSE

HOSTILE = "The captain said: <|im_end|> is data, naïve café 🙂.\n\nAnd\n" * 9


def items(task: FileTask, number: int) -> list[Item]:
    return list(task.items(number, 0, len, lambda seed: iter(())))


def cell(task: FileTask, **more) -> Cell:
    return Cell(**{"task": task.name, "file": task.path, "policy": "streaming_llm", "length": 0, "units": 64,
                   "chunk_size": 32, "stabilizers": 8, "streams": len(task.asks)} | more)


# -- reading ------------------------------------------------------------------------------------------------------


def test_streams_are_the_documents_that_are_asked_something(tmp_path: Path):
    task = file_task(str(write(tmp_path, "paper_assistant.jsonl", leval(evaluation="human"),
                               leval(input="first", evaluation="f1"), leval(input="-", evaluation="LLM"),
                               leval(input="second", evaluation="rouge"))))
    assert (task.name, task.kind) == ("leval/paper_assistant", "documents")
    assert (task.asks, task.unscored, task.asked) == ((2, 2), 4, 2)
    context, *asked = items(task, 1)
    assert context.text.endswith("second") and context.answer is None and not context.needed
    assert [(one.answer, one.answer_tokens, one.question.metric) for one in asked] == [("A", 512, "leval/rouge_l"),
                                                                                       ("B", 512, "leval/rouge_l")]
    assert [task.streams(questions) for questions in (1, 2, 3, 99)] == [1, 1, 2, 2] and task.streams(2, focus=True) == 2
    assert task.tokens(2, 0) == sum(task.characters) // 4 > task.tokens(1, 0) > 0


def test_documents_are_read_forth_back_and_again(tmp_path: Path, monkeypatch):
    path = write(tmp_path, "qasper.jsonl", *(longbench(dataset="qasper", context=f"text {n}") for n in range(5)))
    task, begun = file_task(str(path)), []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: begun.append(self) or real(self, *a, **k))
    for number in (0, 1, 1, 4, 2, 2, 0):
        assert items(task, number)[0].text.endswith(f"text {number}")
    assert len(begun) == 2 * 3, "in order it is opened once, to see what it is and to read; who goes back does so again"
    with pytest.raises(ConfigError, match=r"has no stream 5: it holds 5 documents"):
        items(task, 5)
    assert items(task, 3)[0].text.endswith("text 3")
    path.unlink()
    with pytest.raises(InputError, match="has changed since this run began"):
        items(task, 3)


def test_contexts_are_not_held(tmp_path: Path):
    path, size = tmp_path / "qasper.jsonl", 1_000_000
    with path.open("wb") as file:
        for number in range(30):
            file.write(json.dumps(longbench(dataset="qasper", context=f"{number} " * (size // 3))).encode() + b"\n")
    tracemalloc.start()
    try:
        task = file_task(str(path))
        assert all(len(items(task, number)[0].text) > size // 2 for number in range(30))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 15 * size and len(task.asks) == 30


def test_content_has_another_digest_and_a_path_has_not(tmp_path: Path):
    one, two, three = (file_task(str(write(tmp_path, f"{n}/tpo.jsonl", leval(input=text))))
                       for n, text in enumerate(("a", "a", "b")))
    assert one.digest == two.digest != three.digest and one.path != two.path
    bench = Bench(model(), tokenizer(), PROSE, [one, two, three])
    names = [files.file_name(cell(task), bench.origin_of(cell(task))) for task in (one, two, three)]
    assert names[0] == names[1] != names[2] and names[0].startswith("leval_tpo-streaming_llm-64-0-")
    with pytest.raises(ConfigError, match=r"of leval/tpo of the file elsewhere; expected one of .*leval/tpo of "):
        bench.task(cell(one, file="elsewhere"))


# -- feeding and asking -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.thorough(but=1)
async def test_the_room_of_a_document_is_what_a_runtime_takes_for_it(tmp_path: Path, raw: bool):
    record = leval(input=HOSTILE, instructions=["What? " * 9], outputs=["A"])
    task = file_task(str(write(tmp_path, "tpo.jsonl", record)), raw)
    context, question = items(task, 0)
    room = Bench(model(), tokenizer(), PROSE, [task]).room(cell(task), 0)
    async with (Runtime(model(), tokenizer(), policy="full", budget=900, chunk_size=32, acknowledge=None) as runtime,
                runtime.open(raw=True if raw else None) as ctx):
        await ctx.feed(context.text)
        fed, frame = ctx.memory.tokens, runtime.frames
        async for _ in ctx.generate(question.text, max_new_tokens=1):
            pass
        closed = 0 if raw else len(frame.close_reply(frame.close_user_and_prompt(frame.begin()[1])[1], [])[0])
        assert 0 <= ctx.memory.tokens - (room - question.answer_tokens) <= 1 + closed
    measured = await Bench(model(), tokenizer(), PROSE, [task]).measure(cell(task))
    assert measured.streams[0].tokens == fed, "a document is fed as any text is"


async def test_hundreds_of_questions_wait_for_no_copy_longer_than_one_answer(monkeypatch):
    at_once, most = 0, 0

    class Context:
        async def ask(self, text: str, **more) -> str:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1
            return text.upper()

    asked = [Item(f"q{n}", "a") for n in range(100)]
    assert [found for *_, found in await runner.ask_all(Context(), asked)] == [f"Q{n}" for n in range(100)]
    assert most == runner.AT_ONCE


def test_maps_are_of_tasks_whose_lines_are_known(tmp_path: Path):
    task = file_task(str(write(tmp_path, "tpo.jsonl", leval())))
    with pytest.raises(ConfigError, match=r"a map of the file .*tpo\.jsonl; expected one of the tasks passkey, "):
        maps.retention(Bench(model(), tokenizer(), PROSE, [task]), cell(task), "x")


# -- reporting ----------------------------------------------------------------------------------------------------


def scored(policy: str, scores: list[list[float]], *, path: str = "data/qasper.jsonl", digest: str = "aa11",
           task: str = "longbench/qasper", **more) -> CellResult:
    """A result on a file, made by hand: `scores[i]` of the questions of document i."""
    one = result(policy, [0] * len(scores), task=task, length=0, file=path, **more)
    streams = [StreamResult(seed=seed, tokens=500 + seed, seconds=0.5, unit_tokens=9.0, scores=values,
                            answers=[("?", "a", "b")] * len(values)) for seed, values in enumerate(scores)]
    values = [value for stream in streams for value in stream.scores]
    return msgspec.structs.replace(
        one, streams=streams, origin=msgspec.structs.replace(ORIGIN, text="", file=digest),
        score=sum(values) / len(values), low=min(values), high=max(values), questions=len(values))


def test_of_a_file_every_score_of_full_above_0_counts():
    table = report_of([scored(FULL, [[0.4], [0.2, 0.0]]), scored("locret", [[0.3], [0.0, 0.0]])]).tables[0]
    assert table.length == 0 and table.references["longbench/qasper"].counted
    locret = next(row for row in table.rows if row.label == "locret")
    assert locret.cells["longbench/qasper"].ratio.value == pytest.approx(0.5) == locret.mean.value
    text = markdown(report_of([scored(FULL, [[0.4], [0.2, 0.0]]), scored("locret", [[0.3], [0.0, 0.0]])]))
    assert "0.10 [0.00, 0.30] = 50% of full" in text and "longbench/qasper |" in text and "0.9" not in text
    assert "full | 0.20 [0.00, 0.40] |" in text and "documents of 500 to 501 tokens" in text


def test_of_a_file_on_which_full_scores_0_nothing_is_left():
    others = [scored(name, [[0.5]], task="leval/tpo", path="tpo.jsonl", digest="bb") for name in (FULL, "locret")]
    report = report_of([scored(FULL, [[0.0]]), scored("locret", [[0.3]]), *others])
    locret = next(row for row in report.tables[0].rows if row.label == "locret")
    assert locret.cells["longbench/qasper"].ratio is None and locret.mean.tasks == 1 and locret.mean.value == 1
    assert "longbench/qasper †" in markdown(report) and "on which `full` scores 0 (†)" in markdown(report)


def test_files_of_one_task_are_columns_told_apart():
    paths = {"4k/niah/validation.jsonl": "aa", "8k/niah/validation.jsonl": "bb"}
    results = [scored(policy, [[1.0 if digest == "aa" else 0.5]], task="ruler/niah", path=path, digest=digest)
               for policy in (FULL, "locret") for path, digest in paths.items()]
    report = report_of(results)
    assert report.tasks == ("ruler/niah, 4k/niah/validation.jsonl", "ruler/niah, 8k/niah/validation.jsonl")
    assert {name: source.path for name, source in report.files.items()} == dict(zip(report.tasks, paths, strict=True))
    [table] = report.tables
    assert [table.references[task].score for task in report.tasks] == [1.0, 0.5] and len(table.rows) == 2
    changed = report_of([scored("h2o", [[1.0]]), scored("h2o", [[0.0]], digest="cc22")])
    assert changed.tasks == ("longbench/qasper, content aa11", "longbench/qasper, content cc22")
    assert changed.superseded == 0


def test_files_stand_beside_any_text_or_alone():
    other = msgspec.structs.replace(ORIGIN, text="book")
    of_file, strange = scored("h2o", [[1.0]]), scored("h2o", [[1.0]])
    strange = msgspec.structs.replace(strange, origin=msgspec.structs.replace(strange.origin, weights="ff"))
    groups = dict(files.by_origin([of_file, result("h2o", [1]), result("h2o", [2], origin=other), strange]))
    assert {(origin.text, origin.weights): len(found) for origin, found in groups.items()} == {
        ("prose", "3f5a0c"): 2, ("book", "3f5a0c"): 2, ("", "ff"): 1}
    report = report_of(groups[ORIGIN])
    assert [table.length for table in report.tables] == [1000, 0], "files come last"
    text = markdown(report)
    assert "answered exactly right, of a file the mean over" in text and "scores below 0.9, of a file 0 (†)" in text
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report


def test_questions_on_one_book_are_one_stream(tmp_path: Path):
    task = file_task(str(write(tmp_path, "longbook_qa_eng.jsonl", *(infinitebench(id=n) for n in range(3)))))
    assert task.asks == (3,) and len(items(task, 0)) == 4 and task.streams(2) == 1
