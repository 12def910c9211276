"""Processes that tests start, and the one way to start them: with ordinary signals whatever pytest's own are, and
gone when their test is, however it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
__all__ = ["DEVNULL", "PIPE", "Popen", "ended", "leaving_none", "run", "run_python", "start", "start_python"]
_started: list[Popen] = []


def start(*program: object, ignored: tuple[str, ...] = (), **options: Any) -> Popen[str]:
    """A program in a process group of its own, with pipes for what it says.

    Args:
        ignored: names of signals that it shall ignore, such as "INT".
        options: those of `Popen`.
    """
    launcher = [sys.executable, "-S", str(Path(__file__).with_name("child.py")), str(os.getpid()), ",".join(ignored)]
    options = {"cwd": ROOT, "text": True, "stdout": PIPE, "stderr": PIPE} | options
    process = Popen(launcher + [str(word) for word in program], process_group=0, **options)
    _started.append(process)
    return process


def start_python(*arguments: object, **options: Any) -> Popen[str]:
    """As `start`; Python, and the arguments it is given."""
    return start(sys.executable, *arguments, **options)


def run(*program: object, timeout_s: float = 240, **options: Any) -> CompletedProcess[str]:
    """A program to its end, with what it said.

    Raises:
        TimeoutExpired: and the program is gone.
    """
    with leaving_none():
        process = start(*program, **options)
        out, err = process.communicate(timeout=timeout_s)
    return CompletedProcess(process.args, process.returncode, out, err)


def run_python(*arguments: object, **options: Any) -> CompletedProcess[str]:
    """As `run`; Python, and the arguments it is given."""
    return run(sys.executable, *arguments, **options)


@contextmanager
def leaving_none() -> Iterator[None]:
    """What is started inside is killed at the end, with all that it started itself."""
    before = len(_started)
    try:
        yield
    finally:
        for process in _started[before:]:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    with suppress(OSError):  # what was not written to it has no reader any more
                        pipe.close()
        del _started[before:]


def ended(pid: int) -> bool:
    """Whether no process of that number runs (on Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
