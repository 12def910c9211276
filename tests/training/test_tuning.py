"""Tuning helps where it must, keeps tuned heads only if they help, resumes bit for bit, and refuses bad settings."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from locret_stream import models
from locret_stream.errors import ConfigError, HeadsMismatch, InvalidTokens, ModelError, WindowExceeded
from locret_stream.heads import RetainingHeads
from locret_stream.training import (
    AllocationConfig,
    Example,
    TrainConfig,
    TuneConfig,
    TuneResult,
    allocate,
    first_heads,
    is_tuned,
    train_heads,
    tune,
    tuning,
    validation,
)
from locret_stream.training.checkpoint import FIRST_ALLOCATION, FIRST_WEIGHTS, TUNING_CHECKPOINT, TUNING_METRICS
from tests.architectures import make
from tests.kit import saved_heads
from tests.training.tiny import make_examples

pytestmark = pytest.mark.thorough

QUICK = TuneConfig(units=12, chunk_size=12, sinks=1, stabilizers=1, steps=6, batch=2, lr=1e-3, examples=6, held_out=0.4,
                   checkpoint_every=2)
LENGTH = 60


@pytest.fixture(scope="module")
def model():
    return make("llama")


@pytest.fixture(scope="module")
def examples():
    return make_examples(24, LENGTH)


def weights(folder: Path, name: str = "heads.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / name)


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def measured(monkeypatch, *losses: float) -> list[tuple[int, ...]]:
    """Make these the losses that `tune` measures, in turn; returns the list of budgets that are measured."""
    asked, left = [], [loss for loss in losses for _ in range(QUICK.examples)]

    def answer_nll(engine, policy, example, behind=None):
        asked.append(engine.budgets)
        return left.pop(0) * sum(end - start for start, end in example.answer_spans)

    def measure(*args):  # of `tune` alone: `allocate` still measures
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(validation, "answer_nll", answer_nll)
            return validation.measure(*args)

    monkeypatch.setattr(tuning, "measure", measure)
    return asked


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / TUNING_METRICS).read_text().splitlines()]


# -- it helps -----------------------------------------------------------------------------------------------------


def needles(count: int, seed: int = 0, length: int = 40) -> list[Example]:
    """Noise with the id 5 or 6 somewhere in it, and that id again as the answer at the end."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        ids = torch.randint(20, 400, (length,), generator=generator)
        which = int(torch.randint(5, 7, (1,), generator=generator))
        ids[torch.randint(2, 20, (1,), generator=generator)] = which
        ids[-2], ids[-1] = 7, which
        found.append(Example(ids, ((length - 1, length),)))
    return found


def finder(steps: int = 50):
    """A model trained on needles in seconds; layer 1 alone attends, so only the unit of the needle has the answer."""
    model = make("llama")
    for layer in (0, 2):
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
        model.model.layers[layer].self_attn.o_proj.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for step in range(steps):
        ids = torch.stack([example.ids for example in needles(16, 100 + step)])
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[:, -1]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model, loss.item()


@pytest.mark.thorough
def test_heads_that_evict_the_wrong_units_learn_better(tmp_path):
    model, loss = finder()
    assert loss < 0.05
    folder = saved_heads(model, tmp_path)
    config = msgspec.structs.replace(QUICK, units=8, chunk_size=8, steps=16, batch=4, lr=1e-2, weight=0.0, cold=0.02,
                                     hot=0.2, held_out=0.3, examples=16)
    result = tune(model, folder, needles(100), config)
    assert result.better and result.before.loss > 0.5 and result.after.loss < 0.05
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert lines[0]["temperature"] == 0.2 and lines[-1]["temperature"] == pytest.approx(0.02)
    assert result.kl == pytest.approx(lines[-1]["kl"])
    assert not same(weights(folder), weights(folder, FIRST_WEIGHTS))
    assert all(parameter.grad is None for parameter in model.parameters()) and models.detach(model) == 0


def test_the_loss_is_divergence_and_the_first_stages(model, examples, tmp_path):
    for weight in (0.0, 1.0):
        folder = saved_heads(model, tmp_path / str(weight))
        tune(model, folder, examples, msgspec.structs.replace(QUICK, weight=weight, steps=2))
        for line in metrics(folder):
            terms = line["regression"] + 2.5e-3 * line["smoothing"]
            assert line["loss"] == pytest.approx(line["kl"] + weight * terms) and line["kl"] > 0 < terms
    one, two = (metrics(tmp_path / name) for name in ("0.0", "1.0"))
    assert one[0]["kl"] == two[0]["kl"] and one[1]["kl"] != two[1]["kl"]


def test_examples_that_fit_the_budget_teach_the_first_stage_alone(model, examples, tmp_path):
    folder = saved_heads(model, tmp_path)
    tune(model, folder, make_examples(4, 20), msgspec.structs.replace(QUICK, batch=1), held_out=examples)
    assert all(line["kl"] == 0 and line["regression"] > 0 for line in metrics(folder))


# -- kept only if better ------------------------------------------------------------------------------------------


def test_better_heads_take_the_place_of_the_first(model, examples, tmp_path, monkeypatch):
    folder = saved_heads(model, tmp_path, budget_shares=(1.0, 1.5, 0.5))
    first, described = weights(folder), (folder / "heads.json").read_bytes()
    (folder / "allocation.json").write_text("{}")
    asked = measured(monkeypatch, 2.0, 1.0)
    seen = []
    assert not is_tuned(folder)
    made = tune(model, folder, examples, QUICK, progress=seen.append)
    assert made.better and is_tuned(folder) and set(asked) == {(12, 18, 6)} == {made.budgets}
    assert (made.before.loss, made.after.loss, made.policy) == (2.0, 1.0, "locret")
    assert not same(weights(folder), first) and same(weights(folder, FIRST_WEIGHTS), first)
    assert json.loads((folder / "heads.json").read_bytes()) == json.loads(described)  # the shares, too
    assert (folder / FIRST_ALLOCATION).read_text() == "{}" and not (folder / "allocation.json").exists()
    assert not (folder / TUNING_CHECKPOINT).exists()
    assert msgspec.json.decode((folder / "tuning.json").read_bytes(), type=TuneResult) == made
    assert seen[-1].step == seen[-1].steps == 6 and "after: held-out loss 1.0000 of 6/6" in seen[-1].note
    RetainingHeads.load(folder).check_fits(models.attach(model).shape)
    models.detach(model)


def test_heads_that_are_no_better_are_dropped(model, examples, tmp_path, monkeypatch):
    folder = saved_heads(model, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    measured(monkeypatch, 1.0, 1.0)
    made = tune(model, folder, examples, QUICK)
    assert made.better is False and is_tuned(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after.get(name) for name in before} == before
    assert after.keys() - before.keys() == {"tuning.json", TUNING_METRICS}


@pytest.mark.thorough
def test_a_finished_one_is_returned_and_another_starts_from_the_first_heads(model, examples, tmp_path, monkeypatch):
    folder = saved_heads(model, tmp_path)
    first = weights(folder)
    measured(monkeypatch, 2.0, 1.0)
    made = tune(model, folder, examples, QUICK)
    tuned = weights(folder)
    heads = RetainingHeads.load(folder)
    heads.config = msgspec.structs.replace(heads.config, budget_shares=(1.0, 1.5, 0.5))  # divided anew
    heads.save(folder)
    assert tune(model, folder, examples, QUICK) == made and same(weights(folder), tuned)
    for more, what in (dict(lr=1e-4), "lr: stored 0.001, now 0.0001"), (dict(units=13), "units: stored 12, now 13"):
        with pytest.raises(ConfigError, match=f"another tuning, which differs in {what}; .*restart=True"):
            tune(model, folder, examples, msgspec.structs.replace(QUICK, **more))
    with pytest.raises(ConfigError, match="differs in data: "):
        tune(model, folder, examples[1:], QUICK)
    measured(monkeypatch, 2.0, 2.0)
    again = tune(model, folder, examples, msgspec.structs.replace(QUICK, lr=1e-4), restart=True)
    assert again.heads == made.heads and not again.better
    assert same(weights(folder), first) and not (folder / FIRST_WEIGHTS).exists()


@pytest.mark.parametrize("how", ["renamed", "trained anew"])
@pytest.mark.thorough
def test_first_heads_that_were_put_back_by_hand_are_not_called_tuned(how, model, examples, tmp_path, monkeypatch):
    division = AllocationConfig(units=12, chunk_size=12, sinks=1, stabilizers=1, examples=4, factors=(1 / 4, 1))
    folder = saved_heads(model, tmp_path)
    first, divided = weights(folder), allocate(model, folder, examples, division)
    measured(monkeypatch, 2.0, 1.0)
    made = tune(model, folder, examples, QUICK)
    allocate(model, folder, examples, division)
    assert tune(model, folder, examples, QUICK) == made
    if how == "renamed":
        (folder / FIRST_WEIGHTS).replace(folder / "heads.safetensors")
    else:  # what training gives again
        (folder / "heads.safetensors").write_bytes((folder / FIRST_WEIGHTS).read_bytes())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=r"tuning\.json says that tuned heads took the place of the first; found the "
                                          r"first in heads\.safetensors, expected the tuned ones: .*restart=True"):
        tune(model, folder, examples, QUICK)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    measured(monkeypatch, 1.0, 1.0)
    again = tune(model, folder, examples, QUICK, restart=True)
    assert again.heads == made.heads and not again.better and same(weights(folder), first)
    assert RetainingHeads.load(folder).config.budget_shares == divided.shares
    assert allocate(model, folder, examples, division) == divided, "that of the first heads is back, too"


def test_heads_of_another_origin_are_not_called_tuned(model, examples, tmp_path, monkeypatch):
    folder = saved_heads(model, tmp_path)
    measured(monkeypatch, 2.0, 1.0)
    made = tune(model, folder, examples, QUICK)
    tuned = (folder / "heads.safetensors").read_bytes()
    other = RetainingHeads.load(folder)
    other.fc2[0].weight.data[0, 0] += 1
    other.save(folder)
    with pytest.raises(ConfigError, match=r"found others in heads\.safetensors, expected the tuned ones"):
        tune(model, folder, examples, QUICK)
    (folder / "heads.safetensors").write_bytes(tuned[:-10])
    with pytest.raises(HeadsMismatch, match="cannot be read as retaining heads"):
        tune(model, folder, examples, QUICK)
    (folder / "heads.safetensors").write_bytes(tuned)
    (folder / FIRST_WEIGHTS).unlink()  # the tuned heads alone are enough
    assert tune(model, folder, examples, QUICK) == made


@pytest.mark.thorough
def test_training_anew_forgets_it(model, examples, tmp_path, monkeypatch):
    config = TrainConfig(steps=1, width=8, held_out=0.4)
    train_heads(model, examples, tmp_path, config)
    measured(monkeypatch, 2.0, 1.0)
    made = tune(model, tmp_path, examples, QUICK)
    assert train_heads(model, examples, tmp_path, config).steps == 1 and is_tuned(tmp_path)  # finished as before
    assert made.better
    train_heads(model, examples, tmp_path, msgspec.structs.replace(config, seed=1), restart=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "metrics.jsonl", "result.json", "heads.json",
                                                         "heads.safetensors"}


@pytest.mark.thorough
def test_an_allocation_is_made_anew_for_tuned_heads(model, examples, tmp_path, monkeypatch):
    division = AllocationConfig(units=12, chunk_size=12, sinks=1, stabilizers=1, examples=4, factors=(1 / 4, 1))
    folder = saved_heads(model, tmp_path)
    first = allocate(model, folder, examples, division)
    measured(monkeypatch, 2.0, 1.0)
    assert tune(model, folder, examples, QUICK).budgets == tuple(round(12 * share) for share in first.shares)
    second = allocate(model, folder, examples, division)
    assert second.heads != first.heads and tune(model, folder, examples, QUICK).better
    measured(monkeypatch, 1.0, 1.0)
    tune(model, folder, examples, QUICK, restart=True)
    assert RetainingHeads.load(folder).config.budget_shares == first.shares
    assert allocate(model, folder, examples, division) == first


@pytest.mark.parametrize("stopped", range(8))
@pytest.mark.thorough(but=1)
def test_forgetting_goes_on_where_it_was_stopped(stopped: int, model, examples, tmp_path, monkeypatch):
    """It may stop after any of its changes to the folder."""
    division = AllocationConfig(units=12, chunk_size=12, sinks=1, stabilizers=1, examples=4, factors=(1 / 4, 1))
    folder = saved_heads(model, tmp_path)
    first, heads = allocate(model, folder, examples, division), weights(folder)
    measured(monkeypatch, 2.0, 1.0)
    tune(model, folder, examples, QUICK)
    allocate(model, folder, examples, division)
    left = [stopped]

    def stopping(real):
        def change(*arguments, **more):
            if not left[0]:
                raise Stop
            left[0] -= 1
            return real(*arguments, **more)
        return change

    with monkeypatch.context() as patched:
        for name in ("replace", "unlink"):
            patched.setattr(Path, name, stopping(getattr(Path, name)))
        with contextlib.suppress(Stop):
            first_heads.forget_tuning(folder)
    first_heads.forget_tuning(folder)
    assert same(weights(folder), heads) and not (folder / FIRST_WEIGHTS).exists()
    assert RetainingHeads.load(folder).config.budget_shares == first.shares
    assert allocate(model, folder, examples, division) == first


@pytest.mark.parametrize("name", ["allocation.json", FIRST_ALLOCATION])
@pytest.mark.parametrize("damage", [b'{"config": {}}', b"", b'{"policy": "\xff"}'])
@pytest.mark.thorough(but=1)
def test_a_damaged_allocation_is_named_before_anything_is_forgotten(name, damage, model, examples, tmp_path,
                                                                    monkeypatch):
    folder = saved_heads(model, tmp_path)
    measured(monkeypatch, 2.0, 1.0)
    tune(model, folder, examples, QUICK)
    (folder / name).write_bytes(damage)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} cannot be read: .*; remove it"):
        tune(model, folder, examples, QUICK, restart=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / name).unlink()
    measured(monkeypatch, 2.0, 2.0)
    assert not tune(model, folder, examples, QUICK, restart=True).better


# -- resumed ------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def plain(made: TuneResult) -> TuneResult:
    return msgspec.structs.replace(made, seconds=0, resumed_from=0, **{name: msgspec.structs.replace(
        getattr(made, name), seconds=0) for name in ("before", "after")})


@pytest.mark.parametrize("kind", ["sequence", "stream"])
@pytest.mark.thorough(but=1)
def test_a_resumed_one_equals_an_uninterrupted_one(model, examples, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tuning, "exceeds", lambda *args: True)
    results = []
    for name, stops in ("straight", ()), ("stopped", ((0, 3), (1, 0), (3, 0), (6, 2))):
        folder = saved_heads(model, tmp_path / name)

        def call(folder=folder, **more) -> TuneResult:
            data = examples if kind == "sequence" else iter(make_examples(40, LENGTH))
            return tune(model, folder, data, QUICK, **more)

        for step, count in stops:
            def progress(at, step=step, of=count):
                if at.step == step and (f"of {of}/6" in at.note if of else at.loss is not None):
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                call(progress=progress)
            assert not is_tuned(folder) and (folder / TUNING_CHECKPOINT).is_file() == (step > 0)
        results.append(call())
    straight, stopped = results
    assert stopped.resumed_from == 6 and plain(straight) == plain(stopped)
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "stopped"))
    assert not same(weights(tmp_path / "straight"), weights(tmp_path / "straight", FIRST_WEIGHTS))
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "stopped")


def test_another_call_does_not_go_on_with_what_was_interrupted(model, examples, tmp_path):
    folder = saved_heads(model, tmp_path)

    def stop(at):
        if at.loss is not None:
            raise Stop

    with pytest.raises(Stop):
        tune(model, folder, examples, QUICK, progress=stop)
    with pytest.raises(ConfigError, match="differs in seed: stored 0, now 1"):
        tune(model, folder, examples, msgspec.structs.replace(QUICK, seed=1))
    heads = RetainingHeads.load(folder)
    heads.config = msgspec.structs.replace(heads.config, budget_shares=(1.0, 1.5, 0.5))
    heads.save(folder)
    with pytest.raises(ConfigError, match=r"differs in budgets: stored \(12, 12, 12\), now \(12, 18, 6\)"):
        tune(model, folder, examples, QUICK)
    whole = (folder / "tuning.json").read_bytes()
    (folder / "tuning.json").write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match=r"tuning\.json cannot be read: .*remove it"):
        tune(model, folder, examples, QUICK)
    (folder / "tuning.json").write_bytes(whole)
    (folder / TUNING_CHECKPOINT).write_bytes(b"torn")
    heads.config = msgspec.structs.replace(heads.config, budget_shares=None)
    heads.save(folder)
    with pytest.raises(HeadsMismatch, match=TUNING_CHECKPOINT):
        tune(model, folder, examples, QUICK)


def stopped_at(model, folder: Path, examples, step: int, **more) -> None:
    def stop(at):
        if at.loss is not None and at.step == step:
            raise Stop

    with pytest.raises(Stop):
        tune(model, folder, examples, msgspec.structs.replace(QUICK, **more), progress=stop)


@pytest.mark.thorough
def test_a_tuning_whose_file_was_removed_begins_anew(model, examples, tmp_path):
    """The message promises it; the checkpoint and metrics that are left have unknown settings."""
    folder = saved_heads(model, tmp_path)
    stopped_at(model, folder, examples, 4)
    (folder / "tuning.json").unlink()
    other = msgspec.structs.replace(QUICK, lr=0.05, weight=0.0)
    made = tune(model, folder, examples, other)
    assert made.resumed_from == 0 and [line["step"] for line in metrics(folder)] == list(range(1, 7))


def test_a_checkpoint_of_another_tuning_is_refused(model, examples, tmp_path):
    folder = saved_heads(model, tmp_path)
    stopped_at(model, folder, examples, 4)
    checkpoint = (folder / TUNING_CHECKPOINT).read_bytes()
    first_heads.forget_tuning(folder)
    stopped_at(model, folder, examples, 2, lr=0.05)
    (folder / TUNING_CHECKPOINT).write_bytes(checkpoint)
    with pytest.raises(HeadsMismatch, match="a checkpoint of other settings"):
        tune(model, folder, examples, msgspec.structs.replace(QUICK, lr=0.05))


@pytest.mark.thorough
def test_lost_metrics_are_reported_and_leftovers_of_a_kill_removed(model, examples, tmp_path):
    folder = saved_heads(model, tmp_path)
    stopped_at(model, folder, examples, 6)
    whole = (folder / TUNING_METRICS).read_bytes()
    (folder / TUNING_METRICS).unlink()
    with pytest.raises(ConfigError, match=r"lost lines of the 6 steps.*--restart-tuning for tuning\.jsonl"):
        tune(model, folder, examples, QUICK)
    (folder / TUNING_METRICS).write_bytes(whole)
    assert tune(model, folder, examples, QUICK).resumed_from == 6
    (folder / TUNING_CHECKPOINT).write_bytes(b"left")
    tune(model, folder, examples, QUICK)
    assert not (folder / TUNING_CHECKPOINT).exists()


def test_a_metric_that_cannot_be_written_loses_no_step_before(model, examples, tmp_path, monkeypatch):
    folder, append = saved_heads(model, tmp_path), tuning.files.append_metric

    def full(path: Path, metric) -> None:
        if metric.step == 4:
            path.write_bytes(path.read_bytes() + b'{"step":4,"lo')
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, metric)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(tuning.files, "append_metric", full)
        tune(model, folder, examples, QUICK)
    assert tune(model, folder, examples, QUICK).resumed_from == 4
    assert [line["step"] for line in metrics(folder)] == list(range(1, 7))


@pytest.mark.parametrize(("first", "differs"), [
    ({"held_out": 0.3}, r"held_out 0\.3, now 0\.4"), ({"max_tokens": 59}, "max_tokens 59, now 10240"),
    ({"max_tokens": 4096}, None), ({"held_out_max": 5}, None), ({}, None)])
@pytest.mark.thorough(but=1)
def test_what_the_first_stage_trained_on_is_not_measured_on(model, examples, tmp_path, first, differs):
    made = TrainConfig(**{"steps": 1, "width": 24, "held_out": 0.4} | first)
    train_heads(model, examples, tmp_path, made)
    if differs is None:
        assert tune(model, tmp_path, examples, QUICK).after is not None
        return
    with pytest.raises(ConfigError, match=f"the first stage of the heads in .* had {differs}, so that"):
        tune(model, tmp_path, examples, QUICK)
    assert tune(model, tmp_path, examples, QUICK, held_out=make_examples(6, LENGTH, seed=9)).after is not None


def test_nor_what_it_trained_on_of_a_stream(model, tmp_path):
    train_heads(model, iter(make_examples(40, LENGTH)), tmp_path, TrainConfig(steps=1, width=24, held_out_max=5))
    with pytest.raises(ConfigError, match="held_out_max 5, now 6 examples to measure on"):
        tune(model, tmp_path, iter(make_examples(40, LENGTH)), QUICK)
    fewer = msgspec.structs.replace(QUICK, examples=5)
    assert tune(model, tmp_path, iter(make_examples(40, LENGTH)), fewer).after is not None


def test_killed_while_the_heads_are_replaced(model, examples, tmp_path, monkeypatch):
    folder = saved_heads(model, tmp_path)
    first = weights(folder)
    measured(monkeypatch, 2.0, 1.0)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        real = RetainingHeads.save

        def save(self, *args):
            real(self, *args)
            raise Stop

        patch.setattr(RetainingHeads, "save", save)
        tune(model, folder, examples, QUICK)
    assert is_tuned(folder), "nothing else is to be made of these heads before"
    assert tune(model, folder, examples, QUICK).better
    assert same(weights(folder, FIRST_WEIGHTS), first) and not same(weights(folder), first)


# -- refused ------------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused(model, examples, tmp_path):
    folder = saved_heads(model, tmp_path / "heads")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="tune: of 10 held-out examples, the longest of 20 tokens, 0 are so long"):
        tune(model, folder, examples, QUICK, held_out=make_examples(10, 20))
    with pytest.raises(InvalidTokens, match="token id 401"):
        tune(model, folder, [*examples, Example([1, 2, 401, 4], ((2, 4),))], QUICK)
    with pytest.raises(WindowExceeded, match="tune: 4090 units"):
        tune(model, folder, examples, msgspec.structs.replace(QUICK, units=4090))
    with pytest.raises(ConfigError, match="of 12 units the smallest layer gets 12, and 4 sinks"):
        tune(model, folder, examples, msgspec.structs.replace(QUICK, sinks=4, stabilizers=9))
    with pytest.raises(HeadsMismatch, match="another model"):
        tune(make("qwen3"), folder, examples, QUICK)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    sliding = make("mistral-sliding")
    with pytest.raises(ConfigError, match="every layer of this model has a sliding window"):
        tune(sliding, saved_heads(sliding, tmp_path / "slide"), examples, QUICK)
    with pytest.raises(HeadsMismatch, match=r"no heads\.safetensors"):
        tune(model, tmp_path / "none", examples, QUICK)
    broken = RetainingHeads.load(folder)
    broken.fc2[1].weight.data[:] = 3e38  # finite, and what they give is not
    broken.save(folder)
    with pytest.raises(ModelError, match="tune: the loss of step 0 is nan"):
        tune(model, folder, examples, QUICK)
    assert models.detach(model) == models.detach(sliding) == 0


@pytest.mark.parametrize("name, value", [
    ("units", 0), ("chunk_size", 1.5), ("steps", 0), ("batch", True), ("examples", 3), ("sinks", -1), ("lr", 0),
    ("hot", 0.0), ("cold", 2.0), ("weight", -1), ("held_out", 1.0), ("betas", (0.9, 1.0)), ("seed", -1),
    ("max_tokens", 1), ("clip", float("nan")),
])
def test_configs_check_themselves(name, value):
    with pytest.raises(ConfigError, match=f"tune: {name} is .*; expected "):
        TuneConfig(**{name: value})


def test_gates_cool_from_step_to_step():
    config = TuneConfig(steps=5, hot=1.0, cold=0.01)
    assert [config.temperature_at(step) for step in range(5)] == pytest.approx([1, 0.1**0.5, 0.1, 0.1**1.5, 0.01])
    assert TuneConfig(steps=1).temperature_at(0) == TuneConfig().hot
