"""Runs work in a process of its own, within limits of time and memory, so that its end is not that of the others. It is
forked from this one, as a new interpreter takes seconds to import what the work needs."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

LIMIT_S, LIMIT_BYTES = 240, 10 << 30


class Died(Exception):
    """The process ended without an answer: killed, out of memory, or out of time."""


def apart(work: Callable[[], Any], *, quiet: bool = True, limit_s: float = LIMIT_S) -> Any:
    """What `work` returns, in a forked process; it is ended with this one's wait, whatever ends that.

    Args:
        quiet: what it prints is dropped.

    Raises:
        Died: there is no answer.
    """
    forks = multiprocessing.get_context("fork")
    here, there = forks.Pipe(duplex=False)
    process = forks.Process(target=_run, args=(work, there, quiet, limit_s), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(limit_s):
            raise Died(f"no end within {limit_s:.0f} s")
        return here.recv()
    except EOFError:
        process.join()
        raise Died(f"the process ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        here.close()


def _run(work: Callable[[], Any], there: Any, quiet: bool, limit_s: float) -> None:
    signal.alarm(int(limit_s) + 5)  # should the process that waits be killed, so that it can end nothing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits, which ends this one
    if sys.platform == "linux":  # elsewhere address space is not what limits memory
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    there.send(work())
    there.close()
