"""Products of few rows are those of the layer itself, to rounding; the layers of the user's model stay as they are."""

from __future__ import annotations

import copy
import functools
import gc
import platform
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from locret_stream import Runtime
from locret_stream.models import attach, detach, differentiable, linears
from locret_stream.models.linears import linear, pack, packed_linear, quicken
from tests.tiny_tokenizers import make

SIZES = [(256, 256), (512, 4096), (512, 4100), (258, 512), (64, 64)]  # outputs, inputs


def product(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(layer.weight, layer.bias, x)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 64, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.thorough(but=15)
def test_a_product_is_the_layers_own(rows: int, outputs: int, inputs: int, bias: bool):
    torch.manual_seed(rows)
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.inference_mode():
        for x in (torch.randn(1, rows, inputs), torch.randn(rows, 1, 2 * inputs)[..., ::2]):
            torch.testing.assert_close(product(layer, x), layer(x), atol=1e-5, rtol=1e-5)
            assert product(layer, x).shape == layer(x).shape
            assert torch.equal(product(layer, x), product(layer, x))


def test_of_other_dtypes_and_with_gradients_it_is_the_layers_own_product():
    layer = nn.Linear(512, 512)
    x = torch.randn(1, 1, 512)
    (out,) = torch.autograd.grad(product(layer, x).sum(), [layer.weight])
    assert torch.equal(out[0], x[0, 0]) and torch.equal(product(layer, x), layer(x))
    with torch.inference_mode():
        half = nn.Linear(512, 512).to(torch.bfloat16)
        assert torch.equal(product(half, x.bfloat16()), half(x.bfloat16()))
        with pytest.raises(RuntimeError, match="dtype"):
            product(layer, x.double())


def test_which_product_it_is_depends_on_the_sizes(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    for name, where in (("bmm", torch), ("linear", linears.F)):
        of = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, of=of, name=name: calls.append(name) or of(*args))

    def kind(outputs: int, inputs: int, rows: int) -> str:
        calls.clear()
        with torch.inference_mode():
            product(nn.Linear(inputs, outputs), torch.randn(rows, inputs))
        return calls[0] if calls else "onednn"

    assert [kind(512, 256, rows) for rows in (1, 2, 3, 64, 1000)] == ["bmm", "bmm"] + ["onednn"] * 3
    assert [kind(256, 256, rows) for rows in (1, 2, 3)] == ["bmm", "bmm", "linear"]
    assert kind(64, 8192, 1) == kind(510, 512, 2) == "onednn"


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
    monkeypatch.setattr(linears, "linear", lambda weight, bias, x: used.append(x.shape) or linear(weight, bias, x))
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


def packs_exactly() -> bool:
    weight = torch.randn(512, 256).bfloat16()
    return linears._same_bits(weight, torch.ops.mkldnn._reorder_linear_weight(weight, None))


needs_packing = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    or not linears.mapped_files() or not packs_exactly(),
    reason="packing is for bf16 weights in mapped files, on Linux, by oneDNN for x86, where it gives the same bits")


def mapped_layers(folder: Path, bias: bool = False) -> nn.ModuleList:
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
                           for outputs, inputs in ((512, 256), (260, 1000), (64, 64)))
    save_file({str(n): layer.weight.detach() for n, layer in enumerate(layers)}, folder / "weights.safetensors")
    for n, weight in load_file(folder / "weights.safetensors").items():
        layers[int(n)].weight = nn.Parameter(weight)
    return layers


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_give_the_same_bits(bias: bool, tmp_path: Path):
    layers = mapped_layers(tmp_path, bias)
    xs = [torch.randn(2, rows, layer.in_features).bfloat16() for layer in layers for rows in (0, 1, 3, 200)]
    xs += [x.transpose(0, 1) for x in xs] + [x[0, 0] for x in xs if x.numel()]

    def results() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [layer(input=x) for layer in layers for x in xs if x.shape[-1] == layer.in_features]

    own = results()
    assert pack([layers]) == 2 * (512 * 256 + 260 * 1000)
    assert all(map(torch.equal, own, results())) and len(own) == 33
    assert [type(vars(layer).get("forward")) for layer in layers] == [functools.partial] * 2 + [type(None)]


@needs_packing
def test_with_gradients_packed_layers_are_their_own(tmp_path: Path):
    layers, x = mapped_layers(tmp_path), torch.randn(3, 256).bfloat16()
    with torch.inference_mode():
        own = layers[0](x)
    pack([layers])
    assert linears.is_quicker(layers[0]) and not linears.is_quicker(layers[2]), "`differentiable` takes such out"
    out = layers[0](x)
    (grad,) = torch.autograd.grad(out.sum(), [layers[0].weight])
    assert torch.equal(out, own) and grad.any()


@needs_packing
def test_weights_in_a_file_are_packed_once_for_all_shadows_and_no_others_are(tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch):
    layers = mapped_layers(tmp_path)
    others, copies = (nn.ModuleList(make(layer) for layer in layers) for make in (copy.copy, copy.deepcopy))
    assert pack([layers]) == pack([others]) > 0
    assert vars(layers[0])["forward"].args[2] is vars(others[0])["forward"].args[2]
    assert pack([copies]) == 0

    def full(*_: object) -> None:
        raise MemoryError

    again = mapped_layers(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(linears, "_same_bits", lambda *_: False)
        assert pack([again]) == 0 and "forward" not in vars(again[0])
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", full)
    assert pack([again]) == 0 and "forward" not in vars(again[0])


@needs_packing
@pytest.mark.parametrize("packs", [True, False])
async def test_a_runtime_packs_the_weights_that_it_loads_itself(packs: bool, tmp_path: Path):
    """A model that the caller made may yet change."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    tokenizer = make("byte_level")
    tokenizer.save_pretrained(tmp_path)

    def load() -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)

    options: dict = {"policy": "keydiff", "budget": 32, "chunk_size": 16}
    async with (Runtime.from_pretrained(tmp_path, dtype="bfloat16", **options) if packs
                else Runtime(load, tokenizer, **options)) as runtime:
        runtimes = [runtime, runtime.beside("random", own_thread=True)]
        async with runtimes[1]:
            for one in runtimes:
                kinds = {getattr(vars(module).get("forward"), "func", None) for module in one.attachment.linears}
                assert (packed_linear in kinds) == packs
                assert (one.memory.bytes_packed > 0) == packs
            state = runtime.engine.open(0)
            runtime.engine.accept(state, range(3, 16))
            logits = runtime.engine.logits(state)
    with torch.no_grad():
        expected = load()(torch.arange(3, 16)[None]).logits[0, -1].float()
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)


def test_the_weights_go_with_the_model(monkeypatch: pytest.MonkeyPatch):
    """At once: nothing that `quicken` leaves refers to its module."""
    monkeypatch.setattr(linears, "slow_blas", lambda: True)
    layer = nn.Linear(512, 512)
    gone = weakref.ref(layer)
    assert quicken(layer) == 1
    gc.disable()
    try:
        del layer
        assert gone() is None
    finally:
        gc.enable()


def test_gradients_through_quicker_layers_reach_no_weight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linears, "slow_blas", lambda: True)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=4)).eval()
    assert all(weight.requires_grad for weight in model.parameters())
    attachment, gain = attach(model), torch.ones((), requires_grad=True)
    try:
        quick = [module for tree in (attachment._decoder, attachment._shadow) for module in tree.modules()
                 if linears.is_quicker(module)]
        assert quick
        with differentiable(attachment):
            hidden = attachment.hidden(torch.arange(3, 9)[None], lambda call: (call.q, call.k, gain * call.v, None))
            attachment.logits(hidden).sum().backward()
        assert gain.grad is not None and gain.grad.abs() > 0
        assert all(weight.grad is None for weight in model.parameters())
        assert all(linears.is_quicker(module) for module in quick), "they are quick again"
    finally:
        detach(model)
