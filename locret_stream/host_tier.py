"""Exact units in the host's memory, beside codes on the device: the knobs. Knows no tensors."""

from __future__ import annotations

from typing import Any

import msgspec

from locret_stream.errors import ConfigError

READS = ("exact", "codes")


class HostTier(msgspec.Struct, frozen=True, kw_only=True):
    """How exact units in the host's memory serve a memory whose units are codes (SpeCache, arXiv:2503.16163).

    A token that is decoded attends to codes, and in each layer and KV head to a few exact units in place of their
    codes: those that the guess at it, made one step before, attended to most. These are fetched from the host.

    Args:
        units: exact units of each layer and KV head on the device that are fetched for a token, k. 0 fetches none.
        residual: of the last committed units, how many stay exactly on the device.
        speculate: whether a step decodes a second token, the guess at the next one, which chooses the units that are
            fetched for it. If not, the token before chooses them. Models with a recurrent state have no second token.
        prefill: what chunks and prompts attend to: "exact" units from the host, as in the paper, so that what is
            committed is what a memory of exact units commits; or "codes", which fetches nothing.

    Raises:
        ConfigError: a value out of range.
    """

    units: int = 64
    residual: int = 64
    speculate: bool = True
    prefill: str = "exact"

    def __post_init__(self) -> None:
        for name in ("units", "residual"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"exact: {name} is {value!r}; expected a whole number of units, at least 0")
        if not isinstance(self.speculate, bool):
            raise ConfigError(f"exact: speculate is {self.speculate!r}; expected True or False")
        if self.prefill not in READS:
            raise ConfigError(f"exact: prefill is {self.prefill!r}; expected 'exact' or 'codes'")

    @property
    def rows(self) -> int:
        """Tokens that a step decodes for each context."""
        return 2 if self.speculate and self.units else 1


def host_tier(value: Any) -> HostTier | None:
    """What a user may give for it: None or "none", "host", a HostTier, or its settings by name, as JSON has them.

    Raises:
        ConfigError: none of these.
    """
    if value is None or value == "none" or isinstance(value, HostTier):
        return None if value == "none" else value
    if value == "host":
        return HostTier()
    if isinstance(value, dict) and set(value) <= set(HostTier.__struct_fields__):
        return HostTier(**value)
    raise ConfigError(f"exact is {value!r}; expected None, 'host' (exact units in the host's memory, beside codes on "
                      "the device), or HostTier(units=...)")
