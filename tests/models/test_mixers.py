"""Recurrent mixers that go on from their state for one token only: which they are, and that they read one by one."""

from __future__ import annotations

import pytest
import torch

from locret_stream.errors import UnsupportedModel
from locret_stream.models import attached, attachment
from tests.architectures import STATEFUL, make
from tests.kit import assert_same, build, feed, ids_of, logits_at_each, stock_logits

FORGETFUL = ("jamba", "zamba")


@pytest.mark.parametrize("name", STATEFUL)
def test_only_mixers_that_forget_are_read_one_by_one(name: str):
    with attached(make(name)) as found:
        mixers = [path for path, module in found._decoder.named_modules()
                  if getattr(vars(module).get("forward"), "__name__", "") == "stepping"]
        assert found.stepwise == bool(mixers) == (name in FORGETFUL)
        assert all(path.endswith("mamba") for path in mixers)


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_stream_in_chunks_is_that_of_one_forward(name: str):
    """Of chunks of 8, each after the first goes on from a state; whatever was asked between, the bits are the same."""
    stock = make(name)
    engine = build("streaming_llm", on=stock, units=32, chunk_size=8)
    ids, at_once, asked = ids_of(27, seed=4), engine.open(0), engine.open(1)
    feed(engine, at_once, ids)
    found = engine.logits(at_once)
    expected = stock_logits(stock, ids)
    assert (found - expected[-1]).abs().max() <= 1e-4 * expected.std()
    feed(engine, asked, ids[:10])
    logits_at_each(engine, asked, ids[10:13])
    feed(engine, asked, ids[13:])
    assert_same(engine.export(asked), engine.export(at_once))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_are_found_in_half_precision_too(dtype: torch.dtype):
    with attached(make("jamba", dtype=dtype)) as found:
        assert found.stepwise


def test_a_mixer_that_begins_anew_is_refused(monkeypatch):
    monkeypatch.setattr(attachment, "read_one_by_one", lambda module: None)
    with pytest.raises(UnsupportedModel, match="differ from the stock model's"), attached(make("jamba")):
        pass
