"""Ctrl-C and other signals, and texts that come through pipes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from locret_stream.cli.text_input import Reader, file_text
from locret_stream.errors import InvalidText
from locret_stream.snapshot import Store
from tests.cli.command import invoke, start, wait_for
from tests.processes import PIPE, run_python, start_python


def test_ctrl_c_while_a_stream_is_read_ends_with_a_summary(small: list[str]):
    process = start("run", "-", "--ask", "What?", *small, stdin=PIPE)
    try:
        wait_for(process, "reading stdin")
        process.stdin.write("All work and no play.\n" * 2000)
        process.stdin.flush()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert re.search(r"Interrupted: [\d,]+ tokens read, .* kept", err) and out == "" and "Traceback" not in err, err


@pytest.mark.thorough
def test_ctrl_c_during_the_demo_and_at_the_prompt(small: list[str], tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("Hello.\n")
    for args, word in ((["demo", "--tokens", 2_000_000], "facts in"), (["run", note], "Ask away")):
        process = start(*args, *small, stdin=PIPE)
        try:
            wait_for(process, word)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=240)
        finally:
            process.kill()
        assert process.returncode == 130 and "Interrupted: " in err and "Traceback" not in err, err


ENDS = """
import asyncio, signal, sys
from locret_stream.cli.signals import Summary, interruptible
async def busy():
    while True:
        await asyncio.sleep(0)
async def main():
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(busy())
            print("running", flush=True)
            await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(.2)
        print("ended in order", flush=True)
        raise
if "held" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
before = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
try:
    with interruptible(Summary("so far")):
        asyncio.run(main())
finally:
    print(before == (signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


@pytest.mark.parametrize("sigint", ["heard", "ignored", "held"])
def test_what_runs_is_ended_in_order(sigint: str):
    """A KeyboardInterrupt from inside of any task would leave the others, and print what it interrupted. A held SIGINT
    is what a process finds that one with an ignored SIGINT starts."""
    process = start_python("-c", ENDS, sigint, ignored=("INT",) if sigint == "ignored" else ())
    try:
        assert process.stdout.readline() == "running\n"
        if sigint != "heard":
            process.send_signal(signal.SIGINT)
            time.sleep(.2)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (143, "ended in order\nTrue\n", "\nTerminated: so far.\n")


HANGS_UP = """
import signal
from locret_stream.cli.signals import Summary, interruptible
with interruptible(Summary("so far")):
    signal.raise_signal(signal.SIGHUP)
    print("goes on")
"""


@pytest.mark.parametrize(("ignored", "ends"), [(("HUP",), (0, "goes on\n", "")),
                                               ((), (129, "", "\nTerminated: so far.\n"))], ids=["nohup", "heard"])
def test_a_closed_terminal_ends_a_verb_but_not_under_nohup(ignored: tuple[str, ...], ends: tuple[int, str, str]):
    done = run_python("-c", HANGS_UP, ignored=ignored, timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == ends


def test_the_reader_waits_for_a_pipe_without_a_thread():
    async def both() -> list[str | None]:
        read, write = os.pipe()
        reader = Reader("pipe", os.fdopen(read, "rb"))
        os.write(write, "eins\nzwö".encode()[:-1])  # ends inside of a character
        lines = [await reader.line()]
        async with asyncio.timeout(30):
            waiting = asyncio.create_task(reader.line())
            await asyncio.sleep(0)
            os.write(write, "ö".encode()[1:] + b"lf\r\nrest")
            lines.append(await waiting)
            os.close(write)
            lines += [await reader.line(), await reader.line()]
        reader._file.close()
        return lines

    assert asyncio.run(both()) == ["eins", "zwölf", "rest", None]


def test_files_are_read_in_pieces_that_join_and_end_in_a_newline(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_bytes(("ä€🦉" * 30_000).encode())
    assert "".join(file_text(path)) == "ä€🦉" * 30_000 + "\n"
    path.write_bytes(b"")
    assert "".join(file_text(path)) == ""
    path.write_bytes("ä".encode()[:1])
    with pytest.raises(InvalidText, match="byte 0"):
        list(file_text(path))


@pytest.mark.thorough
def test_a_named_pipe_is_read_as_it_comes(small: list[str], tmp_path: Path):
    pipe, after = tmp_path / "pipe", tmp_path / "after.txt"
    os.mkfifo(pipe)
    after.write_text("More.\n")
    process = start("run", pipe, after, "--ask", "What?", "--max-new-tokens", 2, "--json", *small)
    start_python("-c", f"open({str(pipe)!r}, 'w').write('All work and no play.' * 9)")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert json.loads(out)["tokens_fed"] == 21 * 9 + len("\nMore.\n")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.thorough
def test_signals_end_the_wait_for_a_named_pipe(small: list[str], tmp_path: Path, begun: bool):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start("run", pipe, "--ask", "What?", *small)
    try:
        wait_for(process, "reading ")
        if begun:
            writer = pipe.open("w")  # waits for the reader
            writer.write("All work and no play.\n")
            writer.flush()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        if begun:
            writer.close()
    finally:
        process.kill()
    assert process.returncode == 143 and "Terminated: " in err and "Traceback" not in err, err


LEFT_BEHIND = """
import sys, threading, time
import torch
import locret_stream.cli as cli
def app(**_):
    def spin():
        x = torch.rand(300, 300)
        while True:
            x = x @ x
            x = x / x.norm()
    for _ in range(3):
        threading.Thread(target=spin, daemon=True).start()
    time.sleep(0.3)
    print("said")
    raise SystemExit(143)
cli.app = app
from locret_stream.__main__ import main
main()
"""


def test_a_signal_while_a_model_loads_ends_with_its_own_status():
    """The thread that loads is inside torch, and would abort the process when the interpreter goes."""
    done = run_python("-c", LEFT_BEHIND, timeout_s=120)
    assert (done.returncode, done.stdout) == (143, "said\n") and "terminate called" not in done.stderr


AT_A_TERMINAL = """
import os, pty, sys
typed, *words = sys.argv[1:]
child, terminal = pty.fork()
if not child:
    os.execv(sys.executable, [sys.executable, *words])
shown = b""
try:
    while data := os.read(terminal, 1024):
        shown += data
        if typed and b"[y/N]" in shown:
            os.write(terminal, bytes.fromhex(typed))
            typed = ""
except OSError:  # nobody holds its other end any more
    pass
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode())
"""


@pytest.mark.thorough
def test_ctrl_c_at_a_question_ends_the_command_and_only_yes_is_yes(small: list[str], tmp_path: Path):
    invoke("run", "--session", "a", "--store", tmp_path, *small, "--ask", "What?", "--max-new-tokens", 2,
           text="Some text.\n" * 9)
    for verb, typed, status in (("delete", b"\x03", 130), ("delete", b"\x04", 1), ("forget", b"Yes\n", 0)):
        assert len(Store(tmp_path).list()) == 1, "nothing was deleted yet"
        done = run_python("-c", AT_A_TERMINAL, typed.hex(), "-m", "locret_stream", "snapshots", verb, "a", "--store",
                          tmp_path, timeout_s=60)
        code, _, shown = done.stdout.partition(" ")
        assert code == str(status) and "Traceback" not in shown, done.stdout + done.stderr
        assert ("Interrupted." in shown) == (status == 130), shown
    assert not Store(tmp_path).list()
