"""Exact units in the host's memory, beside codes on the device: the knobs. Knows no tensors."""

from __future__ import annotations

from typing import Any

import msgspec

from locret_stream.errors import ConfigError

READS = ("exact", "codes")
CHOICES = ("query", "guess", "last")


class HostTier(msgspec.Struct, frozen=True, kw_only=True):
    """How exact units in the host's memory serve a memory whose units are codes (SpeCache, arXiv:2503.16163).

    A token that is decoded attends to codes, and in each layer and KV head to a few exact units in place of their
    codes, which are fetched from the host.

    Args:
        units: exact units of each layer and KV head that are fetched for a token, k. 0 fetches none.
        residual: of the last committed units, how many stay exactly on the device.
        chosen_by: which token decides what is fetched, by what it attends to most. "query": the token itself, in the
            same layer; it chooses best, and waits for the copy (the paper's fetching without speculation, Table 4).
            "guess": a guess at it, decoded one step before, so that the copy could hide behind that step (the paper's
            own way); not for models with a recurrent state. "last": the token before it.
        prefill: what chunks and prompts attend to: "exact" units from the host, as in the paper, so that what is
            committed is what a memory of exact units commits; or "codes", which fetches nothing.
        saves: what snapshots have. "exact": exact units, of which codes are made again. "codes": codes, and exactly
            only the sinks and the residual units, in a fraction of the bytes; after a restore or a swap the host has
            of the others what their codes say, and fetching these gains nothing (`Memory.rounded` says of which
            tokens). It needs `prefill="codes"`, and the residual units always stay: so a context that was restored
            commits what one that stayed open does.

    Raises:
        ConfigError: a value out of range, or `saves="codes"` with another `prefill`.
    """

    units: int = 256
    residual: int = 64
    chosen_by: str = "query"
    prefill: str = "exact"
    saves: str = "exact"

    def __post_init__(self) -> None:
        for name in ("units", "residual"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"exact: {name} is {value!r}; expected a whole number of units, at least 0")
        for name, values in (("chosen_by", CHOICES), ("prefill", READS), ("saves", READS)):
            if (value := getattr(self, name)) not in values:
                raise ConfigError(f"exact: {name} is {value!r}; expected {' or '.join(map(repr, values))}")
        if self.saves == "codes" != self.prefill:
            raise ConfigError("exact: saves is 'codes' and prefill is 'exact', so that what a restored context commits "
                              "would be of rounded units, and of no others if it had stayed open; expected "
                              "prefill='codes' beside it, or saves='exact'")

    @property
    def rows(self) -> int:
        """Tokens that a step decodes for each context."""
        return 2 if self.chosen_by == "guess" and self.units else 1

    @property
    def hot(self) -> int:
        """Exact units of each layer and KV head that wait on the device for the next token."""
        return 0 if self.chosen_by == "query" else self.units


def host_tier(value: Any) -> HostTier | None:
    """What a user may give for it: None or "none", "host", a HostTier, or its settings by name, as JSON has them.

    Raises:
        ConfigError: none of these.
    """
    if value is None or value == "none" or isinstance(value, HostTier):
        return None if value == "none" else value
    if value == "host":
        return HostTier()
    if isinstance(value, dict):
        if unknown := sorted(map(str, set(value) - set(HostTier.__struct_fields__))):
            raise ConfigError(f"exact has no setting {', '.join(map(repr, unknown))}; expected of "
                              f"{', '.join(HostTier.__struct_fields__)}")
        return HostTier(**value)
    raise ConfigError(f"exact is {value!r}; expected None, 'host' (exact units in the host's memory, beside codes on "
                      "the device), or HostTier(units=...)")
