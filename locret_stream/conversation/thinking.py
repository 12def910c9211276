"""Whether, and how hard, the model is to think: as options of the chat template, as far as it has any."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

SWITCHES = {"enable_thinking": True, "thinking": True, "reasoning": True, "skip_thinking": False}
"""Names that templates have for the switch, and whether it is on where the model thinks."""
EFFORT, NONE = "reasoning_effort", "none"


def options_for(options: Mapping[str, Any], think: bool | str | None, known: Collection[str], field: str = EFFORT
                ) -> tuple[dict[str, Any], list[str]]:
    """The options of a template, and the names of what was asked that it has none for.

    Args:
        options: by name. think: whether to think, or how hard ("low", "high", ...; "none": not at all); None: as usual.
        known: names of the options that the template has. field: what the caller calls `think`.
    """
    found = {name: value for name, value in options.items() if name in known}
    unknown = [name for name in options if name not in known]
    if think is None:
        return found, unknown
    thinks = think != NONE if isinstance(think, str) else think
    wanted: dict[str, Any] = {name: on == thinks for name, on in SWITCHES.items() if name in known}
    if isinstance(think, str) and think != NONE and EFFORT in known:
        wanted[EFFORT] = think
    return {**wanted, **found}, unknown if wanted else [*unknown, field]
