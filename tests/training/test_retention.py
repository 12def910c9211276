"""Retention-gated attention and the capacity loss equal the paper's definitions, and training by them helps."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from locret_stream import models
from locret_stream.errors import ConfigError
from locret_stream.heads import RetainingHeads
from locret_stream.training import tune
from locret_stream.training.gates import gated_attention
from locret_stream.training.student import Fading, Student, over_capacity
from tests.architectures import make
from tests.kit import random_heads
from tests.training.test_gates import naive, noise
from tests.training.test_tuning import QUICK, finder, metrics, needles
from tests.training.tiny import make_examples


@pytest.mark.parametrize("softcap, with_sinks", [(None, False), (3.0, False), (None, True)])
@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_attention_fades_as_the_paper_has_it(softcap, with_sinks, block_bytes):
    q, k, v = noise(2, 4, 9, 6), noise(2, 2, 9, 6, seed=1), noise(2, 2, 9, 6, seed=2)
    rates = torch.nn.functional.logsigmoid(noise(2, 2, 9, seed=3))
    sinks = noise(4, seed=4) if with_sinks else None
    found = gated_attention(q, k, v, rates.new_zeros(2, 2, 0), scale=0.7, softcap=softcap, sink_logits=sinks,
                            fading=rates, block_bytes=block_bytes)
    for b in range(2):
        torch.testing.assert_close(found[b], naive(q[b], k[b], v[b], rates[b, :, :0], 0.7, softcap, sinks,
                                                   beta=rates[b].exp()))


@pytest.mark.parametrize("units", [1, 3, 40])
@pytest.mark.parametrize("block_bytes", [1, 900, 2**20])
@pytest.mark.thorough(but=2)
def test_the_capacity_loss_is_what_remains_beyond_the_budget(units, block_bytes):
    rates = torch.nn.functional.logsigmoid(3 * noise(2, 3, 12)).requires_grad_(True)
    beta, total = rates.detach().exp(), 0.0
    for b in range(2):
        for h in range(3):
            for t in range(12):
                remaining = sum(beta[b, h, i].item() ** (t - i) for i in range(t + 1))
                total += max(0.0, remaining - units) / (t + 1)
    loss = over_capacity(rates, units, block_bytes)
    assert loss.item() == pytest.approx(total / (2 * 3 * 12), abs=1e-12)
    loss.backward()
    assert (rates.grad >= 0).all() and bool(rates.grad.any()) == (units < 40), "less is left, less is lost"
    assert torch.autograd.gradcheck(lambda r: over_capacity(r, units, block_bytes), rates)


@torch.no_grad()
def lasting_heads(attachment, bias: float) -> RetainingHeads:
    """Heads that give beta = sigmoid(bias), whatever they read."""
    heads = RetainingHeads(msgspec.structs.replace(random_heads(attachment, policy="trimkv").config, bias=True))
    for layer in range(attachment.shape.layers):
        heads.fc2[layer].weight.mul_(0.1)
        heads.fc2[layer].bias.fill_(bias)
    return heads


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
@torch.no_grad()
def test_softcaps_and_attention_sinks_of_a_model_count(name):
    """Without fading, attention equals that of the full cache."""
    attachment = models.attach(make(name))
    shape, ids = attachment.shape, make_examples(1, 60)[0].ids[None]
    student = Fading(attachment, lasting_heads(attachment, 60.0), (80,) * shape.layers, 8, 1, 2, 128)
    engine_like = Student(attachment, lasting_heads(attachment, 60.0), (80,) * shape.layers, 8, 1, 2, 128)
    torch.testing.assert_close(student.hidden(ids, 0.1), engine_like.hidden(ids, 0.1), rtol=1e-4, atol=1e-4)


def test_each_layer_is_bound_by_its_own_budget(tmp_path):
    """The layer with the largest budget has the least loss."""
    model = make("llama")
    attachment = models.attach(model)
    heads = lasting_heads(attachment, 8.0)
    heads.config = msgspec.structs.replace(heads.config, budget_shares=(0.5, 2.0, 0.5))
    heads.save(tmp_path)
    models.detach(model)
    tune(model, tmp_path, make_examples(24, 60), msgspec.structs.replace(QUICK, steps=1))
    rates = torch.full((1, 1, 60), math.log(1 / (1 + math.exp(-8.0))))
    expected = sum(over_capacity(rates, units).item() for units in (6, 24, 6)) / 3
    assert metrics(tmp_path)[0]["regression"] == pytest.approx(expected, rel=0.02)


@torch.no_grad()
def test_what_never_fades_is_the_full_cache():
    """A layer without a head is the full cache too, whatever the rates of the others."""
    attachment = models.attach(make("gemma3"))
    heads, ids = lasting_heads(attachment, 60.0), make_examples(1, 60)[0].ids[None]  # beta rounds to 1
    student = Fading(attachment, heads, (80, 80, 80), 8, 1, 2, 128)
    torch.testing.assert_close(student.hidden(ids, 0.1), full_with_windows(attachment, ids), rtol=1e-4, atol=1e-4)
    heads.fc2[attachment.shape.sliding.index(None)].bias.fill_(-3.0)
    assert (student.hidden(ids, 0.1) - full_with_windows(attachment, ids)).abs().max() > 0.01
    heads.config = msgspec.structs.replace(heads.config, trained_layers=())
    torch.testing.assert_close(student.hidden(ids, 0.1), full_with_windows(attachment, ids), rtol=1e-4, atol=1e-4)


def full_with_windows(attachment, ids):
    tables, ranks = attachment.tables(128), torch.arange(ids.shape[1])
    distance = ranks[:, None] - ranks

    def step(call):
        window = attachment.shape.sliding[call.layer]
        mask = None if window is None else (distance >= 0) & (distance < window)
        return *(tables.rotate(call.layer, x, 0) for x in (call.q, call.k)), call.v, mask

    return attachment.hidden(ids, step)


@pytest.mark.thorough
def test_rates_learn_what_is_to_last(tmp_path):
    model, loss = finder()
    assert loss < 0.05
    attachment = models.attach(model)
    lasting_heads(attachment, 6.0).save(folder := tmp_path)
    models.detach(model)
    config = msgspec.structs.replace(QUICK, units=8, chunk_size=8, steps=60, batch=4, lr=3e-2, held_out=0.3,
                                     examples=16)
    result = tune(model, folder, needles(100), config)
    assert result.better and result.before.loss > 0.5 and result.after.loss < 0.05
    first, last = metrics(folder)[0], metrics(folder)[-1]
    assert first["regression"] > 0.1 > 2 * last["regression"], "what is left fits the budget"
    with pytest.raises(ConfigError, match="background, and heads of output 'retention', which learn without eviction"):
        tune(model, folder, needles(100), config, background=list(range(100)))

