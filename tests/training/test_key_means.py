"""Means of keys: what the model's own modules say of the same ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from locret_stream.errors import ConfigError, HeadsMismatch
from locret_stream.heads import RetainingHeads
from locret_stream.training import Example, store_key_means
from tests.architectures import make
from tests.kit import saved_heads

LENGTHS = (70, 41, 55)


def example(seed: int, length: int) -> Example:
    return Example(torch.randint(3, 401, (length,), generator=torch.Generator().manual_seed(seed)), ((10, 12),))


@pytest.mark.parametrize("on", ["llama", "gemma3"])
def test_they_are_means_over_all_tokens_before_rope(on: str, tmp_path: Path):
    model, examples = make(on), [example(*given) for given in enumerate(LENGTHS)]
    folder, projected = saved_heads(model, tmp_path), list[list[torch.Tensor]]()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    means = store_key_means(model, folder, examples)
    loaded = RetainingHeads.load(folder)
    assert torch.equal(loaded.key_means, means)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in before}
    for layer in model.model.layers:
        attention = layer.self_attn
        (getattr(attention, "k_norm", None) or attention.k_proj).register_forward_hook(
            lambda module, args, out, found=(each := []): found.append(out.detach()))
        projected.append(each)
    for one in examples:
        model(one.ids[None])
    for layer, found in enumerate(projected):
        heads, dim = means.shape[1:]
        keys = torch.cat([(k.transpose(1, 2) if k.dim() == 4 and k.shape[1] == heads else k).reshape(-1, heads, dim)
                          for k in found])
        assert len(keys) == sum(LENGTHS)
        torch.testing.assert_close(means[layer], keys.mean(0), atol=1e-5, rtol=1e-4)


def test_no_example_and_no_heads_are_refused(tmp_path: Path):
    model = make("llama")
    with pytest.raises(ConfigError, match="found no example"):
        store_key_means(model, saved_heads(model, tmp_path / "heads"), [])
    (tmp_path / "none").mkdir()
    with pytest.raises(HeadsMismatch, match=r"no heads\.safetensors"):
        store_key_means(model, tmp_path / "none", [example(0, 20)])
