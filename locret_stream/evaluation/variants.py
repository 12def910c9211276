"""What is compared: a policy with its knobs, its heads and how its budget is divided; and what tables call it."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import PurePath

import msgspec

from locret_stream.evaluation.cells import Cell, Origin
from locret_stream.evaluation.oracles import Oracle, PerHeadOracle

FULL = "full"
ORACLES = (Oracle.name, PerHeadOracle.name)
FIRST, LAST = (FULL, *ORACLES), ("random", "streaming_llm")  # what frames every comparison


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """All that a cell is run with beside its task, length and budget. knobs: the defaults too. heads: their digest.
    everything: no budget."""

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
    knobs = msgspec.json.decode(origin.knobs) if origin.knobs else cell.knobs
    return Variant(policy=cell.policy, knobs=tuple(sorted(knobs.items())), heads=origin.heads,
                   chunk_size=cell.chunk_size, focus=cell.focus, everything=everything, **divided)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What most variants of a report have in common: said once, and of a variant only where it differs."""

    chunk_size: int
    sinks: int
    stabilizers: int
    allocation: str | tuple[float, ...]

    def words(self) -> tuple[str, str, str, str]:
        """In words: how the budget is divided, sinks, stabilizers, chunks."""
        shares = self.allocation if isinstance(self.allocation, str) else ":".join(
            f"{s:g}" if float(f"{s:g}") == s else repr(s) for s in self.allocation)
        return shares, f"{self.sinks} sinks", f"{self.stabilizers} stabilizers", f"chunks of {self.chunk_size}"


def settings_of(cells: Iterable[tuple[Cell, Origin]]) -> Settings | None:
    """The commonest value of each, of equally common ones the first that was given; None where nothing has a budget."""
    variants = [variant for variant in dict.fromkeys(variant_of(*one) for one in cells) if not variant.everything]
    if not variants:
        return None
    return Settings(**{name: Counter(getattr(variant, name) for variant in variants).most_common(1)[0][0]
                       for name in Settings.__struct_fields__})


def labels(cells: Iterable[tuple[Cell, Origin]]) -> dict[Variant, str]:
    """Names that tell all variants apart: the policy, its knobs, what is not as in `settings_of`, and of the rest the
    fewest words that are needed."""
    cells, kinds, given = list(cells), defaultdict[str, dict[Variant, str]](dict), defaultdict[str, set[str]](set)
    for cell, origin in cells:
        kinds[cell.policy].setdefault(variant_of(cell, origin), cell.heads)
        given[cell.policy].update(cell.knobs)
    usual = settings_of(cells)
    return {variant: label for policy, folders in kinds.items()
            for variant, label in _within(folders, usual, given[policy]).items()}


def _within(folders: dict[Variant, str], usual: Settings | None, given: set[str]) -> dict[Variant, str]:
    """Names of the variants of one policy, given the folder of each one's heads. Knobs are said that were given for
    any of them, or that are not the same in all (as when a default changed)."""
    heads = path_ends({variant.heads: folder for variant, folder in folders.items() if variant.heads})
    alike = set.intersection(*(set(variant.knobs) for variant in folders))
    words = {variant: (" ".join(f"{name}={value}" for name, value in variant.knobs
                                if name in given or (name, value) not in alike),
                       *_settings_in(variant), heads.get(variant.heads, "no heads"), "focus" if variant.focus else "")
             for variant in folders}
    odd = {0} | {at for at, word in enumerate(usual.words() if usual else (), 1)
                 if any(own[at] != word for variant, own in words.items() if not variant.everything)}
    rest = [at for at in (1, 5, 6, 2, 3, 4) if at not in odd]
    for count in range(len(rest) + 1):
        for more in itertools.combinations(rest, count):
            found = {variant: ", ".join([variant.policy, *(own[at] for at in sorted(odd | {*more}) if own[at]),
                                         *["everything"] * (variant.everything and variant.policy != FULL)])
                     for variant, own in words.items()}
            if len(set(found.values())) == len(found):
                return found
    raise AssertionError(f"variants that are told apart by nothing: {list(folders)}")


def _settings_in(variant: Variant) -> tuple[str, str, str, str]:
    *divided, chunks = Settings(chunk_size=variant.chunk_size, sinks=variant.sinks, stabilizers=variant.stabilizers,
                                allocation=variant.allocation).words()
    return ("", "", "", chunks) if variant.everything else (*divided, chunks)


def path_ends(folders: dict[str, str], kind: str = "heads") -> dict[str, str]:
    """For each digest the shortest end of its path that no other one has, or else the digest's beginning."""
    found = {}
    for digest, folder in folders.items():
        parts = PurePath(folder).parts
        others = [PurePath(other).parts for key, other in folders.items() if key != digest]
        found[digest] = next(("/".join(parts[-n:]) for n in range(1, len(parts) + 1)
                              if all(other[-n:] != parts[-n:] for other in others)), f"{kind} {digest[:8]}")
    return found
