"""What a snapshot belongs to, by content. Knows digests; knows nothing of files, models or contexts.

A snapshot means something only together with everything its numbers were computed by. Shapes and names do not tell a
model from its fine-tuned sibling, so every tensor is hashed, whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import torch
import xxhash
from msgspec import Meta, Struct
from torch import Tensor

from locret_stream.errors import SnapshotMismatch

Text = Annotated[str, Meta(max_length=65_536)]


class Identity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that must be the same for a snapshot to be resumed. Compared field by field, in this order.

    Args:
        weights: digest of every tensor of the model by name, adapters that are loaded into it included.
        architecture: digest of the model's config: layers, RoPE, attention.
        dtype: of K and V.
        tokenizer, template: digests of the tokenizer's definition and of what the chat template writes.
        heads: digest of the retaining heads, "" without.
        policy, knobs: its name, and its own settings as JSON.
        budgets: units per layer, sinks and stabilizers. chunk_size: the grid.
    """

    weights: Text
    architecture: Text
    dtype: Text
    tokenizer: Text
    template: Text
    heads: Text
    policy: Text
    knobs: Text
    budgets: Text
    chunk_size: Text


def expect_same(found: Identity, expected: Identity, what: str) -> None:
    """Refuse a snapshot of something else.

    Raises:
        SnapshotMismatch: naming the first field that differs, with both values.
    """
    for field in Identity.__struct_fields__:
        ours, theirs = getattr(expected, field), getattr(found, field)
        if ours != theirs:
            raise SnapshotMismatch(f"{what} was made with other {field}: found {theirs or 'none'}, expected "
                                   f"{ours or 'none'}; open it with what it was made with, or under a new name",
                                   field=field, found=theirs, expected=ours)


def digest_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """xxh3-128 over names, dtypes, shapes and every byte of the tensors; their order does not matter."""
    return digest_text(*sorted(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{_digest_bytes(tensor)}"
                               for name, tensor in named))


def _digest_bytes(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)


def digest_text(*parts: str) -> str:
    """xxh3-128 over texts, each with its length."""
    whole = xxhash.xxh3_128()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()


def canonical(values: Mapping[str, Any]) -> str:
    """JSON with sorted keys: equal values give equal text."""
    return msgspec.json.encode(dict(values), order="sorted").decode()
