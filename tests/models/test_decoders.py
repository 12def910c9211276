"""Attention modules that are several layers each, and decoders and layers of any name. That the laws hold for them is
in `tests/engine/test_kinds.py`."""

from __future__ import annotations

import sys

import pytest
import torch

from locret_stream.errors import UnsupportedModel
from locret_stream.models import attached, differentiable
from locret_stream.models.decoders import decoder_of, layers_of
from locret_stream.runtime.loading import drop_towers
from tests.architectures import CONFIGS, make
from tests.kit import build, ids_of, logits_at_each, model, stock_logits


def test_a_forward_that_failed_leaves_no_turn_behind():
    """HRM runs each of its attention modules twice; the count of its runs begins anew with every forward."""
    with attached(model("hrm")) as attachment:
        ids, heard = torch.arange(4)[None], []

        def step(call):
            heard.append(call.layer)
            if len(heard) == 3:
                raise RuntimeError("no more")
            return call.q, call.k, call.v, None

        with pytest.raises(RuntimeError, match="no more"):
            attachment.hidden(ids, step)
        attachment.hidden(ids, step)
        assert heard == [0, 1, 2, *range(8)] and attachment.shape.layers == 8


def test_no_gradients_through_modules_that_are_several_layers():
    """Where they run again, nothing says as which layer."""
    with (attached(model("hrm")) as attachment,
          pytest.raises(UnsupportedModel, match="one attention module is several"), differentiable(attachment)):
        pass


# -- where a decoder and its layers are -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dbrx", "gptj", "llama", "modernbert-decoder", "hrm"])
def test_layers_of_any_name(name: str):
    decoder = decoder_of(model(name))
    assert decoder is model(name).base_model and len(layers_of(decoder)) == (4 if name == "hrm" else 3)


@pytest.mark.parametrize("name", ["dbrx", "modernbert-decoder"])
def test_exact_under_other_names(name: str):
    stock, ids = model(name), ids_of(60, seed=4)
    engine = build("streaming_llm", on=stock, units=64, chunk_size=8)
    expected = stock_logits(stock, ids)
    found = logits_at_each(engine, engine.open(0), ids)
    assert (found - expected).square().mean().sqrt() <= 1e-5 * expected.std()


def test_an_output_layer_that_is_named_decoder_costs_a_model_nothing():
    """As that of ModernBERT, beside whose "decoder" all else looks like a tower that reads images."""
    stock = make("modernbert-decoder", seed=5)
    drop_towers(stock)
    assert torch.isfinite(stock_logits(stock, ids_of(5))).all()


def test_identity_embeddings_cost_no_rotation(monkeypatch):
    """The forwards of attention modules leave it out."""
    stock = make("llama", seed=5)
    with attached(stock) as attachment:
        def never(*_):
            raise AssertionError("it rotates")

        monkeypatch.setattr(sys.modules[type(stock).__module__], "apply_rotary_pos_emb", never)
        attachment.hidden(torch.arange(3)[None], lambda call: (call.q, call.k, call.v, None))


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_a_padding_token_without_an_embedding_hides_nothing_from_probes(padding: int):
    """Its keys are zeros: twice as long, too, so that something behind RoPE seemed to normalise them."""
    config = CONFIGS["qwen3"]()
    config.pad_token_id = padding
    stock = make("", config=config)
    stock.model.embed_tokens.weight.data[padding] = 0
    with attached(stock) as attachment:
        assert not attachment._rotary.factors and padding not in attachment._ids
