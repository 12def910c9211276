"""The state of one context inside the engine, and what became of its tokens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from locret_stream.cache import UnitStore
from locret_stream.errors import ContextClosed

HISTORY = 1024  # token ids kept in memory for repetition penalties; the store has a log of all of them
MOST_PENDING = 1 << 20  # ids; a snapshot may come from anywhere, and what is accepted can be loaded again
MOST_RECEIPTS = 1 << 20  # tokens whose receipts are given at once: 5 bytes for each of them in every head and layer


class EngineState:
    """One context inside the engine: a slot, how many tokens were committed, and the pending ids.

    Attributes:
        seen: tokens committed; a multiple of the chunk size, but in copies that answer (see `Engine.thin`).
        pending: accepted ids that are not committed yet.
        provisional: how many of the pending ids have units behind the committed ones.
        reply_from: how many of the pending ids came before the reply whose tokens follow them; None: the last ids were
            none of a reply. guess: what the next token was guessed at behind the last one, where units were fetched for
            it; None: none were (see `engine.fetching`, which alone reads both).
        committed_ids: the last 1,024 committed ids.
        focus: ids of the focus in front of the stream; next_focus: ids that replace it at the next grid point, None
            for no change; next_focus_at: the position at which those were given. had_focus: whether it ever had one.
        peaks: by layer, the most units that it ever had, provisional and new ones included.
        last_hidden: [1, 1, hidden], of the last committed token.
        tail_logits: [vocab] fp32, of the token after pending[provisional - 1].
        rounded: tokens of the stream before that position were restored from codes, so that what the host's memory has
            of them is rounded; 0: none were.
        swapped_out: whether its slot was given away.
        broken: whether a failure left layers that do not match; the context is lost then.
    """

    def __init__(self, store: UnitStore, policy_state: dict[str, Tensor]):
        self.store, self.policy_state = store, policy_state
        self.seen = 0
        self.pending: list[int] = []
        self.focus: list[int] = []
        self.next_focus: list[int] | None = None
        self.next_focus_at = 0
        self.had_focus = False
        self.provisional = 0
        self.reply_from: int | None = None
        self.guess: int | None = None
        self.peaks = [0] * len(store.counts)
        self.last_hidden: Tensor | None = None
        self.tail_logits: Tensor | None = None
        self.rounded = 0
        self.swapped_out = False
        self.committed_ids: deque[int] = deque(maxlen=HISTORY)
        self.broken = False  # units were moved in some layers only
        self.lock = threading.RLock()  # ids are accepted on the caller's thread, or by a finaliser on any

    @property
    def position(self) -> int:
        """Absolute position of the next token: how many were accepted."""
        with self.lock:
            return self.seen + len(self.pending)

    @contextmanager
    def broken_by_failure(self) -> Iterator[None]:
        """Move units: a failure inside the block leaves layers that do not match, so the context is lost. Until then it
        is not broken: ids may be accepted on other threads meanwhile."""
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def expect_whole(self) -> None:
        """Raises ContextClosed: a failure left layers that do not match."""
        if self.broken:
            raise ContextClosed("a commit failed while it moved units, so this context is lost; expected it to be "
                                "closed and opened anew (restored, if it was saved)")

    def forget_units(self) -> None:
        """Of pending ids: their units lie where others are written now, or behind others that moved."""
        self.provisional, self.tail_logits, self.guess = 0, None, None

    def forget_reply(self, *, stateful: bool) -> None:
        """Forget the units of those pending ids that are of a reply, which hold what was fetched for them; of all
        pending ids where the model is `stateful`, as a recurrent state cannot be taken back."""
        self.provisional, self.guess = 0 if stateful else min(self.provisional, self.reply_from or 0), None

    @property
    def history(self) -> list[int]:
        """The last 1,024 accepted ids, committed or pending."""
        with self.lock:
            return [*self.committed_ids, *self.pending][-HISTORY:]

    def copy(self, store: UnitStore) -> EngineState:
        """The same state over the units of `store`, which are copies of its own."""
        with self.lock:
            copy = EngineState(store, dict(self.policy_state))
            copy.seen, copy.pending, copy.provisional = self.seen, list(self.pending), self.provisional
            copy.rounded = self.rounded
            copy.reply_from, copy.guess = self.reply_from, self.guess
            copy.last_hidden, copy.tail_logits = self.last_hidden, self.tail_logits
            copy.committed_ids, copy.peaks = self.committed_ids.copy(), list(self.peaks)
            copy.focus, copy.had_focus = self.focus, self.had_focus
            copy.next_focus, copy.next_focus_at = self.next_focus, self.next_focus_at
            return copy


@dataclass(frozen=True, slots=True)
class Receipts:
    """What became of the tokens start .. end-1. Tokens accepted and not committed yet count as kept, without score.

    kept [L, H, T] bool; scores [L, H, T] fp32, nan where there is none. In a layer with fewer KV heads than another the
    last of H keep nothing.
    """

    start: int
    end: int
    kept: Tensor
    scores: Tensor
