"""The settings that a stored session was read with, as far as its snapshot says them, for another runtime."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from locret_stream.config import Budget
from locret_stream.errors import ConfigError
from locret_stream.host_tier import HostTier
from locret_stream.snapshot import Identity

_BUDGETS = re.compile(r"(\[[\d, ]+\]), sinks and stabilizers \[([(), \d]+)\](, shared by heads)?")
_BITS = re.compile(r"\w+, stored in (\d+) and (\d+) bits"
                   r"(, exact in the host's memory(?:, codes are read but of (\d{1,5})(?!\d)(, saved as codes)?)?)?")


def settings_of(identity: Identity) -> dict[str, Any]:
    """Options of `Runtime(...)`: policy, knobs, budget, chunk_size, store_bits, exact. What the snapshot says in a way
    that cannot be read, or that no runtime could have, is left out: opening the session then says what differs.

    The budget gives each layer the units that it had. Where layers have sliding windows the sum of these need not be a
    multiple of the layers; then every layer was given as many as the largest.
    """
    found: dict[str, Any] = {"policy": identity.policy}
    try:
        found["knobs"] = msgspec.json.decode(identity.knobs, type=dict[str, float | int | str])
        found["chunk_size"] = msgspec.json.decode(identity.chunk_size, type=int)
        if (said := _BUDGETS.fullmatch(identity.budgets)) is not None:
            units = msgspec.json.decode(said[1], type=list[int])
            pairs = [(int(first), int(last)) for first, last in re.findall(r"\((\d+), (\d+)\)", said[2])]
            # Layers with a sliding window protect none; methods that keep more of the last units at least do that here.
            protected = [pair for pair in pairs if pair != (0, 0)] or [(0, 0)]
            shares = tuple(map(float, units)) if sum(units) % len(units) == 0 else "uniform"
            found["budget"] = Budget(units=sum(units) // len(units) if shares != "uniform" else max(units),
                                     sinks=protected[0][0],
                                     stabilizers=min(last for _, last in protected), allocation=shares,
                                     by_head=said[3] is not None)
        if (said := _BITS.match(identity.dtype)) is not None:
            found["store_bits"] = int(said[1]), int(said[2])
            if said[3]:
                found["exact"] = HostTier() if said[4] is None else HostTier(
                    prefill="codes", residual=int(said[4]), saves="codes" if said[5] else "exact")
    except (msgspec.DecodeError, ValueError, ArithmeticError, ConfigError):  # a snapshot is untrusted input
        pass
    return found
