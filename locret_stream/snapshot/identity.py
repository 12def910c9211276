"""What a snapshot was made with, by content. Knows digests; knows nothing of files, models or contexts.

A snapshot can be used only with everything that its numbers were computed with. Shapes and names do not distinguish a
model from a fine-tuned version of it, so every tensor is hashed whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import torch
import xxhash
from msgspec import Meta, Struct
from torch import Tensor

from locret_stream.errors import SnapshotMismatch

AS_CODES = ", saved as codes"  # in the `dtype` of an identity, where exact units in the host's memory are saved so
Text = Annotated[str, Meta(max_length=65_536)]


class Identity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that must be the same for a snapshot to be resumed, compared field by field in this order.

    All of it is of settings: nothing that is rendered or timed, nothing that depends on an order, the locale, or what a
    library adds to a definition. Earlier libraries wrote other values for the same settings (`Earlier`).

    Args:
        weights: digest of all tensors of the model with their names, loaded adapters included.
        architecture: the model's config, as `settings_text` writes it: layers, RoPE, attention.
        dtype: of K and V, and in how many bits they are stored where that is not their own.
        tokenizer: digest of the tokenizer's definition.
        template: digest of what the chat frame is made by: the template's source, the acknowledgement, end markers.
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


@dataclass(frozen=True)
class Earlier:
    """What earlier libraries wrote in one field for the same settings.

    Args:
        same: whether a value is such a one, given when the snapshot was saved, in seconds since 1970. It may take two
            seconds, and is asked only where values differ.
        hint: what to say of a value that is none; "" for nothing.
    """

    same: Callable[[str, float], bool]
    hint: str = ""


@dataclass(frozen=True)
class Expected:
    """What a snapshot must have been made with: an identity, and by field what counts as the same."""

    identity: Identity
    earlier: Mapping[str, Earlier] = field(default_factory=dict)

    def is_same(self, name: str, found: str, saved: float = 0.0) -> bool:
        """Whether a field's value in a snapshot that was saved then is that of the same settings."""
        wanted = getattr(self.identity, name)
        if found == wanted or (name in _AS_SETTINGS and first_difference(found, wanted) is None):
            return True
        return name in self.earlier and self.earlier[name].same(found, saved)


_AS_SETTINGS = ("architecture",)
_SCORED = ("heads", "policy")  # which together say what stays


def expected_of(identity: Identity | Expected) -> Expected:
    """The same with nothing earlier, of an identity alone."""
    return identity if isinstance(identity, Expected) else Expected(identity)


def expect_same(found: Identity, expected: Identity | Expected, what: str, saved: float = 0.0) -> None:
    """Raises SnapshotMismatch, which names the first field that differs: in `found` of the snapshot `what`, which was
    saved then, and in `expected` of the runtime."""
    expected = expected_of(expected)
    for name in Identity.__struct_fields__:
        wanted, stored = getattr(expected.identity, name), getattr(found, name)
        if wanted == stored or expected.is_same(name, stored, saved):
            continue
        differing = first_difference(stored, wanted) if name in _AS_SETTINGS else None
        part, there, here = differing or ("", stored, wanted)
        if name in _AS_SETTINGS and not part:  # one is of an earlier library, of which only the digest is known
            there, here = (text if len(text) <= 32 else f"digest {digest_text(text)}" for text in (there, here))
        hint = expected.earlier[name].hint if name in expected.earlier else ""
        made_with = "what it was made with" if name not in _SCORED else (
            f"policy={found.policy!r} (--policy {found.policy}) and {'those' if found.heads else 'no'} heads")
        raise SnapshotMismatch(f"{what} was made with other {name}{part and f' ({part})'}: found {there or 'none'}, "
                               f"expected {here or 'none'}{hint and f' ({hint})'}; open it with {made_with}, or under "
                               "a new name", field=name, found=stored, expected=wanted)


def settings_text(given: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Settings as JSON, so that another version of a library, which knows some that this one does not, can compare
    them (`first_difference`).

    Args:
        given: all, by name; dicts in it as names with dots. usual: what they are where nobody sets them.
    """
    given, usual = _flat(given), _flat(usual)
    groups = {kind: {name: value for name, value in given.items() if (usual.get(name) == value) is (kind == "usual")}
              for kind in ("given", "usual")}
    text = msgspec.json.encode(groups, order="sorted").decode()
    return text if len(text) <= _MOST else digest_text(text)


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Each value as JSON, long ones as a digest."""
    flat = dict[str, str]()
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{before}{name}.")
        else:
            text = json.dumps(value, sort_keys=True, default=str)
            flat[f"{before}{name}"] = text if len(text) <= _LONGEST else f"digest {digest_text(text)}"
    return flat


_LONGEST, _MOST = 80, 32_768  # characters of a value, and of all settings, that are stored as they are
_GROUPS = msgspec.json.Decoder(dict[Literal["given", "usual"], dict[str, str]])


def first_difference(found: str, expected: str) -> tuple[str, str, str] | None:
    """(name, there, here) of the first setting that differs between two texts of `settings_text`; None if none does. A
    setting that only one of them knows is the same if it is as usual there."""
    try:
        there, here = _GROUPS.decode(found), _GROUPS.decode(expected)
    except msgspec.MsgspecError:
        return None if found == expected else ("", found, expected)
    every = [{name: value for group in groups.values() for name, value in group.items()} for groups in (there, here)]
    for name in sorted(every[0].keys() | every[1].keys()):
        one, other = every[0].get(name), every[1].get(name)
        known = one is not None and other is not None
        usual = name in {**there.get("usual", {}), **here.get("usual", {})}
        if one != other and (known or not usual):
            return name, one or "", other or ""
    return None


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
