"""A sender without end: `python benchmarks/endless_sender.py --seconds 180`.

A socket sends text to `POST /v1/sessions/<name>/ingest` of a server process (`locret-stream serve`, the bundled model),
as fast as the kernel takes it, which is far faster than the memory reads. Every half second is sampled:

  rss_mib      of the server process. Its growth is the most after the warm-up, less that at the end of the warm-up
  waiting_kib  bytes that were sent and not read by the memory yet: what the kernel and the server buffer

At the end both are stopped in the midst of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import httpx
from record import record

PATH = "/v1/sessions/endless/ingest"


def line(number: int) -> str:
    return f"At gate {number % 1000} the door was shut, and the old man who stood at the window was cold.\n"


class Sender(threading.Thread):
    """Sends until it is told to end; `sent` counts the bytes that the kernel took."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self.sent, self.ended = 0, threading.Event()
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # else what waits is here, not there
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed, it is reset

    def run(self) -> None:
        self._socket.sendall(f"POST {PATH}?upload=u HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                             "Transfer-Encoding: chunked\r\n\r\n".encode())
        number = 0
        with contextlib.suppress(OSError):
            while not self.ended.is_set():
                text = "".join(map(line, range(number, number + 200)))
                number += 200
                framed = memoryview(b"%x\r\n%s\r\n" % (len(text), text.encode()))
                while framed:
                    taken = self._socket.send(framed)
                    framed, self.sent = framed[taken:], self.sent + taken

    def break_off(self) -> None:
        self.ended.set()
        self._socket.close()


def rss_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(url: str, pid: int, seconds: float, warm_up_s: float) -> dict[str, Any]:
    samples: list[dict[str, float]] = []
    with httpx.Client(base_url=url, timeout=120) as client:
        sender, began = Sender(int(url.rpartition(":")[2])), time.perf_counter()
        sender.start()
        while (at := time.perf_counter() - began) < seconds:
            state = client.get(PATH, params={"upload": "u"})
            read = state.json()["offset"] if state.status_code == 200 else 0
            samples.append({"s": round(at, 2), "rss_mib": round(rss_mib(pid), 2), "read": read,
                            "waiting_kib": round((sender.sent - read) / 2**10, 1)})
            if len(samples) % 20 == 0:
                print(samples[-1], file=sys.stderr, flush=True)
            time.sleep(0.5)
        took = time.perf_counter() - began
        memory = client.get("/v1/sessions/endless/memory").json()  # as it is at this moment
        sender.break_off()
    warm = next(sample for sample in samples if sample["s"] >= warm_up_s)
    later = [sample for sample in samples if sample["s"] >= warm_up_s]
    return {"seconds": seconds, "warm_up_s": warm_up_s, "bytes": read, "tokens": memory["tokens"],
            "tokens_a_second": round(memory["tokens"] / took, 1), "rss_mib_warm": warm["rss_mib"],
            "rss_mib_growth": round(max(sample["rss_mib"] for sample in later) - warm["rss_mib"], 2),
            "waiting_kib_most": max(sample["waiting_kib"] for sample in samples),
            "waiting_kib_last": samples[-1]["waiting_kib"], "rss_mib_end": round(rss_mib(pid), 2),
            "samples": samples[::10]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--warm-up", type=float, default=30)
    parser.add_argument("--keep", metavar="NAME")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        process = subprocess.Popen(
            [sys.executable, "-m", "locret_stream", "serve", "--port", "0", "--json", "--store", store],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"].removesuffix("/v1")
            result = measure(url, process.pid, options.seconds, options.warm_up)
        finally:
            process.terminate()
            process.communicate(timeout=60)
    record(options.keep or "endless_sender", result, keep=options.keep is not None)


if __name__ == "__main__":
    main()
