"""A model in bf16 on a CPU where attention is by oneDNN's products: when it is, and that the laws hold for it."""

from __future__ import annotations

import copy

import pytest
import torch

from locret_stream.kernels import torch_ops
from locret_stream.kernels.processor import bf16_products
from tests.kit import DEVICE, assert_same, build, feed, ids_of, model

CHUNK, UNITS = 64, 100
pytestmark = pytest.mark.skipif(DEVICE != "cpu" or not bf16_products(), reason="needs a CPU with products in bf16")


@pytest.fixture
def shapes(monkeypatch) -> list[tuple[int, int]]:
    """Rows and units of every attention by products, on any processor and of any size."""
    seen: list[tuple[int, int]] = []
    real = torch_ops._attention_by_products

    def spied(q, k, v, scale):
        seen.append((q.shape[1], k.shape[1]))
        return real(q, k, v, scale)

    monkeypatch.setattr(torch_ops, "_attention_by_products", spied)
    monkeypatch.setattr(torch_ops, "slow_blas", lambda: True)
    monkeypatch.setattr(torch_ops, "PRODUCTS_LEAST", 0)
    return seen


def engine_of(policy: str):
    return build(policy, on=copy.deepcopy(model()).to(torch.bfloat16), units=UNITS, chunk_size=CHUNK)


def test_whole_chunks_are_attended_by_products_and_tails_are_not(shapes):
    engine = engine_of("locret")
    state = engine.open(0)
    feed(engine, state, ids_of(3 * CHUNK + 30))
    engine.logits(state)
    layers = engine.shape.layers
    assert shapes == [(CHUNK, units + CHUNK) for units in (0, CHUNK, UNITS) for _ in range(layers)]


def test_policies_that_need_log_sum_exps_stay_with_the_flash_kernel(shapes):
    engine = engine_of("h2o")
    feed(engine, engine.open(0), ids_of(3 * CHUNK))
    assert not shapes


def test_what_is_kept_is_the_same_however_the_stream_came(shapes):
    engine, ids = engine_of("locret"), ids_of(4 * CHUNK + 9, distinct=False)
    one, other = engine.open(0), engine.open(1)
    feed(engine, one, ids)
    for at in range(0, len(ids), 23):
        feed(engine, other, ids[at:at + 23])
        engine.logits(other)
    assert_same(engine.export(one), engine.export(other))
    assert shapes


def test_hidden_states_are_those_of_the_flash_kernel_but_for_rounding(shapes, monkeypatch):
    engine, found = engine_of("streaming_llm"), []
    for win in (torch_ops._products_win, lambda q, k: False):
        monkeypatch.setattr(torch_ops, "_products_win", win)
        state = engine.open(0)
        feed(engine, state, ids_of(4 * CHUNK))
        found.append(state.last_hidden.float())
    assert len(shapes) == 4 * engine.shape.layers and not torch.equal(*found)
    assert (found[0] - found[1]).norm() < 2**-5 * found[1].norm()
