"""Writes the golden stores `dated` and `plain`: `python -m tests.golden_days.make`. Never run it again.

They were made on 28 November 2026, with the clock of that day, by the library that took the identity of a template to
be the digest of what it renders. Each holds what a user has after a day: a session that was fed and asked, a server's
named chat of two turns, a response that goes on from another, an ingested log, and a LangChain thread with a stream.
`expected.json` says by which names these are asked for again.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.golden_days.scripted import TEMPLATES, Say, chat_model, runtime, scripted, serving

FOLDER = Path(__file__).parent
DIARY = "".join(f"The door code of house {number} is {4000 + 37 * number}.\n" for number in range(10))
LOG = "".join(f"{number:02}:00 the lamp of hall {number} was lit\n" for number in range(8))
TALK = [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Hello, Ada."},
        {"role": "user", "content": "I live in Rome."}, {"role": "assistant", "content": "Rome, then."}]


async def session(store: Path, template: str, say: Say) -> None:
    async with runtime(store, template) as running, running.open("diary") as context:
        say.replies = ["It is 4037."]
        await context.push(DIARY)
        async for _ in context.generate("What is the code of house 1?"):
            pass
        await context.push("Later that day it rained.\n")


def server(store: Path, template: str, say: Say) -> dict[str, Any]:
    def asked(path: str, body: dict[str, Any]) -> Any:
        answer = served.http.post(path, json={"model": "scripted", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    with serving(store, template) as served:
        say.replies = ["Hello, Ada.", "Rome, then.", "One it is.", "Two it is."]
        for turns in (1, 3):
            asked("/v1/chat/completions", {"session_id": "talk", "messages": TALK[:turns]})
        first = asked("/v1/responses", {"input": "Say one."})
        second = asked("/v1/responses", {"input": "Say two.", "previous_response_id": first["id"]})
        logged = served.http.post("/v1/sessions/log/ingest", content=LOG.encode())
        assert logged.status_code == 200, logged.text
        return {"response": second["id"], "message": logged.json()["message"]}


def langchain(store: Path, template: str, say: Say) -> str:
    with chat_model(store, template) as chat:
        stub = asyncio.run(chat.aingest(LOG, thread_id="thread"))
        assert isinstance(stub.content, str)
        return stub.content


def main() -> None:
    expected = {}
    for name, template in TEMPLATES.items():
        store = FOLDER / name
        assert not store.exists(), f"{store} is there already; old files are never made anew"
        with scripted() as say:
            asyncio.run(session(store, template, say))
            expected[name] = {**server(store, template, say), "stream": langchain(store, template, say)}
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
