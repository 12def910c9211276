"""Recurrent mixers that go on from their state for one token only: which they are, and that they go on now."""

from __future__ import annotations

import pytest
import torch
from transformers.models.jamba import modeling_jamba

from locret_stream.errors import UnsupportedModel
from locret_stream.models import attached, attachment
from locret_stream.models import mixers as mixers_room
from tests.architectures import STATEFUL, make
from tests.kit import assert_same, build, feed, ids_of, logits_at_each, stock_logits

FORGETFUL = ("jamba", "zamba")


@pytest.mark.parametrize("name", STATEFUL)
def test_only_mixers_that_forget_are_mended(name: str):
    with attached(make(name)) as found:
        mixers = [path for path, module in found._decoder.named_modules()
                  if getattr(vars(module).get("forward"), "__module__", "") == mixers_room.__name__]
        assert found.stepwise == bool(mixers) == (name in FORGETFUL)
        assert all(path.endswith("mamba") for path in mixers)


@pytest.mark.parametrize("scan", ["mamba_selective_scan", "a scan that no module has"])
@pytest.mark.parametrize("name", FORGETFUL)
def test_a_stream_in_chunks_is_that_of_one_forward(name: str, scan: str, monkeypatch):
    """Of chunks of 8, each after the first goes on from a state; whatever was asked between, the bits are the same.
    Where a module has no scan that is known, it reads one token after another."""
    monkeypatch.setattr(mixers_room, "_SCAN", scan)
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
    monkeypatch.setattr(attachment, "go_on_from_states", lambda module: None)
    with pytest.raises(UnsupportedModel, match="differ from the stock model's"), attached(make("jamba")):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_scan_goes_on_from_any_state(dtype: torch.dtype):
    """As one token after another does, by transformers' own step."""
    noise, (batch, dim, states, tokens) = torch.Generator().manual_seed(0), (2, 5, 3, 7)
    u, dt, z = (torch.randn(batch, dim, tokens, generator=noise).to(dtype) for _ in range(3))
    b, c = (torch.randn(batch, states, tokens, generator=noise).to(dtype) for _ in range(2))
    a, d, bias = -torch.rand(dim, states, generator=noise), torch.randn(dim, generator=noise), torch.randn(dim)
    state = torch.randn(batch, dim, states, generator=noise)
    expected, stepped = [], state.clone()
    for at in range(tokens):
        expected.append(modeling_jamba.mamba_selective_state_update(
            stepped, u[..., at], dt[..., at], a, b[..., at], c[..., at], d, z=z[..., at], dt_bias=bias,
            dt_softplus=True))
    scan = mixers_room._scan_from([state], modeling_jamba.mamba_selective_scan)
    found, last = scan(u, dt, a, b, c, D=d, z=z, delta_bias=bias, delta_softplus=True, return_last_state=True)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), torch.stack(expected, -1).float(), rtol=close, atol=close)
    torch.testing.assert_close(last, stepped, rtol=close, atol=close)
    plain = modeling_jamba.mamba_selective_scan(
        u, dt, a, b, c, D=d, z=z, delta_bias=bias, delta_softplus=True, return_last_state=True)
    again = scan(u, dt, a, b, c, D=d, z=z, delta_bias=bias, delta_softplus=True, return_last_state=True)
    assert torch.equal(again[0], plain[0]), "no state is left"
    assert (found - plain[0]).abs().max() > 0.1


def test_transformers_own_modules_stay_as_they_are():
    before = modeling_jamba.mamba_selective_scan, modeling_jamba.JambaMambaMixer.forward
    with attached(make("jamba")):
        assert (modeling_jamba.mamba_selective_scan, modeling_jamba.JambaMambaMixer.forward) == before
