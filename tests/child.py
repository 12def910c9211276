"""Become another program, with ordinary signals: `python tests/child.py PARENT IGNORED PROGRAM ARGUMENT…`.

Whoever ignores a signal (nohup, a shell for what runs in the background, some CI) has children that ignore it as well.
IGNORED names those that the program shall ignore, "INT,HUP"; "" for none. It ends with the process PARENT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

ORDINARY = ("INT", "QUIT", "HUP", "TERM", "PIPE", "XFSZ")
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Kill this process when the process `parent`, which is its own, has ended however it ended (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def main(parent: str, ignored: str, *program: str) -> None:
    end_with(int(parent))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in ORDINARY:
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN if name in ignored.split(",") else signal.SIG_DFL)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
