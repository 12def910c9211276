"""What an index chooses, and attention with a mask, by themselves."""

from __future__ import annotations

import pytest
import torch

from locret_stream.errors import UnsupportedModel
from locret_stream.kernels import reference
from locret_stream.models import attach, attached, detach, masked_attention
from locret_stream.models.indexed import Index, choosing_few
from tests.architectures import make
from tests.kit import ids_of, stock_logits


@pytest.mark.parametrize("causal", [True, False])
def test_sink_logits_count_in_attention_with_a_mask(causal: bool):
    q, k, v, sinks = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(4)
    mask = None if causal else torch.ones(5, 5, dtype=torch.bool).tril()
    expected, _ = reference.attention(q[0], k[0], v[0], 0.3, torch.arange(5), sink_logits=sinks)
    found = masked_attention(q, k, v, mask, 0.3, causal=causal, sink_logits=sinks)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    assert (masked_attention(q, k, v, mask, 0.3, causal=causal) - found).abs().max() > 1e-3


def test_units_and_blocks_that_are_chosen_as_a_mask():
    class Module(torch.nn.Module):
        block_size = 3

        def forward(self, hidden_states: torch.Tensor, past_key_values: object) -> torch.Tensor:
            raise NotImplementedError

    module = Module()
    index = Index(module)
    units = index.by_unit(torch.tensor([[[3, 0], [1, -1]]]), 5)
    assert units.long().tolist() == [[[[1, 0, 0, 1, 0], [0, 1, 0, 0, 0]]]]
    blocks = index.by_unit(torch.tensor([[[[1, -1]], [[0, 1]]]]), 5)
    assert blocks.long().tolist() == [[[[0, 0, 0, 1, 1]], [[1, 1, 1, 1, 1]]]]
    mask = torch.tensor([[[[True, False]]]])
    assert index.by_unit(mask, 2) is mask


@pytest.mark.parametrize("on", ["deepseek-v3.2", "minimax-m3"])
def test_the_self_test_sees_a_wrong_choice(on: str, monkeypatch):
    """Also of a model whose index would choose all of its tokens."""
    stock = make(on)
    for layer in stock.get_decoder().layers:
        if layer.self_attn.indexer is not None:
            setattr(layer.self_attn.indexer, "topk_blocks" if on == "minimax-m3" else "index_topk", 100)
    attach(stock)
    assert detach(stock) == 0
    monkeypatch.setattr(Index, "by_unit", lambda self, choice, total: torch.ones(1, 1, 1, total, dtype=torch.bool))
    with pytest.raises(UnsupportedModel, match="its logits differ"):
        attach(stock)


@pytest.mark.parametrize("on", ["deepseek-v3.2", "minimax-m3", "glm-5"])
def test_whole_texts_attend_to_what_an_index_chooses(on: str):
    """As heads are trained on them: several at once, each from its beginning."""
    stock, texts = make(on), torch.tensor([ids_of(30, seed=1), ids_of(30, seed=2)])
    with attached(stock) as attachment:
        tables = attachment.tables(30)
        found = attachment.logits(attachment.hidden(texts, lambda call: call.to_itself(tables, None)))
    for row, text in zip(found, texts, strict=True):
        expected = stock_logits(stock, text.tolist())
        assert (row - expected).square().mean().sqrt() <= 1e-5 * expected.std()


def test_a_model_chooses_as_before_when_it_was_tested():
    stock, ids = make("deepseek-v3.2"), ids_of(30)
    before = stock_logits(stock, ids)
    attachment = attach(stock)
    assert [index.most for index in attachment._indexes] == [12] * 3
    with pytest.raises(ZeroDivisionError), choosing_few([stock], 4):
        assert (stock_logits(stock, ids) - before).abs().max() > 1e-3
        raise ZeroDivisionError
    assert torch.equal(stock_logits(stock, ids), before)
    detach(stock)
