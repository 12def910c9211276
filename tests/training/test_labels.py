"""Labels equal a dense reading of their definition, written out token by token; loss and overlap likewise."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from locret_stream.models import attach, detach
from locret_stream.training import Example
from locret_stream.training.labels import SINKS, TEMPLATE, answer_rows, visit_layers
from locret_stream.training.loss import BESIDE, ENOUGH, layer_losses, layer_terms, listwise_loss, top_overlap
from tests.architectures import make

SPANS = ((35, 39), (40, 42), (60, 66))  # a window of 24 hides the first tokens from all of them
EPS = 1e-5


def make_example(seed: int, spans=SPANS, length: int = 70) -> Example:
    return Example(torch.randint(3, 401, (length,), generator=torch.Generator().manual_seed(seed)), spans)


def collect(model, examples, **knobs):
    """[(labels [B, H, n], valid [B, n])] per layer."""
    attachment, found = attach(model), {}
    try:
        visit_layers(attachment, attachment.tables(80), examples,
                     lambda call, labels, valid: found.update({call.layer: (labels, valid)}), **knobs)
    finally:
        detach(model)
    return [found[layer] for layer in sorted(found)]


def largest(values: torch.Tensor, spans) -> list[list[float]]:
    """values [H*G, T, T] -> per KV head and token the largest over rows that predict later replies; -inf for none."""
    groups = values.shape[0] // 2
    out = [[-math.inf] * spans[-1][0] for _ in range(2)]
    for start, end in spans:
        for token in range(start, end):  # row token-1 predicts it; the last one is the end-of-turn token
            for head in range(values.shape[0]):
                for k in range(start):
                    out[head // groups][k] = max(out[head // groups][k], values[head, token - 1, k].item())
    return out


def dense_logits(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """q_p · k_k / sqrt(D) after RoPE of every layer, [H*G, T, T], from the model's own modules and hidden states."""
    rope = importlib.import_module(type(model).__module__).apply_rotary_pos_emb
    out = model.model(ids[None], output_hidden_states=True)
    cos, sin = model.model.rotary_emb(out.hidden_states[0], torch.arange(len(ids))[None])
    found = []
    for layer, hidden in zip(model.model.layers, out.hidden_states, strict=False):
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        dim = attention.head_dim
        q = attention.q_proj(x).view(1, len(ids), -1, dim)
        k = attention.k_proj(x).view(1, len(ids), -1, dim)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        groups = q.shape[1] // k.shape[1]
        found.append(torch.stack([q[0, h] @ k[0, h // groups].T / math.sqrt(dim) for h in range(q.shape[1])]))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.no_grad()
def test_logit_and_zscore_equal_the_definition(name):
    model, example = make(name), make_example(0)
    raw = collect(model, [example], kind="logit")
    standard = collect(model, [example], kind="zscore")
    for layer, values in enumerate(dense_logits(model, example.ids)):
        expected = torch.tensor(largest(values, SPANS))
        assert expected.std() > 0.1 and expected.isfinite().all()
        torch.testing.assert_close(raw[layer][0][0], expected, atol=1e-4, rtol=1e-4)
        for head, row in enumerate(expected):
            row = (row - row.mean()) / row.std(correction=0)
            torch.testing.assert_close(standard[layer][0][0, head], row, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-sliding", "phi3-partial", "gemma2", "smollm3", "gpt-oss",
                                  "llama4", "hunyuan"])
@torch.no_grad()
@pytest.mark.thorough(but=2)
def test_logprob_equals_the_log_of_the_stock_models_own_attention(name):
    model, example = make(name, attn="eager"), make_example(1)
    attentions = model(example.ids[None], output_attentions=True).attentions
    hidden_from_all = 0
    for (labels, valid), values in zip(collect(model, [example], kind="logprob", eps=EPS), attentions, strict=True):
        dense = torch.tensor(largest(values[0], SPANS))
        seen = dense[0] > 0  # a sliding window gives exactly 0
        hidden_from_all += int((~seen).sum())
        assert valid[0].tolist() == seen.tolist()
        torch.testing.assert_close(labels[0][:, seen], (dense[:, seen] + EPS).log(), atol=1e-3, rtol=1e-4)
        assert not labels[0][:, ~seen].any()
    assert bool(hidden_from_all) == (name in ("mistral-sliding", "gemma2", "gpt-oss", "llama4"))


@torch.no_grad()
def test_attention_is_the_stock_models_own_but_for_the_first_tokens():
    model, example = make("llama", attn="eager"), make_example(1)
    attentions = model(example.ids[None], output_attentions=True).attentions
    for (labels, valid), values in zip(collect(model, [example], kind="attention"), attentions, strict=True):
        dense = torch.tensor(largest(values[0], SPANS))
        assert not valid[0, :SINKS].any() and valid[0, SINKS:].all() and not labels[0][:, :SINKS].any()
        torch.testing.assert_close(labels[0][:, SINKS:], dense[:, SINKS:], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_what_the_template_wrote_is_labelled_apart_and_for_attention_alone():
    model, plain = make("llama"), make_example(2)
    written = torch.zeros(len(plain.ids), dtype=torch.bool)
    written[[0, 7, 8, 21, -1]] = True
    marked = replace(plain, template=written)
    for (labels, valid), (bare, seen) in zip(collect(model, [marked], kind="attention"),
                                             collect(model, [plain], kind="attention"), strict=True):
        n = valid.shape[1]
        assert torch.equal(valid, seen) and (labels[0][:, [7, 8, 21]] == TEMPLATE).all() and not labels[0][:, 0].any()
        rest = ~written[:n]
        torch.testing.assert_close(labels[0][:, rest], bare[0][:, rest])
    for (labels, _), (bare, _) in zip(collect(model, [marked], kind="logit"), collect(model, [plain], kind="logit"),
                                      strict=True):
        assert torch.equal(labels, bare)


@torch.no_grad()
def test_a_background_runs_along_and_changes_no_label():
    model, examples = make("llama"), [make_example(2), make_example(3)]
    background, rows = make_example(4).ids[None], set()
    alone = collect(model, examples, kind="attention")
    attachment, beside = attach(model), {}
    try:
        hidden = visit_layers(attachment, attachment.tables(80), examples, lambda call, labels, valid: (
            beside.update({call.layer: (labels, valid)}), rows.add(len(call.q))), kind="attention",
            background=background)
    finally:
        detach(model)
    assert rows == {3} and len(hidden) == 3
    for layer, (labels, valid) in enumerate(alone):
        torch.testing.assert_close(beside[layer][0], labels, atol=1e-6, rtol=1e-5)
        assert torch.equal(beside[layer][1], valid)


@pytest.mark.parametrize("kind", ["logprob", "zscore", "logit", "attention"])
def test_blocks_and_batches_change_nothing(kind):
    model = make("llama")
    examples = [make_example(2), make_example(3, spans=((5, 8), (20, 21)))]
    whole = collect(model, examples, kind=kind)
    pieces = [collect(model, [example], kind=kind, block_bytes=1) for example in examples]  # a row at a time
    for layer, (labels, valid) in enumerate(whole):
        for i, (own, seen) in enumerate(part[layer] for part in pieces):
            n = seen.shape[1]
            torch.testing.assert_close(labels[i, :, :n], own[0], atol=1e-4, rtol=1e-4)
            assert valid[i, :n].equal(seen[0]) and not valid[i, n:].any() and not labels[i, :, n:].any()


def test_no_block_is_larger_than_its_bound(monkeypatch):
    sizes = []
    original = torch.Tensor.amax
    monkeypatch.setattr(torch.Tensor, "amax", lambda x, dim: sizes.append(x.nbytes) or original(x, dim))
    collect(make("llama"), [make_example(4, spans=((8, 70),))], kind="logit", block_bytes=4096)
    assert 3 * 4 < len(sizes) and max(sizes) <= 4096


def test_rows_predict_the_end_of_the_reply_and_limits_leave_the_reply_out():
    rows, limits = answer_rows([(3, 5), (9, 10)])
    assert rows.tolist() == [2, 3, 8] and limits.tolist() == [3, 3, 9]


def test_losses_are_means_of_examples_and_ignore_what_has_no_label():
    noise = torch.Generator().manual_seed(0)
    scores, labels = 3 * torch.randn(2, 2, 2, 7, generator=noise)
    valid = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0, 0]]).bool()
    regression, smoothing = layer_losses(scores, labels, valid)
    kept = [0, 1, 3, 4]
    expected = (F.smooth_l1_loss(scores[0], labels[0]) + F.smooth_l1_loss(scores[1][:, kept], labels[1][:, kept])) / 2
    torch.testing.assert_close(regression, expected)
    steps = torch.stack([scores[1][:, 1] - scores[1][:, 0], scores[1][:, 4] - scores[1][:, 3]])
    expected = (F.mse_loss(scores[0][:, :-1], scores[0][:, 1:]) + steps.square().mean()) / 2
    torch.testing.assert_close(smoothing, expected)


def test_the_listwise_loss_is_its_definition_with_and_without_a_background():
    noise = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(2, 3, 12, generator=noise), torch.rand(2, 3, 12, generator=noise) ** 4
    valid, background = torch.ones(2, 12, dtype=torch.bool), torch.randn(2, 3, 7, generator=noise)
    valid[:, :4] = valid[1, 9:] = False
    labels = labels * valid[:, None]
    for others in (None, background):
        expected = []
        for b in range(2):
            for h in range(3):
                at = valid[b].nonzero()[:, 0].tolist()
                near = [max(labels[b, h, max(0, k - BESIDE // 2):k + BESIDE // 2 + 1].tolist()) for k in at]
                wanted = torch.tensor([min(value, ENOUGH) for value in near])
                rest = [] if others is None else others[:, h].flatten().tolist()
                total = torch.tensor([*scores[b, h, at].tolist(), *rest]).logsumexp(0)
                expected.append(((total - scores[b, h, at]) * wanted).sum() / wanted.sum())
        found = listwise_loss(scores, labels, valid, others)
        torch.testing.assert_close(found, torch.stack(expected).mean())
        terms = layer_terms(scores, labels, valid, "attention", others)
        assert terms[0] == found and terms[1] == 0
    marked = labels.clone()
    marked[:, :, 6] = TEMPLATE  # it competes, is not wanted, and makes nothing beside it wanted
    gone = labels.clone()
    gone[:, :, 6] = 0
    wanted = F.max_pool1d(gone, BESIDE, stride=1, padding=BESIDE // 2).clamp(max=ENOUGH) * valid[:, None]
    wanted[:, :, 6] = 0
    lost = scores.masked_fill(~valid[:, None], -torch.inf).logsumexp(-1, keepdim=True) - scores
    torch.testing.assert_close(listwise_loss(scores, marked, valid), (
        (lost * wanted).sum(-1) / wanted.sum(-1)).mean())
    labels[:] = 0
    assert listwise_loss(scores, labels, valid, background) == 0, "a head to which no answer attends learns nothing"
    assert layer_terms(scores, labels, valid, "zscore") == layer_losses(scores, labels, valid)


def test_overlap_counts_the_top_tenth_of_valid_tokens():
    labels = torch.arange(40.0).expand(1, 2, 40).clone()
    valid = torch.ones(1, 40, dtype=torch.bool)
    scores = labels.clone()
    assert top_overlap(scores, labels, valid).item() == 1
    scores[0, 0, 36:38] = -1  # two of head 0's four
    assert top_overlap(scores, labels, valid).item() == 0.75
    valid[0, 20:] = False
    assert top_overlap(-scores, labels, valid).item() == 0
