"""The suite itself: it runs where signals are ignored, hangs nowhere and leaves no process behind."""

from __future__ import annotations

import ast
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.child import ORDINARY
from tests.processes import ROOT, ended, leaving_none, run_python, start_python

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
ASLEEP = 'start_python("-c", "import time; print(\'up\', flush=True); time.sleep(600)")'


def expect_ended(pid: int) -> None:
    deadline = time.monotonic() + 20
    while not ended(pid):
        assert time.monotonic() < deadline, f"process {pid} is left behind"
        time.sleep(0.02)


@pytest.mark.slow
def test_tests_of_signals_pass_where_signals_are_ignored():
    """As under nohup, for what a shell runs in the background, and in some CI."""
    done = run_python(*PYTEST, "tests/test_runtime.py", "tests/training/test_loop.py", "-k",
                      "ctrl_c_in_a_sync or ctrl_c_never_tears", ignored=("INT", "QUIT", "HUP", "TERM"))
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_process_of_a_test_has_ordinary_signals_and_those_it_asks_for_ignored():
    program = "import signal; print(*[s.name for s in signal.Signals if signal.getsignal(s) == signal.SIG_IGN], " \
              "*signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    pythons_own = [f"SIG{name}" for name in ORDINARY if name in ("PIPE", "XFSZ")]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGQUIT)}
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        plain = run_python("-c", program).stdout.split()
        deaf = run_python("-c", program, ignored=("INT",)).stdout.split()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sorted(plain) == pythons_own and sorted(deaf) == ["SIGINT", *pythons_own]


@ON_LINUX
@pytest.mark.parametrize("where", ["test", "fixture"])
@pytest.mark.thorough
def test_a_test_that_hangs_is_ended_by_its_limit_with_its_processes(tmp_path: Path, where: str):
    """Also in a fixture of a test that failed, and when it hears no exception."""
    hang = "\n        ".join(["while True:", "    try:", "        time.sleep(60)", "    except BaseException:",
                              "        pass"])
    (tmp_path / "test_hangs.py").write_text(f"""
import pathlib, time, pytest
from tests.processes import start_python
@pytest.fixture
def child():
    process = {ASLEEP}
    process.stdout.readline()
    pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(process.pid))
    yield
    if {where == "fixture"}:
        {hang}
def test_that_hangs(child):
    assert {where == "test"}
    if True:
        {hang}
""")
    done = run_python(*PYTEST, "-p", "tests.limits", tmp_path, env=os.environ | {"LOCRET_TEST_LIMIT_S": "2"})
    assert done.returncode == 1 and "Timeout (0:00:02)!" in done.stderr and "test_hangs.py" in done.stderr, done
    expect_ended(int((tmp_path / "pid").read_text()))


@ON_LINUX
def test_processes_end_with_the_test_run_that_started_them():
    """However it ends: here by SIGKILL."""
    parent = start_python("-c", f"from tests.processes import start_python; child = {ASLEEP}; child.stdout.readline()\n"
                                "print(child.pid, flush=True); child.wait()")
    child = int(parent.stdout.readline())
    assert not ended(child)
    parent.kill()
    expect_ended(child)


@ON_LINUX
def test_what_a_test_started_is_gone_when_it_has_failed():
    with pytest.raises(ZeroDivisionError), leaving_none():
        parent = start_python("-c", "import os, time\nif child := os.fork(): print(child, flush=True)\ntime.sleep(600)")
        child = int(parent.stdout.readline())
        1 / 0  # noqa: B018
    for pid in (parent.pid, child):
        expect_ended(pid)


def test_tests_start_processes_in_no_other_way():
    """What is started otherwise has the signals of whoever started pytest, and may be left behind."""
    others = ("subprocess", "multiprocessing")
    found = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in sorted((ROOT / "tests").rglob("*.py"))
             if path != ROOT / "tests" / "processes.py" and any(name in path.read_text() for name in others)
             for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, (ast.Import, ast.ImportFrom))
             for name in ([node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
             if name in others]
    assert not found, f"{found}; expected start or run of tests/processes.py"
