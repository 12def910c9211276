"""Processes that save, collect and die: `python -m tests.snapshot.kill` forks one for every line of JSON it reads.

So torch is imported once for hundreds of processes. A child does what its line says and reports by lines of JSON; every
line has its `pid`. {"wait": pid} reports how a child ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

import torch

from locret_stream.errors import SnapshotError, StaleOwner
from locret_stream.snapshot import Store
from tests.child import end_with
from tests.processes import PIPE, start_python
from tests.snapshot.support import BUDGETS, GEOMETRY, IDENTITY, Record, Toy, begin, loaded, resume, save

STEP = 7  # tokens per generation


def expected(generation: int, seed: int = 1) -> Record:
    """What generation number so and so of `save_forever` holds."""
    return Toy(seed).feed(STEP * generation).record()


def report(**what: Any) -> None:
    """One line for the parent; short ones are written whole or not at all."""
    os.write(1, (json.dumps({"pid": os.getpid(), **what}) + "\n").encode())


def save_forever(root: str, key: str | None, name: str = "alice", seed: int = 1, keep_last: int = 3) -> None:
    """Save, prune, tell, until killed."""
    store = Store(root, key=key, keep_last=keep_last)
    branch, toy = resume(store, name) if store.has(name) else begin(store, name, seed)
    report(began=branch.head)
    while True:
        done = save(branch, toy.feed(STEP, branch))
        report(saved=done.generation)
        store.prune(branch)


def contend(root: str, key: str | None, rounds: int, seed: int, at: float, name: str = "alice") -> None:
    """Be one of many owners: open, feed, save, at the same moments as the others; tell who got which number."""
    store = Store(root, key=key, keep_last=1_000)
    time.sleep(max(0.0, at - time.time()))
    for _ in range(rounds):
        branch, toy = resume(store, name)
        head = branch.head
        try:
            done = save(branch, toy.feed(STEP, branch))
            report(won=done.generation, digest=branch.parent)
        except StaleOwner:
            report(stale=head + 1)
    report(ended=True)


def churn(root: str, key: str | None, rounds: int, seed: int, at: float) -> None:
    """Save sessions and forks of one's own inside one session's folder, delete and prune them again."""
    store = Store(root, key=key, keep_last=2)
    time.sleep(max(0.0, at - time.time()))
    branch, toy = resume(store, "alice")
    own = branch.fork(f"alice {seed}", toy.seen)
    toy.seed = seed
    for number in range(rounds):
        done = save(own, toy.feed(STEP, own))
        assert own.load(IDENTITY, GEOMETRY, BUDGETS).manifest.generation == done.generation
        toy = Toy.of(loaded(store, own.name))
        store.prune(own)
        if number % 5 == 4 and len(snapshots := store.info(own.name)) > 1:
            store.delete(own.name, snapshots[0].generation)
    report(ended=True, name=own.name, saved=done.generation, tokens=toy.seen + len(toy.pending))


def collect(root: str, key: str | None, rounds: int, at: float) -> None:
    """Collect, list and verify all the while."""
    store = Store(root, key=key)
    time.sleep(max(0.0, at - time.time()))
    for _ in range(rounds):
        store.gc()
        store.list()
        problems = [result for result in store.verify() if result.problem]
        if problems:
            report(problem=str(problems[0]))
    report(ended=True)


TASKS = {task.__name__: task for task in (save_forever, contend, churn, collect)}


def main() -> None:
    """Fork for every line."""
    torch.set_num_threads(1)
    report(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            report(of=order["wait"], status=os.waitstatus_to_exitcode(status))
            continue
        parent, child = os.getpid(), os.fork()
        if child == 0:
            code = 0
            try:
                end_with(parent)
                TASKS[order.pop("do")](**order)
            except BaseException as error:
                kind = "snapshot error" if isinstance(error, SnapshotError) else "failure"
                report(error=f"{kind}: {error}", trace=traceback.format_exc()[-3000:])
                code = 1
            os._exit(code)
        report(forked=child)


class Hands:
    """The parent's end: starts children, reads what they tell, kills them."""

    def __init__(self) -> None:
        self.process = start_python("-m", "tests.snapshot.kill", stdin=PIPE, stderr=None,
                                    env={**os.environ, "OMP_NUM_THREADS": "1"})
        self._read: list[dict[str, Any]] = []
        self.of(self.process.pid, "ready")

    def start(self, task: str, **arguments: Any) -> int:
        """The process that does it."""
        self._send({"do": task, **arguments})
        return self.of(self.process.pid, "forked")["forked"]

    def of(self, pid: int, key: str) -> dict[str, Any]:
        """The next line of a process that has a key; an error it tells is raised here."""
        while True:
            for index, report in enumerate(self._read):
                if report["pid"] == pid and (key in report or "error" in report):
                    del self._read[index]
                    if "error" in report:
                        raise AssertionError(f"process {pid}: {report['error']}\n{report['trace']}")
                    return report
            line = self.process.stdout.readline()
            if not line:
                raise AssertionError("the forking process ended")
            self._read.append(json.loads(line))

    def kill(self, pid: int) -> list[dict[str, Any]]:
        """SIGKILL, and everything the process reported before that was not read yet."""
        os.kill(pid, 9)
        assert self.wait(pid) == -9
        reports = [report for report in self._read if report["pid"] == pid]
        self._read = [report for report in self._read if report["pid"] != pid]
        errors = [report["error"] for report in reports if "error" in report]
        assert not errors, errors
        return reports

    def wait(self, pid: int) -> int:
        """How a child ended."""
        self._send({"wait": pid})
        while True:
            ended = self.of(self.process.pid, "status")
            if ended["of"] == pid:
                return ended["status"]

    def reports(self, pid: int) -> list[dict[str, Any]]:
        """What was read of a process and not taken."""
        reports = [report for report in self._read if report["pid"] == pid]
        self._read = [report for report in self._read if report["pid"] != pid]
        return reports

    def close(self) -> None:
        """End the forking process."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)

    def _send(self, order: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()


if __name__ == "__main__":
    main()
