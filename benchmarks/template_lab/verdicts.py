"""Verdicts: whether a behaviour was as promised, and if not, in which kind it failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

OK, NONE = "ok", "-"  # as promised; not asked of this template
KINDS = {
    "refused": "a request or call that any engine would answer was refused (4xx, ConfigError and its like)",
    "failed": "5xx, or another error",
    "reread": "more was read than what is new, of what was read before",
    "restated": "nothing was read again, and what the template writes around what is new takes more than 64 tokens",
    "thought": "a thought, or marks of one, in an answer",
    "wrong": "another answer, call, finish or text than said, or a text that the model was not shown",
    "differs": "rendered otherwise than apply_chat_template does",
}
Cells = dict[str, str]  # of one template: the verdict of each behaviour, OK, NONE or "kind: why"


class Failed(Exception):
    """A behaviour failed; `kind` of KINDS."""

    def __init__(self, kind: str, why: str):
        assert kind in KINDS, kind
        super().__init__(f"{kind}: {' '.join(why.split())[:400]}")


class NotAsked(Exception):
    """The template's models do no such thing."""


@contextmanager
def judged(cells: Cells, behaviour: str) -> Iterator[None]:
    """What happens inside is that behaviour. Nothing gets through but Ctrl-C."""
    from locret_stream.errors import LocretError
    assert behaviour not in cells, behaviour
    try:
        yield
        cells[behaviour] = OK
    except NotAsked:
        cells[behaviour] = NONE
    except Failed as failed:
        cells[behaviour] = str(failed)
    except LocretError as error:
        cells[behaviour] = str(Failed("refused", f"{type(error).__name__}: {error}"))
    except Exception as error:
        cells[behaviour] = str(Failed("failed", f"{type(error).__name__}: {error}"))


def kind_of(cell: str) -> str:
    return cell.partition(":")[0]


def asked(cells: Mapping[str, str]) -> dict[str, str]:
    return {behaviour: cell for behaviour, cell in cells.items() if cell != NONE}


def totals(table: Mapping[str, Cells]) -> dict[str, Any]:
    """Counts of the whole table, of each behaviour, and of each template that has failures."""
    def count(cells: Iterator[str]) -> dict[str, int]:
        return dict(Counter(map(kind_of, cells)))

    every = [cell for cells in table.values() for cell in asked(cells).values()]
    kinds = {OK: 0} | dict.fromkeys(KINDS, 0) | count(iter(every))
    behaviours = dict.fromkeys(behaviour for cells in table.values() for behaviour in cells)
    return {
        "templates": len(table), "behaviours": len(behaviours), "cells": len(every), **kinds,
        "percent": {kind: round(100 * number / max(len(every), 1), 2) for kind, number in kinds.items()},
        "by_behaviour": {behaviour: count(cells[behaviour] for cells in table.values() if asked(cells).get(behaviour))
                         for behaviour in behaviours},
        "by_template": {name: found for name, cells in table.items()
                        if set(found := count(iter(asked(cells).values()))) - {OK}}}


def as_expected(summed: Mapping[str, Any], most_refused: float = 2.0) -> bool:
    """Whether nothing failed but at most that percentage, which was refused."""
    return not any(summed[kind] for kind in KINDS if kind != "refused") and summed["percent"]["refused"] <= most_refused


def reasons(table: Mapping[str, Cells], shorten: Callable[[str], str]) -> list[tuple[str, int, list[str]]]:
    """Reasons of failures, the most frequent ones first: each with its number of cells and the templates."""
    found: dict[str, list[str]] = {}
    for name, cells in table.items():
        for behaviour, cell in asked(cells).items():
            if cell != OK:
                found.setdefault(f"{behaviour.partition('.')[0]} · {shorten(cell)}", []).append(name)
    return sorted(((why, len(names), [*dict.fromkeys(names)]) for why, names in found.items()),
                  key=lambda each: -each[1])
