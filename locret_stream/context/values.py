"""What a context reports of its memory and answers with, and how the options of one generation are read."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import msgspec

from locret_stream.config import Sampling
from locret_stream.context.session_index import Recalled
from locret_stream.errors import ConfigError

FinishReason = Literal["eos", "stop", "length", "closed", "failed"]


class Answer(str):
    """The reply of `ask`, a `str` that also says how it came. `str(answer)` is the text alone, for encoders that take
    no other type (msgspec).

    Attributes:
        finish_reason: as of `Generation`. "length": `max_new_tokens` cut it off, so that it may lack its end.
        recalled: the passages that were read again for it.
    """

    finish_reason: FinishReason
    recalled: tuple[Recalled, ...]

    def __new__(cls, text: str, finish_reason: FinishReason = "eos", recalled: tuple[Recalled, ...] = ()) -> Answer:
        made = super().__new__(cls, text)
        made.finish_reason, made.recalled = finish_reason, recalled
        return made


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a context keeps. Units are counted per KV head.

    Args:
        tokens: accepted since the beginning. pending: those of them that are not committed yet.
        buffered: token ids and characters that were pulled from a source and not accepted yet; the next feed takes
            them first.
        units: committed, per layer, those of the focus included.
        capacity: the most that committed and provisional units may take, per layer. peak: the most they ever took.
        bytes_resident: of the tensors in this context's slot; 0 while it is swapped out.
        bytes_full_cache: of K and V of all accepted tokens, which a cache that never evicts would need.
        focus: how many tokens the focus has that is in force.
        bytes_recall: of the index that recall keeps of all that was read, in a temporary file (of an encrypted session
            in memory). It grows with the stream, some 10 bytes a token, and does not shrink. 0 without recall, and
            after reopening until the first question.
        rounded: of the tokens before that position the exact units in the host's memory are those that a snapshot of
            codes says (`HostTier(saves="codes")`): fetching them brings nothing back. 0: all are exact, or there are
            none.
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
    bytes_recall: int = 0
    rounded: int = 0

    @property
    def held(self) -> int:
        """The former name of `buffered`; deprecated."""
        warnings.warn("Memory.held is called Memory.buffered now", DeprecationWarning, stacklevel=2)
        return self.buffered


def sampling_of(base: Sampling | None, options: dict[str, Any]) -> Sampling:
    """The settings of one generation: `base` with `options`, which are fields of Sampling; `stop` may be one string.
    Raises ConfigError for no such option, and for no such value."""
    if base is not None and not isinstance(base, Sampling):
        raise ConfigError(f"sampling is a {type(base).__name__}; expected a Sampling, or its fields as options")
    stop = options.get("stop", ())
    if isinstance(stop, (str, list)) or stop is None:
        options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    unknown = sorted(set(options) - set(Sampling.__struct_fields__))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; expected some of {', '.join(Sampling.__struct_fields__)}")
    return msgspec.structs.replace(base, **options) if base is not None else Sampling(**options)
