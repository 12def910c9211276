"""Cells on a random model: what is measured, what is kept, what is not run again."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch

from locret_stream.errors import ConfigError
from locret_stream.evaluation import runner, suite
from locret_stream.evaluation.runner import Cell, CellResult, run_cells
from tests.context.support import model, tokenizer


def prose(seed: int):
    rng = random.Random(seed)
    while True:
        yield " ".join(rng.choice(("once", "upon", "a", "time")) for _ in range(rng.randint(1, 9)))


def cell(**more) -> Cell:
    return Cell(**{"task": "recall", "policy": "streaming_llm", "length": 700, "units": 64, "chunk_size": 32,
                   "stabilizers": 8, "streams": 2} | more)


def test_a_cell_is_run_once_and_read_afterwards(tmp_path: Path, monkeypatch):
    cells, seen = [cell(), cell(units=48)], []
    results = run_cells(cells, model(), tokenizer(), tmp_path, lines=prose,
                        progress=lambda result, there: seen.append(there))
    assert seen == [False, False] and len(list(tmp_path.iterdir())) == 2
    first = results[0]
    assert first.cell == cells[0] and first.questions == 32 and first.budgets == (64, 64)
    assert 0 <= first.low <= first.score <= first.high <= 1 and first.tok_per_s > 0 and first.slot_bytes > 0
    assert all(500 < one.tokens and len(one.answers) == 16 for one in first.streams)
    assert results[1].slot_bytes < first.slot_bytes
    monkeypatch.setattr(runner, "run_cell", None)
    again = run_cells(cells, model(), tokenizer(), tmp_path, lines=prose,
                      progress=lambda result, there: seen.append(there))
    assert msgspec.json.encode(again) == msgspec.json.encode(results) and seen[2:] == [True, True]


def test_cells_that_differ_have_files_that_differ():
    cells = [cell(), cell(units=None), cell(policy="h2o"), cell(knobs={"recent": 0.1}), cell(streams=3),
             cell(allocation="pyramid"), cell(allocation=(1.0, 2.0)), cell(heads="x"), cell(model="y")]
    assert len({one.file for one in cells}) == len(cells)
    assert cell(knobs={"a": 1, "b": 2}).file == cell(knobs={"b": 2, "a": 1}).file


def test_answers_do_not_depend_on_which_cells_ran_before(tmp_path: Path):
    def answers(folder: Path, cells: list[Cell]) -> list:
        return [one.answers for one in run_cells(cells, model(), tokenizer(), folder, lines=prose)[-1].streams]

    assert answers(tmp_path / "a", [cell(policy="h2o")]) == answers(tmp_path / "b", [cell(), cell(policy="h2o")])


def test_the_oracle_keeps_what_is_asked_about_everywhere(tmp_path: Path, monkeypatch):
    kept: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    real = runner.ask_all

    async def look(ctx, questions):
        state = ctx._session.state
        kept.append((ctx._session.host.engine.policy.wanted,
                     [state.store.positions(layer).clone() for layer in range(len(state.store.counts))]))
        return await real(ctx, questions)

    monkeypatch.setattr(runner, "ask_all", look)
    run_cells([cell(task="passkey", policy="oracle", units=40)], model(), tokenizer(), tmp_path, lines=prose)
    for wanted, layers in kept:
        committed = wanted[wanted < max(int(positions.max()) for positions in layers)]
        for positions in layers:
            for head in positions:
                assert torch.isin(committed, head).all()


def test_bits_are_those_of_the_stock_model_while_everything_fits(tmp_path: Path):
    result: CellResult = run_cells([cell(task="text", policy="full", units=None, length=150, streams=1)], model(),
                                   tokenizer(), tmp_path, lines=prose)[0]
    items = list(suite.TASKS["text"].items(0, 150, lambda text: len(tokenizer().encode(text)), prose))
    ids = [token for item in items for token in tokenizer().encode(item.text)]
    one = result.streams[0]
    assert one.tokens == len(ids)
    with torch.no_grad():
        logprobs = model()(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    committed = len(ids) // 32 * 32
    bits = -sum(float(logprobs[t - 1, ids[t]]) for t in range(1, committed)) / 0.6931471805599453
    assert one.bits == pytest.approx(bits, rel=1e-4)
    assert result.score == pytest.approx(bits / one.bytes, rel=1e-4)


def test_a_task_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no task 'recal'; expected one of passkey, recall"):
        run_cells([cell(task="recal")], model(), tokenizer(), tmp_path)
