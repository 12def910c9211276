"""Training learns, resumes bit for bit, refuses another run, and writes heads that name their model."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from locret_stream import models
from locret_stream.errors import ConfigError, HeadsMismatch, InputError, InvalidTokens, ModelError
from locret_stream.heads import RetainingHeads
from locret_stream.training import Example, TrainConfig, allocate, train_heads, tune
from locret_stream.training.checkpoint import CHECKPOINT, METRICS, RUN
from locret_stream.training.labels import visit_layers
from locret_stream.training.loop import evaluate_heads
from locret_stream.training.sampler import Source
from tests.architectures import make
from tests.kit import random_heads
from tests.training.tiny import make_examples, make_tokenizer

QUICK = TrainConfig(steps=12, width=16, eval_every=5, checkpoint_every=4, lr=2e-3, held_out=0.3, warmup=0.3, batch=2)


@pytest.fixture(scope="module")
def model():
    return make("llama")


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "heads.safetensors")


def same(one, two) -> bool:
    one, two = weights(one), weights(two)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("label, more", [
    ("logprob", dict(bias=True, input_norm=True)), ("logprob", {}), ("zscore", {}), ("logit", {}),
    ("attention", dict(bias=True, kernel=3)), ("attention", dict(layers=(0, 2))),
    ("logprob", dict(features="hidden")), ("logprob", dict(features="hidden", output="retention", input_norm=True)),
])
@pytest.mark.thorough(but=1)
def test_training_learns_what_held_out_examples_need(tmp_path, label, more):
    model = make("llama")  # what its embeddings share is in every query, so that some tokens matter to all replies
    shared = torch.randn(64, generator=torch.Generator().manual_seed(3))
    model.model.embed_tokens.weight.data += 0.3 * shared
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 3
    config = TrainConfig(label=label, steps=60, width=64, lr=5e-3, warmup=0.1, batch=4, eval_every=30, **more)
    result = train_heads(model, make_examples(64, vocab=60), tmp_path, config,
                         held_out=make_examples(16, seed=9, vocab=60))
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    before = next(line for line in lines if "held_out_loss" in line)
    assert before["step"] == 0 and before["overlap"] == result.overlap_before < 0.15
    most = {"logprob": 0.3, "zscore": 0.85, "logit": 0.3, "attention": 0.995}[label]  # the last has the labels' entropy
    assert result.held_out_loss < most * before["held_out_loss"]
    assert result.overlap > 0.2 > 1.5 * result.overlap_before
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 61))
    heads = RetainingHeads.load(tmp_path)
    assert heads.config.label == label and heads.config.alpha == 2.5e-3 and heads.config.act == "silu"
    assert heads.config.trained_layers == more.get("layers")
    assert heads.config.features == more.get("features", "qkv") and heads.config.output == more.get("output", "score")


def test_alpha_smooths_and_clip_bounds_every_gradient(model, tmp_path, monkeypatch):
    largest, terms = [], {}
    real = torch.optim.AdamW.step

    def step(self, *args):
        largest.append(max(p.grad.abs().max().item() for group in self.param_groups for p in group["params"]))
        return real(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    for alpha, clip in ((0.0, 1e9), (5.0, 1e-3)):
        config = msgspec.structs.replace(QUICK, alpha=alpha, clip=clip, steps=30, label="logit", lr=1e-2)
        train_heads(model, make_examples(7), tmp_path / str(alpha), config)
        lines = [json.loads(line) for line in (tmp_path / str(alpha) / METRICS).read_text().splitlines()]
        last = [line for line in lines if "loss" in line][-1]
        assert last["loss"] == pytest.approx(last["regression"] + alpha * last["smoothing"])
        terms[alpha] = last["smoothing"]
    assert terms[5.0] < 0.5 * terms[0.0]
    assert max(largest[:30]) > 1e-3 and max(largest[30:]) <= 1.0001e-3


@pytest.mark.parametrize("more", [dict(bias=True), dict(output="retention", horizon=50)])
def test_bias_starts_at_the_mean_label(model, tmp_path, more):
    examples = make_examples(2)
    config = msgspec.structs.replace(QUICK, steps=1, lr=1e-9, label="logprob", **more)
    train_heads(model, examples[:1], tmp_path, config, held_out=examples[1:])
    attachment, means = models.attach(model), {}
    visit_layers(attachment, attachment.tables(64), examples[:1], lambda call, labels, valid: means.update(
        {call.layer: labels[0].mean(1)}), kind=config.label)
    models.detach(model)
    heads = RetainingHeads.load(tmp_path)
    for layer, mean in means.items():
        said = heads.fc2[layer].bias.detach()
        said = 50 * said.sigmoid().log() if more.get("output") else said
        torch.testing.assert_close(said, mean, rtol=1e-4, atol=1e-4)


def test_heads_know_their_model(model, tmp_path):
    config = msgspec.structs.replace(QUICK, steps=1, budget_shares=(1.0, 2.0, 1.0), kernel=5)
    train_heads(model, make_examples(8), tmp_path, config)
    heads = RetainingHeads.load(tmp_path)
    assert heads.config.budget_shares == (1.0, 2.0, 1.0) and heads.config.kernel == 5
    own, other = models.attach(model), models.attach(make("llama", seed=5))
    heads.check_fits(own.shape, own.fingerprint)
    with pytest.raises(HeadsMismatch, match=f"same shape: they were trained for {own.fingerprint}, this model is "):
        heads.check_fits(other.shape, other.fingerprint)
    larger = models.attach(make("qwen3"))
    with pytest.raises(HeadsMismatch, match=r"'fc1\.0\.weight' is \(16, 128\), this model needs \(16, 256\)"):
        heads.check_fits(larger.shape, larger.fingerprint)
    assert models.detach(model) == 0


def test_the_model_is_left_as_it_was(model, tmp_path):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train_heads(model, make_examples(8), tmp_path, QUICK)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert models.detach(model) == 0  # nothing is left attached


class Stop(Exception):
    pass


def stop_at(step: int, error: BaseException):
    def progress(at):
        if at.step == step:
            raise error
    return progress


@pytest.mark.parametrize("stops", [(5,), (1, 4, 11), (12,)])
@pytest.mark.parametrize("kind", ["sequence", "stream"])
@pytest.mark.thorough(but=1)
def test_a_resumed_run_equals_an_uninterrupted_one(model, tmp_path, kind, stops):
    config = msgspec.structs.replace(QUICK, bias=True, held_out_max=3)

    def data():
        examples = make_examples(7) if kind == "sequence" else make_examples(30)
        return examples if kind == "sequence" else iter(examples)

    straight = train_heads(model, data(), tmp_path / "straight", config)
    for step in stops:
        with pytest.raises(KeyboardInterrupt):
            train_heads(model, data(), tmp_path / "resumed", config, progress=stop_at(step, KeyboardInterrupt()))
        assert (tmp_path / "resumed" / CHECKPOINT).is_file()
    resumed = train_heads(model, data(), tmp_path / "resumed", config)
    assert same(tmp_path / "straight", tmp_path / "resumed")
    assert resumed.resumed_from == stops[-1] and straight.resumed_from == 0
    assert (tmp_path / "straight" / METRICS).read_bytes() == (tmp_path / "resumed" / METRICS).read_bytes()
    assert msgspec.structs.replace(resumed, out=straight.out, resumed_from=0, seconds=straight.seconds) == straight
    assert not (tmp_path / "resumed" / CHECKPOINT).exists()


def test_a_killed_run_goes_on_from_its_last_checkpoint(model, tmp_path, monkeypatch):
    """As after kill -9: the newest state is not written, the log is ahead of it, and its last line is cut."""
    from locret_stream.training.steps import Updates

    straight = train_heads(model, make_examples(7), tmp_path / "straight", QUICK)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        save = Updates.save
        patch.setattr(Updates, "save", lambda self: save(self) if self.step == 4 else None)
        train_heads(model, make_examples(7), tmp_path / "killed", QUICK, progress=stop_at(7, Stop()))
    with (tmp_path / "killed" / METRICS).open("ab") as log:
        log.write(b'{"step":8,"lo')
    assert train_heads(model, make_examples(7), tmp_path / "killed", QUICK).resumed_from == 4
    assert same(tmp_path / "straight", tmp_path / "killed")
    assert (tmp_path / "straight" / METRICS).read_bytes() == (tmp_path / "killed" / METRICS).read_bytes()
    assert straight.steps == 12


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_never_tears_an_update(model, tmp_path, monkeypatch):
    assert threading.current_thread() is threading.main_thread()
    real, count = torch.optim.AdamW.step, []

    def step(self, *args):
        count.append(1)
        if len(count) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # arrives inside the update, is raised behind it
        return real(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        train_heads(model, make_examples(7), tmp_path / "torn", QUICK)
    assert len(count) == 3
    assert train_heads(model, make_examples(7), tmp_path / "torn", QUICK).resumed_from == 3
    train_heads(model, make_examples(7), tmp_path / "straight", QUICK)
    assert same(tmp_path / "straight", tmp_path / "torn")


def test_ctrl_c_that_is_ignored_interrupts_no_update():
    from locret_stream.training.steps import uninterrupted

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_finished_run_is_returned_and_another_one_is_refused_by_name(model, tmp_path):
    first = train_heads(model, make_examples(7), tmp_path, QUICK)
    assert train_heads(model, make_examples(7), tmp_path, QUICK) == first
    other = msgspec.structs.replace(QUICK, lr=1e-3, seed=3)
    with pytest.raises(ConfigError, match=r"differs in lr: stored 0.002, now 0.001; seed: stored 0, now 3; expected"):
        train_heads(model, make_examples(7), tmp_path, other)
    with pytest.raises(ConfigError, match="differs in data: "):
        train_heads(model, make_examples(8), tmp_path, QUICK)
    with pytest.raises(ConfigError, match="differs in fingerprint: "):
        train_heads(make("llama", seed=8), make_examples(7), tmp_path, QUICK)
    before = weights(tmp_path)
    train_heads(model, make_examples(7), tmp_path, other, restart=True)
    assert not torch.equal(before["fc1.0.weight"], weights(tmp_path)["fc1.0.weight"])


@pytest.mark.parametrize("name, damage", [
    ("heads.safetensors", lambda b: b[:-40]), ("heads.safetensors", lambda b: b""), ("heads.json", lambda b: b""),
    ("heads.json", lambda b: b.replace(b'"width": 16', b'"width": 17')),
    ("heads.json", lambda b: b.replace(b'"silu"', b'"none"')),
    ("heads.json", lambda b: b.replace(b'"budget_shares": null', b'"budget_shares": [0, 1, 1]')),
])
@pytest.mark.thorough(but=2)
def test_a_finished_run_does_not_vouch_for_damaged_heads(model, tmp_path, name, damage):
    done = train_heads(model, make_examples(7), tmp_path, QUICK)
    whole = {key: tensor.clone() for key, tensor in weights(tmp_path).items()}  # the file is mapped, and is cut below
    damaged = damage((tmp_path / name).read_bytes())
    assert damaged != (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(HeadsMismatch, match=r"its heads are damaged: remove heads\.safetensors to train them anew"):
        train_heads(model, make_examples(7), tmp_path, QUICK)
    (tmp_path / "heads.safetensors").unlink()
    assert msgspec.structs.replace(train_heads(model, make_examples(7), tmp_path, QUICK), seconds=done.seconds) == done
    assert all(torch.equal(tensor, whole[key]) for key, tensor in weights(tmp_path).items())


def test_a_finished_run_does_not_vouch_for_heads_of_another_model(model, tmp_path):
    train_heads(model, make_examples(7), tmp_path / "own", QUICK)
    train_heads(make("llama", seed=8), make_examples(7), tmp_path / "other", QUICK)
    for name in ("heads.json", "heads.safetensors"):
        (tmp_path / "other" / name).replace(tmp_path / "own" / name)
    with pytest.raises(HeadsMismatch, match="another model of the same shape"):
        train_heads(model, make_examples(7), tmp_path / "own", QUICK)


def test_a_finished_run_that_was_moved_names_where_it_is(model, tmp_path):
    done = train_heads(model, make_examples(7), tmp_path / "old", QUICK)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = train_heads(model, make_examples(7), tmp_path / "new", QUICK)
    assert moved == msgspec.structs.replace(done, out=str(tmp_path / "new"))


RANKED = msgspec.structs.replace(QUICK, label="attention", kernel=3, layers=(1, 2))
PLAIN = list(range(3, 400)) * 3


def test_a_background_is_part_of_a_run_that_goes_on_bit_for_bit(model, tmp_path):
    examples = make_examples(7)
    whole = train_heads(model, examples, tmp_path / "whole", RANKED, background=PLAIN)
    with pytest.raises(Stop):
        train_heads(model, examples, tmp_path / "parts", RANKED, background=PLAIN, progress=stop_at(5, Stop()))
    for other in (None, PLAIN[1:]):
        with pytest.raises(ConfigError, match="differs in data"):
            train_heads(model, examples, tmp_path / "parts", RANKED, background=other)
    resumed = train_heads(model, examples, tmp_path / "parts", RANKED, background=PLAIN)
    assert resumed.resumed_from == 5 and same(tmp_path / "whole", tmp_path / "parts")
    assert resumed.loss == whole.loss and whole.overlap_per_layer[0] == 0 < whole.overlap_per_layer[1]
    train_heads(model, examples, tmp_path / "alone", RANKED)
    assert not same(tmp_path / "whole", tmp_path / "alone")
    assert not any(name.startswith("fc1.0.") for name in weights(tmp_path / "whole"))


@pytest.mark.thorough
def test_heads_learn_to_score_the_background_lower(model, tmp_path):
    examples, text = make_examples(24, vocab=200), torch.randint(200, 401, (4000,)).tolist()
    config = msgspec.structs.replace(RANKED, layers=None, steps=60, width=64, lr=5e-3)
    found = {}
    for name, background in (("with", text), ("without", None)):
        train_heads(model, examples, tmp_path / name, config, background=background)
        heads, scores = RetainingHeads.load(tmp_path / name), {}
        attachment = models.attach(model)
        plain = torch.randint(200, 401, (1, 48), generator=torch.Generator().manual_seed(7))
        visit_layers(attachment, attachment.tables(64), examples[:1], lambda call, *_, scores=scores, heads=heads:
                     scores.update({call.layer: heads.score(call.layer, call.q, call.k, call.v)}), kind="attention",
                     background=plain)
        models.detach(model)
        found[name] = sum((of_layer[0].mean() - of_layer[1].mean()).item() for of_layer in scores.values())
    assert found["with"] > 1 + found["without"]


@pytest.mark.parametrize("background, label, complaint", [
    (PLAIN, "zscore", "background and label 'zscore'"), ([], "attention", "the background is empty"),
    ([9, 5000], "attention", "token id 5000"), ([-1], "attention", "token id -1")])
def test_backgrounds_are_checked(model, tmp_path, background, label, complaint):
    config = msgspec.structs.replace(QUICK, label=label)
    with pytest.raises((ConfigError, InvalidTokens), match=complaint):
        train_heads(model, make_examples(7), tmp_path / "new", config, background=background)
    assert not (tmp_path / "new").exists()


def test_a_background_is_not_for_heads_that_know_the_question(model, tmp_path):
    config = msgspec.structs.replace(RANKED, query_tokens=4)
    with pytest.raises(ConfigError, match="found a background and query_tokens"):
        train_heads(model, make_examples(7), tmp_path, config, background=PLAIN)


@pytest.mark.parametrize("background", [None, PLAIN])
def test_an_example_whose_replies_follow_only_sinks_is_skipped(model, tmp_path, background):
    short = [Example(torch.arange(3, 9) + i, ((3, 6),)) for i in range(20)]
    config = msgspec.structs.replace(RANKED, bias=True, batch=1)
    result = train_heads(model, make_examples(7) + short, tmp_path, config, background=background)
    assert result.skipped == 20 and result.held_out_loss < float("inf")


def test_layers_of_another_model_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="all have a sliding window"):
        train_heads(make("gemma2"), make_examples(7), tmp_path / "gemma", msgspec.structs.replace(QUICK, layers=(0,)))
    with pytest.raises(ConfigError, match=r"layers is \[0, 3\]; expected numbers from 0 to 2"):
        train_heads(model, make_examples(7), tmp_path, msgspec.structs.replace(QUICK, layers=(0, 3)))


def test_another_stream_is_refused_on_resume(model, tmp_path):
    with pytest.raises(Stop):
        train_heads(model, iter(make_examples(60)), tmp_path, QUICK, progress=stop_at(2, Stop()))
    with pytest.raises(ConfigError, match="the first 2 steps differ"):
        train_heads(model, iter(make_examples(60)[:QUICK.held_out_max] + make_examples(9, seed=1)), tmp_path, QUICK)
    with pytest.raises(ConfigError, match="differs in data: stored 'stream "):
        train_heads(model, iter(make_examples(60, seed=1)), tmp_path, QUICK)


def test_what_is_held_out_is_part_of_a_run_and_never_trained_on(model, tmp_path):
    kept_out = make_examples(6, seed=5)
    config = msgspec.structs.replace(QUICK, held_out_max=2)
    with pytest.raises(Stop):
        train_heads(model, iter(make_examples(60)), tmp_path, config, held_out=kept_out, progress=stop_at(2, Stop()))
    with pytest.raises(ConfigError, match="differs in data"):
        train_heads(model, iter(make_examples(60)), tmp_path, config, held_out=kept_out[:5])
    source = Source(make_examples(4) + kept_out, config, 48, 401, kept_out)
    assert len(source.held_out) == 2 and source.size == 4, "those that are not evaluated on are not trained on either"
    assert train_heads(model, iter(make_examples(60)), tmp_path, config, held_out=kept_out).resumed_from == 2


def test_a_checkpoint_of_other_settings_is_refused(model, tmp_path):
    with pytest.raises(Stop):
        train_heads(model, make_examples(7), tmp_path, QUICK, progress=stop_at(2, Stop()))
    (tmp_path / "run.json").write_bytes((tmp_path / "run.json").read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    with pytest.raises(HeadsMismatch, match="a checkpoint of other settings"):
        train_heads(model, make_examples(7), tmp_path, msgspec.structs.replace(QUICK, seed=1))


def test_another_precision_of_the_model_is_another_run(model, tmp_path):
    with pytest.raises(Stop):
        train_heads(model, make_examples(7), tmp_path, QUICK, progress=stop_at(2, Stop()))
    with pytest.raises(ConfigError, match=r"differs in (.*; )?dtype: stored 'float32', now 'bfloat16'"):
        train_heads(make("llama", dtype=torch.bfloat16), make_examples(7), tmp_path, QUICK)


@pytest.mark.parametrize(("damage", "lost"), [
    (lambda lines: [], "lines of the 3 steps"), (lambda lines: [lines[1]], "lines of the 3 steps"),
    (lambda lines: [b"{torn", *lines[1:]], "lines of the 3 steps"),
    (lambda lines: lines[1:], "the evaluation before the first step")])
@pytest.mark.thorough(but=2)
def test_metrics_that_are_lost_are_reported(model, tmp_path, damage, lost):
    """They are flushed before the checkpoint that relies on them."""
    with pytest.raises(Stop):
        train_heads(model, make_examples(7), tmp_path, QUICK, progress=stop_at(3, Stop()))
    lines = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    (tmp_path / METRICS).write_bytes(b"".join(damage(lines)))
    with pytest.raises(ConfigError, match=f"lost {lost}.*restart=True"):
        train_heads(model, make_examples(7), tmp_path, QUICK)
    assert train_heads(model, make_examples(7), tmp_path, QUICK, restart=True).steps == 12


def test_what_a_kill_leaves_is_removed(model, tmp_path):
    train_heads(model, make_examples(7), tmp_path, QUICK)
    for name in (CHECKPOINT, f"{CHECKPOINT}abc.tmp", "heads.safetensors_x.tmp", "other.tmp"):
        (tmp_path / name).write_bytes(b"left")
    train_heads(model, make_examples(7), tmp_path, QUICK)
    assert {"other.tmp"} == {path.name for path in tmp_path.iterdir() if "tmp" in path.name or path.name == CHECKPOINT}


@pytest.mark.parametrize("stopped", [Stop, KeyboardInterrupt])
def test_a_full_disk_is_reported(model, tmp_path, monkeypatch, stopped):
    """An error stays the one that is raised; after Ctrl-C the user learns that nothing was saved."""
    from locret_stream.training import checkpoint

    def full(tensors, path, **more):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(Stop if stopped is Stop else OSError) as caught:
        train_heads(model, make_examples(7), tmp_path, QUICK, progress=stop_at(2, stopped()))
    if stopped is Stop:
        assert "No space left" in caught.value.__notes__[0]
    else:
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / CHECKPOINT)
    assert not [*tmp_path.glob("*.tmp")] and not (tmp_path / CHECKPOINT).exists()
    monkeypatch.undo()
    assert train_heads(model, make_examples(7), tmp_path, QUICK).resumed_from == 0


def test_a_run_stopped_in_its_first_evaluation_goes_on(model, tmp_path, monkeypatch):
    from locret_stream.training import loop

    def stopped(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "evaluate_heads", stopped)
        train_heads(model, make_examples(7), tmp_path / "stopped", QUICK)
    assert train_heads(model, make_examples(7), tmp_path / "stopped", QUICK).resumed_from == 0
    train_heads(model, make_examples(7), tmp_path / "straight", QUICK)
    assert same(tmp_path / "straight", tmp_path / "stopped")
    assert (tmp_path / "straight" / METRICS).read_bytes() == (tmp_path / "stopped" / METRICS).read_bytes()


@pytest.mark.parametrize(("room", "resumed_from"), [(True, 7), (False, 4)])
def test_a_metric_that_cannot_be_written_loses_no_step_before(model, tmp_path, monkeypatch, room, resumed_from):
    """A checkpoint is written only after the lines that it relies on."""
    from locret_stream.training import checkpoint

    replace, opened = checkpoint.replace, Path.open

    class Full:
        """A file that takes only a part of the line of step 7."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, line):
            if b'"step":7,' in line:
                self.file.write(line[:9])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.file.write(line)

    def full(path, write):
        if path.name == METRICS and path.with_name(CHECKPOINT).exists() and not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        replace(path, write)

    straight = train_heads(model, make_examples(7), tmp_path / "straight", QUICK)
    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(Path, "open", lambda path, mode="r", **more: (
            Full(opened(path, mode)) if path.name == METRICS and mode == "ab" else opened(path, mode, **more)))
        patch.setattr(checkpoint, "replace", full)
        train_heads(model, make_examples(7), tmp_path / "full", QUICK)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "full" / METRICS))
    assert train_heads(model, make_examples(7), tmp_path / "full", QUICK).resumed_from == resumed_from
    assert same(tmp_path / "straight", tmp_path / "full") and straight.steps == 12
    assert (tmp_path / "straight" / METRICS).read_bytes() == (tmp_path / "full" / METRICS).read_bytes()


def test_evaluation_refuses_what_it_cannot_average(model):
    with models.attached(model) as attachment:
        heads = random_heads(attachment)
        for examples in ([], make_examples(2, length=60)):
            with pytest.raises(ConfigError, match=f"found {len(examples)} examples, the longest of"):
                evaluate_heads(attachment, heads, examples, msgspec.structs.replace(QUICK, max_tokens=59))


def test_a_stream_that_ends_keeps_its_state(model, tmp_path):
    config = msgspec.structs.replace(QUICK, held_out_max=2)
    with pytest.raises(ConfigError, match="the examples ended after 9; expected 12 steps of 2"):
        train_heads(model, iter(make_examples(11)), tmp_path, config)
    assert train_heads(model, iter(make_examples(60)), tmp_path, config).resumed_from == 4


def test_a_damaged_checkpoint_is_named(model, tmp_path):
    with pytest.raises(Stop):
        train_heads(model, make_examples(7), tmp_path, QUICK, progress=stop_at(2, Stop()))
    whole = (tmp_path / CHECKPOINT).read_bytes()
    for damaged in (whole[:-100], whole[:-50] + bytes([whole[-50] ^ 1]) + whole[-49:]):
        (tmp_path / CHECKPOINT).write_bytes(damaged)
        with pytest.raises(HeadsMismatch, match=CHECKPOINT):
            train_heads(model, make_examples(7), tmp_path, QUICK)


@pytest.mark.parametrize("name", ["run.json", "result.json"])
def test_a_damaged_state_file_is_named(model, tmp_path, name):
    train_heads(model, make_examples(7), tmp_path, QUICK)
    whole = (tmp_path / name).read_bytes()
    for damaged in (whole[:-30], b"", b"[]", whole.replace(b'"', b'"\xff', 1), whole.replace(b': "', b': "\xff', 1)):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"{re.escape(name)} cannot be read: .*restart=True"):
            train_heads(model, make_examples(7), tmp_path, QUICK)
    if name == "result.json":  # as the message says
        (tmp_path / name).unlink()
        assert train_heads(model, make_examples(7), tmp_path, QUICK).steps == 12


def test_two_runs_in_one_folder_do_not_write_into_each_other(model, tmp_path):
    examples, refusals = make_examples(12), []

    def again(at):
        for call in (lambda: train_heads(model, examples, tmp_path, QUICK),
                     lambda: tune(model, tmp_path, examples), lambda: allocate(model, tmp_path, examples)):
            with pytest.raises(ConfigError, match=r"another run trains, tunes or divides there.*name another folder"):
                call()
            refusals.append(at)

    train_heads(model, examples, tmp_path, QUICK, progress=lambda at: refusals or again(at))
    assert len(refusals) == 3
    train_heads(model, examples, tmp_path / "apart", QUICK)
    assert same(tmp_path, tmp_path / "apart")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [path.name for path in (tmp_path / "apart").iterdir()] + ["apart"])  # the lock leaves nothing behind


def test_heads_made_elsewhere_are_not_overwritten(model, tmp_path):
    train_heads(model, make_examples(7), tmp_path, QUICK)
    (tmp_path / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"no run\.json describes"):
        train_heads(model, make_examples(7), tmp_path, QUICK)


def test_examples_of_mixed_lengths_share_a_step(model, tmp_path):
    examples = make_examples(6) + make_examples(6, length=30)
    result = train_heads(model, examples, tmp_path, msgspec.structs.replace(QUICK, batch=4, max_tokens=40))
    assert (result.cut, result.skipped) == (6, 0)  # 48 tokens lose their second reply


def test_text_goes_in_by_the_chat_template(tmp_path):
    words = make("llama")
    lines = [{"prompt": f"The code of door {n} is {n * 7}. Which?", "answer": f"It is {n * 7}."} for n in range(12)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    with pytest.raises(ConfigError, match="found no tokenizer"):
        train_heads(words, path, tmp_path / "out", QUICK)
    seen = []
    result = train_heads(words, str(path), tmp_path / "out", QUICK, tokenizer=make_tokenizer(), progress=seen.append)
    assert result.examples + result.held_out == 12
    assert seen[-1].step == seen[-1].steps == 12 and seen[-1].overlap == result.overlap
    path.write_text(path.read_text() + "\n{}")
    with pytest.raises(InputError, match=r"data\.jsonl:13: "):
        train_heads(words, path, tmp_path / "out", QUICK, tokenizer=make_tokenizer())


def test_what_cannot_work_is_refused(model, tmp_path):
    with pytest.raises(InvalidTokens, match="found token id 401; expected ids below the model's vocabulary of 401"):
        train_heads(model, [*make_examples(3), Example([1, 2, 401, 4], ((2, 4),))], tmp_path, QUICK)
    with pytest.raises(ConfigError, match="found 1 usable"):
        train_heads(model, make_examples(1), tmp_path, QUICK)
    with pytest.raises(ConfigError, match="found 2 budget_shares; expected 3"):
        train_heads(model, make_examples(7), tmp_path, msgspec.structs.replace(QUICK, budget_shares=(1.0, 2.0)))
    broken = make("llama", seed=3)
    broken.model.layers[2].self_attn.q_proj.weight.data[0, 0] = float("nan")
    attachment = models.Attachment(broken, "auto")  # the self-test of attach would refuse it
    with pytest.raises(ModelError, match="the loss of step 0 is nan"):
        train_heads(attachment, make_examples(7), tmp_path / "nan", QUICK)


@pytest.mark.parametrize("name, value", [
    ("label", "softmax"), ("steps", 0), ("batch", 1.5), ("lr", 0), ("lr", float("nan")), ("betas", (0.9, 1.0)),
    ("warmup", 1.0), ("held_out", -0.1), ("clip", 0), ("alpha", -1), ("max_tokens", 1), ("seed", -1), ("bias", 1),
    ("budget_shares", ()), ("budget_shares", (1.0, 0.0)), ("eps", 0.0), ("weight_decay", float("inf")),
    ("kernel", 0), ("kernel", 4), ("layers", ()), ("layers", (1, 1)), ("layers", (-1,)),
])
def test_configs_check_themselves(name, value):
    with pytest.raises(ConfigError, match=f"train: {name} is .*; expected "):
        TrainConfig(**{name: value})


@pytest.mark.parametrize("other", [dict(features="hidden"), dict(output="retention")])
def test_only_policy_locret_averages_scores(other):
    with pytest.raises(ConfigError, match="kernel is 9; expected 1 for heads of features 'hidden' or output 'ret"):
        TrainConfig(kernel=9, **other)


def test_labels_are_standardised_unless_a_rate_is_what_is_learnt(model, tmp_path):
    assert TrainConfig().label == "zscore" and TrainConfig(output="retention").label == "logprob"
    with pytest.raises(ConfigError, match="label is 'zscore'; expected 'logprob' for heads of output 'retention'"):
        TrainConfig(output="retention", label="zscore")
    train_heads(model, make_examples(8), tmp_path, msgspec.structs.replace(QUICK, steps=1))
    assert RetainingHeads.load(tmp_path).config.label == "zscore"
    assert json.loads((tmp_path / RUN).read_bytes())["config"]["label"] == "zscore"


def test_the_rate_rises_for_two_thirds_and_falls_to_zero():
    config = TrainConfig()
    assert config.lr_at(0) == pytest.approx(5e-4 / 2000) and config.lr_at(1999) == config.lr_at(2000) == 5e-4
    assert config.lr_at(2999) == pytest.approx(5e-4 / 1000)
    assert TrainConfig(warmup=0, steps=1).lr_at(0) == 5e-4


def test_the_bar_shows_the_figures():
    import io

    from rich.console import Console

    from locret_stream.training import Progress, progress_bar

    file = io.StringIO()
    with progress_bar(Console(file=file, force_terminal=True, width=160)) as show:
        show(Progress(step=0, steps=9))
        show(Progress(step=9, steps=9, loss=0.5, held_out_loss=0.25, overlap=0.625))
    assert "9/9" in file.getvalue() and "held-out 0.2500  top-10% overlap 62.5%" in file.getvalue()


def test_without_a_terminal_there_is_a_line_for_every_tenth():
    import io

    from rich.console import Console

    from locret_stream.training import Progress, progress_bar

    file = io.StringIO()
    with progress_bar(Console(file=file), "tuning heads") as show:
        for step in range(1, 101):
            show(Progress(step=step, steps=100, loss=0.5, note="KL 0.1"))
    lines = file.getvalue().splitlines()
    assert lines == [f"tuning heads: {step} of 100  loss 0.5000  KL 0.1" for step in range(10, 101, 10)]


def test_query_aware_heads_are_trained_and_measured_on_questions_in_front(model, tmp_path):
    config = msgspec.structs.replace(QUICK, steps=1, query_tokens=3)
    source = Source(make_examples(8), config, 10_000, 10**6)
    for example in [*source.held_out, *source.draw()]:
        [(start, _)] = example.answer_spans
        assert torch.equal(example.ids[:3], example.ids[start - 3:start])
    train_heads(model, make_examples(8), tmp_path, config)
    assert RetainingHeads.load(tmp_path).config.query_tokens == 3
    with pytest.raises(ConfigError, match="query_tokens is -1"):
        msgspec.structs.replace(config, query_tokens=-1)
