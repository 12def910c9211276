"""What is compared: a policy with its knobs, its heads and how its budget is divided; and what tables call it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import PurePath

import msgspec

from locret_stream.evaluation.cells import Cell, Origin
from locret_stream.evaluation.probes import Oracle, PerHeadOracle

FULL = "full"
ORACLES = (Oracle.name, PerHeadOracle.name)
FIRST, LAST = (FULL, *ORACLES), ("random", "streaming_llm")  # what frames every comparison


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """All that a cell is run with beside its task, length and budget. heads: their digest. everything: no budget."""

    policy: str
    knobs: tuple[tuple[str, float | int | str | bool], ...] = ()
    allocation: str | tuple[float, ...] = ""
    heads: str = ""
    sinks: int = 0
    stabilizers: int = 0
    chunk_size: int = 0
    focus: bool = False
    everything: bool = False


def variant_of(cell: Cell, origin: Origin) -> Variant:
    """What does not matter is left out: without a budget nothing is divided and nothing protected."""
    everything = cell.units is None
    divided = {} if everything else {"allocation": cell.allocation, "sinks": cell.sinks,
                                     "stabilizers": cell.stabilizers}
    return Variant(policy=cell.policy, knobs=tuple(sorted(cell.knobs.items())), heads=origin.heads,
                   chunk_size=cell.chunk_size, focus=cell.focus, everything=everything, **divided)


def labels(cells: Iterable[tuple[Cell, Origin]]) -> dict[Variant, str]:
    """The shortest names that tell all variants apart: the policy, and of the rest what differs within it."""
    kinds: dict[str, dict[Variant, str]] = defaultdict(dict)
    for cell, origin in cells:
        kinds[cell.policy].setdefault(variant_of(cell, origin), cell.heads)
    return {variant: label for folders in kinds.values() for variant, label in _within(folders).items()}


def _within(folders: dict[Variant, str]) -> dict[Variant, str]:
    """Names of the variants of one policy, given the folder of each one's heads."""
    heads = path_ends({variant.heads: folder for variant, folder in folders.items() if variant.heads})
    words: tuple[Callable[[Variant], str], ...] = (
        lambda v: " ".join(f"{name}={value}" for name, value in v.knobs),
        lambda v: v.allocation if isinstance(v.allocation, str) else ":".join(f"{share:g}" for share in v.allocation),
        lambda v: heads.get(v.heads, "no heads"),
        lambda v: "focus" if v.focus else "",
        lambda v: f"{v.sinks} sinks",
        lambda v: f"{v.stabilizers} stabilizers",
        lambda v: f"chunks of {v.chunk_size}",
    )
    for count in range(len(words) + 1):
        for chosen in itertools.combinations(words, count):
            found = {variant: ", ".join([variant.policy, *filter(None, (word(variant) for word in chosen)),
                                         *["everything"] * (variant.everything and variant.policy != FULL)])
                     for variant in folders}
            if len(set(found.values())) == len(found):
                return found
    raise AssertionError(f"variants that are told apart by nothing: {list(folders)}")


def path_ends(folders: dict[str, str], kind: str = "heads") -> dict[str, str]:
    """For each digest the shortest end of its path that no other one has, or else the digest's beginning."""
    found = {}
    for digest, folder in folders.items():
        parts = PurePath(folder).parts
        others = [PurePath(other).parts for key, other in folders.items() if key != digest]
        found[digest] = next(("/".join(parts[-n:]) for n in range(1, len(parts) + 1)
                              if all(other[-n:] != parts[-n:] for other in others)), f"{kind} {digest[:8]}")
    return found
