"""Products of few rows are those of the layer itself, to rounding; the layers of the user's model stay as they are."""

from __future__ import annotations

import copy
import functools
import platform

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from locret_stream import Runtime
from locret_stream.models import attach, detach, linears
from locret_stream.models.linears import linear, pack, packed_linear, quicken
from tests.tiny_tokenizers import make

SIZES = [(256, 256), (512, 4096), (512, 4100), (258, 512), (64, 64)]  # outputs, inputs


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 64, 65])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_the_layers_own(rows: int, outputs: int, inputs: int, bias: bool):
    torch.manual_seed(rows)
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.inference_mode():
        for x in (torch.randn(1, rows, inputs), torch.randn(rows, 1, 2 * inputs)[..., ::2]):
            torch.testing.assert_close(linear(layer, x), layer(x), atol=1e-5, rtol=1e-5)
            assert linear(layer, x).shape == layer(x).shape
            assert torch.equal(linear(layer, x), linear(layer, x))


def test_of_other_dtypes_and_with_gradients_it_is_the_layers_own_product():
    layer = nn.Linear(512, 512)
    x = torch.randn(1, 1, 512)
    (out,) = torch.autograd.grad(linear(layer, x).sum(), [layer.weight])
    assert torch.equal(out[0], x[0, 0]) and torch.equal(linear(layer, x), layer(x))
    with torch.inference_mode():
        half = nn.Linear(512, 512).to(torch.bfloat16)
        assert torch.equal(linear(half, x.bfloat16()), half(x.bfloat16()))
        with pytest.raises(RuntimeError, match="dtype"):
            linear(layer, x.double())


def test_which_product_it_is_depends_on_the_sizes(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    for name, where in (("bmm", torch), ("linear", linears.F)):
        of = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, of=of, name=name: calls.append(name) or of(*args))

    def product(outputs: int, inputs: int, rows: int) -> str:
        calls.clear()
        with torch.inference_mode():
            linear(nn.Linear(inputs, outputs), torch.randn(rows, inputs))
        return calls[0] if calls else "onednn"

    assert [product(512, 256, rows) for rows in (1, 2, 3, 64, 65)] == ["bmm", "bmm", "onednn", "onednn", "linear"]
    assert [product(256, 256, rows) for rows in (1, 2, 3)] == ["bmm", "bmm", "linear"]
    assert product(64, 8192, 1) == product(510, 512, 2) == "onednn"


def test_only_plain_layers_in_fp32_that_are_large_get_it(monkeypatch: pytest.MonkeyPatch):
    class Other(nn.Linear):
        pass

    wrapped = nn.Linear(512, 512)
    wrapped.forward = wrapped.forward  # as accelerate leaves it
    tree = nn.ModuleList([nn.Linear(512, 512), nn.Linear(64, 64), Other(512, 512), wrapped,
                          nn.Linear(512, 512, dtype=torch.bfloat16)])
    for slow, count in ((False, 0), (True, 1)):
        monkeypatch.setattr(linears, "slow_blas", lambda slow=slow: slow)
        assert quicken(tree) == count
        assert ("forward" in vars(tree[0])) == slow
    assert not any("forward" in vars(module) for module in (tree[1], tree[2], tree[4]))


def test_a_model_decodes_with_it_and_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    used: list[torch.Size] = []
    monkeypatch.setattr(linears, "slow_blas", lambda: True)
    monkeypatch.setattr(linears, "linear", lambda module, x: used.append(x.shape) or linear(module, x))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=4)).eval()
    attachment = attach(model)
    try:
        ids = torch.arange(3, 9)[None]

        def step(call):
            return call.q, call.k, call.v, None

        with torch.inference_mode():
            used.clear()
            out = attachment.hidden(ids[:, :1], step)
            assert used and set(used) <= {torch.Size([1, 1, 256]), torch.Size([1, 1, 512])}
            used.clear()
            model(ids)
            assert not used and not any("forward" in vars(module) for module in model.modules())
            assert out.isfinite().all()
    finally:
        detach(model)


needs_bf16 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN packs bf16 weights for x86 processors with AVX-512 alone")


def bf16_layers(**more: bool) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(nn.Linear(inputs, outputs, dtype=torch.bfloat16, **more)
                         for outputs, inputs in ((512, 256), (260, 1000), (64, 64)))


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_give_the_same_bits(bias: bool):
    layers = bf16_layers(bias=bias)
    xs = [torch.randn(2, rows, layer.in_features).bfloat16() for layer in layers for rows in (0, 1, 3, 200)]
    with torch.inference_mode():
        own = [layer(x) for layer in layers for x in xs if x.shape[-1] == layer.in_features]
        assert pack([layers]) == 2 * (512 * 256 + 260 * 1000)
        packed = [layer(x) for layer in layers for x in xs if x.shape[-1] == layer.in_features]
    assert all(map(torch.equal, own, packed))
    assert [type(vars(layer).get("forward")) for layer in layers] == [functools.partial] * 2 + [type(None)]


@needs_bf16
def test_with_gradients_packed_layers_are_their_own():
    layers, x = bf16_layers(), torch.randn(3, 256).bfloat16()
    with torch.inference_mode():
        own = layers[0](x)
    pack([layers])
    out = layers[0](x)
    (grad,) = torch.autograd.grad(out.sum(), [layers[0].weight])
    assert torch.equal(out, own) and grad.any()


@needs_bf16
def test_weights_are_packed_once_for_all_shadows_and_never_beyond_a_share_of_the_memory(
        monkeypatch: pytest.MonkeyPatch):
    layers = bf16_layers()
    others = nn.ModuleList(copy.copy(layer) for layer in layers)  # the same parameters
    assert pack([layers]) == pack([others]) > 0
    assert vars(layers[0])["forward"].args[1] is vars(others[0])["forward"].args[1]
    size = 2 * (512 * 256 + 260 * 1000)
    for memory, expected in ((4 * size - 4, 0), (4 * size, size), (0, 0)):
        monkeypatch.setattr(linears, "memory_bytes", lambda memory=memory: memory)
        assert pack([bf16_layers()]) == expected


@needs_bf16
async def test_a_runtime_packs_the_weights_that_it_loaded_itself():
    """A model that the caller has may yet change."""
    def load() -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=4)
        return LlamaForCausalLM(config).eval().bfloat16()

    logits = []
    for model, packs in ((load, True), (load(), False)):
        async with Runtime(model, make("byte_level"), policy="keydiff", budget=32, chunk_size=16) as runtime:
            kinds = {getattr(vars(module).get("forward"), "func", None) for module in runtime.attachment.linears}
            assert (packed_linear in kinds) == packs
            state = runtime.engine.open(0)
            runtime.engine.accept(state, range(3, 16))
            logits.append(runtime.engine.logits(state))
    assert torch.equal(*logits)
