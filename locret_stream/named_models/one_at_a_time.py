"""One load of a model at a time, in the whole process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """A block that waits until no other one runs, in any thread: around each `from_pretrained` of a model.

    transformers replaces functions while it loads (`PreTrainedModel.tie_weights`, `torch.linspace`), and puts back what
    it found; so does what hides its progress bar. Two loads at once would find each other's: both fail, and so does
    every later one.
    """
    with _lock:
        yield


def _in_a_fork() -> None:
    """A thread that does not exist there may have the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)
