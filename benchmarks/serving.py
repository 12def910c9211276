"""What the server costs over the library: `python benchmarks/serving.py`.

The same prompts are answered by the bundled model through `runtime.open` and `generate` in this process, and through
`POST /v1/chat/completions` of a server process (`locret-stream serve`, one torch thread each), streamed, with 1 and
with --streams at once. The two take turns, --repeats times, as the speed of a shared machine changes. Measured:

  cpu_ms       CPU time (user and system) of the process that answers, per token: steadier than wall time on a machine
               with others. Of the server it is all of it: HTTP, JSON, boundaries, template
  first_ms     from the request to its first text, a new connection and the loopback included: one request at a time, in
               --pairs neighbours of one by the library and one by the server
  left_ms      from the moment in which a client closes its connection in the middle of an answer until `/metrics` shows
               that nothing runs: the turn is undone and its slot is free. It is asked every 5 ms

Ratios and differences are quartiles over neighbours: the one in the middle counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import torch
from record import record

from locret_stream import Runtime

PROMPT = "The door code of falcon is 48213. It was cold, and number {} stood at the gate. What is the door code?"
REQUEST = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
           b"Connection: close\r\nContent-Length: %d\r\n\r\n")
POLL_S = 0.005
FIRST_TEXT = re.compile(rb'"content":"[^"]')
HERTZ = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int | None = None) -> float:
    """CPU seconds of a process so far; of this one without a number."""
    if pid is None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HERTZ


async def by_library(runtime: Runtime, number: int, tokens: int) -> float:
    """Seconds to the first text."""
    began, first = time.perf_counter(), 0.0
    async with runtime.open() as context:
        async for token in context.generate(PROMPT.format(number), max_new_tokens=tokens, ignore_eos=True):
            if not first and token.text:
                first = time.perf_counter() - began
    return first


async def by_server(port: int, number: int, tokens: int) -> float:
    """Seconds to the first text. A bare socket, as what a client's own library costs is no cost of the server."""
    body = json.dumps({"messages": [{"role": "user", "content": PROMPT.format(number)}], "max_tokens": tokens,
                       "stream": True, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began, first, answer = time.perf_counter(), 0.0, b""
    writer.write(REQUEST % len(body) + body)
    while piece := await reader.read(1 << 16):
        answer += piece
        if not first and FIRST_TEXT.search(answer):
            first = time.perf_counter() - began
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer and first, answer[-2000:]
    return first


async def until_left(port: int, number: int) -> float:
    """Seconds until the turn of a session whose client has left runs no more."""
    body = json.dumps({"messages": [{"role": "user", "content": PROMPT.format(number)}], "max_tokens": 2000,
                       "session_id": f"left-{number}", "stream": True, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST % len(body) + body)
    await reader.readuntil(b'"content":"')
    for _ in range(number % 40):  # somewhere in the answer
        await reader.readline()
    watching, commands = await asyncio.open_connection("127.0.0.1", port)
    writer.transport.abort()
    began = time.perf_counter()
    while True:
        await asyncio.sleep(POLL_S)  # a loop without it would take the server's time from what it waits for
        commands.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await watching.readuntil(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head)
        assert size is not None, head
        if b"\nlocret_running 0.0" in await watching.readexactly(int(size[1])):
            commands.close()
            return time.perf_counter() - began


async def measure(options: argparse.Namespace, port: int, pid: int) -> dict[str, Any]:
    numbers = iter(range(10**6))
    cpu: dict[int, list[dict[str, float]]] = {1: [], options.streams: []}
    firsts: list[dict[str, float]] = []
    async with Runtime.from_pretrained("bundled", max_live=options.streams) as runtime:
        ways: list[tuple[str, Callable[[int, int], Awaitable[float]], int | None]] = [
            ("library", lambda number, tokens: by_library(runtime, number, tokens), None),
            ("server", lambda number, tokens: by_server(port, number, tokens), pid)]
        for repeat in range(options.repeats + 1):
            for streams, rows in cpu.items():
                row = {}
                for name, one, process in ways:
                    before = cpu_s(process)
                    await asyncio.gather(*(one(next(numbers), options.tokens) for _ in range(streams)))
                    row[name] = 1e3 * (cpu_s(process) - before) / streams / options.tokens
                if repeat:  # the first one warms up
                    rows.append(row)
                    print(streams, row, file=sys.stderr, flush=True)
        for _ in range(options.pairs):
            firsts.append({name: 1e3 * await one(next(numbers), 4) for name, one, _ in ways})
        left = sorted([1e3 * await until_left(port, number) for number in range(options.leave)])
    return {"cpu_ms": {str(streams): summary(rows) for streams, rows in cpu.items()}, "first_ms": summary(firsts),
            "left_ms": {"median": statistics.median(left), "most": left[-1], "clients": len(left)}}


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of both, and of what neighbours are to each other, with the quartiles of that."""
    ratios, more = [row["server"] / row["library"] for row in rows], [row["server"] - row["library"] for row in rows]
    return {**{name: statistics.median(row[name] for row in rows) for name in ("library", "server")},
            "ratio": statistics.quantiles(ratios, n=4), "more": statistics.quantiles(more, n=4), "rounds": len(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--leave", type=int, default=100, help="clients that leave in the middle of an answer")
    parser.add_argument("--keep", metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as store:
        process = subprocess.Popen(
            [sys.executable, "-m", "locret_stream", "serve", "--port", "0", "--json", "--store", store, "--max-live",
             str(options.streams)], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            assert process.stdout is not None
            port = urlsplit(json.loads(process.stdout.readline())["url"]).port
            result = asyncio.run(measure(options, port, process.pid))
        finally:
            process.terminate()
            process.communicate(timeout=60)
    record(options.keep or "serving", {"tokens": options.tokens, **result}, keep=options.keep is not None)


if __name__ == "__main__":
    main()
