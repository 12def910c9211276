"""Writes the hostile files beside it: each lies in one way, and its checksums hold where the lie allows.

    python -m tests.snapshot.hostile.make_hostile

They are committed so that a later reader meets the very bytes that an earlier one refused; `test_hostile_headers`
checks what the refusal of each says.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from locret_stream.snapshot.format import LogPart, Manifest, Page
from tests.snapshot.forge import SOUND, build, entry, rebuilt, resaved, safetensors

FOLDER = Path(__file__).parent
KINDS = {"manifest": Manifest, "page": Page, "log": LogPart}
BOMB = 4096
PAGE = {"start": 0, "end": 1}


def body(kind: type, **lies: Any) -> bytes:
    """The sound container of a kind with fields of its body changed."""
    return rebuilt(kind, lambda body, _: body.update(lies))


def section(kind: type, name: str, **lies: torch.Tensor | None) -> bytes:
    """The sound container of a kind with tensors of one section changed, added or (None) left out."""
    return rebuilt(kind, lambda _, sections: sections.update({name: resaved(sections[name], **lies)}))


def one_section(entries: Any, data: bytes = b"", **more: Any) -> bytes:
    """A page whose only section has that tensor header and those bytes."""
    return build(2, PAGE, [("units", safetensors(entries, data, **more))])


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# kind-name: how it is made, and what its refusal says
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "page-empty": (lambda: b"", "0 bytes; expected at least 48"),
    "page-pickle": (lambda: pickle.dumps({"keys": [1.0]}, 2) + bytes(64), "not a snapshot file"),
    "page-cut-short": (lambda: SOUND[Page]()[:-64], "it says"),
    "page-appended": (lambda: SOUND[Page]() + bytes(64), "it says"),
    "page-of-2-to-the-60-bytes": (lambda: build(2, PAGE, size=2**60), "it says 1152921504606846976 bytes"),
    "page-header-of-4-gib": (lambda: build(2, PAGE, length=2**32 - 1), "header of 4294967295"),
    "page-section-of-2-to-the-53": (lambda: build(2, PAGE, entries=[["units", 2**53, "0" * 32]]), "not lie inside"),
    "page-section-of-2-to-the-60": (lambda: build(2, PAGE, entries=[["units", 2**60, "0" * 32]]), "not one of this"),
    "page-two-sections-of-a-name": (lambda: build(2, PAGE, [("units", safetensors({}))] * 2), "'units' does not lie"),
    "page-filled-gap": (lambda: rebuilt(Page, gap=b"\1"), "not zero"),
    "page-unknown-field": (lambda: body(Page, later=1), "unknown field `later`"),
    "page-bomb-msgpack": (lambda: build(2, None, header=b"\x91" * BOMB), "not one of this format"),
    "page-bomb-array-of-4-gi": (lambda: build(2, None, header=b"\xdd\xff\xff\xff\xff"), "not one of this format"),
    "page-bomb-json": (lambda: one_section(b'{"a":{"shape":' + b"[" * BOMB), "not a tensor header"),
    "page-tensor-header-of-2-to-the-60": (lambda: one_section({}, length=2**60), "header of 1152921504606846976"),
    "page-tensors-overlap": (lambda: one_section({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, bytes(6)),
                             "from byte 4 on"),
    "page-tensors-apart": (lambda: one_section({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, bytes(5)),
                           "from byte 2 on"),
    "page-tensor-past-the-end": (lambda: one_section({"a": entry("U8", [2**53], 0, 2**53)}), "of just its size"),
    "page-tensor-huge-beside-zero": (lambda: one_section({"a": entry("F32", [0, 2**53, 2**53], 0, 0)}),
                                     "of just its size"),
    "page-tensor-askew": (lambda: one_section({"a": entry("U8", [1], 0, 1), "b": entry("F64", [1], 1, 9)}, bytes(9)),
                          "tensor 'b'"),
    "page-negative-counts": (lambda: section(Page, "index", counts=i32(3, 4, 7, -2).reshape(2, 2)), "no counts"),
    "page-counts-of-2-gi": (lambda: section(Page, "index", counts=torch.full((2, 2), 2**31 - 1, dtype=torch.int32)),
                            "tensor '0.positions'"),
    "page-positions-descend": (lambda: section(Page, "index", **{"0.positions": i32(0, 4, 2, 0, 2, 4, 6)}),
                               "not ascending"),
    "page-positions-twice": (lambda: section(Page, "index", **{"0.positions": i32(0, 2, 2, 0, 2, 4, 6)}),
                             "not ascending"),
    "page-position-before-it": (lambda: section(Page, "index", **{"0.positions": i32(-1, 2, 4, 0, 2, 4, 6)}),
                                "not ascending inside"),
    "page-position-behind-it": (lambda: section(Page, "index", **{"0.positions": i32(0, 2, 4, 0, 2, 4, 20)}),
                                "not ascending inside"),
    "page-keys-of-another-dtype": (lambda: section(Page, "units", **{"0.keys": torch.zeros(7, 2, dtype=torch.float16)}),
                                   "tensor '0.keys'"),
    "manifest-version-3": (lambda: rebuilt(Manifest, version=3), "format version 3"),
    "manifest-pages-of-2-to-the-53-units": (
        lambda: body(Manifest, pages=[["c" * 32, 0, 10, 99, 2**53, 2**53], ["d" * 32, 10, 30, 99, 12, 8]]),
        "page 1 has 9 living units; expected 8"),
    "manifest-page-name-is-a-path": (lambda: body(Manifest, pages=[["../../../../../../etc/passwd", 0, 9, 9, 1, 1]]),
                                     "not one of this format"),
    "manifest-created-never": (lambda: body(Manifest, created=float("nan")), "created"),
    "manifest-mask-behind-the-end": (lambda: section(Manifest, "masks", **{"1": torch.tensor([183, 209]).byte()}),
                                     "behind its end"),
    "manifest-mask-of-no-page": (lambda: section(Manifest, "masks", **{"2": torch.tensor([183, 208]).byte()}),
                                 "a mask of page '2'"),
    "log-fewer-ids": (lambda: body(LogPart, end=12), "tensor 'ids'"),
    "log-of-2-to-the-53-ids": (lambda: body(LogPart, start=1, end=2**53), "tensor 'ids'"),
    "log-backwards": (lambda: body(LogPart, start=11, end=4), "ids 11 to 4"),
    "log-held-is-one-number": (lambda: section(LogPart, "ids", held=torch.tensor(7, dtype=torch.uint8)),
                               "tensor 'held'"),
    "log-behind-nothing": (lambda: body(LogPart, before=""), "behind part none"),
}


def main() -> None:
    for name, (make, _) in HOSTILE.items():
        (FOLDER / f"{name}.bin").write_bytes(make())


if __name__ == "__main__":
    main()
