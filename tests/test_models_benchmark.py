"""benchmarks/models.py: the tables of docs/models.md are those of its results, the results are of the classes that the
installed transformers have, and its verdicts are what they say they are."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from locret_stream import UnsupportedModel
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
MEND = "mend it with: python benchmarks/models.py all --keep models --write docs/models.md"
SERVED_AND_NOT = ("qwen3", "lfm2", "llava", "gpt2", "deepseek_v3")  # plain, hybrid, wrapper, refused, latent


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch):
    """Modules of the benchmark by their names."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as the script sets it
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return module


@pytest.fixture
def kept() -> dict[str, Any]:
    return json.loads(RESULTS.read_bytes())


# -- the page and the results -------------------------------------------------------------------------------------


def test_the_tables_of_the_page_are_those_of_the_results(lab, kept):
    page, text = lab("model_lab.page"), (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert MEND.endswith(page.COMMAND)
    begin, end = text.index(page.BEGIN), text.index(page.END) + len(page.END)
    if text[begin:end] != page.tables(kept):
        raise AssertionError("docs/models.md has other tables than benchmarks/results/models.json; mend it with: "
                             "python benchmarks/models.py --of benchmarks/results/models.json --write docs/models.md")


def test_the_results_are_of_every_class_that_the_installed_transformers_have(lab, kept):
    said = lab("model_lab.page").out_of_date(kept)
    assert not said, "\n".join([*said, MEND])


def test_a_class_too_many_and_one_too_few_are_told(lab, kept):
    classes = kept["result"]["causal"]["classes"]
    lost = classes.pop()["name"]
    classes.append({"name": "NovelForCausalLM"})
    said = lab("model_lab.page").out_of_date(kept)
    assert len(said) == 2 and said[0].startswith(f"{lost} (causal) is a class of the installed transformers")
    assert said[1].startswith("NovelForCausalLM (causal) is in the results")


def test_what_does_not_count_is_known_and_has_one_reason(lab):
    counted = lab("model_lab.counted")
    for kind in counted.KINDS:
        types = " ".join(counted.NOT_COUNTED[kind].values()).split()
        assert len(set(types)) == len(types)
        assert not counted.unknown(kind), "transformers have no such types: take them out of model_lab/counted.py"
    assert counted.Counted("Qwen3_5ForCausalLM", "qwen3_5_text") in counted.counted("causal")


def test_every_row_of_the_most_used_names_what_was_measured(lab, kept):
    """And a type in them stands for one class, so that a row is of the class that it means."""
    page, counted = lab("model_lab.page"), lab("model_lab.counted")
    types = [each.model_type for kind in counted.KINDS for each in counted.counted(kind)]
    assert len(page.MOST_USED) == 40
    for _, made_of in page.MOST_USED:
        for each in page._parts(kept["result"], made_of):
            assert each["verdict"] and types.count(each["type"]) == 1


def test_states_are_told_in_a_few_words(lab):
    page, measure = lab("model_lab.page"), lab("model_lab.measure")
    says = ("UnsupportedModel: GPT2LMHeadModel: its positions are learned embeddings, which are added to tokens before "
            "the first layer: a unit would keep its own; expected another")
    for verdict in measure.VERDICTS:
        assert page.state({"verdict": verdict, "says": says, "gap": 0.2, "tokens": "other"})
    assert page.state({"verdict": "REFUSED", "says": says}) == "refused: its positions are learned embeddings"
    assert page.reason("WindowExceeded: layer 0 would hold 256 + 17 = 273 units, the model attends to all of at most "
                       "32, which is not served; expected less") == "the model attends to all of at most 32"
    assert page.state({"verdict": "EQUAL"}) == "served"


def test_a_page_without_a_place_for_the_tables_is_left_as_it_is(lab, tmp_path):
    (tmp_path / "page.md").write_text("# Which models\n")
    with pytest.raises(ValueError, match="has no place for the tables"):
        lab("model_lab.page").write(tmp_path / "page.md", {})
    assert (tmp_path / "page.md").read_text() == "# Which models\n"


# -- verdicts -----------------------------------------------------------------------------------------------------


def test_a_class_that_is_equal_and_one_that_is_not(lab, tmp_path, monkeypatch):
    measure = lab("model_lab.measure")
    case = measure.Case("causal", "LlamaForCausalLM", "llama", {"num_hidden_layers": 2})
    (tmp_path / "equal").mkdir()
    found = measure.measure(case, tmp_path / "equal")
    assert found["verdict"] == "EQUAL" and found["gap"] < 1e-5 and found["tokens"] == "same"
    stock = measure.stock

    def other(*given):
        expected = stock(*given)
        return expected._replace(logits=expected.logits + 2e-4 * torch.randn_like(expected.logits))

    monkeypatch.setattr(measure, "stock", other)
    (tmp_path / "differs").mkdir()
    found = measure.measure(case, tmp_path / "differs")
    assert found["verdict"] == "DIFFERS" and found["gap"] > 1e-4 and found["own_gap"] < 1e-4


@pytest.mark.parametrize("changes, verdict, says", [
    ({"rope_parameters": {"rope_type": "none of these"}}, "NOTBUILT", "none of these"),
    ({"vocab_size": 100}, "NOSTOCK", "index out of range"),
], ids=["no such config", "stock fails"])
def test_a_class_that_transformers_cannot_make_or_run(lab, tmp_path, changes, verdict, says):
    measure = lab("model_lab.measure")
    found = measure.measure(measure.Case("causal", "LlamaForCausalLM", "llama", changes), tmp_path)
    assert found["verdict"] == verdict and says in found["says"]


def test_an_error_that_only_repeats_another_one_is_told_from_a_reason(lab):
    failed = lab("model_lab.measure").failed

    def raised(error: Exception, cause: Exception | None = None) -> str:
        try:
            raise error from cause
        except Exception as caught:
            return failed(caught)["verdict"]

    assert raised(UnsupportedModel("it has ALiBi")) == "REFUSED"
    assert raised(UnsupportedModel("it has ALiBi"), KeyError("layer")) == "REFUSED"
    assert raised(UnsupportedModel("failed with KeyError: 0"), KeyError(0)) == "WRAPPED"
    assert raised(UnsupportedModel("size 2 is not 4"), RuntimeError("size 2 is not 4")) == "WRAPPED"
    assert raised(RuntimeError("size 2 is not 4")) == "RAW"


def test_work_apart_answers_dies_and_is_ended():
    """In a process without torch, which forks in no time."""
    script = """if True:
        import os, sys, time
        sys.path.insert(0, "benchmarks")
        from model_lab.apart import Died, apart
        print(apart(lambda: {"a": 1}))
        too_much = [lambda: bytearray(11 << 30)] if sys.platform == "linux" else []
        for work in (lambda: os._exit(3), lambda: time.sleep(60), *too_much):
            try:
                apart(work, limit_s=1)
            except Died as died:
                print(died)
    """
    done = run_python("-c", script, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == ["{'a': 1}", "the process ended with status 3", "no end within 1 s"]
    assert set(done.stdout.splitlines()[3:]) <= {"the process ended with status 1"}


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, why", [
    (["causal", "zebra"], "zebra: no such type"), (["causal", "--keep", "models"], "expected `all` without types"),
    (["all", "qwen3", "--write", "page.md"], "expected `all` without types"),
    (["--of", "models.json", "--out", "there"], "measures nothing"),
])
def test_the_command_says_what_is_wrong(lab, monkeypatch, capsys, words, why):
    monkeypatch.setattr("sys.argv", ["benchmarks/models.py", *words])
    with pytest.raises(SystemExit) as ended:
        lab("models").main()
    assert ended.value.code == 2 and why in " ".join(capsys.readouterr().err.split())


def test_the_list_says_what_counts_and_what_does_not(lab, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks/models.py", "--list"])
    lab("models").main()
    said = capsys.readouterr().err
    assert "not counted: what drafts for another model" in said and " qwen3 " in said


def equal(case, *, quiet: bool) -> dict[str, Any]:
    """What a run of a class says that is served."""
    return {"name": case.name, "type": case.model_type, "class": case.name, "verdict": "EQUAL", "s": 0.1}


def test_one_command_keeps_results_and_writes_the_page(lab, monkeypatch, tmp_path):
    script, record = lab("models"), lab("record").record
    monkeypatch.setattr(script, "run", equal)
    monkeypatch.setattr(script, "warm_up", lambda loud: None)
    monkeypatch.setattr(script, "record", lambda *given, **options: record(*given, **options, results=tmp_path))
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "models.md").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["benchmarks/models.py", "all", "--keep", "models", "--write", str(page)])
    script.main()
    kept = json.loads((tmp_path / "models.json").read_bytes())
    assert kept["result"].keys() == {"causal", "multimodal", "variants"} and kept["commit"]
    text = page.read_text(encoding="utf-8")
    assert lab("model_lab.page").tables(kept) in text and "| Llama 3 | LlamaForCausalLM | served |" in text
    assert "## Layers that carry a state" in text, "what is written by hand stays"


def test_ctrl_c_leaves_what_was_measured(lab, monkeypatch, capsys, tmp_path):
    script, asked = lab("models"), []

    def run(case, *, quiet):
        asked.append(case)
        if len(asked) > 2:
            raise KeyboardInterrupt
        return equal(case, quiet=quiet)

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script, "warm_up", lambda loud: None)
    monkeypatch.setattr("sys.argv", ["benchmarks/models.py", "all", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 130
    kept = json.loads((tmp_path / "models.json").read_bytes())["result"]
    assert kept.keys() == {"causal"} and kept["causal"]["served"] == len(kept["causal"]["classes"]) == 2
    assert "stopped" in capsys.readouterr().err


@pytest.mark.thorough
def test_five_classes_are_as_the_results_have_them(tmp_path, kept):
    """One served plain, one hybrid, one in a wrapper, one refused, one latent."""
    done = run_python("benchmarks/models.py", "all", *SERVED_AND_NOT, "--out", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "models.json").read_bytes())["result"]
    rows = {row["type"]: row for each in found.values() for row in each["classes"]}
    before = {row["type"]: row for kind in ("causal", "multimodal") for row in kept["result"][kind]["classes"]}
    assert rows.keys() == set(SERVED_AND_NOT)
    for name, row in rows.items():
        assert row["verdict"] == before[name]["verdict"], f"{name}: {row}; {MEND}"
