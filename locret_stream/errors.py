"""Every error this library raises on purpose, in one tree. Knows nothing else.

LocretError
├── ConfigError              a knob or a combination of knobs cannot work        (also a ValueError)
│   ├── UnknownPolicy        no policy bears that name
│   └── WindowExceeded       budget + chunk_size does not fit the model's window
├── InputError               what was fed or asked cannot be read                (also a ValueError)
│   ├── EmptySource          a stream that ended without giving anything
│   ├── InvalidText          not text: lone surrogates, undecodable bytes
│   ├── InvalidTokens        not token ids of this model
│   └── SourceError          the source iterator raised; the cause is attached
├── ModelError
│   ├── UnsupportedModel     attaching would change what the model computes
│   └── HeadsMismatch        retaining heads that belong to another model
├── ContextError             the context cannot do that now; it stays as it was
│   ├── BudgetExceeded       a policy that never evicts, or a fixed reserve, is full
│   ├── ContextBusy          another feed or generation is running in it
│   ├── ContextClosed        used before opening or after closing
│   └── NoSlot               no slot came free before the deadline
└── SnapshotError            a stored session cannot be written or read; what is live stays as it was
    ├── SnapshotCorrupt      damaged, cut short, or never a snapshot
    ├── SnapshotMismatch     made by another model, tokenizer, policy, budget, ...
    ├── SnapshotNotFound     no session or snapshot of that name
    ├── SnapshotTooNew       written by a later format than this library reads
    ├── StaleOwner           another owner has saved this session meanwhile
    └── StoreError           the store itself failed: disk full, no access, a key that is missing

Messages say what was found, what was expected, and what to do. After any of them the context holds
exactly what it held before the call that failed, plus the tokens that were already accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LocretError(Exception):
    """Base of every error raised on purpose by locret_stream."""


class ConfigError(LocretError, ValueError):
    """A knob, or a combination of knobs, that cannot work. Nothing was allocated."""


class UnknownPolicy(ConfigError):
    """No policy bears that name; the message lists the known ones and the closest match."""

    def __init__(self, name: object, known: Iterable[str]):
        known = sorted(known)
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown policy {name!r}; expected one of: {', '.join(known)}.{hint}")
        self.name, self.known = name, known


class WindowExceeded(ConfigError):
    """budget + chunk_size of a layer is more than the positions the model was made for."""


class InputError(LocretError, ValueError):
    """Something fed or asked cannot be read. Tokens accepted before it stay accepted."""


class EmptySource(InputError):
    """The stream ended without giving a single token, and nothing was held; memory is as it was."""


class InvalidText(InputError):
    """Not text: a lone surrogate, or bytes that are not UTF-8."""


class InvalidTokens(InputError):
    """Not token ids of this model: a wrong type, or outside [0, vocabulary)."""


class SourceError(InputError):
    """The source iterator raised; what it gave before was accepted. `__cause__` is its own error."""


class ModelError(LocretError):
    """The model, or something trained for it, cannot be used."""


class UnsupportedModel(ModelError):
    """Attaching would change what the model computes, so it is refused; the model is untouched."""


class HeadsMismatch(ModelError):
    """Retaining heads that do not fit this model, by name, shape or fingerprint."""


class ContextError(LocretError):
    """The context cannot do that now. It stays as it was."""


class BudgetExceeded(ContextError):
    """The next token does not fit: the policy never evicts, or a preallocated reserve is full."""


class ContextBusy(ContextError):
    """Another feed or generation is running in this context."""


class ContextClosed(ContextError):
    """Used before `async with`, after `aclose()`, after the runtime was closed, or in a fork of its process."""


class NoSlot(ContextError):
    """Every slot is taken and none came free before the deadline."""


class SnapshotError(LocretError):
    """A stored session cannot be written or read. The live context, and what was stored before, stay as they were."""


class SnapshotCorrupt(SnapshotError):
    """Damaged, cut short, or never a snapshot. Nothing of it was used."""


class SnapshotMismatch(SnapshotError):
    """A snapshot of something else: `field` names what differs, with the values `found` and `expected`."""

    def __init__(self, message: str, *, field: str, found: str, expected: str):
        super().__init__(message)
        self.field, self.found, self.expected = field, found, expected


class SnapshotNotFound(SnapshotError):
    """The store has no session, or no snapshot of it, by that name."""


class SnapshotTooNew(SnapshotError):
    """Written by a later format than this library reads."""


class StaleOwner(SnapshotError):
    """Another owner has saved this session since it was opened here. Nothing was written; what is live is intact."""


class StoreError(SnapshotError):
    """The store failed. What was acknowledged before is intact; what failed was not acknowledged."""
