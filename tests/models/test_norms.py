"""RMS norms by torch's kernel. It is on CUDA alone; here its place is taken by torch's operations of the same name."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from locret_stream.models import attached, norms
from locret_stream.models.norms import fuse
from tests.architectures import make


@pytest.fixture(autouse=True)
def as_if_on_cuda(monkeypatch):
    monkeypatch.setattr(norms, "_has_kernel", lambda weight: True)


def fused(tree: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in tree.modules() if "forward" in vars(module)]


def strewn(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A model whose norms have weights that differ."""
    model, noise = make(name).to(dtype), torch.Generator().manual_seed(0)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.weight.data.normal_(generator=noise)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "of_layer"), [("llama", 2), ("qwen3", 4)])
def test_all_norms_of_a_model_give_what_they_gave(name: str, of_layer: int, dtype: torch.dtype):
    model = strewn(name, dtype)
    layers = len(model.model.layers)
    inputs = [torch.randn(2, 7, module.weight.numel(), generator=torch.Generator().manual_seed(1)).to(dtype)
              for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    own = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    with torch.no_grad():
        before = [module(x) for module, x in zip(own, inputs, strict=True)]
        assert fuse(model) == of_layer * layers + 1 == len(fused(model))
        for module, x, expected in zip(own, inputs, before, strict=True):
            torch.testing.assert_close(module(x), expected, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-6)
    assert fuse(model) == 0, "they have it"


def test_a_norm_that_multiplies_by_another_number_stays_as_it_is():
    assert fuse(strewn("gemma3")) == 0


class Biased(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
        self.eps = 1e-6


class BiasedRMSNorm(Biased):
    def forward(self, x):
        return torch.nn.functional.rms_norm(x, (8,), self.weight, self.eps) + 0 * self.bias


class GatedRMSNorm(Biased):
    def __init__(self):
        super().__init__()
        del self.bias

    def forward(self, x, gate):
        return x * gate


class OutsideRMSNorm(GatedRMSNorm):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


@pytest.mark.parametrize("kind", [BiasedRMSNorm, GatedRMSNorm, OutsideRMSNorm])
def test_a_norm_of_another_kind_stays_as_it_is(kind):
    """One with a bias, which may count elsewhere; one that takes a gate; one that adds eps outside of the root."""
    assert fuse(kind()) == 0


def test_a_model_that_is_attached_has_the_kernel_and_the_users_own_object_has_not():
    model = make("llama")
    with attached(model) as attachment:
        assert len(fused(attachment._decoder.norm)) == 1
        assert all("forward" in vars(layer.input_layernorm) for layer in attachment.layers)
    assert "forward" not in vars(model.model.norm)


def test_a_wrapped_norm_and_other_modules_stay_as_they_are():
    model = strewn("llama")
    wrapped = model.model.norm
    wrapped.forward = lambda x: x
    count = fuse(model)
    assert count == 2 * len(model.model.layers) and wrapped.forward(1) == 1
    assert all(type(module).__name__.endswith("RMSNorm") for module in fused(model))


def test_gradients_and_other_dtypes_take_the_modules_own_operations(monkeypatch):
    norm = strewn("llama").model.norm
    fuse(norm)
    calls = []
    kernel = torch.nn.functional.rms_norm
    monkeypatch.setattr(norms.F, "rms_norm", lambda *a: calls.append(a) or kernel(*a))
    x = torch.randn(1, 3, norm.weight.numel(), requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and not calls
    with torch.no_grad():
        assert norm(x.bfloat16()).dtype == torch.float32 and not calls, "as the module promotes it"
        norm(x)
    assert len(calls) == 1


def test_a_norm_goes_with_its_model():
    norm = strewn("llama").model.norm
    fuse(norm)
    gone = weakref.ref(norm)
    gc.disable()
    try:
        del norm
        assert gone() is None
    finally:
        gc.enable()


def test_on_a_cpu_nothing_changes(monkeypatch):
    monkeypatch.undo()
    assert fuse(strewn("llama")) == 0
