"""What is tried before a model is used: every kind passes; what fails, or differs, is refused by the model's name."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from locret_stream import Runtime
from locret_stream.engine import trial, try_out
from locret_stream.engine.core import Engine
from locret_stream.errors import UnsupportedModel
from locret_stream.models import attached
from tests.architectures import BASE, CONFIGS, make
from tests.kit import model
from tests.tiny_tokenizers import make as make_tokenizer

FEW = ("llama", "gemma3", "lfm2", "deepseek-v3", "gemma4-e2b", "bloom")


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.thorough)
                                  for name in CONFIGS])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
def test_every_kind_passes(name: str, dtype: torch.dtype):
    with attached(model(name) if dtype == torch.float32 else make(name, dtype=dtype)) as attachment:
        try_out(attachment)
        assert attachment.tried


def stock() -> tf.PreTrainedModel:
    return make("", config=tf.LlamaConfig(**BASE | dict(vocab_size=4096)))


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(stock(), make_tokenizer("metaspace"), policy="h2o", budget=32, chunk_size=8)


def test_what_fails_on_the_way_is_no_raw_error(runtime: Runtime, monkeypatch):
    def full(*args: object) -> None:
        raise RuntimeError("shape '[2, 3]' is invalid")

    monkeypatch.setattr(Engine, "_commit", full)
    with pytest.raises(UnsupportedModel, match=r"^LlamaForCausalLM: RuntimeError: shape .* is invalid; expected what "
                                               "one forward computes. It is a fault of this library"):
        runtime.start()


def test_a_commit_that_evicts_nothing_is_refused(runtime: Runtime, monkeypatch):
    monkeypatch.setattr(Engine, "_keep", lambda *args: None)
    with pytest.raises(UnsupportedModel, match="a layer kept 24 units of 16"):
        runtime.start()


def test_units_that_are_not_what_was_computed_are_refused(runtime: Runtime, monkeypatch):
    forward = Engine._forward

    def shifted(engine, state, ids, offset, scorer):
        out = forward(engine, state, ids, offset, scorer)
        state.store.rotated(0, 8).mul_(0.5)
        return out

    monkeypatch.setattr(Engine, "_forward", shifted)
    with pytest.raises(UnsupportedModel, match=r"its logits behind 19 tokens in chunks of 8 differ from those of one"):
        runtime.start()


async def test_a_model_is_tried_once(monkeypatch):
    tried, real = [], trial._try
    monkeypatch.setattr(trial, "_try", lambda attachment: (tried.append(1), real(attachment)))
    on, tokenizer = stock(), make_tokenizer("metaspace")
    async with (Runtime(on, tokenizer, policy="h2o", budget=32, chunk_size=8),
                Runtime(on, tokenizer, policy="tova", budget=32, chunk_size=8)):
        assert tried == [1]
