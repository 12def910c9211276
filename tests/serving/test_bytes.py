"""Streams whose bytes are not all UTF-8: refused by their place, or read and counted, in whatever pieces they come."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.support import Served

BEFORE, BEHIND = "The door code of falcon is 48213.\n", "The port of otter is 3390.\n"
BAD = BEFORE.encode() * 40 + b"caf\xe9 \xf0\x9f\x98\n" + BEHIND.encode() * 40
READ = BEFORE * 40 + "caf\ufffd \ufffd\n" + BEHIND * 40
WIDE = codecs.BOM_UTF16_LE + (BEFORE + BEHIND).encode("utf-16-le")


def ingest(served: Served, content: Any, session: str = "log", **query: Any) -> tuple[int, dict[str, Any]]:
    answer = served.http.post(f"/v1/sessions/{session}/ingest", content=content, params=query)
    return answer.status_code, answer.json()


def text_of(served: Served, session: str = "log") -> str:
    return served.http.get(f"/v1/sessions/{session}/text").json()["text"]


def test_one_bad_byte_is_refused_by_its_place_unless_it_is_to_be_replaced(served: Served):
    status, told = ingest(served, BAD)
    place = BAD.index(b"\xe9")
    assert status == 400 and f"byte {place} is not UTF-8" in told["error"]["message"]
    assert "?errors=replace" in told["error"]["message"]
    assert served.http.get("/v1/sessions/log").status_code == 404

    def bytes_alone() -> Iterator[bytes]:
        for at in range(place - 20, place + 20):
            yield BAD[at:at + 1]

    done = {}
    for session, content in (("whole", BAD), ("pieces", [BAD[:place - 20], *bytes_alone(), BAD[place + 20:]])):
        content = content if isinstance(content, bytes) else iter(content)
        status, done[session] = ingest(served, content, session, errors="replace")
        assert status == 200 and (done[session]["replaced"], done[session]["bytes_replaced"]) == (2, 4)
        assert done[session]["offset"] == len(BAD) and done[session]["characters"] == len(READ)
        assert READ in text_of(served, session)
    assert done["whole"]["message"] == done["pieces"]["message"]
    assert "replaced" not in ingest(served, READ.encode(), "same")[1]


def test_utf_16_and_byte_order_marks(served: Served):
    status, told = ingest(served, WIDE)
    assert status == 400 and "UTF-16 (PowerShell's > writes it)" in told["error"]["message"]
    assert "?encoding=utf-16" in told["error"]["message"]
    assert ingest(served, WIDE, errors="replace")[0] == 400, "half of it would be noise"
    for session, content, query in (("a", WIDE, {"encoding": "utf-16"}), ("b", iter(
            [WIDE[at:at + 1] for at in range(len(WIDE))]), {"encoding": "UTF16"}),
            ("c", WIDE[2:], {"encoding": "utf-16-le"}), ("d", codecs.BOM_UTF8 + (BEFORE + BEHIND).encode(), {}),
            ("e", (BEFORE + BEHIND).encode("latin-1"), {"encoding": "latin-1"})):
        status, done = ingest(served, content, session, **query)
        assert status == 200 and done["characters"] == len(BEFORE + BEHIND), done
        assert BEFORE + BEHIND in text_of(served, session) and "\ufeff" not in text_of(served, session)
    status, done = ingest(served, WIDE[2:], "nul")  # it is valid UTF-8
    assert status == 200 and "?encoding=utf-16-le" in done["warnings"][0]


def test_progress_ends_with_the_same_receipt(served: Served):
    with served.http.stream("POST", "/v1/sessions/log/ingest", params={"errors": "replace"}, content=BAD,
                            headers={"accept": "text/event-stream"}) as answer:
        last = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")][-1]
    assert last["type"] == "ingest.completed" and (last["replaced"], last["bytes_replaced"]) == (2, 4)


@pytest.mark.parametrize("query", [{"errors": "ignore"}, {"encoding": "utf-7"}, {"encoding": "x" * 5000}])
def test_what_is_no_encoding_is_refused_by_name(served: Served, query: dict[str, str]):
    status, told = ingest(served, b"text", **query)
    assert status == 400 and told["error"]["param"] == next(iter(query)) and "expected" in told["error"]["message"]


def test_an_upload_in_pieces_has_one_charset(served: Served):
    """Cut inside the character that is broken, and ended there: what came of it is no text yet."""
    cut = BAD.index(b"\xf0") + 2
    query = {"upload": "u", "errors": "replace"}
    with pytest.raises(Exception, match="gone"):
        served.http.post("/v1/sessions/log/ingest", content=leaving(BAD[:cut]), params=query)
    state = wait_for_state(served, cut)
    assert (state["replaced"], state["bytes_replaced"], state["done"]) == (1, 1, False)
    for wrong in ({"errors": "strict"}, {"errors": "replace", "encoding": "latin-1"}):
        status, told = ingest(served, BAD[cut:], upload="u", offset=cut, **wrong)
        assert status == 409 and told["error"]["code"] == "wrong_charset" and told["error"]["param"] in wrong
    status, done = ingest(served, BAD[cut:], upload="u", offset=cut)  # as it began
    assert status == 200 and (done["replaced"], done["bytes_replaced"]) == (2, 4) and READ in text_of(served)
    status, again = ingest(served, b"", upload="u", offset=len(BAD), errors="replace")
    assert status == 200 and again["message"] == done["message"] and again["replaced"] == 2


def test_a_stream_that_ends_inside_a_character(served: Served):
    half = BEFORE.encode() + "ä".encode()[:1]
    status, done = ingest(served, half, "a", errors="replace")
    assert status == 200 and (done["replaced"], done["characters"]) == (1, len(BEFORE) + 1)
    assert BEFORE + "\ufffd" in text_of(served, "a")
    status, told = ingest(served, half, "b", upload="u")
    assert status == 400 and f"byte {len(BEFORE)} is not UTF-8" in told["error"]["message"]
    status, done = ingest(served, "ä".encode()[1:], "b", upload="u", offset=len(half))  # its sender has the rest
    assert status == 200 and BEFORE + "ä" in text_of(served, "b")


def leaving(data: bytes) -> Iterator[bytes]:
    import time
    yield data
    time.sleep(0.5)  # else it is gone before a byte of it was read
    raise RuntimeError("gone")


def wait_for_state(served: Served, offset: int) -> dict[str, Any]:
    from tests.serving.test_left import wait_until
    wait_until(lambda: served.service._running == 0)
    state = served.http.get("/v1/sessions/log/ingest", params={"upload": "u"}).json()
    assert state["offset"] == offset
    return state
