"""The worker: bounded steps in turn on one thread, results and errors across, cancellation before a step starts."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from concurrent.futures import CancelledError

import pytest
import torch

from locret_stream import worker as module
from locret_stream.errors import ContextClosed
from locret_stream.worker import Worker, leave_worker, share_worker

WAIT_S = 20


@pytest.fixture
def worker():
    made = Worker("locret-test")
    yield made
    made.close()
    assert not made._thread.is_alive()


class Gate:
    """A step that holds the worker until it is opened."""

    def __init__(self, worker: Worker, key: object = "gate"):
        self.inside, self.open = threading.Event(), threading.Event()
        self.future = worker.submit(key, self)
        assert self.inside.wait(WAIT_S)

    def __call__(self) -> str:
        self.inside.set()
        assert self.open.wait(WAIT_S)
        return "passed"


def test_steps_of_one_key_run_in_order_and_keys_take_turns(worker: Worker):
    gate, ran = Gate(worker), []
    for key, count in (("a", 5), ("b", 2), ("c", 3)):
        for n in range(count):
            last = worker.submit(key, lambda key=key, n=n: ran.append((key, n)))
    gate.open.set()
    worker.submit("a", lambda: None).result(WAIT_S)
    assert last.done()
    assert ran == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 2), ("a", 3), ("a", 4)]


def test_a_key_that_always_has_work_never_shuts_out_another(worker: Worker):
    ran: list[str] = []

    def again() -> None:
        ran.append("busy")
        if len(ran) < 50:
            worker.submit("busy", again)

    gate = Gate(worker)
    worker.submit("busy", again)
    worker.submit("other", lambda: ran.append("other")).add_done_callback(lambda _: None)
    gate.open.set()
    while len(ran) < 50:
        time.sleep(0.001)
    assert ran.index("other") <= 1


def test_everything_runs_on_one_thread_without_gradients(worker: Worker):
    weight = torch.ones(2, requires_grad=True)
    seen = [worker.submit(n, lambda: (threading.current_thread(), (weight * 2).requires_grad)).result(WAIT_S)
            for n in range(3)]
    assert {thread for thread, _ in seen} == {worker._thread} and not any(grad for _, grad in seen)
    assert torch.is_grad_enabled(), "the caller's thread is as it was"


def test_a_queued_step_can_be_cancelled_and_a_running_one_completes(worker: Worker):
    ran, gate = [], Gate(worker)
    queued = worker.submit("a", lambda: ran.append("queued"))
    after = worker.submit("a", lambda: ran.append("after"))
    assert queued.cancel() and not gate.future.cancel()
    gate.open.set()
    after.result(WAIT_S)
    assert gate.future.result(WAIT_S) == "passed" and ran == ["after"]
    with pytest.raises(CancelledError):
        queued.result()


@pytest.mark.parametrize("joint", [False, True])
def test_a_step_is_let_go_before_its_result_is_given(worker: Worker, joint: bool):
    """The task that waits for the result may then drop an iterator that the step used, which has to end at once."""
    class Step:
        def __call__(self, items=()):
            return [None for _ in items]

    gate, step, item, alive = Gate(worker), Step(), Step(), []
    held = [weakref.ref(step), weakref.ref(item)]
    future = worker.submit_joint("a", "g", item, step) if joint else worker.submit("a", step)
    future.add_done_callback(lambda _: alive.extend(ref() for ref in held))
    del step, item
    gate.open.set()
    future.result(WAIT_S)
    assert alive == [None, None]


@pytest.mark.parametrize("error", [ValueError("here"), KeyboardInterrupt(), GeneratorExit(), StopAsyncIteration()])
def test_errors_cross_and_the_thread_goes_on(worker: Worker, error: BaseException):
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        worker.submit("a", fail).result(WAIT_S)
    assert caught.value is error and "fail" in [entry.name for entry in caught.traceback]
    assert worker.submit("a", lambda: 5).result(WAIT_S) == 5


async def test_a_step_that_raises_stop_iteration_does_not_hang_who_waits(worker: Worker):
    """No asyncio future can carry it, so it crosses as a RuntimeError, as out of a generator."""
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        async with asyncio.timeout(WAIT_S):
            await asyncio.wrap_future(worker.submit("a", lambda: next(iter(()))))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_closing_lets_the_running_step_finish_and_fails_the_queued(worker: Worker):
    gate, ran = Gate(worker), []
    queued = [worker.submit(key, lambda: ran.append(1)) for key in ("gate", "a", "a", "b")]
    cancelled = worker.submit("c", lambda: ran.append(1))
    cancelled.cancel()
    closing = threading.Thread(target=worker.close)
    closing.start()
    while not queued[-1].done():
        time.sleep(0.001)
    assert not gate.future.done()
    gate.open.set()
    closing.join(WAIT_S)
    assert gate.future.result(WAIT_S) == "passed" and not ran
    for future in queued:
        assert isinstance(future.exception(WAIT_S), ContextClosed), "closed is not cancelled"
    with pytest.raises(ContextClosed):
        worker.submit("a", lambda: None)
    worker.close()


def test_many_threads_may_submit(worker: Worker):
    ran: list[tuple[int, int]] = []
    threads = [threading.Thread(target=lambda key=key: [worker.submit(key, lambda n=n: ran.append((key, n)))
                                                        for n in range(200)]) for key in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key in range(8):
        worker.submit(key, lambda: None).result(WAIT_S)
    assert len(ran) == 1600
    assert all([n for k, n in ran if k == key] == list(range(200)) for key in range(8))


# -- joint steps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch):
    """Joint steps wait for their members as long as a test may take."""
    monkeypatch.setattr(module, "_PATIENCE_S", (WAIT_S, 0.0, WAIT_S))


class Together:
    """A joint step that gives each item back doubled, and keeps what it was given."""

    def __init__(self):
        self.calls: list[list] = []

    def __call__(self, items):
        self.calls.append(list(items))
        return [item if isinstance(item, Exception) else 2 * item for item in items]


def test_a_joint_step_takes_all_that_wait_for_it_and_the_rest_take_turns(worker: Worker):
    gate, step, other, ran = Gate(worker), Together(), Together(), []
    first = worker.submit_joint("a", "g", 1, step)
    plain = worker.submit("b", lambda: ran.append(len(step.calls)))
    behind = worker.submit_joint("b", "g", 9, step)  # behind another step of its own context
    futures = [worker.submit_joint(key, "g", n, step) for n, key in enumerate("cde", start=2)]
    apart = worker.submit_joint("f", "h", 7, other)
    gate.open.set()
    assert [f.result(WAIT_S) for f in (first, *futures, apart, behind)] == [2, 4, 6, 8, 14, 18]
    plain.result(WAIT_S)
    assert step.calls == [[1, 2, 3, 4], [9]] and other.calls == [[7]] and ran == [1]


def test_each_member_of_a_joint_step_has_its_own_result_or_error(worker: Worker):
    gate, step = Gate(worker), Together()
    items = [1, ValueError("two"), StopIteration(), 4]
    futures = [worker.submit_joint(n, "g", item, step) for n, item in enumerate(items)]
    cancelled = worker.submit_joint("gone", "g", 5, step)
    assert cancelled.cancel()
    gate.open.set()
    assert futures[0].result(WAIT_S) == 2 and futures[3].result(WAIT_S) == 8
    with pytest.raises(ValueError, match="two"):
        futures[1].result(WAIT_S)
    with pytest.raises(RuntimeError, match="StopIteration"):
        futures[2].result(WAIT_S)
    assert step.calls == [items], "who was cancelled is left out"

    def fails(items):
        raise KeyError("all")

    gate = Gate(worker)
    futures = [worker.submit_joint(n, "g", n, fails) for n in range(3)]
    gate.open.set()
    for future in futures:
        with pytest.raises(KeyError):
            future.result(WAIT_S)


def test_a_joint_step_waits_for_those_that_took_the_last_one_together(worker: Worker, patient):
    gate, step = Gate(worker), Together()
    for future in [worker.submit_joint(key, "g", key, step) for key in (1, 2, 3)] + [gate.future]:
        gate.open.set()
        future.result(WAIT_S)
    early = worker.submit_joint(2, "g", 2, step)
    time.sleep(0.05)
    assert not early.done(), "1 and 3 are on their way"
    joining, other = worker.submit_joint(7, "g", 7, step), worker.submit_joint(3, "g", 3, step)
    time.sleep(0.05)
    assert not (joining.done() or other.done())
    worker.submit_joint(1, "g", 1, step)
    assert [early.result(WAIT_S), joining.result(WAIT_S), other.result(WAIT_S)] == [4, 14, 6]
    assert step.calls[1:] == [[2, 7, 3, 1]]


def test_a_joint_step_waits_for_a_moment_only_and_not_again(worker: Worker, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", (0.3, 0.0, 1.0))
    gate, step = Gate(worker), Together()
    both = [worker.submit_joint(key, "g", key, step) for key in (1, 2)]
    gate.open.set()
    assert [future.result(WAIT_S) for future in both] == [2, 4]
    for least, most in ((0.3, 5.0), (0.0, 0.29)):  # 2 has left: it is missed once
        started = time.monotonic()
        worker.submit_joint(1, "g", 1, step).result(WAIT_S)
        assert least <= time.monotonic() - started < most
    assert step.calls == [[1, 2], [1], [1]]


def test_a_joint_step_does_not_wait_for_a_context_that_is_done(worker: Worker, patient):
    gate, step = Gate(worker), Together()
    both = [worker.submit_joint(key, "g", key, step) for key in (1, 2)]
    gate.open.set()
    assert [future.result(WAIT_S) for future in both] == [2, 4]
    worker.leave(2)
    started = time.monotonic()
    assert worker.submit_joint(1, "g", 1, step).result(WAIT_S) == 2
    assert time.monotonic() - started < WAIT_S / 4
    assert step.calls == [[1, 2], [1]]


def test_what_can_be_done_ahead_is_done_when_nothing_else_waits(worker: Worker):
    gate, ran = Gate(worker), []

    def step(items):
        ran.append(list(items))
        return items

    def ahead():
        ran.append("ahead")

    first = worker.submit_joint("a", "g", 1, step, ahead)
    waits = worker.submit("b", lambda: ran.append("other"))
    gate.open.set()
    assert first.result(WAIT_S) == 1
    waits.result(WAIT_S)
    worker.submit_joint("a", "g", 2, step, ahead).result(WAIT_S)
    worker.submit("b", lambda: None).result(WAIT_S)
    assert ran == [[1], "other", [2], "ahead"]


def test_nothing_is_done_ahead_behind_a_step_that_did_not_run(worker: Worker):
    ran: list[str] = []

    def fails(items):
        raise KeyError("all")

    gate = Gate(worker)
    cancelled = worker.submit_joint("a", "g", 1, Together(), lambda: ran.append("cancelled"))
    assert cancelled.cancel()
    gate.open.set()
    with pytest.raises(KeyError):
        worker.submit_joint("b", "g", 1, fails, lambda: ran.append("failed")).result(WAIT_S)
    worker.submit("c", lambda: None).result(WAIT_S)
    assert ran == []


def test_a_joint_step_does_not_wait_for_its_members_while_others_have_work(worker: Worker, patient):
    gate, step = Gate(worker), Together()
    both = [worker.submit_joint(key, "g", key, step) for key in (1, 2)]
    gate.open.set()
    assert [future.result(WAIT_S) for future in both] == [2, 4]
    early = worker.submit_joint(1, "g", 1, step)
    time.sleep(0.05)
    assert not early.done()
    assert worker.submit("feed", lambda: "read").result(WAIT_S) == "read" and early.result(WAIT_S) == 2


def test_closing_ends_a_joint_step_that_waits(patient):
    worker, step = Worker("locret-test"), Together()
    gate = Gate(worker)
    both = [worker.submit_joint(key, "g", key, step) for key in (1, 2)]
    gate.open.set()
    assert [future.result(WAIT_S) for future in both] == [2, 4]
    waits = worker.submit_joint(1, "g", 1, step)
    time.sleep(0.02)
    started = time.monotonic()
    worker.close()
    assert time.monotonic() - started < WAIT_S / 4
    with pytest.raises(ContextClosed):
        waits.result(WAIT_S)
    assert not worker._thread.is_alive()


def test_a_worker_is_shared_counted_and_closed_by_the_last():
    class Owner:
        pass

    owner, other = Owner(), Owner()
    first, second, apart = share_worker(owner), share_worker(owner), share_worker(other)
    assert first is second is not apart and (first.users, apart.users) == (2, 1)
    leave_worker(owner)
    assert first.submit("a", lambda: 1).result(WAIT_S) == 1
    leave_worker(owner)
    assert not first._thread.is_alive() and apart._thread.is_alive()
    again = share_worker(owner)
    assert again is not first
    leave_worker(owner)
    leave_worker(other)
    assert not apart._thread.is_alive() and not again._thread.is_alive()
