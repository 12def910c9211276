"""What is compared: a policy with its knobs, its heads and the division of its budget; and what tables call it."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import PurePath

import msgspec

from locret_stream.evaluation.cells import Cell, Origin, bits_in_words
from locret_stream.evaluation.oracles import Oracle, PerHeadOracle
from locret_stream.host_tier import HostTier

FULL = "full"
ORACLES = (Oracle.name, PerHeadOracle.name)
FIRST, LAST = (FULL, *ORACLES), ("random", "streaming_llm")  # the first and the last rows of every table


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """All that a cell is run with, its task, length and budget aside.

    Args:
        knobs: (name, value) of each, defaults included. heads: their digest.
        everything: there is no budget; then nothing is divided and nothing protected, and these fields are empty.
    """

    policy: str
    knobs: tuple[tuple[str, float | int | str | bool], ...] = ()
    allocation: str | tuple[float, ...] = ""
    heads: str = ""
    sinks: int = 0
    stabilizers: int = 0
    chunk_size: int = 0
    focus: bool = False
    store_bits: int = 16
    exact: HostTier | None = None
    by_head: bool = False
    everything: bool = False


def variant_of(cell: Cell, origin: Origin) -> Variant:
    """The variant that a cell is of; settings that have no effect on the cell are left empty."""
    knobs = msgspec.json.decode(origin.knobs) if origin.knobs else cell.knobs
    variant = Variant(policy=cell.policy, knobs=tuple(sorted(knobs.items())), heads=origin.heads,
                      chunk_size=cell.chunk_size, focus=cell.focus, everything=cell.units is None)
    if variant.everything:
        return variant
    return msgspec.structs.replace(variant, allocation=cell.allocation, sinks=cell.sinks, stabilizers=cell.stabilizers,
                                   store_bits=cell.store_bits, exact=cell.exact, by_head=cell.by_head)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What most variants of a report have in common: said once in its header, and of a variant only where it differs.
    """

    chunk_size: int
    sinks: int
    stabilizers: int
    allocation: str | tuple[float, ...]

    def words(self) -> tuple[str, str, str, str]:
        """In words: allocation, sinks, stabilizers, chunks."""
        shares = self.allocation if isinstance(self.allocation, str) else ":".join(
            f"{s:g}" if float(f"{s:g}") == s else repr(s) for s in self.allocation)
        return shares, f"{self.sinks} sinks", f"{self.stabilizers} stabilizers", f"chunks of {self.chunk_size}"


def settings_of(cells: Iterable[tuple[Cell, Origin]]) -> Settings | None:
    """The commonest value of each setting, the first one given of those that are equally common; None where no cell has
    a budget."""
    variants = [variant for variant in dict.fromkeys(itertools.starmap(variant_of, cells)) if not variant.everything]
    if not variants:
        return None
    return Settings(**{name: Counter(getattr(variant, name) for variant in variants).most_common(1)[0][0]
                       for name in Settings.__struct_fields__})


def labels(cells: Iterable[tuple[Cell, Origin]]) -> dict[Variant, str]:
    """Names that tell all variants apart: the policy, its knobs, the settings that differ from `settings_of`, and as
    few of the other words as that takes."""
    cells = list(cells)
    folders: defaultdict[str, dict[Variant, str]] = defaultdict(dict)  # by policy: of each variant the folder of heads
    given: defaultdict[str, set[str]] = defaultdict(set)  # by policy: names of the knobs that were given
    for cell, origin in cells:
        folders[cell.policy].setdefault(variant_of(cell, origin), cell.heads)
        given[cell.policy].update(cell.knobs)
    usual = settings_of(cells)
    return {variant: label for policy, of_policy in folders.items()
            for variant, label in _labels_within(of_policy, usual, given[policy]).items()}


def _labels_within(folders: dict[Variant, str], usual: Settings | None, given: set[str]) -> dict[Variant, str]:
    """Labels of the variants of one policy, given the folder of each one's heads. Knobs are part of a label if they
    were `given` for any variant, or are not the same in all of them (as when a default changed)."""
    heads = path_ends({variant.heads: folder for variant, folder in folders.items() if variant.heads})
    alike = set.intersection(*(set(variant.knobs) for variant in folders))
    words = {variant: (" ".join(f"{name}={value}" for name, value in variant.knobs
                                if name in given or (name, value) not in alike),
                       *_settings_in(variant), heads.get(variant.heads, "no heads"), "focus" if variant.focus else "",
                       bits_in_words(variant.store_bits, variant.exact) if variant.store_bits != 16 else "",
                       "by head" if variant.by_head else "")
             for variant in folders}
    unusual = {0, 7, 8} | {at for at, word in enumerate(usual.words() if usual else (), 1)
                     if any(own[at] != word for variant, own in words.items() if not variant.everything)}
    others = [at for at in (1, 5, 6, 2, 3, 4) if at not in unusual]
    for count in range(len(others) + 1):
        for more in itertools.combinations(others, count):
            labelled = {variant: ", ".join([variant.policy, *(own[at] for at in sorted(unusual | {*more}) if own[at]),
                                            *["everything"] * (variant.everything and variant.policy != FULL)])
                        for variant, own in words.items()}
            if len(set(labelled.values())) == len(labelled):
                return labelled
    raise AssertionError(f"no words tell these variants apart: {list(folders)}")


def _settings_in(variant: Variant) -> tuple[str, str, str, str]:
    shares, sinks, stabilizers, chunks = Settings(
        chunk_size=variant.chunk_size, sinks=variant.sinks, stabilizers=variant.stabilizers,
        allocation=variant.allocation).words()
    return ("", "", "", chunks) if variant.everything else (shares, sinks, stabilizers, chunks)


def path_ends(paths: dict[str, str], kind: str = "heads") -> dict[str, str]:
    """For each digest the shortest end of its path that no other path has, or else the beginning of the digest."""
    ends = {}
    for digest, path in paths.items():
        parts = PurePath(path).parts
        others = [PurePath(other).parts for key, other in paths.items() if key != digest]
        ends[digest] = next(("/".join(parts[-n:]) for n in range(1, len(parts) + 1)
                             if all(other[-n:] != parts[-n:] for other in others)), f"{kind} {digest[:8]}")
    return ends
