"""What one request asks for keeps nobody else waiting: long texts, long searches."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from locret_stream.conversation.thread_memory import WORDS
from locret_stream.snapshot.transcript import Passage, Transcript
from locret_stream.text import TextCodec
from tests.langchain.support import Script
from tests.serving.support import MODEL, Served, serving
from tests.serving.test_attacked import respond
from tests.serving.test_left import wait_until
from tests.serving.test_sessions import ingest

LONG = "a line of a document about falcon\n" * 200


def test_long_texts_are_tokenised_beside_the_event_loop(script: Script, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch):
    seen, stock = list[tuple[int, int]](), TextCodec.encode_text

    def noted(codec: TextCodec, text: str, *more: Any, **options: Any) -> list[int]:
        seen.append((len(text), threading.get_ident()))
        return stock(codec, text, *more, **options)

    with serving(tmp_path, recall=True) as served:
        looping: list[int] = []
        served.loop.call_soon_threadsafe(lambda: looping.append(threading.get_ident()))
        ingest(served, "s", LONG)
        monkeypatch.setattr(TextCodec, "encode_text", noted)
        for path, body in (("sessions/s/ask", {"question": LONG, "recall": False}),
                           ("sessions/s/ask", {"question": "What of falcon?"}), ("sessions/s/focus", {"focus": LONG}),
                           ("responses", {"input": LONG, "conversation": "s"}),
                           ("responses", {"input": "one", "focus": LONG, "session_id": "t"}),
                           ("chat/completions", {"messages": [{"role": "user", "content": LONG}]})):
            before = len(seen)
            answer = served.http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, (path, answer.text)
            long = [size for size, _ in seen[before:] if size > 512]
            assert long or body.get("question") == "What of falcon?", path
        assert looping and not [size for size, thread in seen if size > 512 and thread == looping[0]]


def test_searches_take_no_turn_s_place(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun, go_on = threading.Semaphore(0), threading.Event()

    def waits(*_: Any) -> list[Passage]:
        begun.release()
        assert go_on.wait(30)
        return []

    with serving(tmp_path, max_live=2) as served, ThreadPoolExecutor(2) as pool:
        for name in ("a", "b"):
            respond(served, input="one", session_id=name)
        monkeypatch.setattr(Transcript, "find", waits)
        searches = [pool.submit(served.http.get, f"/v1/sessions/{name}/search?words=one") for name in ("a", "b")]
        try:
            assert begun.acquire(timeout=10) and begun.acquire(timeout=10)
            respond(served, input="two", session_id="c")
        finally:
            go_on.set()
        assert [search.result(30).status_code for search in searches] == [200, 200]


def test_a_search_that_nobody_waits_for_ends(served: Served, monkeypatch: pytest.MonkeyPatch):
    begun, ended = threading.Event(), threading.Event()

    def endless(self: Transcript, words: list[str], decode: Any, limit: int) -> list[Passage]:
        try:
            while True:
                decode([1])
                begun.set()
        finally:
            ended.set()

    respond(served, input="one", session_id="s")
    monkeypatch.setattr(Transcript, "find", endless)
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{served.url}/v1/sessions/s/search?words=one", timeout=0.3)
    assert begun.is_set() and ended.wait(10)
    wait_until(lambda: served.service._running == 0)
    monkeypatch.undo()
    assert respond(served, input="two", session_id="s")["model"] == MODEL


def test_so_many_words_are_refused(served: Served):
    respond(served, input="one", session_id="s")
    many = served.http.get("/v1/sessions/s/search", params={"words": "one " * (WORDS + 1)})
    assert many.status_code == 400 and f"more than {WORDS} words" in many.json()["error"]["message"], many.text
    assert served.http.get("/v1/sessions/s/search", params={"words": "one " * WORDS}).status_code == 200
