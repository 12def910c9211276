"""Requests and seconds of a chat's turn whose memory is stored in an object store: `python benchmarks/object_store.py`.

A server on this machine plays S3 (moto) and answers every request after `--delay-ms`, as a store in another building
does. A chat of `--turns` turns over the bundled model (LocretChatModel) saves its memory twice a turn, behind the
question and behind the answer; then another process's model opens it and goes on. What is counted are the requests
that arrive at the server. The first turn of a chat is not counted: it makes the session, and loads the model.

Needs `pip install s3fs "moto[server]"`.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from record import record


class Server:
    """S3 by moto, which counts requests by their method and answers late."""

    def __init__(self, delay_s: float):
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.delay_s, self.seen, self._lock = delay_s, Counter[str](), threading.Lock()
        self._s3 = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}", "AWS_ACCESS_KEY_ID": "k",
                       "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        listing = environ["REQUEST_METHOD"] == "GET" and "list-type" in environ.get("QUERY_STRING", "")
        with self._lock:
            self.seen["LIST" if listing else environ["REQUEST_METHOD"]] += 1
        time.sleep(self.delay_s)
        return self._s3(environ, start)


def chat(server: Server, history: list[Any], turns: int, key: str | None) -> list[dict[str, Any]]:
    """So many turns of one process: where the memory came from, requests and seconds of each."""
    from langchain_core.messages import HumanMessage

    from langchain_locret import LocretChatModel

    model, done = LocretChatModel(model="bundled", store="s3://bucket/memories", key=key), []
    for _ in range(turns):
        history.append(HumanMessage(f"The door code of room {len(history)} is {48213 + len(history)}."))
        server.seen.clear()
        began = time.perf_counter()
        answer = model.invoke(history, {"configurable": {"thread_id": "alice"}})
        seconds = time.perf_counter() - began
        history.append(answer)
        receipt = answer.response_metadata["locret"]
        assert receipt["saved"], receipt
        done.append({"source": receipt["source"], "requests": server.seen.total(), "kinds": dict(server.seen),
                     "seconds": round(seconds, 3)})
    model.close()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=20.0, help="of every request (default: 20)")
    parser.add_argument("--turns", type=int, default=12, help="of the first process (default: 12)")
    parser.add_argument("--encrypted", action="store_true", help="store the session encrypted")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/object_store.json")
    arguments = parser.parse_args()
    import boto3

    server = Server(arguments.delay_ms / 1000)
    boto3.client("s3").create_bucket(Bucket="bucket")
    key, history = "5a" * 32 if arguments.encrypted else None, []
    first = chat(server, history, arguments.turns, key)
    second = chat(server, history, 3, key)
    turns = [turn for turn in (*first, *second) if turn["source"] == "live"]
    result = {
        "delay_ms": arguments.delay_ms, "encrypted": arguments.encrypted,
        "requests_of_a_turn": {"median": statistics.median(turn["requests"] for turn in turns),
                               "most": max(turn["requests"] for turn in turns)},
        "seconds_of_a_turn": {"median": statistics.median(turn["seconds"] for turn in turns),
                              "most": max(turn["seconds"] for turn in turns)},
        "opened_by_another_process": second[0], "turns": [*first, *second]}
    record("object_store", result, keep=arguments.keep)


if __name__ == "__main__":
    main()
