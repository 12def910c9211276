"""What Ray Serve costs over one process: `python benchmarks/ray_cost.py`. Needs the extra [ray].

The bundled model decodes --tokens tokens in 1 and in --streams streams at once, at `locret-stream serve --ray` with two
replicas, and at `locret-stream serve` with one torch thread. The two take turns, --repeats times. Measured:

  cpu_ms       CPU time (user and system) per token of each kind of process: replicas, fronts, Ray's HTTP proxy
  token_ms     wall time per token of one stream, between its first and its last
  gap_ms       of one stream: the longest time without text
  first_ms     from the request to its first text

All are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from record import record

PROMPT = "The door code of falcon is 48213. It was cold, and number {} stood at the gate. What is the door code?"
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
KINDS = {"ServeReplica:locret:Memory": "replicas", "ServeReplica:locret:Front": "fronts", "ProxyActor": "proxy"}


@contextmanager
def server(*arguments: str) -> Iterator[tuple[str, int]]:
    """The root URL of a server with a store of its own, and its process id."""
    with tempfile.TemporaryDirectory() as store:
        process = subprocess.Popen(
            [sys.executable, "-m", "locret_stream", "serve", "--port", "0", "--json", "--store", store, *arguments],
            stdout=subprocess.PIPE, text=True, env={"RAY_object_store_memory": str(120 << 20), **os.environ,
                                                    "OMP_NUM_THREADS": "1"})
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the server did not start; its messages are above")
            yield json.loads(line)["url"].removesuffix("/v1"), process.pid
        finally:
            process.terminate()
            process.communicate(timeout=120)


def cpu_ms(pid: int) -> Counter[str]:
    """CPU time so far of Ray's processes by their kind, and of one process as "one"."""
    found = Counter[str]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            title = stat.with_name("cmdline").read_bytes().partition(b"\0")[0].decode()
        except OSError:
            continue  # it ended meanwhile
        kind = "one" if stat.parent.name == str(pid) else next((KINDS[name] for name in KINDS if name in title), None)
        if kind:
            found[kind] += (int(fields[11]) + int(fields[12])) * TICK_MS
    return found


async def stream(client: httpx.AsyncClient, number: int, tokens: int) -> dict[str, float]:
    times = [time.perf_counter()]
    body = {"messages": [{"role": "user", "content": PROMPT.format(number)}], "max_tokens": tokens, "stream": True,
            "ignore_eos": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if re.search(r'"content":"[^"]', line):
                times.append(time.perf_counter())
    return {"first_ms": 1e3 * (times[1] - times[0]), "token_ms": 1e3 * (times[-1] - times[1]) / (tokens - 1),
            "gap_ms": 1e3 * max(after - before for before, after in pairwise(times[1:]))}


async def measure(options: argparse.Namespace, cluster: str, single: tuple[str, int]) -> dict[str, Any]:
    numbers = iter(range(10**6))
    rows: dict[int, dict[str, list[dict[str, float]]]] = {
        streams: {"ray": [], "one process": []} for streams in (1, options.streams)}
    async with httpx.AsyncClient(base_url=cluster, timeout=600) as many, httpx.AsyncClient(
            base_url=single[0], timeout=600) as one:
        for repeat in range(options.repeats + 1):
            for streams, sides in rows.items():
                for side, client in (("ray", many), ("one process", one)):
                    before = cpu_ms(single[1])
                    each = await asyncio.gather(*(stream(client, next(numbers), options.tokens)
                                                  for _ in range(streams)))
                    spent = cpu_ms(single[1])
                    kinds = KINDS.values() if side == "ray" else ("one",)
                    row = {f"cpu_ms {kind}": (spent[kind] - before[kind]) / streams / options.tokens for kind in kinds}
                    row |= {name: statistics.median(one[name] for one in each) for name in each[0]}
                    if repeat:  # the first one warms up
                        sides[side].append(row)
                        print(streams, side, row, file=sys.stderr, flush=True)
    return {str(streams): {side: {name: round(statistics.median(row[name] for row in found), 2) for name in found[0]}
                           for side, found in sides.items()} for streams, sides in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", metavar="NAME")
    options = parser.parse_args()
    slots = str(options.streams)
    with server("--ray", "--replicas", "2", "--max-live", slots) as (cluster, _), server("--max-live", slots) as single:
        result = asyncio.run(measure(options, cluster, single))
    record(options.keep or "ray_cost", {"tokens": options.tokens, "load": os.getloadavg(), "streams": result},
           keep=options.keep is not None)


if __name__ == "__main__":
    main()
