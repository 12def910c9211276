"""Real processes own one branch against each other, or delete and collect at once: nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.snapshot.kill import STEP, Hands, expected
from tests.snapshot.support import KEY, begin, loaded, local_store, needed, same, save, sound, stored

pytestmark = pytest.mark.usefixtures("spools")


def reports_of(hands: Hands, pids: list[int], check: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Wait until all have ended; everything they reported."""
    reports = []
    for pid in pids:
        reports.append(hands.of(pid, "ended"))
        assert hands.wait(pid) == 0
        reports += hands.reports(pid)
    for report in reports:
        check(report)
    return reports


def save_one_branch(hands: Hands, root: Path, key: str | None, owners: int, rounds: int) -> int:
    """Processes save one branch against each other; every generation that was acknowledged was so to just one."""
    store = local_store(root, key=key, keep_last=1000)
    branch, toy = begin(store, "alice", 1)
    save(branch, toy.feed(STEP, branch))
    at = time.time() + 0.5
    pids = [hands.start("contend", root=str(root), key=key, rounds=rounds, seed=seed, at=at)
            for seed in range(owners)]
    reports = reports_of(hands, pids, lambda report: None)
    won = [report["won"] for report in reports if "won" in report]
    assert sorted(won) == list(range(2, 2 + len(won)))
    assert len(won) + sum("stale" in report for report in reports) == owners * rounds
    digests = {report["won"]: report["digest"] for report in reports if "won" in report}
    for info in store.info("alice")[1:]:
        assert info.generation == 2 or info.parent == digests[info.generation - 1]
        assert same(loaded(store, "alice", info.generation), expected(info.generation))
    assert [info.generation for info in store.info("alice")] == [1, *sorted(won)] and sound(store)
    return len(won)


def save_forks_and_collect(hands: Hands, root: Path, key: str | None, owners: int, rounds: int) -> None:
    """Processes save forks of one session, prune and delete, while others collect, list and verify."""
    store = local_store(root, key=key)
    branch, toy = begin(store, "alice", 1)
    save(branch, toy.feed(STEP, branch))
    at = time.time() + 0.5
    pids = [hands.start("churn", root=str(root), key=key, rounds=rounds, seed=seed, at=at)
            for seed in range(2, 2 + owners)]
    pids += [hands.start("collect", root=str(root), key=key, rounds=rounds, at=at) for _ in range(2)]

    def no_problem(report: dict[str, Any]) -> None:
        assert "problem" not in report, report

    reports = reports_of(hands, pids, no_problem)
    assert sound(store) and same(loaded(store, "alice"), expected(1))
    for report in reports:
        if "name" in report:
            record = loaded(store, report["name"])
            assert record.tokens == report["tokens"] == STEP * (rounds + 1)
            assert store.info(report["name"])[-1].generation == report["saved"] == rounds
    store.gc()
    assert stored(store, "alice") == needed(store, "alice")


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.thorough(but=1)
def test_of_many_processes_just_one_saves_each_number(hands, tmp_path, key):
    assert save_one_branch(hands, tmp_path / "store", key, 3, 6) >= 6


def test_processes_that_save_delete_and_collect_at_once_lose_nothing(hands, tmp_path):
    save_forks_and_collect(hands, tmp_path / "store", None, 2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_many_processes_for_long(hands, tmp_path, key):
    print(save_one_branch(hands, tmp_path / "one", key, 4, 60), "numbers")
    save_forks_and_collect(hands, tmp_path / "two", key, 4, 60)
