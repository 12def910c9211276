"""The command line as tests call it: in this process, or in one of its own that gets signals."""

from __future__ import annotations

import time
from pathlib import Path

from typer.testing import CliRunner

from locret_stream.cli import app
from tests.processes import Popen, start_python


def invoke(*args: object, text: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in args], input=text)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def mistake(*args: object, text: str | None = None) -> str:
    """The one line of a user's mistake."""
    code, out, err = invoke(*args, text=text)
    assert (code, out) == (2, ""), (code, out, err)
    *before, line = err.splitlines()
    known = ("model ", "reading ", "making conversations", "training heads ", "tuning heads ", "dividing the budget ",
             "Session ")
    assert all(progress.startswith(known) for progress in before), err
    assert line.startswith("locret-stream: "), err
    return line


def start(*args: object, **more: object) -> Popen[str]:
    return start_python("-m", "locret_stream", *args, **more)


def wait_until_idle(process: Popen) -> None:
    """Until it has used no CPU for half a second: whatever it was given is read."""
    used, still = None, 0
    for _ in range(600):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        now = int(fields[11]) + int(fields[12])
        still = still + 1 if now == used else 0
        if still >= 5:
            return
        used = now
        time.sleep(0.1)
    raise AssertionError("the process never came to rest")


def wait_for(process: Popen[str], word: str) -> None:
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"{word!r} never came; exit {process.wait()}")
