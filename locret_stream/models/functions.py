"""Functions of transformers, with others in place of what they call. Knows no model."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def calls(function: Any, name: str) -> bool:
    """Whether a function, or the one that it wraps, reads that global name."""
    inner = getattr(function, "__wrapped__", None)
    return calls(inner, name) if inner is not None else (
        isinstance(function, types.FunctionType) and name in function.__code__.co_names)


def globals_of(function: Any) -> dict[str, Any]:
    """The globals of a function, or of the one that it wraps."""
    inner = getattr(function, "__wrapped__", None)
    return function.__globals__ if inner is None else globals_of(inner)


def with_globals(function: Any, **changed: Any) -> Callable[..., Any]:
    """A copy of a function in which these globals are others, and of what wraps it. The module that it is of, which
    other models use, stays as it is."""
    inner, closure = getattr(function, "__wrapped__", None), function.__closure__
    given = {**function.__globals__, **(changed if inner is None else {})}
    if inner is not None:
        made = with_globals(inner, **changed)
        closure = tuple(types.CellType(made) if cell.cell_contents is inner else cell for cell in closure or ())
    copied = types.FunctionType(function.__code__, given, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
