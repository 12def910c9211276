"""Benchmarks measure nothing here: at toy sizes they run to their end and say all that they promise."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from locret_stream import ConfigError
from locret_stream.context import StreamingContext
from locret_stream.named_models import smollm2
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[1]


def gpu_small(**env: str) -> dict[str, Any]:
    done = run_python("benchmarks/gpu.py", "--small", "--only", "card,prefill,parts,decode,full,choices,widths",
                      env=os.environ | {"PYTHONPATH": str(ROOT)} | env, timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["command"].startswith("python benchmarks/gpu.py --small ")
    return told["result"]


def expect_whole(found: dict[str, Any]) -> None:
    assert found["small"] is True
    for tokens in ("320", "640"):
        assert found["prefill"][tokens]["units"] == 90 and found["prefill"][tokens]["peak_units"] == 90 + 80
        assert 0 < found["prefill"][tokens]["share_of_matmul"]
    assert found["prefill"]["pool_bytes"] == found["prefill"]["formula_bytes"]
    assert found["parts"]["parts_ms"].keys() >= {"attention", "heads", "selection", "compaction", "projections"}
    assert found["decode"]["1"]["ms_per_step"] > 0 and found["decode"]["3"]["share_of_bandwidth"] > 0
    assert found["full"].keys() == {"160", "240"}
    for row in found["widths"].values():
        assert row.keys() == {"prefill", "prefill spec", "reduced", "decode 1", "decode 3", "decode 1 spec",
                              "share_of_matmul", "share_of_bandwidth"} and min(row.values()) > 0


@pytest.mark.thorough
def test_the_script_for_a_gpu_runs_at_toy_sizes():
    found = gpu_small(LOCRET_KERNELS="torch")
    expect_whole(found)
    assert found["choices"].keys() == {"prefill_attention torch", "score_units torch"}


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["nacl", "focus"])
def test_parts_of_methods_are_measured_at_toy_sizes(part: str):
    done = run_python("benchmarks/ablations.py", part, "--model", "recall", "--facts", "2", "--asked", "2",
                      env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["result"]["rows"]
    assert len(rows) >= 8 and {row["questions"] for row in rows.values()} == {2}


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_in_triton_s_interpreter():
    pytest.importorskip("triton", reason="triton is published for Linux only")
    found = gpu_small(LOCRET_KERNELS="triton", TRITON_INTERPRET="1")
    expect_whole(found)
    assert len(found["choices"]) == 5


@pytest.mark.parametrize(("options", "units"), [(["--recent"], 48), ([], 128), (["--at-once"], 128)])
@pytest.mark.thorough
def test_stock_transformers_keep_all_or_as_much_as_the_memory(options: list[str], units: int):
    done = run_python("benchmarks/prefill.py", *options, "--tokens", "128", "--chunk", "16", "--budget", "48",
                      "--decode", "4", "--repeats", "1", "--threads", "1", "--json",
                      env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    cases = json.loads(done.stdout)["result"]["cases"]
    assert cases["ours"]["units"]["median"] == 48 and cases["stock"]["units"]["median"] == units
    assert ("chunk_ms" in cases["stock"]) is (options != ["--at-once"]), "a single pass has no time per chunk"


@pytest.mark.thorough
def test_cold_starts_are_timed_to_the_answer():
    done = run_python("benchmarks/cold_start.py", "--repeats", "1", "--models", "bundled", "--busy", "1",
                      env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    cases = json.loads(done.stdout)["result"]["cases"]
    assert cases.keys() == {"help", "import_langchain", "imports", "bundled", "bundled_spinning"}
    assert all(0 < case["first_s"]["median"] <= case["end_s"]["median"] for case in cases.values())


@pytest.mark.thorough
def test_parts_are_held_against_what_the_processor_can(tmp_path):
    picture = tmp_path / "roofline.svg"
    done = run_python("benchmarks/roofline.py", "--models", "tiny", "--chunk", "64", "--chunks", "3", "--threads", "1",
                      "--plot", str(picture), env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    assert picture.read_text().count("<path") > 20
    tiny = json.loads(done.stdout)["result"]["models"]["tiny"]
    projections, attention = (tiny["parts"][part] for part in ("projections", "attention"))
    weights = 4 * (2 * 256 * 512 + 2 * 256 * 128 + 3 * 256 * 768)
    assert projections["gflops"] * projections["ms"] == pytest.approx(2 * 64 * weights / 1e6)
    assert attention["gflops"] * attention["ms"] == pytest.approx(4 * 4 * 8 * 64 * 64 * (64 + 32.5) / 1e6)
    for part in (projections, attention, tiny["token"]):
        assert 0 < part["least_ms"] < 1.3 * part["ms"] and part["share_of_limit"] == part["least_ms"] / part["ms"]


@pytest.mark.thorough
def test_a_turn_is_timed_by_the_length_of_its_history():
    done = run_python("benchmarks/langchain_growth.py", "--repeats", "2", "--lengths", "4", "40",
                      env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["result"]["by_length"]
    assert found.keys() == {"4", "40"} and found["4"]["fed"] == found["40"]["fed"] > 0
    assert all(row["cpu_ms"] > 0 and row["s"] > 0 for row in found.values())


SYSTEMS = ("locret", "pinned", "streaming_llm", "policy:random", "pinned:streaming_llm", "truncation", "truncation:300",
           "summary", "oracle", "gathered", "gathered_recent", "sentences_recent")


@pytest.fixture
def long_memory(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[dict[str, Any], str]]:
    """Runs benchmarks/long_memory.py here, with `tmp_path` as its folder: its result, and what it said meanwhile."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module("long_memory")

    def run(*words: object) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr("sys.argv", ["benchmarks/long_memory.py", *map(str, words)])
        script.main()
        out, err = capsys.readouterr()
        return json.loads(out)["result"] if out else {}, err

    return run


@pytest.mark.thorough
def test_a_long_memory_is_measured_in_parts_and_drawn(tmp_path, long_memory, monkeypatch):
    (tmp_path / "book.txt").write_text("".join(f"It was the {day} of May; it rained.\nWe\nstayed.\n\n"
                                               for day in range(400)))
    toy = ("--text", "book.txt", "--out", "cells", "--model", "bundled", "--tokens", 1500, "--asked", 3,
           "--budget", 512, "--chunk-size", 128)
    systems = [*SYSTEMS, *(["bm25"] if importlib.util.find_spec("bm25s") else [])]
    _, said = long_memory(*toy, "--streams", 1, "--systems", "locret", "truncation")
    assert said.count(" right, ") == 2
    found, said = long_memory(*toy, "--streams", 2, "--systems", *systems)
    assert said.count(" right, ") == 2 * len(systems) - 2, "what was there was measured again"
    assert found["systems"].keys() == set(systems) and found["streams"] == [0, 1]
    for system, figures in found["systems"].items():
        answers = [answer for stream in figures["streams"] for answer in stream["answers"]]
        assert figures["questions"] == len(answers) == 6 and all(answer["expected"] for answer in answers), system
        assert figures["score"] == sum(answer["right"] for answer in answers) / 6, system
        assert figures["handed"] <= (300 if system.endswith("300") else 640), system
        assert all(("kept_by_layer" in answer) == (system in SYSTEMS[:5]) for answer in answers), system
    recent = sorted((answer["position"], answer["kept"])
                    for answer in found["systems"]["streaming_llm"]["streams"][0]["answers"])
    assert [kept for _, kept in recent] == sorted(kept for _, kept in recent), "the most recent tokens stay"
    for plain, system in ("locret", "pinned"), ("streaming_llm", "pinned:streaming_llm"):
        kept, pinned = ([answer["kept"] for stream in found["systems"][one]["streams"] for answer in stream["answers"]]
                        for one in (plain, system))
        assert max(pinned) == 1 and sum(pinned) > sum(kept) + 0.5, "units of facts go last"
    gathered, alone = ([[answer["handed"] for answer in stream["answers"]]
                        for stream in found["systems"][system]["streams"]] for system in ("gathered", "oracle"))
    assert gathered == [[min(640, sum(some))] * 3 for some in alone], "all facts at once, each as the oracle has it"
    filled = [answer["handed"] for stream in found["systems"]["gathered_recent"]["streams"]
              for answer in stream["answers"]]
    assert filled == [640] * 6, "and the last tokens, as many as fit"
    assert [answer["handed"] for stream in found["systems"]["sentences_recent"]["streams"]
            for answer in stream["answers"]] == filled
    assert found["systems"]["summary"]["tokens_written"] > 0 == found["systems"]["oracle"]["bytes_kept"]
    (tmp_path / "kept.json").write_text(json.dumps({"result": found}))
    longer = {"result": found | {"tokens": 3000}}
    (tmp_path / "longer.json").write_text(json.dumps(longer))
    long_memory("--plot", "drawn.svg", "--of", "kept.json", "longer.json")
    assert "streaming_llm" in (tmp_path / "drawn.svg").read_text()
    recalled, _ = long_memory(*toy, "--streams", 1, "--systems", "recall")
    cell = next((tmp_path / "cells").glob("truncation-*"))
    whole = cell.read_bytes()
    cell.write_bytes(whole[:-9])
    with pytest.raises(SystemExit):
        long_memory(*toy, "--streams", 3, "--systems", "locret", "truncation")
    assert not list((tmp_path / "cells").glob("locret-1500-002-*")), "a damaged file is found before hours of measuring"
    cell.write_bytes(whole)
    recalls, ask = [], StreamingContext.ask

    def asking(self: StreamingContext, question: str, **options: Any) -> Any:
        recalls.append(options["recall"])
        return ask(self, question, **options)

    monkeypatch.setattr(StreamingContext, "ask", asking)
    both, said = long_memory(*(word if word != "cells" else "both" for word in toy), "--streams", 1,
                             "--systems", "locret", "recall")
    assert said.count(" right, ") == 2 and recalls == [None, False] * 3
    for system, alone in (("locret", found), ("recall", recalled)):
        one, other = (_timeless(result["systems"][system]["streams"][0]) for result in (alone, both))
        assert one == other, f"{system}: a stream that is read once for both is answered as one that is read for each"


def _timeless(stream: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in answer.items() if name != "seconds"} for answer in stream["answers"]]


@pytest.mark.parametrize("options, why", [
    (["--text", "book.txt", "--out", "cells", "--systems", "bm26"], "there is no system 'bm26'"),
    (["--text", "book.txt", "--out", "cells", "--systems", "locret:9"], "there is no system 'locret:9'"),
    (["--text", "book.txt", "--out", "cells", "--systems", "summary:100"], "there is no system 'summary:100'"),
    (["--text", "book.txt", "--out", "cells", "--systems", "truncation:0"], "there is no system 'truncation:0'"),
    (["--text", "book.txt", "--out", "cells", "--systems", "summary", "--budget", "64"], "expected 600 or more"),
    (["--plot", "drawn.svg"], "with --of"),
    (["--plot", "drawn.svg", "--of", "none.json"], "none.json holds no result"),
    (["--out", "cells"], "expected --text"),
])
def test_a_long_memory_says_what_is_wrong(long_memory, capsys, options, why):
    with pytest.raises(SystemExit) as ended:
        long_memory(*options)
    assert ended.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.real
def test_smollm2_finds_facts_in_what_it_is_handed(long_memory):
    if importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"needs {smollm2.PACKAGE}, which is not installed here: {smollm2.INSTALL}")
    found, _ = long_memory("--text", ROOT / "README.md", "--out", "cells", "--tokens", 2000, "--streams", 1,
                           "--systems", "oracle", "locret")
    assert found["systems"]["oracle"]["score"] >= 5 / 6 and found["systems"]["locret"]["kept_value_where_right"] > 0.5


async def test_the_sentences_alone_are_read_before_the_last_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import alternatives
    import book
    (tmp_path / "book.txt").write_text("".join(f"It was the {day} of May; it rained.\n\n" for day in range(90)))
    books = [book.Book(tmp_path / "book.txt")]
    stream = book.make_stream(0, books, 900, "numbers", 3, lambda text: list(text.encode()))
    handed: list[list[int]] = []

    async def ask_of(runtime: Any, stream: Any, ids: list[int]) -> None:
        handed.append(ids)

    monkeypatch.setattr(alternatives, "ask_of", ask_of)
    await alternatives.sentences_recent(None, stream, 400)
    told = b"".join(fact.told.line.encode() + b" " for fact in sorted(stream.facts, key=lambda fact: fact.start))
    assert bytes(handed[0]) == told + bytes(stream.tokens[len(told) - 400:])


def test_libraries_for_constrained_decoding_are_measured_alike(monkeypatch):
    """Of the library that is installed here; with the keywords that it holds, refuses, narrows or ignores."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("constrained")
    run = script.of_library(SimpleNamespace(library="llguidance", model="bundled", cover=True))
    whole = script.of_all([run, run])
    assert whole["compile_ms"].keys() == whole["mask_ms"].keys() == script.SCHEMAS.keys() and not whole["refused"]
    assert not any(whole["missed"].values()) and all(count > 20 for count in whole["tokens"].values())
    found = {keyword: word.partition(" ")[0] for keyword, word in whole["coverage"].items()}
    assert found.keys() == script.KEYWORDS.keys() and set(found.values()) == {"held", "refused"}
    assert found["minimum"] == found["anyOf beside properties"] == "held" and found["not"] == "refused"
    assert script.of_apply(100, 2).keys() == {"numpy", "shifts"}
    script.show({"llguidance": whole})


PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURN = "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
COLLECTION = {  # of our own wording
    "calls": "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n"
             "{% endif %}{% for m in messages %}" + TURN + "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' + "
             "(c.function | tojson) + '\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT,
    "thinks": "{% for m in messages %}" + TURN.replace("(m.content or '')", "m.content.split('</think>')[-1]")
              + "<|im_end|>\n{% endfor %}" + PROMPT + "{# a model opens <think> #}",
    "refuses": "{{ raise_exception('no chats here') }}"}


@pytest.mark.thorough
def test_templates_are_tried_with_all_that_sessions_do(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("templates")
    collection, cells_file, tables = tmp_path / "some.json", tmp_path / "cells.json", tmp_path / "table.md"
    collection.write_text(json.dumps(COLLECTION))

    def run(*words: object) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["benchmarks/templates.py", "--collection", *map(str, words),
                                         "--json", str(cells_file), "--markdown", str(tables)])
        script.main()
        return json.loads(cells_file.read_text())

    found = run(collection, "--behaviour", "chat,tools,thoughts,langchain,restart,replay")
    cells, totals = found["cells"], found["totals"]
    assert cells.keys() == COLLECTION.keys() and totals["by_template"] == {}
    assert {cells[name]["chat.three turns"] for name in ("calls", "thinks")} == {"ok"}
    assert cells["calls"]["tools.two calls"] == cells["calls"]["langchain.tools"] == "ok"
    assert cells["thinks"]["thoughts.three turns"] == "ok" and cells["calls"]["thoughts.three turns"] == "-"
    for behaviour in "restart.chat", "restart.tool result", "restart.langchain", "replay.chat", "replay.tool loop":
        assert cells["calls"][behaviour] == cells["thinks"][behaviour] == "ok", behaviour
    assert set(cells["refuses"].values()) == {"-"}, "transformers refuses it, too"
    asked = sum(cell != "-" for row in cells.values() for cell in row.values())
    assert totals["cells"] == asked == totals["ok"] > 40
    assert "| thinks | ok | ok | ok | ok | ok | ok |" in tables.read_text() and "no chats here" in tables.read_text()

    folder = tmp_path / "folder"
    folder.mkdir()
    for name, template in COLLECTION.items():
        (folder / f"{name}.jinja").write_text(template)
    capsys.readouterr()
    run(folder, "--behaviour", "chat", "--only", "calls", "--expect")
    assert "1 templates × 2 behaviours, 2 cells: ok 2 (100.0 %)" in capsys.readouterr().err
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(importlib.import_module("template_lab.talking"), "MARGIN", -1000)
        run(folder, "--behaviour", "chat", "--only", "calls", "--expect")
    assert ended.value.code == 1 and set(map(_kind, json.loads(cells_file.read_text())["cells"]["calls"].values())) == {
        "restated"}


def _kind(cell: str) -> str:
    return cell.partition(":")[0]


def test_a_trial_of_templates_is_as_expected_with_few_refused_and_nothing_worse(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    verdicts = importlib.import_module("template_lab.verdicts")
    cells: dict[str, str] = {}
    for name, error in (("a", None), ("b", verdicts.NotAsked()), ("c", verdicts.Failed("wrong", "a  b")),
                        ("d", ConfigError("no")), ("e", ValueError("odd"))):
        with verdicts.judged(cells, name):
            if error is not None:
                raise error
    assert cells == {"a": "ok", "b": "-", "c": "wrong: a b", "d": "refused: ConfigError: no",
                     "e": "failed: ValueError: odd"}
    table = {"x": dict.fromkeys(map(str, range(98)), "ok") | {"98": "refused: 400", "99": "-"}}
    summed = verdicts.totals(table)
    assert summed["cells"] == 99 and summed["percent"]["refused"] == 1.01 and verdicts.as_expected(summed)
    assert not verdicts.as_expected(verdicts.totals({"x": table["x"] | {"97": "refused: 400"}}))
    assert not verdicts.as_expected(verdicts.totals({"x": table["x"] | {"98": "reread: fed 9"}}))


@pytest.mark.parametrize("options, why", [
    (["--collection", "none.json"], "none.json"), ([], "expected --collection"),
    (["--collection", "some.json", "--only", "zebra"], "part of one of the 3 names"),
    (["--collection", "some.json", "--behaviour", "chat,walks"], "--behaviour has walks"),
])
def test_a_trial_of_templates_says_what_is_wrong(tmp_path, monkeypatch, capsys, options, why):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.json").write_text(json.dumps(COLLECTION))
    monkeypatch.setattr("sys.argv", ["benchmarks/templates.py", *options])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("templates").main()
    assert ended.value.code == 2 and why in capsys.readouterr().err


def test_what_a_model_writes_is_read_off_its_template(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    forms, collection = (importlib.import_module(f"template_lab.{name}") for name in ("forms", "collection"))
    calls = forms.form_of(collection.tokenizer_of(COLLECTION["calls"]))
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert calls.calls(forms.ROME) == f"{one}<|im_end|>" and calls.source == "template"
    assert calls.calls(forms.ROME, forms.OSLO) == f"{one}{one.replace('Rome', 'Oslo')}<|im_end|>"
    assert calls.answer("Hi.") == "Hi.<|im_end|>" and calls.thinks is None
    thinks = forms.form_of(collection.tokenizer_of(COLLECTION["thinks"]))
    assert thinks.thought("So.", "Hi.") == "<think>\nSo.\n</think>\n\nHi.<|im_end|>" and thinks.source == "words"
    source = COLLECTION["thinks"].replace("assistant\n'", "assistant\n<think>\n'")
    opened = forms.form_of(collection.tokenizer_of(source))
    assert opened.thought("So.", "Hi.") == "So.\n</think>\n\nHi.<|im_end|>"
    assert opened.answer("Hi.") == "\n</think>\n\nHi.<|im_end|>", "an answer without a thought closes it"


@pytest.mark.parametrize(("tokens", "units"), [pytest.param(30_000, 256, marks=pytest.mark.thorough),
                                               pytest.param(1_000_000, 1024, marks=pytest.mark.slow)])
def test_a_long_stream_with_units_in_the_host_s_memory_takes_what_its_formulas_say(tokens: int, units: int):
    """And the process does not grow with it: a cache of all its tokens would be as large as is said, too."""
    done = run_python("benchmarks/host_tier.py", "--flat", str(tokens), "--exact", str(units), "--chunk", str(units),
                      env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout_s=3_000)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["result"]
    assert found["tokens"] >= tokens
    assert found["host_bytes"] == found["formula_host_bytes"] > 0 and found["pool_bytes"] == found["formula_bytes"]
    assert found["fetched_for_a_token"] == [found["formula_for_a_token"]] and found["formula_for_a_token"] > 0
    assert found["read_for_a_chunk"] == [found["formula_for_a_chunk"]] and found["formula_for_a_chunk"] > 0
    assert found["most_growth_mib"] < 16, f"a cache of all tokens has {found['bytes_full_cache'] / 2**20:.0f} MiB"
