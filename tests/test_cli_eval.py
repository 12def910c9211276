"""`locret-stream eval` as a user meets it, on a random model: what is run, kept, reported, refused and drawn."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from locret_stream.cli.eval import Board, duration
from locret_stream.config import Budget, ModelShape
from locret_stream.errors import ConfigError
from locret_stream.evaluation import cells as files
from locret_stream.evaluation import maps, plan, plots, suite
from locret_stream.evaluation.cells import Cell, in_words
from locret_stream.evaluation.request import Request, allocation_of, knob_values
from locret_stream.heads import HeadsConfig, RetainingHeads
from tests import tiny_tokenizers
from tests.cli.command import invoke, mistake, start, wait_for
from tests.evaluation.results import ORIGIN, result

pytestmark = pytest.mark.thorough

PLOTS = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra [plots]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def make_model(folder: Path) -> Path:
    """A folder with a random Llama of 2 layers and 1,024 positions over byte-level BPE, and its heads."""
    trained = tiny_tokenizers.train("byte_level", tiny_tokenizers.corpus()[:40_000], size=480)
    tokenizer = tiny_tokenizers.wrap(trained, template=tiny_tokenizers.CHATML)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0,
                         bos_token_id=1, eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    RetainingHeads(HeadsConfig(layers=2, query_heads=4, kv_heads=2, head_dim=8, width=8,
                               budget_shares=(1.0, 3.0))).save(folder / "heads")
    RetainingHeads(HeadsConfig(layers=2, query_heads=4, kv_heads=2, head_dim=8, width=8, features="hidden",
                               hidden=32)).save(folder / "zap")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("\n".join(" ".join(rng.choice(("once", "upon", "a", "time")) for _ in range(rng.randint(1, 9)))
                              for _ in range(300)))
    return path


@pytest.fixture
def small(model: Path, text: Path) -> list[str]:
    return ["--model", str(model), "--text", str(text), "--budget", "64", "--length", "300", "--chunk-size", "32",
            "--stabilizers", "8"]


# -- running ------------------------------------------------------------------------------------------------------


def test_it_runs_reports_and_goes_on(small: list[str], tmp_path: Path):
    here = ["eval", *small, "--out", tmp_path / "out", "--task", "passkey", "--task", "text", "--questions", 2,
            "--policy", "streaming_llm", "--policy", "oracle", "--policy", "full"]
    code, out, err = invoke(*here)
    assert code == 0, err
    told = "oracle on text, of which nothing is asked that it could know"
    assert f"skipped: {told} (1 cell)" in err
    assert "5 cells, of which 0 are there already" in err and "5 of 5: text, full, all units, 8 streams" in err
    report = tmp_path / "out" / "report.md"
    assert out == report.read_text() and "| streaming_llm |" in out and "text: full / own" in out
    assert "prose.txt" in out and "passkey 2, text 8 streams" in out
    code, again, err = invoke(*here, "--json")
    found = json.loads(again)
    assert code == 0 and (found["ran"], found["read"], found["skipped"]) == (0, 5, {told: 1})
    assert found["reports"] == json.loads((tmp_path / "out" / "report.json").read_text())["reports"]
    assert report.read_text() == out, "a report from kept results is the same"
    assert found["files"] == [str(tmp_path / "out" / name) for name in ("report.md", "report.json")]
    code, out_only, err = invoke("eval", "--out", tmp_path / "out", "--report-only")
    assert (code, out_only) == (0, out) and "cells" not in err
    code, _, err = invoke(*here, "--budget", 48)
    assert "7 cells, of which 5" not in err and "8 cells, of which 5 are there already" in err


def test_a_question_in_the_turn_of_its_text_is_another_measurement(small: list[str], tmp_path: Path):
    here = ["eval", *small, "--out", tmp_path, "--task", "chat_needles", "--questions", 2, "--policy", "streaming_llm"]
    for more, cells in (([], 1), (["--acknowledge", "OK."], 1), (["--acknowledge", ""], 2),
                        (["--acknowledge", "Noted."], 3)):
        code, _, err = invoke(*here, *more)
        assert code == 0 and len(list(tmp_path.glob("chat_needles-*.json"))) == cells, err


def test_full_beyond_the_window_is_skipped_and_said(small: list[str], tmp_path: Path):
    here = ["eval", *small, "--length", 1100, "--out", tmp_path / "out", "--task", "passkey", "--questions", 1,
            "--policy", "full", "--policy", "random"]
    code, out, err = invoke(*here, "--json")
    assert code == 0, err
    skipped = json.loads(out)["skipped"]
    assert skipped == {"full at 1,100 tokens with chunks of 32 does not fit the model's window of 1,024": 1}
    assert "skipped: full at 1,100 tokens with chunks of 32 does not fit the model's window of 1,024 (1 cell)" in err
    assert "`full` was not run at 1,100 tokens; there" in (tmp_path / "out" / "report.md").read_text()
    assert "no cell can run: full at 1,100" in mistake("eval", *small[:4], "--length", 1100, "--out", tmp_path / "no",
                                                       "--task", "passkey", "--policy", "full")


def test_full_that_its_questions_take_beyond_the_window_is_skipped_by_its_real_size(small: list[str], tmp_path: Path):
    code, out, err = invoke("eval", *small[:4], "--budget", 64, "--chunk-size", 32, "--stabilizers", 8, "--length", 990,
                            "--out", tmp_path, "--task", "passkey", "--questions", 1, "--policy", "full", "--policy",
                            "random", "--json")
    assert code == 0, err
    [reason] = json.loads(out)["skipped"]
    size = re.fullmatch(r"full on passkey at 990 tokens: a stream of ([\d,]+) tokens with question and answer, with "
                        r"chunks of 32 does not fit the model's window of 1,024", reason)
    assert size and int(size[1].replace(",", "")) > 1024 - 32


@pytest.mark.thorough
def test_heads_knobs_and_allocations_are_variants(model: Path, small: list[str], tmp_path: Path):
    code, out, err = invoke(
        "eval", *small, "--out", tmp_path, "--task", "passkey", "--questions", 1, "--heads", model / "heads",
        "--heads", f"kvzap={model / 'zap'}", "--policy", "locret", "--policy", "kvzap", "--policy", "h2o",
        "--policy", "random", "--knob", "h2o.recent=0.1", "--knob", "h2o.recent=0.25", "--allocation", "uniform",
        "--allocation", "1,2")
    assert code == 0, err
    for label in ("locret, uniform", "locret, 1:2", "kvzap, uniform", "h2o, recent=0.1, uniform",
                  "h2o, recent=0.25, 1:2", "random, 1:2"):
        assert f"| {label} |" in out, out
    results = files.read_all(tmp_path)
    assert {one.budgets for one in results if one.cell.allocation == (1.0, 2.0)} == {(43, 85)}


def test_adaptive_shares_are_those_of_the_heads_for_every_policy(model: Path, small: list[str], tmp_path: Path):
    code, _, err = invoke("eval", *small, "--out", tmp_path, "--task", "passkey", "--questions", 1, "--heads",
                          model / "heads", "--policy", "locret", "--policy", "random", "--allocation", "adaptive")
    assert code == 0, err
    assert [one.budgets for one in files.read_all(tmp_path)] == [(32, 96), (32, 96)]


@PLOTS
def test_plots_without_anything_to_draw_say_so(tmp_path: Path):
    files.write(one := result("full", [4, 4]), tmp_path / files.file_name(one.cell, one.origin))
    code, _, err = invoke("eval", "--out", tmp_path, "--report-only", "--plots")
    assert code == 0 and "nothing to draw: curves need two budgets" in err and not list(tmp_path.glob("*.png"))


@PLOTS
@pytest.mark.thorough
def test_plots_are_drawn_and_drawn_again(small: list[str], tmp_path: Path, monkeypatch):
    here = ["eval", "--out", tmp_path, "--plots"]
    asked = [*small, "--budget", 48, "--task", "passkey", "--questions", 1, "--policy", "streaming_llm"]
    code, _, err = invoke(*here, *asked)
    assert code == 0 and "making maps of 1 variant" in err, err
    pictures = {"by_budget_300.png", "retention.png", "consistency.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == pictures
    for name in pictures:
        (tmp_path / name).unlink()
    code, out, err = invoke(*here, "--report-only", "--json")
    assert code == 0 and {path.name for path in tmp_path.glob("*.png")} == pictures
    assert {Path(name).name for name in json.loads(out)["files"]} == {*pictures, "report.md", "report.json"}
    report = (tmp_path / "report.md").read_text()
    assert all(report.count(f"- Picture [{name}]({name}): ") == 1 for name in pictures)
    monkeypatch.setattr(plots, "draw", lambda *args, **more: [])
    assert "making maps" not in invoke(*here, *asked)[2], "maps are kept"
    assert "making maps of 1 variant" in invoke(*here, *asked, "--budget", 40)[2], "of the smallest budget"


@PLOTS
@pytest.mark.thorough
def test_another_run_adds_to_the_maps(small: list[str], tmp_path: Path):
    here = ["eval", *small, "--out", tmp_path, "--plots", "--questions", 1]
    assert "making maps of 1 variant" in invoke(*here, "--task", "passkey", "--policy", "streaming_llm")[2]
    assert "making maps of 2 variants" in invoke(*here, "--task", "passkey", "--policy", "random")[2]
    [path] = tmp_path.glob("maps-*.json")
    assert [one.label for one in maps.read(path).retention] == ["streaming_llm", "random"]
    err = invoke(*here, "--task", "decoys", "--policy", "h2o")[2]
    assert f"maps are of passkey, 300 tokens and 64 units, as before; remove {path} to have others" in err
    assert "making maps" not in err
    report = (tmp_path / "report.md").read_text()
    assert "nobody asks about (passkey, 300 tokens, 64 units)" in report
    assert "that is always 1 (passkey, 300 tokens, all units held)" in report


@PLOTS
@pytest.mark.thorough
def test_maps_are_made_again_of_heads_that_were_trained_again(model: Path, small: list[str], tmp_path: Path):
    heads = tmp_path / "heads"
    shutil.copytree(model / "heads", heads)
    here = ["eval", *small, "--out", tmp_path / "out", "--plots", "--task", "passkey", "--questions", 1, "--policy",
            "locret", "--heads", heads]
    for expected in (True, False):
        assert ("making maps of 1 variant" in invoke(*here)[2]) == expected
    loaded = RetainingHeads.load(heads)
    with torch.no_grad():
        next(loaded.parameters()).mul_(-1)
    loaded.save(heads)
    assert "making maps of 1 variant" in invoke(*here)[2]


@pytest.mark.thorough
def test_ctrl_c_keeps_what_is_done(small: list[str], tmp_path: Path):
    many = [word for units in range(40, 64) for word in ("--budget", units)]
    process = start("eval", *small, *many, "--out", tmp_path, "--task", "passkey", "--questions", 2, "--policy", "h2o")
    try:
        wait_for(process, "2 of 25: ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130 and out == "" and "Traceback" not in err, err
    assert f"Interrupted: what is done is kept in {tmp_path}; the same command goes on from there." in err
    assert 2 <= len(files.read_all(tmp_path)) < 25


# -- mistakes -----------------------------------------------------------------------------------------------------


def test_mistakes_are_told_before_anything_runs(model: Path, small: list[str], tmp_path: Path):
    out = tmp_path / "out"
    base = ["eval", *small, "--out", out, "--task", "passkey"]
    assert "no task 'pasky'" in (line := mistake("eval", *small, "--out", out, "--task", "pasky"))
    assert "Did you mean 'passkey'?" in line
    assert "Did you mean 'random'?" in mistake(*base, "--policy", "randm")
    assert "Did you mean 'oracle'?" in mistake(*base, "--policy", "oracel")
    assert "policy 'locret' needs retaining heads; expected their folder" in mistake(*base)
    assert "--heads trimkv=FOLDER" in mistake(*base, "--policy", "trimkv", "--heads", model / "heads")
    assert "no folder 'nowhere'" in mistake(*base, "--heads", "nowhere")
    assert "Did you mean 'kvzap'?" in mistake(*base, "--heads", "kvzp=nowhere")
    assert "policy 'h2o' scores without heads" in mistake(*base, "--heads", f"h2o={model / 'heads'}")
    assert "those of policy 'kvzap'" in mistake(*base, "--policy", "locret", "--heads", model / "zap")
    assert "expected POLICY.NAME=VALUE" in mistake(*base, "--policy", "h2o", "--knob", "recent=1")
    assert "knobs are given for policy 'h2o'" in mistake(*base, "--policy", "random", "--knob", "h2o.recent=0.1")
    assert "no knob 'nonsense'" in mistake(*base, "--policy", "h2o", "--knob", "h2o.nonsense=1")
    assert "allocation is 'pyramidal'" in mistake(*base, "--policy", "h2o", "--allocation", "pyramidal")
    assert "3 layer shares for a model of 2" in mistake(*base, "--policy", "h2o", "--allocation", "1,2,3")
    assert "no shares are stored" in mistake(*base, "--policy", "h2o", "--allocation", "adaptive")
    assert "the model knows 1024 positions" in mistake(*base, "--policy", "h2o", "--budget", 2000)
    assert "4 sinks + 8 stabilizers" in mistake(*base, "--policy", "h2o", "--budget", 10)
    assert "--questions" in mistake(*base, "--questions", 0)
    assert "--text" in mistake("eval", "--out", out, "--text", tmp_path / "missing.txt")
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "has no text in it" in mistake(*base, "--policy", "h2o", "--text", tmp_path / "empty.txt")
    assert not out.exists(), "nothing ran"


def test_a_folder_without_results_and_a_damaged_one(tmp_path: Path):
    assert "holds no results" in mistake("eval", "--out", tmp_path / "nothing", "--report-only")
    assert "holds no results" in mistake("eval", "--out", tmp_path, "--report-only")
    (tmp_path / "recall-h2o-64-300-0123456789ab.json").write_text("{")
    assert "recall-h2o-64-300-0123456789ab.json is no result" in mistake("eval", "--out", tmp_path, "--report-only")
    assert "found --report-only and --policy" in mistake("eval", "--out", tmp_path, "--report-only", "--policy", "h2o")
    (tmp_path / "file").write_text("in the way")
    assert mistake("eval", "--out", tmp_path / "file", "--report-only")


def test_results_of_two_origins_are_two_reports(tmp_path: Path):
    other = ORIGIN.__class__(weights="ffff", tokenizer="77b1", heads="", text="prose", tasks=1)
    for one in (result("full", [4, 4]), result("locret", [3, 3]), result("locret", [0, 0], origin=other)):
        files.write(one, tmp_path / files.file_name(one.cell, one.origin))
    code, out, err = invoke("eval", "--out", tmp_path, "--report-only")
    assert code == 0 and out.count("# What the memory remembers") == 2, err
    first, second = out.split("# What the memory remembers")[1:]
    assert ("ffff" in first) != ("ffff" in second) and "0.75 [" in (second if "ffff" in first else first)
    assert files.tag_of(other) != files.tag_of(ORIGIN)


def test_without_matplotlib_plots_name_the_extra(tmp_path: Path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))
    assert "locret-stream[plots]" in mistake("eval", "--out", tmp_path, "--report-only", "--plots")


# -- parts --------------------------------------------------------------------------------------------------------


def axes(**more) -> plan.Axes:
    return Request(**{"model": "elsewhere", "tasks": ["recall"], "policies": ["h2o"], "budgets": [64], "lengths": [300],
                      "allocations": ["uniform"]} | more).axes()


def test_cells_are_crossed_and_have_questions_enough():
    cells = plan.planned(axes(tasks=["markers", "recall"], policies=["h2o", "full", "oracle"], budgets=[64, 32, 64],
                              lengths=[300, 500]))
    count = len(suite.MARKER_TASKS)
    assert len(cells) == 2 * (2 * count + count + 2 * count), "one full for both budgets"
    streams = {cell.task: cell.streams for cell in cells}
    assert (streams["recall"], streams["last_write"], streams["passkey"], streams["text"]) == (4, 6, 64, 8)
    assert {cell.units for cell in cells if cell.policy == "full"} == {None}
    told = plan.planned(axes(tasks=["recall", "passkey"], focus=True))
    assert {(cell.focus, cell.streams) for cell in told} == {(True, 64)}
    with pytest.raises(ConfigError, match="nothing to focus on"):
        plan.planned(axes(tasks=["text"], focus=True))


def test_full_runs_where_layers_have_smaller_windows():
    """These need to hold no more than they see."""
    class Sliding:
        shape = ModelShape.even(layers=2, kv_heads=2, groups=2, head_dim=8, vocab=99, window=4096, item_bytes=4,
                           sliding=(256, None)), ""
        task = staticmethod(lambda cell: suite.task_named(cell.task))
        budget = staticmethod(lambda cell: Budget(units=320, sinks=0, stabilizers=0))

    cells = [Cell(task="recall", policy="full", length=300), Cell(task="recall", policy="h2o", length=300, units=512)]
    assert plan.checked(cells, Sliding()) == (cells, {})


def test_bits_need_a_whole_line_in_whole_chunks(small: list[str], tmp_path: Path):
    line = tmp_path / "line.txt"
    line.write_text("word " * 4000)
    base = ["eval", *small, "--out", tmp_path / "out", "--task", "text", "--policy", "random"]
    assert "begins with a line of " in mistake(*base, "--text", line)
    assert "hold no whole line" in mistake(*base, "--length", 5)
    assert not (tmp_path / "out").exists(), "nothing ran"


def test_what_cannot_be_used_is_refused(model: Path, small: list[str], tmp_path: Path):
    base = ["eval", *small, "--out", tmp_path / "out", "--task", "passkey", "--policy", "h2o", "--policy", "oracle"]
    assert "'kvzap' is not run; expected --policy kvzap" in mistake(*base, "--heads", f"kvzap={model / 'zap'}")
    assert "knobs x are given for policy 'oracle', which has none" in mistake(*base, "--knob", "oracle.x=1")


def test_by_default_a_policy_is_run_as_a_runtime_runs_it(small: list[str], model: Path):
    """With the shares of the heads, where there are some."""
    cells = plan.planned(axes(policies=["locret", "h2o"], heads=[str(model / "heads")], allocations=["auto"]))
    assert {(cell.policy, cell.heads, cell.allocation) for cell in cells} == {
        (policy, str(model / "heads"), "adaptive") for policy in ("locret", "h2o")}
    alone = plan.planned(axes(policies=["h2o"], allocations=["auto"]))
    assert alone == plan.planned(axes(policies=["h2o"], allocations=["uniform"])) and alone[0].heads == ""
    even = plan.planned(axes(policies=["kvzap"], heads=[f"kvzap={model / 'zap'}"], allocations=["auto"]))
    assert {(cell.heads, cell.allocation) for cell in even} == {(str(model / "zap"), "uniform")}


def test_knobs_given_twice_are_crossed():
    knobs = knob_values(["snapkv.window=8", "snapkv.window=16", "snapkv.kernel=3", "snapkv.window=8"])
    cells = plan.planned(axes(policies=["snapkv"], knobs=["snapkv.window=8", "snapkv.window=16", "snapkv.kernel=3"]))
    assert knobs == {"snapkv": {"window": (8, 16), "kernel": (3,)}}
    assert [cell.knobs for cell in cells] == [{"window": 8, "kernel": 3}, {"window": 16, "kernel": 3}]
    (one,) = plan.planned(axes(knobs=["h2o.recent=1", "h2o.recent=1.0"]))
    assert repr(one.knobs) == "{'recent': 1.0}", "the same share twice"
    assert knob_values(["a.b=x=1"]) == {"a": {"b": ("x=1",)}} and knob_values(["a.b=1e-3"]) == {"a": {"b": (0.001,)}}


def test_the_bundled_model_brings_heads_and_others_do_not():
    assert axes(policies=["locret"], model="bundled").heads["locret"]
    with pytest.raises(ConfigError, match="needs retaining heads"):
        plan.planned(axes(policies=["locret"]))


def test_allocations_are_names_or_shares():
    assert allocation_of("pyramid") == "pyramid" and allocation_of("1,4.5,1") == (1.0, 4.5, 1.0)
    for value in ("1,0", "1,-2", "1,nan", "1,,2", ""):
        with pytest.raises(ConfigError, match="allocation"):
            allocation_of(value)


def test_a_cell_in_words_tells_it_from_the_others_of_its_policy():
    one = Cell(task="recall", policy="kvzap", length=300, units=64, heads="run/heads-a", allocation="adaptive",
               streams=1)
    other = Cell(task="recall", policy="nacl", length=300, units=64, knobs={"random": 0.5}, streams=2)
    assert in_words(one) == "recall, kvzap (heads-a, adaptive), 64 units, 1 stream of 300 tokens"
    assert in_words(other) == "recall, nacl (random=0.5, uniform), 64 units, 2 streams of 300 tokens"


def test_the_time_that_is_left_is_by_the_tokens_of_cells_that_were_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("locret_stream.cli.eval.time.monotonic", lambda: now[0])
    cells = [Cell(task="recall", policy="h2o", length=length, streams=2) for length in (1000, 1000, 3000)]
    board = Board(cells, 1, lambda cell: cell.length * cell.streams)
    done = [result("h2o", [1, 1], length=length) for length in (1000, 1000)]
    board(done[0], True)
    assert board._left() == ""
    now[0] = 10.0
    board(done[1], False)
    assert board._left() == ", 30 s left" and "2 of 3 cells: recall, h2o" in board._render().plain
    assert (duration(99), duration(600), duration(36_000)) == ("99 s", "10 min", "10.0 h")
