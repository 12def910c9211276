"""The one thread that touches an engine: bounded steps, contexts in turn. Knows neither asyncio nor text.

A step is a function of at most about one chunk of work. Steps of one context run in the order given; contexts with
work take turns, one step each, so that a long feed delays the answer of another context by one step at most.

A *joint* step is one that many contexts take together: when the first of them has its turn, all others that wait for
the same step take it too. Contexts that took the last joint step together queue the next one soon after they get their
results, so the next joint step waits a little for those that have not done so yet. What can be computed ahead for them
is computed meanwhile, unless there is other work.

A forked process gets the objects and not the threads, so a call that waits for a step there would wait for ever. All
use of an object that has a thread is refused there, at once (`expect_own`).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from locret_stream.errors import ContextClosed

T = TypeVar("T")
I = TypeVar("I")

# How long a joint step waits for its last members: a share of the last step's duration, at least min s, at most max s.
_PATIENCE_S = 0.002, 0.5, 0.01  # min, share, max


def expect_own(process: int) -> None:
    """Raises ContextClosed in any process but the one with that id, in which the threads were started."""
    if os.getpid() != process:
        raise ContextClosed(f"this is process {os.getpid()}, a fork of process {process}, where the runtime has its "
                            "threads; expected a runtime made in this process, or a process started with "
                            "multiprocessing's 'spawn' or 'forkserver'")


@dataclass(slots=True)
class _Work:
    """A queued step. The `step` of a joint one takes the items of all its members and returns a result or an error for
    each; `ahead` runs after the results are given."""

    future: Future[Any]
    step: Callable[..., Any]
    group: Hashable = None
    item: Any = None
    ahead: Callable[[], None] | None = None


class Worker:
    """A thread with a queue per key. Results are concurrent futures, so any event loop may wait for them."""

    def __init__(self, name: str = "locret-engine"):
        self._queues: dict[Hashable, deque[_Work]] = {}
        self._turns: deque[Hashable] = deque()  # keys with work, next first
        self._last: tuple[Hashable, set[Hashable], float] = (None, set(), 0.0)  # joint step: group, keys, seconds
        self._wake = threading.Condition()
        self._closed = False
        self.users, self.process = 0, os.getpid()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def submit(self, key: Hashable, step: Callable[[], T]) -> Future[T]:
        """Queue a step of the context `key`. Cancelling the future works until the step starts; then it completes.

        Raises:
            ContextClosed: the worker was closed, or this is a fork of its process.
        """
        return self._queue(key, _Work(Future(), step))

    def submit_joint(self, key: Hashable, group: Hashable, item: I,
                     step: Callable[[Sequence[I]], Sequence[T | BaseException]],
                     ahead: Callable[[], None] | None = None) -> Future[T]:
        """Queue an item of the context `key` for a step that all waiting contexts of that group take together.

        The step gets their items and returns a result for each, or an error of that item alone, in the same order. All
        of a group pass the same step, and the same `ahead`, which is called afterwards if no other work is waiting; it
        raises nothing.
        """
        return self._queue(key, _Work(Future(), step, group, item, ahead))

    def leave(self, key: Hashable) -> None:
        """The context `key` takes no further joint step, so that no other waits for it. For finalisers too: without the
        lock, as the worst that can be lost is one such wait."""
        group, keys, seconds = self._last
        self._last = group, keys - {key}, seconds

    def _queue(self, key: Hashable, work: _Work) -> Future:
        expect_own(self.process)
        with self._wake:
            if self._closed:
                raise ContextClosed("the runtime is closed; expected a call inside its `async with`")
            queue = self._queues.setdefault(key, deque())
            queue.append(work)
            if len(queue) == 1:
                self._turns.append(key)
            self._wake.notify()
        return work.future

    def close(self) -> None:
        """Let the running step finish, fail the queued ones with ContextClosed, end the thread. Idempotent."""
        with self._wake:
            self._closed = True
            waiting = [work.future for queue in self._queues.values() for work in queue]
            self._queues.clear()
            self._turns.clear()
            self._wake.notify()
        for future in waiting:  # not cancelled: the task that waits would take that for its own cancellation
            if future.set_running_or_notify_cancel():
                future.set_exception(ContextClosed("the runtime was closed before this step began"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _next(self) -> list[_Work] | None:
        """The work of the next turn, several pieces if it is a joint step; None when the worker was closed."""
        with self._wake:
            while not self._turns:
                if self._closed:
                    return None
                self._wake.wait()
            group = self._queues[self._turns[0]][0].group
            if group is None:
                return [self._pop(self._turns[0])]
            self._wait_for_members(group)
            keys = [key for key in self._turns if self._queues[key][0].group == group]
            self._last = group, set(keys), 0.0
            return [self._pop(key) for key in keys]

    def _wait_for_members(self, group: Hashable) -> None:
        """Wait until all that took the last step of the group have queued work of any kind, or for `_PATIENCE_S`; not
        while there is other work."""
        last_group, keys, seconds = self._last
        least, share, most = _PATIENCE_S
        deadline = time.monotonic() + min(max(least, share * seconds), most)
        while last_group == group and not self._closed and (
                any(key not in self._queues for key in keys)
                and all(self._queues[key][0].group == group for key in self._turns)):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._wake.wait(left)

    def _pop(self, key: Hashable) -> _Work:
        """The next work of a key, which goes to the end of the line if it has more."""
        self._turns.remove(key)
        queue = self._queues[key]
        work = queue.popleft()
        if queue:
            self._turns.append(key)
        else:
            del self._queues[key]
        return work

    def _loop(self) -> None:
        with torch.no_grad():
            while (works := self._next()) is not None:
                if works and works[0].group is not None:
                    self._take_joint(works)
                elif works:
                    self._run(works)

    def _take_joint(self, works: list[_Work]) -> None:
        started, ahead = time.monotonic(), works[0].ahead
        # Only after a step that ran: an earlier one's contexts may be closed by now, and `ahead` is for those.
        if self._run_joint(works) and ahead is not None and not self._turns:
            ahead()
        self._last = *self._last[:2], time.monotonic() - started

    @staticmethod
    def _run(works: list[_Work]) -> None:
        """Run one step. The step is dropped before its result is given: the task that waits for the result may then
        drop an iterator, which has to end at once."""
        work = works.pop()
        future, step = work.future, work.step
        del work
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = step()
            del step
        except BaseException as error:
            _fail(future, error)
        else:
            future.set_result(result)

    @staticmethod
    def _run_joint(works: list[_Work]) -> bool:
        """Run a joint step for those of its members that were not cancelled. Returns whether it ran to its end."""
        running = [work for work in works if work.future.set_running_or_notify_cancel()]
        works.clear()
        if not running:
            return False
        futures, items, step = [work.future for work in running], [work.item for work in running], running[0].step
        running.clear()
        ran = True
        try:
            results = list(step(items))
            assert len(results) == len(futures), "a joint step gives one result per item"
        except BaseException as error:
            ran, results = False, [error] * len(futures)
        del step
        items.clear()
        for future, result in zip(futures, results, strict=True):
            if isinstance(result, BaseException):
                _fail(future, result)
            else:
                future.set_result(result)
        return ran


def _fail(future: Future[Any], error: BaseException) -> None:
    if isinstance(error, StopIteration):  # no asyncio future can carry one: the task that waits would wait for ever
        crossing = RuntimeError("a step raised StopIteration")
        crossing.__cause__ = error
        error = crossing
    future.set_exception(error)


_workers: weakref.WeakKeyDictionary[object, Worker] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def share_worker(owner: object) -> Worker:
    """The worker of this owner (an attachment), made on first use. Each call counts as a user until `leave_worker`."""
    with _lock:
        worker = _workers.get(owner)
        if worker is None:
            worker = _workers[owner] = Worker()
        worker.users += 1
        return worker


def _in_a_fork() -> None:
    """Let `share_worker` make workers with threads there. A thread that does not exist there may have the lock."""
    global _lock
    _lock = threading.Lock()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)


def leave_worker(owner: object) -> None:
    """Stop using the owner's worker; the last user closes it."""
    with _lock:
        worker = _workers[owner]
        worker.users -= 1
        last = worker.users == 0
        if last:
            del _workers[owner]
    if last:
        worker.close()
