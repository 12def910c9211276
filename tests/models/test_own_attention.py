"""Modules that compute attention by themselves, and ALiBi: what is noticed of them, at which ranks their units are, and
what is refused. That they are exact while the tokens fit, and that the laws hold for them, is in
`tests/engine/test_kinds.py`."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers as tf

from locret_stream.errors import UnsupportedModel
from locret_stream.models import attach, attached, differentiable, position_tables
from locret_stream.models.alibi import Ranks, bias_of, is_alibi, numbers_of, shear, slopes_in, widen
from tests.architectures import ALIBI, CONFIGS, OWN, make
from tests.kit import build, feed, ids_of, model, stock_logits


def of_one_layer(name: str) -> tf.PreTrainedModel:
    config = CONFIGS[name]()
    config.num_hidden_layers = 1
    return make(name, config=config)


def _of_4096(name: str) -> tf.PreTrainedConfig:
    config = CONFIGS[name]()
    config.max_position_embeddings = 4_096
    return config


@pytest.mark.parametrize("name", OWN)
def test_after_an_eviction_units_are_at_their_ranks(name: str):
    """In one layer keys and values depend on their own token alone: what is kept is what a model reads that gets the
    kept tokens, and no others."""
    stock = of_one_layer(name)
    engine = build("streaming_llm", on=stock, units=20, chunk_size=8)
    ids = ids_of(67, seed=3)
    feed(engine, state := engine.open(0), ids)
    kept = state.store.positions(0)[0].tolist()
    assert len(kept) == 20 and kept != list(range(44, 64)), "sinks are among them"
    expected = stock_logits(stock, [ids[at] for at in kept] + ids[64:])[-1]
    assert (engine.logits(state) - expected).abs().max() <= 1e-5 * expected.std()


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_more_ranks_than_half_precision_tells_apart(name: str):
    stock, ids = of_one_layer(name), ids_of(300, seed=1)
    engine = build("streaming_llm", on=stock, units=320, chunk_size=64)
    feed(engine, state := engine.open(0), ids)
    expected = stock_logits(stock, ids)[-1]
    assert (engine.logits(state) - expected).abs().max() <= 1e-5 * expected.std()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_shear_gives_the_bias_exactly_in_half_precision(dtype: torch.dtype):
    ranks, scale = torch.tensor([[0, 1, 255, 256, 257, 4_097, 65_535]]), 0.25
    slopes = torch.tensor([0.5, 2**-8])
    q, k = torch.zeros(1, 2, 7, 4, dtype=dtype), torch.zeros(1, 2, 7, 4, dtype=dtype)
    q, k = widen(q, k, numbers_of(slopes, scale, k))
    high, low = (part[:, None] for part in Ranks()(k, ranks))
    turned, keys = shear(q, high, low), shear(k, high, low)
    assert torch.equal(turned, q), "queries stay as they are"
    assert keys.dtype == dtype
    bias = torch.einsum("bhtd,bhsd->bhts", turned.double(), keys.double()) * scale
    assert torch.equal(bias[0, :, 3], slopes[:, None].double() * ranks)


def test_slopes_are_read_off_what_a_module_adds():
    slopes, ranks = torch.tensor([0.5, 0.25]), torch.arange(300)
    alibi, mask = slopes[:, None, None] * ranks, torch.zeros(1, 1, 1, 1)
    for added, expected in (([(alibi, 1.0)], slopes), ([(alibi - 7, 0.5), (mask, 1.0)], slopes / 2)):
        bias = bias_of(added, 2, 300)
        assert torch.equal(slopes_in(bias), expected) and is_alibi(bias, expected, torch.float32)
    nothing = bias_of([(mask, 1.0)], 2, 300)
    assert slopes_in(nothing) is None and is_alibi(nothing, None, torch.float32)
    for other in (alibi * ranks, torch.triu(torch.ones(2, 300, 300)), alibi.bfloat16()):
        bias = bias_of([(other, 1.0)], 2, 300)
        assert not is_alibi(bias, slopes_in(bias), torch.float32)
    assert is_alibi(bias, slopes, torch.bfloat16), "of which it is rounded to"


def test_a_bias_that_is_rounded_to_fewer_bits_is_refused():
    """Falcon's ALiBi is in bfloat16, whatever the model is in: of ranks from 257 on some are one."""
    with pytest.raises(UnsupportedModel, match=r"FalconAttention .* a bias that in torch.float32 is not linear, as "):
        attach(make("falcon-alibi", config=_of_4096("falcon-alibi"), seed=5))
    assert attach(make("falcon-alibi", config=_of_4096("falcon-alibi"), dtype=torch.bfloat16)).shape.ranked
    with attached(model("falcon-alibi")) as attachment:
        assert attachment.shape.window == 256


@pytest.mark.parametrize("name", ALIBI)
def test_keys_have_three_numbers_for_their_rank(name: str):
    with attached(model(name)) as attachment:
        assert attachment.shape.ranked and {unit.dims for unit in attachment.shape.units} == {(19, 16)}
        assert attachment.shape.window <= 65_536


# -- what is noticed ----------------------------------------------------------------------------------------------


def test_heads_that_are_copies_are_kept_once():
    """Falcon repeats keys and values for all query heads before it shows them."""
    with attached(model("falcon-new")) as attachment:
        assert {(unit.kv_heads, unit.groups) for unit in attachment.shape.units} == {(2, 2)}
    with attached(model("gptj")) as attachment:
        assert {(unit.kv_heads, unit.groups) for unit in attachment.shape.units} == {(4, 1)}


def test_equal_tables_of_all_layers_are_one():
    with attached(model("gptj")) as attachment:
        assert attachment.tables(16).bytes_resident == 16 * 8 * 4, "of 8 angles' sines and cosines in fp32"


def test_a_table_of_sines_and_cosines_is_known_by_its_content():
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1])
    sines, cosines = angles.sin(), angles.cos()
    for halves in ((sines, cosines), (cosines, sines)):
        tensor = torch.cat(halves, 1)
        assert position_tables.Table.holds(tensor)
        made = position_tables.Table(tensor)(sines, torch.tensor([[3, 1]]))
        assert torch.equal(made.real[0], cosines[[3, 1]]) and torch.equal(made.imag[0], sines[[3, 1]])
    for other in (torch.cat([sines, cosines], 1)[1:], torch.eye(4), torch.zeros(0, 4), torch.ones(4), sines):
        assert not position_tables.Table.holds(other)


def test_a_module_that_turns_its_keys_where_nobody_sees_is_refused(monkeypatch):
    """While its tokens fit it would be exact, and at other ranks it would be wrong."""
    monkeypatch.setattr(position_tables.Table, "holds", lambda tensor: False)
    with pytest.raises(UnsupportedModel, match="GPTJForCausalLM: layer 0 turns its keys by position in a way of its"):
        attach(make("gptj", seed=5))


def capped(self, query, key, value, attention_mask=None):
    weights = torch.softmax(torch.tanh(query @ key.transpose(-1, -2)), dim=-1)
    return weights @ value, weights


def biased(self, query, key, value, attention_mask=None):
    far = torch.arange(query.shape[-2]).square().float()
    weights = torch.softmax(query @ key.transpose(-1, -2) / self.scale_attn + far, dim=-1)
    return weights @ value, weights


def masked_first(self, query, key, value, attention_mask=None):
    weights = torch.softmax(attention_mask + query @ key.transpose(-1, -2) / self.scale_attn, dim=-1)
    return torch.matmul(weights, value), weights


def test_operands_may_be_in_any_order(monkeypatch):
    monkeypatch.setattr(sys.modules[tf.GPTJForCausalLM.__module__].GPTJAttention, "_attn", masked_first)
    stock = make("gptj", seed=5)
    stock.config._attn_implementation = "eager"
    assert attach(stock).shape.layers == 3


def shifted(self, query, key, value, attention_mask=None):
    weights = torch.softmax(query @ (query[..., :1, :] + key).transpose(-1, -2), dim=-1)
    return weights @ value, weights


def turned_around(self, query, key, value, attention_mask=None):
    weights = torch.softmax((key @ query.transpose(-1, -2)).transpose(-1, -2), dim=-1)
    return weights @ value, weights


def twice(self, query, key, value, attention_mask=None):
    weights = torch.softmax(query.transpose(-1, -2) @ (query @ key.transpose(-1, -2)), dim=-1)
    return weights @ value, weights


def unnormalised(self, query, key, value, attention_mask=None):
    weights = query @ key.transpose(-1, -2) / self.scale_attn
    return weights @ value, weights


def doubled(self, query, key, value, attention_mask=None):
    weights = torch.softmax(query @ (key + key).transpose(-1, -2), dim=-1)
    return weights @ value, weights


@pytest.mark.parametrize(("attention", "why"), [
    (capped, "GPTJAttention computes its attention by itself, with tanh, which is not served"),
    (biased, "GPTJAttention computes its attention by itself, with a bias"),
    (unnormalised, "GPTJAttention computes its attention by itself, with matmul"),
    (shifted, "GPTJAttention computes its attention by itself, with add"),
    (turned_around, "GPTJAttention computes its attention by itself, with __rmatmul__"),
    (twice, "GPTJAttention computes its attention by itself, with matmul"),
    (doubled, "its attention is not of a form that is served"),
])
def test_what_is_no_known_attention_is_refused(attention, why: str, monkeypatch):
    monkeypatch.setattr(sys.modules[tf.GPTJForCausalLM.__module__].GPTJAttention, "_attn", attention)
    with pytest.raises(UnsupportedModel, match=why):
        attach(make("gptj", seed=5))


def test_their_attention_is_torchs_own():
    """They have no eager function that gets keys of earlier tokens."""
    for name in ("falcon", "falcon-alibi"):  # whose modules compute something else then
        assert attach(make(name, attn="eager", seed=5)).attn == attach(make(name, attn="eager", seed=6), "sdpa").attn
    assert attach(make("falcon", attn="eager", seed=5)).attn == "sdpa"
    assert attach(make("gptj", seed=5)).attn == "sdpa", "which transformers has for none of these models"
    with pytest.raises(UnsupportedModel, match="FalconModel: attn is 'eager', and its modules compute attention by"):
        attach(model("falcon"), "eager")


@pytest.mark.parametrize("name", ["gptj", "falcon-alibi"])
def test_the_users_model_goes_on_as_before(name: str):
    stock = make(name, seed=5)
    tables = {path: buffer for path, buffer in stock.named_buffers()}
    ids, named = ids_of(30), stock.config._attn_implementation
    before = stock_logits(stock, ids)
    engine = build("streaming_llm", on=stock, units=64, chunk_size=8)
    feed(engine, engine.open(0), ids)
    assert torch.equal(stock_logits(stock, ids), before)
    assert stock.config._attn_implementation == named
    assert all(buffer is tables[path] for path, buffer in stock.named_buffers())
    assert {module.config._attn_implementation for module in stock.modules() if hasattr(module, "config")} == {named}


def test_gradients_pass_through_them():
    stock = make("bloom", seed=5)
    gain = torch.ones((), requires_grad=True)
    with attached(stock) as attachment, differentiable(attachment):
        attachment.hidden(torch.arange(5)[None], lambda call: (call.q, call.k, call.v * gain, None)).square().sum(
            ).backward()
    assert gain.grad and all(parameter.grad is None for parameter in stock.parameters())
