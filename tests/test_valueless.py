"""Tensors without values have the shape, strides and type that torch gives them, whoever works it out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from locret_stream.runtime.valueless import SMALL, _Quick, quick_arithmetic
from tests.architectures import CONFIGS, make, text_of

META = torch.device("meta")


class Own(torch.Tensor):
    pass


WORK: dict[str, Callable[[], torch.Tensor]] = {
    "rotary": lambda: 1.0 / (10_000.0 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8)),
    "integers": lambda: torch.arange(5) * 2 + 1,
    "divided": lambda: torch.arange(5) / 2,
    "two": lambda: torch.arange(5.0)[:, None] - torch.arange(3),
    "half": lambda: torch.empty(3, dtype=torch.bfloat16) ** 2,
    "eighth": lambda: torch.empty(3, dtype=torch.float8_e4m3fn) * 2.0,
    "like": lambda: torch.empty_like(torch.empty(3, 4, dtype=torch.bfloat16)),
    "turned": lambda: torch.empty_like(torch.empty(3, 4).t()) * torch.empty(4, 3),
    "expanded": lambda: torch.empty_like(torch.empty(3, 1).expand(3, 4), device="cpu"),
    "sliced": lambda: torch.empty(3, 4)[:, :2] + 1,
    "of a class": lambda: torch.empty(3).as_subclass(Own) * 2.0,
    "like that": lambda: torch.empty_like(torch.empty(3).as_subclass(Own)),
    "counting": lambda: torch.empty(3, requires_grad=True) * 2.0,
    "typed": lambda: torch.empty_like(torch.empty(3), dtype=torch.int8),
    "elsewhere": lambda: torch.empty_like(torch.empty(3, 2), device="cpu"),
    "large": lambda: torch.empty(SMALL + 1) * 2.0,
    "learned": lambda: torch.nn.Linear(3, 2).weight * 2,
    "drawn": lambda: torch.nn.init.normal_(torch.empty(3)),
    "counted": lambda: torch.arange(4.0, requires_grad=True),
    "here": lambda: torch.arange(4, device="cpu") * 2}


@pytest.mark.parametrize("name", WORK)
def test_they_are_as_torch_makes_them(name: str):
    with META:
        usual = WORK[name]()
    with _Quick(), META:
        found = WORK[name]()
    seen = [(made.shape, made.stride(), made.dtype, made.device, made.requires_grad, made.is_leaf,
             type(made)) for made in (usual, found)]
    assert seen[0] == seen[1]
    assert name != "here" or torch.equal(usual, found)


def test_tensors_with_values_keep_them():
    torch.manual_seed(0)
    usual = torch.nn.init.normal_(torch.empty(4)), torch.arange(4.0) / 3, torch.empty_like(torch.ones(3)).shape
    torch.manual_seed(0)
    with _Quick():
        found = torch.nn.init.normal_(torch.empty(4)), torch.arange(4.0) / 3, torch.empty_like(torch.ones(3)).shape
    assert torch.equal(usual[0], found[0]) and torch.equal(usual[1], found[1]) and usual[2] == found[2]


def test_what_cannot_be_computed_is_refused_as_ever():
    with _Quick(), META, pytest.raises(RuntimeError, match="size of tensor"):
        torch.arange(4) * torch.arange(3)


def test_a_process_with_the_compiler_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    import torch._dynamo  # noqa: F401

    with quick_arithmetic() as mode:
        assert mode is None
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    with quick_arithmetic() as mode:
        assert isinstance(mode, _Quick)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.thorough(but=12)
def test_a_model_that_is_loaded_so_is_the_same(name: str, tmp_path: Path):
    stock = make(name)
    stock.save_pretrained(tmp_path)
    usual = text_of(stock.config).from_pretrained(tmp_path).eval()
    with _Quick():
        found = text_of(stock.config).from_pretrained(tmp_path).eval()
    assert found.state_dict().keys() == usual.state_dict().keys()
    assert all(torch.equal(value, found.state_dict()[key]) for key, value in usual.state_dict().items())
    buffers = dict(found.named_buffers())
    assert all(torch.equal(value, buffers.pop(key)) for key, value in usual.named_buffers()) and not buffers
    with torch.no_grad():
        assert torch.equal(*(model(torch.arange(24)[None]).logits for model in (usual, found)))
