"""Heads with a `kernel` have their scores averaged over neighbours of the chunk by policy `locret`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from locret_stream.errors import ConfigError
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.policies.base import Chunk
from locret_stream.policies.locret import Locret

LAYERS, HEADS, GROUPS, DIM, TOKENS = 2, 2, 2, 4, 11


def heads(**options) -> RetainingHeads:
    torch.manual_seed(0)
    config = HeadsConfig(layers=LAYERS, query_heads=HEADS * GROUPS, kv_heads=HEADS, head_dim=DIM, width=8, **options)
    return RetainingHeads(config).eval()


@torch.no_grad()
def scores(by: RetainingHeads) -> torch.Tensor:
    torch.manual_seed(1)
    q, k, v = (torch.randn(count, TOKENS, DIM) for count in (HEADS * GROUPS, HEADS, HEADS))
    return Locret(by).score(Chunk(layer=1, start=0, q=q, k=k, v=v, keys=k, scores=torch.empty(1, HEADS, 0), budget=5,
                                  sinks=1, stabilizers=1))


@pytest.mark.parametrize("kernel", [1, 3, 9, 41])
def test_scores_are_averaged_over_the_neighbours_that_the_chunk_has(kernel: int):
    plain, half = scores(heads()), kernel // 2
    expected = torch.stack([plain[:, max(0, t - half):t + half + 1].mean(1) for t in range(TOKENS)], 1)
    torch.testing.assert_close(scores(heads(kernel=kernel)), expected)
    assert torch.equal(plain, expected) == (kernel == 1)


@pytest.mark.parametrize("kernel", [0, 4, -3])
def test_a_width_has_a_middle(kernel: int):
    with pytest.raises(ConfigError, match=f"kernel is {kernel}; expected an odd number"):
        heads(kernel=kernel)


def test_the_width_is_stored_and_files_without_it_stay_as_they_are(tmp_path: Path):
    heads(kernel=9).save(tmp_path)
    assert RetainingHeads.load(tmp_path).config.kernel == 9
    assert b"kernel" not in msgspec.json.encode(heads().config), "digests of older heads stay"
