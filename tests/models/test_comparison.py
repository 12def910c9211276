"""What the self-test sees: mistakes behind thresholds, at windows, in few bits, in one layer; and what it does not
refuse. Every kind of model passes it in float32 and in bfloat16."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from locret_stream.engine import try_out
from locret_stream.errors import UnsupportedModel
from locret_stream.models import Attachment, attach, attached, comparison, detach, rotary, self_test
from locret_stream.models.comparison import _Comparison
from tests.architectures import CONFIGS, LATENT, make


@pytest.fixture
def as_a_large_model(monkeypatch):
    """No copy in float32 is made."""
    monkeypatch.setattr(comparison, "COPIED", 0)
    monkeypatch.setattr(comparison, "TRIED", 0)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.thorough]) if name not in (
    "gemma3", "deepseek-v3", "lfm2") else name for name in CONFIGS])
def test_every_kind_passes_in_few_bits_by_its_parts(name: str, as_a_large_model):
    stock = make(name, dtype=torch.bfloat16)
    attach(stock)
    detach(stock)


@pytest.mark.parametrize(("name", "least", "most"), [("deepseek-v3.2", 0.05, 0.5), ("llama", 1e-3, 0.03)])
def test_how_far_rounding_moves_logits_is_measured_on_the_model(name: str, least: float, most: float, as_a_large_model,
                                                                monkeypatch):
    """DeepSeek-V3.2 chooses experts: on a CPU without products in bf16, rounding alone moves its logits by 0.2. So it
    is read once more with attention off by rounding, and differs from its attachment by no more than from itself."""
    measure, moved = _Comparison._moved_by_rounding, list[float]()
    monkeypatch.setattr(_Comparison, "_moved_by_rounding", lambda self: moved.append(measure(self)) or moved[-1])
    monkeypatch.setattr(comparison, "_TOLERANCE", {torch.bfloat16: 1e-3})
    attach(stock := make(name, dtype=torch.bfloat16))
    detach(stock)
    assert least < moved[0] < most, moved
    monkeypatch.setattr(_Comparison, "_moved_by_rounding", lambda self: 0.0)
    monkeypatch.setattr(_Comparison, "_own", lambda self: 0.0)
    with pytest.raises(UnsupportedModel, match="Each of its layers agrees by itself"):
        attach(stock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_changes_with_the_position_is_compared_behind_the_threshold(dtype, monkeypatch):
    """Ministral 3 scales queries from token 16,384 on: 24 tokens from the beginning do not show it."""
    config = CONFIGS["ministral3"]()
    config.rope_parameters |= dict(original_max_position_embeddings=1024, factor=4.0)
    stock, hidden = make("", config=config, dtype=dtype), Attachment.hidden
    monkeypatch.setattr(Attachment, "hidden", lambda self, ids, step, carried=None, start=0: hidden(
        self, ids, step, carried, start if torch.is_tensor(start) or start < 1000 else start - 1000))
    with pytest.raises(UnsupportedModel, match=r"hidden states differ .* from position 1,012 on; expected"):
        attach(stock)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama4", "modernbert-decoder"])
def test_windows_are_compared_though_the_text_is_shorter(name: str, monkeypatch):
    config = CONFIGS[name]()
    for field in ("sliding_window", "attention_chunk_size", "local_attention"):
        if getattr(config, field, None):
            setattr(config, field, 2048)
    attach(stock := make("", config=config))
    detach(stock)
    monkeypatch.setattr(comparison, "visible", lambda unit, queries, keys: queries[:, None] >= keys)
    with pytest.raises(UnsupportedModel, match="its logits differ from the stock model's"):
        attach(stock)


def test_a_window_of_the_stock_model_is_as_long_again_afterwards():
    stock = make("gemma3")
    attachment = attach(stock)
    assert stock.config.sliding_window == attachment.config.sliding_window == 24
    assert attachment.shape.sliding == (24, None, None)
    detach(stock)


def in_pairs(monkeypatch):
    """The rotation of neighbours in place of that of halves, or the other way round."""
    usual = rotary.reference.rotate_halves, rotary._rotate_pairs
    monkeypatch.setattr(rotary.reference, "rotate_halves", lambda x, cos, sin: usual[1](
        x, cos[..., :cos.shape[-1] // 2], sin[..., :sin.shape[-1] // 2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrong_rotation_of_weights_as_small_as_untrained_ones_is_refused_in_every_dtype(dtype, monkeypatch):
    """Their logits differ by less than rounding may make them."""
    torch.manual_seed(0)
    stock = tf.AutoModelForCausalLM.from_config(LATENT["deepseek-v3"](), dtype=dtype).eval()
    attach(stock)
    detach(stock)
    in_pairs(monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"Layer 0 is the first that differs by itself"):
        attach(stock)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wrong_rotation_of_a_large_model_in_few_bits_is_refused(dtype, as_a_large_model, monkeypatch):
    stock = make("deepseek-v3", dtype=dtype)
    in_pairs(monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"Layer 0 is the first .*; load it in float32 to rule rounding out"):
        attach(stock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_layer_that_differs_is_named(layer: int, dtype, as_a_large_model):
    stock = make("llama", dtype=dtype)
    attachment = Attachment(stock, "auto")
    attachment.layers[layer].self_attn.scaling *= 2
    with pytest.raises(UnsupportedModel, match=f"Layer {layer} is the first that differs by itself, by 0"):
        self_test(stock, attachment)


@pytest.mark.parametrize("wrong", [False, True])
def test_layers_that_run_several_times_are_compared_one_by_one(wrong: bool):
    stock = make("hrm", seed=5)
    attachment = Attachment(stock, "auto")
    if wrong:
        attachment.layers[3].self_attn.scaling *= 1.01
    compared = comparison._Comparison(stock, comparison.shadow(stock), attachment, attachment.shape.units)
    with torch.no_grad():
        runs, _, _ = compared._read_whole(0)
        found = compared._first_wrong(runs, 0)
    assert len(runs) == 8 and len(attachment.layers) == 4
    assert (found is not None and found[0] == 3 and found[1] > 1e-4) if wrong else found is None


@pytest.mark.parametrize(("name", "fields"), [
    ("mistral-sliding", dict(sliding_window=1)), ("mistral-sliding", dict(sliding_window=7)),
    ("recurrent-gemma", dict(attention_window_size=7)), ("llama", dict(max_position_embeddings=16)),
    ("doge", dict(keep_window_size=16)), ("qwen3.5", dict(max_position_embeddings=12))])
def test_models_for_fewer_tokens_than_a_text_has_are_served(name: str, fields: dict):
    """Short windows in all layers, few positions, and a choice of few keys: the text is as long as fits."""
    config = CONFIGS[name]()
    for field, value in fields.items():
        setattr(config, field, value)
    with attached(make("", config=config)) as attachment:
        try_out(attachment)
        assert attachment.shape.window <= 16 or attachment.shape.sliding == (fields["sliding_window"],) * 3


@pytest.mark.parametrize(("name", "served"), [("glm-5", True), ("llama", False)])
def test_another_text_is_tried_where_an_index_chooses(name: str, served: bool, monkeypatch):
    """Between index scores that are nearly equal rounding decides."""
    agrees, seen = comparison._Comparison._agrees, []

    def but_for_the_first(self, *args):
        seen.append(self._ids.tolist())
        return len(seen) > 1 and agrees(self, *args)

    monkeypatch.setattr(comparison._Comparison, "_agrees", but_for_the_first)
    stock = make(name)
    if served:
        attach(stock)
        assert seen[0] != seen[1]
        detach(stock)
    else:
        with pytest.raises(UnsupportedModel, match=r"Each of its layers agrees by itself\. The model does something"):
            attach(stock)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_in_few_bits_a_large_model_whose_attention_agrees_is_refused_for_what_differs_elsewhere(
        name: str, as_a_large_model):
    """By more than the tolerance, and by more than the stock model differs from itself."""
    stock = make(name, dtype=torch.bfloat16)
    attachment = Attachment(stock, "auto")
    assert self_test(stock, attachment) < 0.08
    attachment._head = torch.nn.Linear(64, 401, bias=False)
    attachment._head.weight.data = stock.lm_head.weight.data * 1.2
    with pytest.raises(UnsupportedModel, match=r"by 0\.2.* in torch.bfloat16. Each of its layers agrees by itself"):
        self_test(stock, attachment)


def test_no_other_text_is_tried_where_a_layer_differs_by_itself(monkeypatch):
    stock, seen, text = make("glm-5"), [], comparison._Comparison._text
    monkeypatch.setattr(comparison._Comparison, "_text", lambda self, number: (
        seen.append(number), text(self, number))[1])
    attachment = Attachment(stock, "auto")
    attachment.layers[1].self_attn.scaling *= 2
    with pytest.raises(UnsupportedModel, match="Layer 1 is the first that differs by itself"):
        self_test(stock, attachment)
    assert 1 not in seen
