"""What reproduces the papers, at toy sizes, and what it found: `docs/` tells what was kept."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from locret_stream.cli import eval as cli_eval
from locret_stream.evaluation import cells, chat, plan, plots, reporting, suite
from locret_stream.evaluation.cells import Cell
from locret_stream.evaluation.report import report_of
from locret_stream.evaluation.runner import ORACLES
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.policies import POLICIES
from research import RESULTS, findings, findings_table, keep_report, side_by_side
from research.recall_model.data import save_tokenizer, train_tokenizer
from tests.cli.command import invoke
from tests.evaluation.results import result
from tests.processes import run, run_python

ROOT = Path(__file__).resolve().parents[1]


def cells_of(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """What research/policies.sh has run, all of it or a part."""
    told, stub = folder / "told", folder / "python"
    told.unlink(missing_ok=True)
    stub.write_text(f'#!/bin/sh\nprintf "%s " "$@" >> {told}; echo >> {told}\n')
    stub.chmod(0o755)
    for name in ("heads", "heads-hidden", "heads-retention"):
        (folder / "model" / name).mkdir(parents=True, exist_ok=True)
    run("bash", ROOT / "research" / "policies.sh", "model", "out", cwd=folder,
        env=os.environ | {"PYTHON": str(stub), "PART": part}).check_returncode()
    found: list[Cell] = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli_eval, "run", lambda request, *more, **options: found.extend(
        plan.planned(request.axes())) or {})
    monkeypatch.setattr(reporting, "write_reports", lambda *more: reporting.Written([], [], []))
    monkeypatch.setattr(plots, "expect_matplotlib", lambda: None)  # nothing is drawn here
    for line in told.read_text().splitlines():
        runner, *words = line.split()[1:]
        assert runner == "locret_stream"
        code, _, err = invoke(*words, "--json")
        assert code == 0, err
    return found


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_every_chat_task_is_run_with_the_full_cache_and_the_memory(tmp_path: Path):
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\necho "$@" >> told\n')
    stub.chmod(0o755)
    (tmp_path / "a book.txt").write_text("Once.")
    run("bash", ROOT / "research" / "chat_tasks.sh", "a book.txt", "out", cwd=tmp_path,
        env=os.environ | {"PYTHON": str(stub), "JOBS": "2"}).check_returncode()
    *cells, report = (tmp_path / "told").read_text().splitlines()
    assert report == "-m locret_stream eval --out out --report-only"
    common = ("-m locret_stream eval --model smollm2 --text a book.txt --out out --length 1024 --chunk-size 128 "
              "--questions 256")
    assert sorted(cells) == sorted(f"{common} --task {task} --policy {policy} --budget {units}" for task in chat.MADE
                                   for policy, units in (("full", 512), *(("locret", n) for n in (512, 256, 128))))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_table_has_every_policy_on_every_task_and_its_parts_are_all_of_it(tmp_path, monkeypatch):
    found = cells_of("all", tmp_path, monkeypatch)
    eighth = {(one.policy, one.task) for one in found if one.units in (128, None)}
    bounded = set(POLICIES) - {"full"}
    assert eighth >= {(policy, task) for policy in {*bounded, "full"} for task in suite.MARKER_TASKS}
    for units, length, policies in ((256, 4096, bounded), (64, 4096, bounded), (128, 16_384, bounded),
                                    (64, 1_000_000, {"locret", "streaming_llm", "random"})):
        there = {one.policy for one in found if (one.units, one.length, one.task) == (units, length, "recall")}
        assert there - set(ORACLES) == policies
    for one in found:
        streams = suite.task_named(one.task).streams(64 if one.length == 1_000_000 else 256)
        assert (one.streams, one.chunk_size) == (streams, 128) and (one.policy == "full" or one.stabilizers == 4), one
    parts = [cell for part in ("short", "long", "trained", "shared", "far", "far_others", "endless")
             for cell in cells_of(part, tmp_path, monkeypatch)]
    assert sorted(map(repr, parts)) == sorted(map(repr, found)) and len(set(map(repr, found))) == len(found)


def test_a_question_that_comes_last_ends_with_the_chunk():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "research" / "models" / "recall")

    def measure(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    asked = set()
    for seed in range(8):
        *lines, begun, end = findings.question_last(seed, 896, measure, suite.STDLIB.lines)
        assert sum(measure(item.text) for item in (*lines, begun)) == 896 and begun.answer is None
        question = begun.text + end.text
        mark = f"{question.removeprefix('?')}{end.answer}>\n"
        assert [item.text for item in lines].count(mark) == 1 and measure(end.text) == 1
        assert sum(item.text.startswith(question.removeprefix("?")) for item in lines) == 1
        asked.add(question)
    assert len(asked) == 8


@pytest.mark.slow
def test_findings_train_what_they_need_and_go_on_where_they_stopped(tmp_path):
    """On a random model: nothing is found, but everything is run."""
    words = random.Random(0)
    book = tmp_path / "book.txt"
    book.write_text("\n".join(" ".join("".join(words.choices("abcdefgh", k=5)) for _ in range(8)) for _ in range(900)))
    tokenizer = train_tokenizer(book.read_text(), 1200)
    save_tokenizer(tokenizer, make_dir(tmp_path / "model"), 1280)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=1280, eos_token_id=0,
        pad_token_id=0, bos_token_id=None))
    model.save_pretrained(tmp_path / "model")
    RetainingHeads(HeadsConfig(layers=2, query_heads=2, kv_heads=1, head_dim=16, width=4,
                               budget_shares=(1.0, 3.0))).save(tmp_path / "model" / "heads")
    (tmp_path / "model" / "heads" / "allocation.json").write_text("{}")
    command = ["-m", "research.findings", "--model", tmp_path / "model", "--text", book, "--out",
               tmp_path / "out", "--finding", "pyramid", "--questions", "1", "--steps", "1"]
    for again in range(2):
        done = run_python(*command, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("training heads on all" in done.stderr) == (again == 0)
    told = json.loads(done.stdout)
    assert told["command"].startswith("python -m research.findings --model ")
    [row] = told["result"]["findings"]
    assert {label: one["units"] for label, one in row["variants"].items()} == {
        "uniform": [48, 48], "pyramid": row["variants"]["pyramid"]["units"],
        "learned with the recipe's heads": [24, 72]}
    assert len(list((tmp_path / "out").glob("recall-*.json"))) == 3


def test_a_report_is_kept_with_its_cells(tmp_path, monkeypatch, capsys):
    out, kept = tmp_path / "out", make_dir(tmp_path / "results")
    code, _, err = invoke("eval", "--out", str(out), "--policy", "streaming_llm", "--policy", "random", "--task",
                          "sentences", "--length", "512", "--questions", "1", "--budget", "128", "--chunk-size", "128")
    assert code == 0, err
    monkeypatch.setattr(keep_report, "RESULTS", kept)
    monkeypatch.setattr(side_by_side, "RESULTS", kept)
    monkeypatch.setattr(sys, "argv", ["keep_report.py", str(out), "--name", "some", "--by", "a command"])
    packed = []
    for _ in range(2):
        keep_report.main()
        packed.append((kept / "some" / "cells.tar.xz").read_bytes())
    assert packed[0] == packed[1]
    shutil.unpack_archive(kept / "some" / "cells.tar.xz", tmp_path / "again", filter="data")
    names = sorted(path.name for path in out.glob("sentences-*.json"))
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names and len(names) == 2
    code, _, err = invoke("eval", "--out", str(tmp_path / "again"), "--report-only")
    assert code == 0, err
    for name in "report.md", "report.json":
        assert (tmp_path / "again" / name).read_text() == (out / name).read_text()
    (make_dir(tmp_path / "half") / "report.json").write_text("{}")
    shutil.copytree(kept / "some", tmp_path / "copy")  # with its cells packed
    for wrong, why in ((kept / "some", "is what is kept already"), (tmp_path / "half", r"there is no .*report\.md"),
                       (tmp_path / "copy", "a report and no cells")):
        monkeypatch.setattr(sys, "argv", ["keep_report.py", str(wrong), "--name", "some", "--by", "another"])
        with pytest.raises(SystemExit, match=why):
            keep_report.main()
        assert (kept / "some" / "cells.tar.xz").read_bytes() == packed[0], "nothing is lost by a mistake"
    assert not (kept / "some.part").exists()
    whole = json.loads((kept / "some.json").read_text())["result"]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", "some", "--length", "512", "--units", "128"])
    capsys.readouterr()
    side_by_side.main()
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| policy | mean of score / full | sentences |"
    assert sorted(row.split(" | ")[0] for row in rows) == ["| random", "| streaming_llm"]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", "some", "--length", "1", "--units", "128"])
    with pytest.raises(SystemExit, match="no table of 1 tokens and 128 units; expected one of 512 and 128"):
        side_by_side.main()
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", "other", "--length", "512", "--units", "128"])
    with pytest.raises(SystemExit, match=r"there is no .*other"):
        side_by_side.main()
    assert whole["by"] == "a command" and set(whole["tables"][0]["means"]) == {"streaming_llm", "random"}


def test_the_docs_tell_of_longer_streams_what_was_kept():
    [report] = json.loads((RESULTS / "policies" / "report.json").read_bytes())["reports"]
    there = {f"{row['mean']['value']:.2f}" for table in report["tables"] if table["length"] >= 16_384
             for row in table["rows"] if row["mean"]}
    _, found, behind = (ROOT / "docs" / "benchmarks.md").read_text().partition("- **Longer streams.**")
    told = set(re.findall(r"\d\.\d\d", behind.partition("\n- ")[0]))
    assert found and len(told) >= 6 and told <= there, told - there


def test_a_mean_over_fewer_tasks_says_so_and_stands_behind():
    found = [result("full", [4, 4]), result("full", [4, 4], task="decoys"), result("locret", [3, 3]),
             result("locret", [3, 3], task="decoys"), result("random", [4, 4]), result("random", [2, 2], sinks=1)]
    report = json.loads(msgspec.json.encode(report_of(found)))
    *_, first, second = side_by_side.table(report, 1000, 64).splitlines()
    assert first.startswith("| locret | 0.75 [") and "tasks" not in first
    assert second.startswith("| random") and "] (1 of 2 tasks) | " in second and second.count("1.00") == 4


def test_the_docs_show_what_was_kept():
    [report] = json.loads((RESULTS / "policies" / "report.json").read_bytes())["reports"]
    assert f"\n\n{side_by_side.table(report, 4096, 128)}\n\n" in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_docs_have_a_line_for_every_finding_that_was_kept(tmp_path):
    """With its figures: what stands behind its name are scores of that finding."""
    kept = json.loads((RESULTS / "findings.json").read_bytes())
    assert [one["finding"] for one in kept["result"]["findings"]] == [one.name for one in findings.FINDINGS]
    assert (RESULTS / "findings.md").read_text() == findings_table.markdown(kept, "findings")
    with tarfile.open(RESULTS / "findings.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    assert {round(cell.score, 4) for cell in cells.read_all(tmp_path)} == {
        found["score"] for one in kept["result"]["findings"] for found in one["variants"].values()}
    text = " ".join((ROOT / "docs" / "findings.md").read_text().split())
    for one, formal in zip(kept["result"]["findings"], findings.FINDINGS, strict=True):
        assert list(one["variants"]) == list(formal.variants)
        _, name, behind = text.partition(f"**{one['finding']}**")
        assert name, f"no line on {one['finding']}"
        told = set(re.findall(r"\d\.\d\d", behind.partition("**")[0]))
        there = {f"{found['score']:.2f}" for found in one["variants"].values()}
        assert told and told <= there, (one["finding"], told - there)


def make_dir(path: Path) -> Path:
    path.mkdir()
    return path
