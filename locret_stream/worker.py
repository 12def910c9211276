"""The one thread that touches an engine: bounded steps, contexts in turn. Knows neither asyncio nor text.

A step is a function of at most about one chunk of work. Steps of one context run in the order given; contexts with
work take turns, one step each, so that a long feed never holds up somebody's answer for more than a step.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

import torch

from locret_stream.errors import ContextClosed

T = TypeVar("T")


class Worker:
    """A thread with a queue per key. Results cross by concurrent futures, so any event loop may wait for them."""

    def __init__(self, name: str = "locret-engine"):
        self._queues: dict[Hashable, deque[list]] = {}  # of [future, step]
        self._turns: deque[Hashable] = deque()  # keys with work, next first
        self._wake = threading.Condition()
        self._closed = False
        self.users = 0
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, step: Callable[[], T]) -> Future[T]:
        """Queue a step of the context `key`. Cancelling the future works until the step starts; then it completes.

        Raises:
            ContextClosed: the worker was closed.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._closed:
                raise ContextClosed("the runtime is closed; expected a call inside its `async with`")
            queue = self._queues.setdefault(key, deque())
            queue.append([future, step])
            if len(queue) == 1:
                self._turns.append(key)
            self._wake.notify()
        return future

    def close(self) -> None:
        """Let the running step finish, fail the queued ones with ContextClosed, end the thread. Idempotent."""
        with self._wake:
            self._closed = True
            waiting = [future for queue in self._queues.values() for future, _ in queue]
            self._queues.clear()
            self._turns.clear()
            self._wake.notify()
        for future in waiting:  # not cancelled: whoever waits would take that for a cancellation of its own
            if future.set_running_or_notify_cancel():
                future.set_exception(ContextClosed("the runtime was closed before this step began"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _next(self) -> list | None:
        with self._wake:
            while not self._turns:
                if self._closed:
                    return None
                self._wake.wait()
            key = self._turns.popleft()
            queue = self._queues[key]
            work = queue.popleft()
            if queue:
                self._turns.append(key)
            else:
                del self._queues[key]
            return work

    def _loop(self) -> None:
        with torch.no_grad():
            while (work := self._next()) is not None:
                self._run(work)

    @staticmethod
    def _run(work: list) -> None:
        """Run one queued (future, step). The step is let go before its result is given: whoever waits for the result
        may drop an iterator then, and expects it to end at once."""
        future, step = work
        work.clear()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = step()
            del step
        except StopIteration as error:  # no asyncio future can carry one: whoever waits would wait for ever
            crossing = RuntimeError("a step raised StopIteration")
            crossing.__cause__ = error
            future.set_exception(crossing)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


_workers: weakref.WeakKeyDictionary[object, Worker] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def share_worker(owner: object) -> Worker:
    """The worker of this owner (an attachment), made on first use and counted; give it back with `leave_worker`."""
    with _lock:
        worker = _workers.get(owner)
        if worker is None:
            worker = _workers[owner] = Worker()
        worker.users += 1
        return worker


def leave_worker(owner: object) -> None:
    """Give the owner's worker back; the last user closes it."""
    with _lock:
        worker = _workers[owner]
        worker.users -= 1
        last = worker.users == 0
        if last:
            del _workers[owner]
    if last:
        worker.close()
