"""The models that are kept for the comparison of policies: they are whole, and they are those of the kept results."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret_stream.evaluation.cells import Cell
from locret_stream.evaluation.runner import Bench

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "research" / "models"
NAMES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def bench_of(folder: Path) -> Bench:
    return Bench(AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(),
                 AutoTokenizer.from_pretrained(folder))


def test_there_is_one_with_circuits_and_one_without():
    told = {name: json.loads((MODELS / name / "training.json").read_bytes())["seeded"] for name in NAMES}
    assert told == {"recall": False, "seeded": True}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thorough
def test_recall_at_an_eighth(name: str, tmp_path: Path):
    """48 facts in 1,024 tokens, of which 128 stay in a layer on the mean: the heads and their shares are of this
    model."""
    bench, heads = bench_of(MODELS / name), str(MODELS / name / "heads")
    base = {"task": "recall", "length": 1024, "units": 128, "stabilizers": 4, "streams": 2}
    [full, learned, even, recent] = bench.run([
        Cell(**base | {"policy": "full", "units": None}), Cell(**base, policy="locret", heads=heads,
                                                               allocation="adaptive"),
        Cell(**base, policy="locret", heads=heads), Cell(**base, policy="streaming_llm")], tmp_path)
    assert full.score >= 0.9 and learned.score >= 0.9
    assert learned.score >= even.score > recent.score + 0.3
    assert sum(learned.budgets) == sum(even.budgets) and len(set(learned.budgets)) > 1
    if name == "seeded":  # all that it looks up it looks up in one layer
        assert learned.score > even.score + 0.1


@pytest.mark.parametrize(("policy", "folder"), [("kvzap", "heads-hidden"), ("trimkv", "heads-retention")])
@pytest.mark.thorough
def test_heads_of_the_others(policy: str, folder: str, tmp_path: Path):
    bench, heads = bench_of(MODELS / "recall"), str(MODELS / "recall" / folder)
    base = {"task": "recall", "length": 1024, "units": 128, "stabilizers": 4, "streams": 2}
    [learned, recent] = bench.run([Cell(**base, policy=policy, heads=heads, allocation="adaptive"),
                                   Cell(**base, policy="streaming_llm")], tmp_path)
    assert learned.score > recent.score + 0.5 and len(set(learned.budgets)) > 1


@pytest.mark.parametrize("kept", sorted((ROOT / "research" / "results").glob("policies*.json")),
                         ids=lambda path: path.stem)
def test_kept_tables_are_of_a_model_that_is_kept(kept: Path):
    [origin] = json.loads(kept.read_bytes())["result"]["origins"]
    assert origin in [msgspec.to_builtins(bench_of(MODELS / name).base) for name in NAMES]
