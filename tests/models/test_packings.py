"""Models as people load them: quantised ones stream as their own stock forward computes, and stay as they were."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
import transformers as tf

from locret_stream.errors import UnsupportedModel
from locret_stream.models import attach, detach, differentiable, expect_gradients, self_test
from tests.kit import build, feed, ids_of
from tests.packings import BASE, EXACT, IN_NIBBLES, PACKINGS, needs, packed

tf.logging.set_verbosity_error()
COUNT, CHUNK = 60, 16


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@torch.no_grad()
def stock_in_pieces(of: tf.PreTrainedModel, ids: list[int], size: int) -> torch.Tensor:
    """What the user's own model computes with its own cache when it reads pieces of that size, [T, vocab]."""
    cache = tf.DynamicCache()
    return torch.cat([of(torch.tensor([part]), past_key_values=cache, use_cache=True).logits[0].float()
                      for part in (ids[i:i + size] for i in range(0, len(ids), size))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
                         ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("packing", [*PACKINGS, *IN_NIBBLES])
@pytest.mark.thorough(but=4)
def test_a_quantised_model_streams_as_its_own_forward_computes(packing: str, dtype: torch.dtype, root: Path):
    """With a full budget, read in the same pieces: what rounds activations rounds them by the piece."""
    stock = packed(packing, root, dtype=dtype)
    ids = ids_of(COUNT)
    expected = stock_in_pieces(stock, ids, CHUNK)[CHUNK - 1::CHUNK]
    engine = build("streaming_llm", on=stock, units=64, chunk_size=CHUNK)
    state, found = engine.open(0), []
    for start in range(0, COUNT - CHUNK + 1, CHUNK):
        feed(engine, state, ids[start:start + CHUNK])
        found.append(engine.logits(state))
    gap = ((torch.stack(found) - expected).square().mean().sqrt() / expected.std()).item()
    assert engine.pool.layers[0].keys.dtype == dtype == engine.attachment.dtype
    assert engine.pool.bytes_resident == engine.pool.formula_bytes()
    exact = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    print(f"{packing} {dtype}: {gap:.2e}")
    assert gap <= (exact if packing in EXACT else 8e-2)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("packing", ["torchao-int8", "bitsandbytes-4"])
@pytest.mark.thorough(but=2)
def test_so_do_quantised_qwens(name: str, packing: str, root: Path):
    """Qwen 2 has biases, which bitsandbytes casts in place; Qwen 3 norms Q and K."""
    attachment = attach(stock := packed(packing, root, name=name))
    assert attachment.quantised and self_test(stock, attachment) <= 1e-2


@pytest.mark.parametrize("packing", [name for name in PACKINGS if name.startswith("bitsandbytes")])
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "used"])
@pytest.mark.thorough(but=2)
def test_the_first_tree_is_left_as_it_was_though_forwards_repack_weights(packing: str, ran: bool, root: Path):
    """bitsandbytes' first forward takes scales off the parameter and repacks it: a shadow has parameters of its own."""
    stock, ids = packed(packing, root, dtype=torch.bfloat16), torch.tensor([ids_of(20)])
    if ran:
        with torch.no_grad():
            stock(ids)

    def portrait() -> dict:
        return {name: (id(p), p.data_ptr(), sorted((key, id(value)) for key, value in vars(p).items()),
                       sorted((key, id(value)) for key, value in vars(getattr(p, "quant_state", None) or p).items()))
                for name, p in stock.named_parameters()}

    before = portrait()
    engine = build("streaming_llm", on=stock)
    feed(engine, engine.open(0), ids_of(20))
    assert portrait() == before
    with torch.no_grad():
        expected = packed(packing, root, dtype=torch.bfloat16)(ids).logits
        assert torch.equal(stock(ids).logits, expected)
    detach(stock)


@pytest.mark.parametrize("packing", ["torchao-int8", "bitsandbytes-8"])
def test_packed_weights_are_shared_not_copied(packing: str, root: Path):
    stock = packed(packing, root)
    theirs = dict(stock.model.named_parameters())
    scales = {name: getattr(p, "SCB", None) for name, p in theirs.items()}
    for path, module in attach(stock)._decoder.named_modules():
        for name, mine in module._parameters.items():
            whole = f"{path}.{name}"
            if packing == "torchao-int8":
                assert mine is theirs.get(whole)
            elif mine is not None:
                assert mine.data_ptr() == theirs[whole].data_ptr()
        if hasattr(module, "state"):
            assert module.state.SCB.data_ptr() == scales[f"{path}.weight"].data_ptr()


def test_generating_beside_the_engine_gives_what_it_gave_alone(root: Path):
    stock, prompt = packed("bitsandbytes-4", root), torch.tensor([ids_of(12)])

    def generate() -> torch.Tensor:
        return stock.generate(prompt, max_new_tokens=6, do_sample=False)

    expected = packed("bitsandbytes-4", root).generate(prompt, max_new_tokens=6, do_sample=False)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(generate() for _ in range(4)))
    thread.start()
    for _ in range(2):
        engine = build("streaming_llm", on=stock)
        feed(engine, engine.open(0), ids_of(40))
        detach(stock)
    thread.join(60)
    assert len(found) == 4 and all(torch.equal(one, expected) for one in found)


def test_a_quantised_norm_after_rope_is_refused_too(root: Path):
    """Where logits differ by rounding the layers are compared one by one, which finds it."""
    needs("bitsandbytes")
    torch.manual_seed(0)
    hunyuan = tf.HunYuanDenseV1ForCausalLM(tf.HunYuanDenseV1Config(**BASE, head_dim=32)).eval()
    hunyuan.save_pretrained(root / "hunyuan")
    packed_one = tf.AutoModelForCausalLM.from_pretrained(
        root / "hunyuan", dtype=torch.float32, quantization_config=tf.BitsAndBytesConfig(load_in_8bit=True))
    for layer in packed_one.model.layers:  # Hunyuan's own, which takes squares alone, is served
        for name in ("query_layernorm", "key_layernorm"):
            setattr(layer.self_attn, name, torch.nn.LayerNorm(32, bias=False))
    with pytest.raises(UnsupportedModel, match=r"HunYuanDenseV1ForCausalLM.* logits differ from the stock model's"):
        attach(packed_one)


def test_a_model_whose_layers_give_keys_of_two_dtypes_is_refused_by_name(root: Path):
    mixed = copy.deepcopy(packed("plain", root))
    mixed.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"hidden_states": kwargs["hidden_states"].double()}),
        with_kwargs=True)
    mixed.model.layers[1].self_attn.double().register_forward_hook(
        lambda module, args, out: (out[0].float(), *out[1:]))
    with pytest.raises(UnsupportedModel, match=r"keys of \['torch.float32', 'torch.float64'\]; expected one"):
        attach(mixed)


@pytest.mark.slow
def test_a_model_that_hqq_packed_is_attached(root: Path):
    needs("hqq")
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    stock = packed("plain", root)
    AutoHQQHFModel.quantize_model(stock, quant_config=BaseQuantizeConfig(nbits=4, group_size=64),
                                  compute_dtype=torch.float32, device="cpu")
    attachment = attach(stock)
    assert "HQQLinear" in attachment.form and self_test(stock, attachment) <= 2e-5
    assert any(name.endswith("q_proj.scale") for name, _ in attachment.named_weights())


@pytest.mark.slow
def test_a_model_that_compressed_tensors_packed_is_attached(root: Path):
    """The first forward of a whole model unpacks it: that of the shadow leaves the user's model packed."""
    needs("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    made = packed("plain", root)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=32))
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], format="pack-quantized")
    apply_quantization_config(made, config)
    for module in made.modules():
        if hasattr(module, "quantization_scheme"):
            rows = module.weight.data.unflatten(1, (-1, 32))
            module.weight_scale.data.copy_(rows.abs().amax(-1) / 7.5)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(made)
    made.save_pretrained(root / "compressed", state_dict=made.state_dict())
    compressor.update_config(root / "compressed")
    stock = tf.AutoModelForCausalLM.from_pretrained(root / "compressed", dtype=torch.float32)
    attachment = attach(stock)
    assert attachment.form == "compressed-tensors" and self_test(stock, attachment) <= 2e-5
    assert "weight_packed" in stock.model.layers[0].self_attn.q_proj._parameters


@pytest.mark.parametrize("packing", [*PACKINGS, *IN_NIBBLES])
@pytest.mark.thorough(but=2)
def test_gradients_pass_or_it_is_said_before_anything_is_tuned(packing: str, root: Path):
    """int8 of activations has none, nor has bitsandbytes' 4 bit where its kernel for CPUs is used."""
    attachment, scale = attach(packed(packing, root)), torch.nn.Parameter(torch.zeros(()))
    tables, ids = attachment.tables(12), torch.arange(5, 17)[None]

    def loss() -> torch.Tensor:
        return attachment.logits(attachment.hidden(ids, lambda call: (
            tables.rotate(call.layer, call.q, 0), tables.rotate(call.layer, call.k, 0),
            call.v * scale.exp() if call.layer == 0 else call.v, None))).float().square().mean()

    try:
        expect_gradients(attachment)
    except UnsupportedModel as error:
        assert packing not in EXACT and "gradients do not pass through this model's layers" in str(error)
        return
    with differentiable(attachment):
        [found] = torch.autograd.grad(loss(), scale)
    with torch.no_grad():
        above, below = (loss() for scale.data in (torch.tensor(0.05), torch.tensor(-0.05)))
    assert found.item() == pytest.approx((above - below).item() / 0.1, rel=0.01 if packing in EXACT else 0.3)


def test_four_bit_weights_whose_scales_are_spoilt_are_refused_by_name(root: Path):
    """bitsandbytes 0.50's state_dict() unpacks a weight that a forward on a CPU packed, and not its scales."""
    stock, ids = packed("bitsandbytes-4", root), torch.tensor([ids_of(9)])
    with torch.no_grad():
        before = stock(ids).logits
        stock.state_dict()
        if torch.equal(stock(ids).logits, before):
            pytest.skip("this CPU or bitsandbytes does not pack weights, so that nothing is spoilt")
        stock.state_dict()
    with pytest.raises(UnsupportedModel, match=r"are not of one layout; expected .* loaded anew"):
        attach(stock)
