"""Streams of bytes that are not all UTF-8, absorbed by a thread."""

from __future__ import annotations

import codecs
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from langchain_locret import LocretChatModel, NoTextWarning
from locret_stream import ConfigError, InvalidText
from tests.langchain.support import held, receipt, rendered, thread

BEFORE, BEHIND = "The door code of falcon is 48213.\n", "The port of otter is 3390.\n"
BAD = BEFORE.encode() + b"caf\xe9 \xf0\x9f\x98\n" + BEHIND.encode()
READ = f"{BEFORE}caf\ufffd \ufffd\n{BEHIND}"


def one_by_one(data: bytes) -> Iterator[bytes]:
    return (data[at:at + 1] for at in range(len(data)))


async def test_bad_bytes_are_refused_or_replaced_and_counted(chat: LocretChatModel, tmp_path: Path):
    with pytest.raises(InvalidText, match=rf"byte {BAD.index(233)} is not UTF-8.*errors='replace'"):
        await chat.aingest(iter([BAD]), thread_id="a")
    file = tmp_path / "raw.log"
    file.write_bytes(BAD)
    stubs = [await chat.aingest(source, thread_id=name, errors="replace") for name, source in
             (("whole", BAD), ("pieces", one_by_one(BAD)), ("file", file))]
    for stub, name in zip(stubs, ("whole", "pieces", "file"), strict=True):
        assert stub.response_metadata["locret"] == {"replaced": 2, "bytes_replaced": 4}
        assert stub.content == stubs[0].content and held(chat, name) == rendered([HumanMessage(READ)])
    answer = await chat.ainvoke([stubs[0], HumanMessage("what?")], thread("whole"))
    assert receipt(answer)["source"] == "live", "a receipt of the stand-in changes nothing of it"
    again = HumanMessage(stubs[0].content)
    assert receipt(await chat.ainvoke([again, HumanMessage("what?")], thread("whole")))["source"] != "new"
    assert (await chat.aingest("some text", thread_id="b")).response_metadata == {}


def test_callers_who_do_not_await_give_the_same_options(chat: LocretChatModel):
    stub = chat.ingest(BAD, thread_id="a", errors="replace")
    assert stub.response_metadata["locret"]["bytes_replaced"] == 4
    wide = codecs.BOM_UTF16_LE + BEFORE.encode("utf-16-le")
    with pytest.raises(InvalidText, match=r"UTF-16 \(PowerShell's > writes it\).*encoding='utf-16'"):
        chat.ingest(one_by_one(wide), thread_id="b")
    chat.ingest(one_by_one(wide), thread_id="b", encoding="utf-16")
    assert held(chat, "b") == rendered([HumanMessage(BEFORE)])
    with pytest.warns(NoTextWarning, match="may be UTF-16 without a byte-order mark, which encoding='utf-16-le' reads"):
        chat.ingest(wide[2:], thread_id="c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat.ingest(wide[2:], thread_id="d", encoding="utf-16-le")
    for options in ({"errors": "ignore"}, {"encoding": "rot13"}):
        with pytest.raises(ConfigError, match="expected"):
            chat.ingest(BAD, thread_id="e", **options)


def test_text_does_not_go_inside_a_character(chat: LocretChatModel):
    parts: list[Any] = ["ä".encode()[:1], "between", "ä".encode()[1:]]
    with pytest.raises(InvalidText, match="byte 0 is not UTF-8"):
        chat.ingest(iter(parts), thread_id="a")
    stub = chat.ingest(iter(parts), thread_id="a", errors="replace")
    assert held(chat, "a") == rendered([HumanMessage("\ufffdbetween\ufffd")])
    assert stub.response_metadata["locret"]["replaced"] == 2
