"""Every error this library raises on purpose, in one tree. Knows nothing else.

LocretError
├── ConfigError              a knob or a combination of knobs cannot work        (also a ValueError)
│   ├── UnknownPolicy        no policy has that name
│   └── WindowExceeded       budget + chunk_size does not fit the model's window
├── InputError               what was fed or asked cannot be read                (also a ValueError)
│   ├── EmptySource          a stream ended without giving anything
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
│   └── NoSlot               no slot became free before the deadline
└── SnapshotError            a stored session cannot be written or read; the live context stays as it was
    ├── SnapshotCorrupt      damaged, cut short, or never a snapshot
    ├── SnapshotMismatch     made by another model, tokenizer, policy, budget, ...
    ├── SnapshotNotFound     no session or snapshot of that name
    ├── SnapshotTooNew       written in a later format than this library reads
    ├── StaleOwner           another owner has saved this session meanwhile
    ├── StateLost            what a call goes on from is held by no memory at hand
    └── StoreError           the store itself failed: disk full, no access, a missing key

Every message says what was found, what was expected, and what to do. After any of these errors the context is exactly
as it was before the call that failed, plus the tokens that were already accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LocretError(Exception):
    """The base of every error that locret_stream raises on purpose: catch it to catch them all."""


class ConfigError(LocretError, ValueError):
    """Raised, before anything is allocated, when a knob or several together cannot work: change what is named."""


class UnknownPolicy(ConfigError):
    """Raised when no policy has the name that was asked for: use one of the names that the message lists.

    Attributes:
        name: what was asked for. known: the names of all policies, sorted.
    """

    def __init__(self, name: object, known: Iterable[str]):
        known = sorted(known)
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown policy {name!r}; expected one of: {', '.join(known)}.{hint}")
        self.name, self.known = name, known


class WindowExceeded(ConfigError):
    """Raised when budget + chunk_size of a layer exceeds the positions the model was made for: lower one of them."""


class InputError(LocretError, ValueError):
    """Raised when what was fed or asked cannot be read: correct it and go on; tokens accepted before it stay."""


class EmptySource(InputError):
    """Raised when a stream ends without any token and none is buffered: see why; the memory is as it was."""


class InvalidText(InputError):
    """Raised when text holds a lone surrogate, or bytes are not UTF-8: decode the source with its real encoding."""


class InvalidTokens(InputError):
    """Raised when a token id has a wrong type or lies outside [0, vocabulary): encode with this model's tokenizer."""


class SourceError(InputError):
    """Raised when the source iterator raises: repair `__cause__`, and feed what comes behind the accepted tokens."""


class ModelError(LocretError):
    """Raised when a model, or something trained for it, cannot be used: the message says what to use instead."""


class UnsupportedModel(ModelError):
    """Raised when attaching would change what the model computes: use a supported one; this one is left untouched."""


class HeadsMismatch(ModelError):
    """Raised when retaining heads do not fit by name, shape or fingerprint: use the model they were trained for."""


class ContextError(LocretError):
    """Raised when the context cannot do this now: do first what the message says; the context stays as it was."""


class BudgetExceeded(ContextError):
    """Raised when a token does not fit, because nothing is evicted or a reserve is full: enlarge budget or reserve."""


class ContextBusy(ContextError):
    """Raised when another feed or generation is running in this context: wait for it to end."""


class ContextClosed(ContextError):
    """Raised when a context is used before `async with`, after `aclose()`, after its runtime was closed, or in a fork
    of its process: open a new one."""


class NoSlot(ContextError):
    """Raised when no slot becomes free before the deadline: close a context, wait longer, or configure more slots."""


class SnapshotError(LocretError):
    """Raised when a stored session cannot be written or read: do what the message says; the live context, and what was
    stored before, stay as they were."""


class SnapshotCorrupt(SnapshotError):
    """Raised when a stored file is damaged, cut short, or was never a snapshot: restore it from a copy, or go on from
    an older snapshot; nothing of it was used."""


class SnapshotMismatch(SnapshotError):
    """Raised when a snapshot was made with something else: open it with what it was made with, or rebuild it.

    Attributes:
        field: what differs, a field of `snapshot.identity.Identity`. found, expected: its two values.
    """

    def __init__(self, message: str, *, field: str, found: str, expected: str):
        super().__init__(message)
        self.field, self.found, self.expected = field, found, expected


class SnapshotNotFound(SnapshotError):
    """Raised when the store has no session, or no snapshot of it, by that name: `Store.list` shows those it has."""


class SnapshotTooNew(SnapshotError):
    """Raised when a snapshot was written in a later format than this library reads: install a newer version."""


class StaleOwner(SnapshotError):
    """Raised when another owner saved this session since it was opened here, or forgot it: save under a new name, or
    open it again; nothing was written, and the live context is intact."""


class StateLost(SnapshotError):
    """Raised when messages name an absorbed stream, and no memory that holds it can be reached: the messages do not
    contain the stream, so absorb it again, or take its stand-in out of the history. And when a call without the history
    goes on from turns that were not saved and are lost, as the call behind them was undone: give the whole history."""


class StoreError(SnapshotError):
    """Raised when the store itself fails: remove the cause and try again; what was acknowledged before is intact, and
    what failed was not acknowledged."""
