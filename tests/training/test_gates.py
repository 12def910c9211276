"""Gates equal their definition, keep the budget at every temperature, and become eviction as it falls; the student with
hard gates is the engine."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locret_stream import Budget, models
from locret_stream.config import StreamConfig
from locret_stream.engine import Engine
from locret_stream.kernels import select_units
from locret_stream.policies import make_policy
from locret_stream.training import Example
from locret_stream.training import gates as gates_module
from locret_stream.training.gates import gated_attention, log_gates, visibility
from locret_stream.training.student import Student, divergence
from locret_stream.training.validation import Recording, answer_nll
from tests.architectures import make
from tests.kit import ids_of, random_heads
from tests.training.tiny import make_examples


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- gates --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.data(), st.sampled_from([1e-4, 0.01, 0.1, 0.5, 3.0, 100.0]), st.integers(0, 99))
def test_gates_together_are_the_budget_at_every_temperature(count, data, temperature, seed):
    keep = data.draw(st.integers(1, count - 1))
    scores = noise(2, 3, count, seed=seed)
    scores = torch.where(scores > 1, 20 * scores, scores)  # a few far above the others
    gates = log_gates(scores, keep, temperature).exp()
    torch.testing.assert_close(gates.sum(-1), torch.full((2, 3), float(keep), dtype=torch.float64), rtol=0, atol=0.02)
    torch.testing.assert_close(log_gates(7 * scores - 3, keep, temperature).exp(), gates, rtol=1e-3, atol=1e-3)
    order = scores.argsort(-1)
    assert (gates.gather(-1, order).diff(dim=-1) >= -1e-9).all()


def test_cold_gates_are_those_of_eviction_and_the_threshold_is_half_way():
    scores = torch.tensor([5.0, -1.0, 3.0, 0.0, 4.0, 1.0])
    spread = scores.std(correction=0).item()
    assert log_gates(scores, 3, 1e-6).exp().tolist() == [1, 0, 1, 0, 1, 0]
    z = (scores - 2.0) / spread / 0.01  # between 3 and 1
    torch.testing.assert_close(log_gates(scores, 3, 0.01), torch.nn.functional.logsigmoid(z), rtol=1e-3, atol=1e-6)


def test_what_one_unit_gains_the_others_lose():
    """The gradient through the threshold is exact, and the budget does not move."""
    scores = noise(2, 9).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda s: log_gates(s, 4, 0.4), scores, eps=1e-6, atol=1e-5)
    [total] = torch.autograd.grad(log_gates(scores, 4, 0.4).exp().sum(), scores)
    assert total.abs().max() < 1e-6
    [one] = torch.autograd.grad(log_gates(scores, 4, 0.4)[0, 2], scores)
    assert one[0, 2] > 0 and one[0].sum().abs() < 1e-6 and not one[1].any()
    [flat] = torch.autograd.grad(log_gates(0 * scores, 4, 0.4).sum(), scores)
    assert flat.isfinite().all()


def test_what_is_protected_is_seen_as_it_is_and_ranks_are_those_of_who_stays():
    scores = noise(1, 2, 20).float()
    gates, ranks = visibility(scores, 20, 2, 3, 0.3)
    assert not gates.any() and ranks[0, 1].tolist() == list(range(20))
    gates, ranks = visibility(scores, 9, 2, 3, 0.3)
    assert not gates[..., :2].any() and not gates[..., -3:].any() and (gates[..., 2:-3] < 0).all()
    torch.testing.assert_close(gates[..., 2:-3], log_gates(scores[..., 2:-3], 4, 0.3))
    for head in range(2):
        kept = select_units(scores[0], 9, 2, 3)[head].tolist()
        assert ranks[0, head].tolist() == [sum(other < unit for other in kept) for unit in range(20)]


# -- attention ----------------------------------------------------------------------------------------------------


def naive(q, k, v, gates, scale, softcap, sinks, beta=None):
    """One number after another: row r of the last R sees the units 0 .. n-R+r, the first ones through gates; with
    `beta` [H, n] their logits fade with age."""
    heads, count, rows = k.shape[0], k.shape[1], q.shape[1]
    groups, out = q.shape[0] // heads, torch.zeros_like(q)
    for h in range(q.shape[0]):
        for r in range(rows):
            weights = []
            for i in range(count - rows + r + 1):
                logit = (q[h, r] @ k[h // groups, i]).item() * scale
                logit = softcap * math.tanh(logit / softcap) if softcap else logit
                if beta is not None:
                    logit *= beta[h // groups, i].item() ** (count - rows + r - i)
                gate = gates[h // groups, i].exp().item() if i < gates.shape[1] else 1.0
                weights.append(gate * math.exp(logit))
            total = sum(weights) + (math.exp(sinks[h].item()) if sinks is not None else 0)
            out[h, r] = sum(w / total * v[h // groups, i] for i, w in enumerate(weights))
    return out


@pytest.mark.parametrize("softcap, with_sinks", [(None, False), (3.0, False), (None, True)])
@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_attention_behind_gates_equals_the_naive_one(softcap, with_sinks, block_bytes):
    q, k, v = noise(2, 4, 5, 6), noise(2, 2, 12, 6, seed=1), noise(2, 2, 12, 6, seed=2)
    gates = visibility(noise(2, 2, 7, seed=3), 4, 1, 1, 0.5)[0]
    sinks = noise(4, seed=4) if with_sinks else None
    found = gated_attention(q, k, v, gates, scale=0.7, softcap=softcap, sink_logits=sinks, block_bytes=block_bytes)
    for b in range(2):
        torch.testing.assert_close(found[b], naive(q[b], k[b], v[b], gates[b], 0.7, softcap, sinks))


def test_attention_behind_gates_has_the_right_gradient():
    tensors = [noise(1, 4, 2, 2), noise(1, 2, 5, 2, seed=1), noise(1, 2, 5, 2, seed=2), noise(1, 2, 3, seed=3)]
    for tensor in tensors:
        tensor.requires_grad_(True)
    for block_bytes in (1, 2**20):
        assert torch.autograd.gradcheck(lambda q, k, v, s, b=block_bytes: gated_attention(
            q, k, v, visibility(s, 2, 0, 0, 0.5)[0], scale=0.5, block_bytes=b), tensors)


# -- the student --------------------------------------------------------------------------------------------------

BUDGET = Budget(units=14, sinks=1, stabilizers=2, allocation=(1.0, 2.0, 0.5))
UNEVEN = {"llama4": (0.4, 1.0, 0.5, 2.0)}


def student_of(attachment, heads, budgets, **more) -> Student:
    return Student(attachment, heads, budgets, 8, BUDGET.sinks, BUDGET.stabilizers, 128, **more)


@pytest.mark.parametrize("name, policy", [("llama", "locret"), ("llama", "kvzap"), ("qwen3", "locret"),
                                          ("smollm3", "locret"), ("gemma3", "locret"), ("gpt-oss", "locret"),
                                          ("phi3-partial", "locret"), ("llama4", "locret"),
                                          ("hunyuan", "locret")])
@torch.no_grad()
@pytest.mark.thorough(but=1)
def test_with_hard_gates_it_is_the_engine(name, policy):
    """Budgets, chunks, protection, ranks and sliding layers that keep less than their window are as in the engine."""
    attachment = models.attach(make(name))
    heads = random_heads(attachment, seed=5, policy=policy)
    listening = Recording(make_policy(policy, heads=heads))
    budget = msgspec.structs.replace(BUDGET, allocation=UNEVEN.get(name, BUDGET.allocation))
    engine = Engine(attachment, StreamConfig(budget=budget, chunk_size=8, policy=policy), listening, 1)
    for length in (57, 64, 71):  # a last chunk of one token, a whole one, and one between
        example = Example(ids_of(length, distinct=True), make_examples(1, length)[0].answer_spans)  # no two units tie
        hidden = student_of(attachment, heads, engine.budgets).hidden(example.ids[None], 1e-6)
        logprobs = attachment.logits(hidden)[0].log_softmax(-1)
        found = -sum(logprobs[at - 1, example.ids[at]].item() for start, end in example.answer_spans
                     for at in range(start, end))
        assert found == pytest.approx(answer_nll(engine, listening, example), rel=1e-4)
        soft = student_of(attachment, heads, engine.budgets).hidden(example.ids[None], 0.5)
        assert (soft - hidden).abs().max() > 0.01


def full(attachment, ids):
    tables = attachment.tables(128)
    return attachment.hidden(ids, lambda call: (*(tables.rotate(call.layer, x, 0) for x in (
        call.q, call.k)), call.v, None))


@pytest.mark.parametrize("temperature", [0.01, 2.0])
def test_a_budget_that_holds_everything_differs_in_nothing(temperature):
    attachment = models.attach(make("llama"))
    heads, ids = random_heads(attachment).requires_grad_(True), make_examples(1, 60)[0].ids[None]
    with models.differentiable(attachment):
        hidden = student_of(attachment, heads, (56, 60, 80)).hidden(ids, temperature)
        kl = divergence(attachment, full(attachment, ids)[0], hidden[0])
        assert kl.item() == 0 and not kl.requires_grad
        hidden = student_of(attachment, heads, (56, 60, 55)).hidden(ids, temperature)  # 56 are committed in the end
        assert divergence(attachment, full(attachment, ids)[0], hidden[0]).item() > 0


@pytest.mark.parametrize("name, policy, more", [
    ("llama", "locret", {}), ("qwen3", "kvzap", dict(block_bytes=600)), ("gemma3", "locret", {}),
])
def test_gradients_reach_the_heads_alone_and_are_those_of_finite_differences(name, policy, more):
    model = make(name)
    attachment = models.attach(model)
    heads = random_heads(attachment, policy=policy).requires_grad_(True)
    ids = make_examples(2, 60, seed=1)
    ids = torch.stack([example.ids for example in ids])
    expected = full(attachment, ids) if name != "gemma3" else torch.zeros(2, 60, 64)
    student = student_of(attachment, heads, (12, 24, 6), **more)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def kl() -> torch.Tensor:
        with models.differentiable(attachment):
            hidden = student.hidden(ids, 0.5)
            loss = sum(divergence(attachment, expected[i, 20:], hidden[i, 20:], **more) for i in range(2))
            if torch.is_grad_enabled():
                loss.backward()
        return loss.detach()

    kl()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    moved = [p for p in heads.parameters() if p.grad is not None]  # a sliding layer's heads decide nothing
    gradients = [p.grad for p in moved]
    square = sum(g.square().sum().item() for g in gradients)
    assert len(moved) == 2 * attachment.shape.sliding.count(None) and all(g.abs().max() > 0 for g in gradients)
    step, found = 4e-4 / square**0.5, []  # so small that no unit changes its rank
    with torch.no_grad():
        for sign in (1, -1):
            for parameter, gradient in zip(moved, gradients, strict=True):
                parameter.add_(gradient, alpha=sign * step)
            found.append(kl().item())
            for parameter, gradient in zip(moved, gradients, strict=True):
                parameter.sub_(gradient, alpha=sign * step)
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(square, rel=5e-3)


def test_a_model_is_differentiable_within_and_as_before_behind():
    model = make("llama")
    attachment = models.attach(model)
    ids = make_examples(1, 20)[0].ids[None]
    plain = full(attachment, ids)
    inside = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(KeyError), models.differentiable(attachment):
        gain = torch.ones((), requires_grad=True)
        tables = attachment.tables(20)
        hidden = attachment.hidden(ids, lambda call: (*(tables.rotate(call.layer, x, 0) for x in (
            call.q, call.k)), gain * call.v, None))
        attachment.logits(hidden).sum().backward()
        assert gain.grad is not None and torch.equal(hidden.detach(), plain)
        with models.differentiable(attachment):
            pass
        assert attachment.logits(hidden).requires_grad, "one within another ends itself alone"
        raise KeyError
    assert not full(attachment, ids).requires_grad and torch.equal(full(attachment, ids), plain)
    assert not attachment.logits(plain).requires_grad
    assert {name: id(p) for name, p in model.named_parameters()} == inside
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_layers_without_a_head_keep_the_newest():
    attachment = models.attach(make("llama"))
    heads = random_heads(attachment)
    heads.config = msgspec.structs.replace(heads.config, trained_layers=(0, 2))
    listening = Recording(make_policy("locret", heads=heads))
    engine = Engine(attachment, StreamConfig(budget=BUDGET, chunk_size=8, policy="locret"), listening, 1)
    example = Example(ids_of(60, distinct=True), make_examples(1, 60)[0].answer_spans)
    with torch.no_grad():
        logprobs = attachment.logits(student_of(attachment, heads, engine.budgets).hidden(
            example.ids[None], 1e-6))[0].log_softmax(-1)
    found = -sum(logprobs[at - 1, example.ids[at]].item() for start, end in example.answer_spans
                 for at in range(start, end))
    assert found == pytest.approx(answer_nll(engine, listening, example), rel=1e-4)


def test_kernels_are_given_the_units_of_a_batch_as_rows(monkeypatch):
    """Triton's take [H, n] alone."""
    seen = []
    monkeypatch.setattr(gates_module, "select_units", lambda scores, *more: seen.append(scores.shape) or select_units(
        scores, *more))
    scores = noise(2, 3, 40, dtype=torch.float32)
    _, ranks = visibility(scores, 12, 2, 3, 0.1)
    assert seen == [(6, 40)]
    for b in range(2):
        kept = torch.zeros(3, 40, dtype=torch.int64).scatter_(-1, select_units(scores[b], 12, 2, 3), 1)
        assert torch.equal(ranks[b], kept.cumsum(-1) - kept)
