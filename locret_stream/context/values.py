"""What a context shows of itself, and how options of one generation are read."""

from __future__ import annotations

import warnings

import msgspec

from locret_stream.config import Sampling
from locret_stream.errors import ConfigError
from locret_stream.snapshot import Snapshot


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a context holds. Units are per KV head and layer.

    tokens: accepted since the beginning. pending: of these, not committed yet. buffered: token ids and characters that
    were pulled from a source and not accepted yet; the next feed takes them first. units: committed, per layer, those
    of the focus included. focus: tokens of the focus in force.
    capacity: the most that units and the tail may take, per layer. peak: the most they ever took.
    bytes_resident: of this context's slot, as its tensors are; 0 while it waits in the store. bytes_full_cache: K and
    V of all accepted tokens, what a cache that never evicts would need.
    """

    tokens: int
    pending: int
    buffered: int
    units: tuple[int, ...]
    capacity: tuple[int, ...]
    peak: tuple[int, ...]
    bytes_resident: int
    bytes_full_cache: int
    focus: int = 0

    @property
    def held(self) -> int:
        """The former name of `buffered`; deprecated."""
        warnings.warn("Memory.held is called Memory.buffered now", DeprecationWarning, stacklevel=2)
        return self.buffered


def sampling_of(base: Sampling | None, options: dict[str, object]) -> Sampling:
    """Settings of one generation; `stop` may be a single string."""
    if base is not None and not isinstance(base, Sampling):
        raise ConfigError(f"sampling is a {type(base).__name__}; expected a Sampling, or its fields as options")
    stop = options.get("stop", ())
    if isinstance(stop, (str, list)) or stop is None:
        options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    unknown = sorted(set(options) - set(Sampling.__struct_fields__))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; expected some of {', '.join(Sampling.__struct_fields__)}")
    return msgspec.structs.replace(base, **options) if base is not None else Sampling(**options)


def generation_of(found: object, name: str) -> int:
    """The number of a snapshot of `name`, given as such or as the snapshot itself; 0 is the beginning."""
    if isinstance(found, Snapshot) and found.name == name:
        found = found.generation
    if not isinstance(found, int) or isinstance(found, bool):
        raise ConfigError(f"rewind() was given {found!r}; expected the number of a snapshot of {name!r}, or what "
                          "snapshot() returned")
    return found
