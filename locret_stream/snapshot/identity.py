"""What a snapshot was made with, by content. Knows digests; knows nothing of files, models or contexts.

A snapshot can be used only with everything that its numbers were computed with. Shapes and names do not distinguish a
model from a fine-tuned version of it, so every tensor is hashed whole.
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
    """Everything that must be the same for a snapshot to be resumed, compared field by field in this order.

    Args:
        weights: digest of all tensors of the model with their names, loaded adapters included.
        architecture: digest of the model's config: layers, RoPE, attention.
        dtype: of K and V, and in how many bits they are stored where that is not their own.
        tokenizer, template: digests of the tokenizer's definition and of what the chat template writes.
        heads: digest of the retaining heads, "" if there are none.
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
    """Raises SnapshotMismatch, which names the first field that differs: in `found` of the snapshot `what`, and in
    `expected` of the runtime."""
    for field in Identity.__struct_fields__:
        wanted, stored = getattr(expected, field), getattr(found, field)
        if wanted != stored:
            raise SnapshotMismatch(f"{what} was made with other {field}: found {stored or 'none'}, expected "
                                   f"{wanted or 'none'}; open it with what it was made with, or under a new name",
                                   field=field, found=stored, expected=wanted)


def digest_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """xxh3-128 of names, dtypes, shapes and every byte of the tensors, in whatever order they come."""
    return digest_text(*sorted(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{_digest_bytes(tensor)}"
                               for name, tensor in named))


def _digest_bytes(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)


def digest_text(*parts: str) -> str:
    """xxh3-128 of texts, each preceded by its length."""
    state = xxhash.xxh3_128()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def canonical(values: Mapping[str, Any]) -> str:
    """JSON with sorted keys: equal values give equal text."""
    return msgspec.json.encode(dict(values), order="sorted").decode()
