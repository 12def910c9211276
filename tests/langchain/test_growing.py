"""A history that grows: what was read before is recognised, not read again; nothing that changed in it is missed."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
)

from langchain_locret import LocretChatModel, chat_model, seen
from langchain_locret.messages import read
from langchain_locret.seen import EACH, THREADS, Seen
from locret_stream.conversation.boundaries import LEDGER, Boundary, fitting, heading, split
from locret_stream.conversation.histories import MOST_RECEIPTS, History, Keys
from locret_stream.conversation.messages import Message, chain, stand_in

START = b"s" * 32


def afresh(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    return messages_from_dict(messages_to_dict(messages))


def call(arguments: dict[str, Any], call_id: str = "c1", name: str = "look") -> Any:
    return {"name": name, "args": arguments, "id": call_id, "type": "tool_call"}


def receipt(state: str) -> dict[str, Any]:
    return {"locret": {"state": state, "fed": 3}, "finish_reason": "stop"}


def some(number: int) -> list[BaseMessage]:
    """Messages of every kind, of a run of an agent and a chat."""
    return [HumanMessage(f"question {number}", name="Ann"),
            AIMessage(f"let me look {number}",
                      tool_calls=[call({"at": number, "deep": [1, {"x": None}]}), call({}, "c2")],
                      additional_kwargs={"reasoning_content": "hm"}, response_metadata=receipt("ab" * 32)),
            ToolMessage("found", tool_call_id="c1", name="look"), ToolMessage(["a", {"b": 1}], tool_call_id="c2"),
            AIMessage([{"type": "text", "text": "here"}, {"type": "reasoning", "reasoning": "so"}]),
            HumanMessage([{"type": "text", "text": "block"}]), ChatMessage("a note", role="critic"),
            AIMessage("", invalid_tool_calls=[{"name": "f", "args": "{", "id": "i", "error": None}]),
            HumanMessage("older ones in short", additional_kwargs={"lc_source": "summarization"}),
            AIMessage("fine", response_metadata=receipt(f"{number % 256:02x}" * 32)),
            HumanMessage(stand_in("log", number, "0" * 64)), AIMessage("Noted.")]


def history(rounds: int) -> list[BaseMessage]:
    return [SystemMessage("be brief"), *(message for number in range(rounds) for message in some(number))]


def given(seen: Seen, messages: Sequence[BaseMessage], thread: str | None = "t") -> tuple[History, Keys, int]:
    """The messages as a call gives them; how many were recognised."""
    said = seen.history(thread, afresh(messages))
    keys = Keys(START, said)
    return said, keys, keys.known.count if keys.known is not None else 0


EDITS: dict[str, tuple[int, Callable[[Any], Any]]] = {  # what is noticed today: number within `some`, and the edit
    "text": (0, lambda m: m.model_copy(update={"content": "other"})),
    "text by one letter": (0, lambda m: m.model_copy(update={"content": m.content + " "})),
    "speaker": (0, lambda m: m.model_copy(update={"name": "Bob"})),
    "no speaker": (0, lambda m: m.model_copy(update={"name": None})),
    "role": (0, lambda m: AIMessage(m.content)),
    "a system's": (0, lambda m: SystemMessage(m.content, name=m.name)),
    "argument": (1, lambda m: m.model_copy(update={"tool_calls": [call({"at": -1}), call({}, "c2")]})),
    "argument's type": (1, lambda m: m.model_copy(update={"tool_calls": [
        call({"at": str(m.tool_calls[0]["args"]["at"]), "deep": [1, {"x": None}]}), call({}, "c2")]})),
    "argument true for 1": (1, lambda m: m.model_copy(update={"tool_calls": [
        call({"at": m.tool_calls[0]["args"]["at"], "deep": [True, {"x": None}]}), call({}, "c2")]})),
    "tool": (1, lambda m: m.model_copy(update={"tool_calls": [m.tool_calls[0], call({}, "c2", "other")]})),
    "order of calls": (1, lambda m: m.model_copy(update={"tool_calls": m.tool_calls[::-1]})),
    "call fewer": (1, lambda m: m.model_copy(update={"tool_calls": m.tool_calls[:1]})),
    "no calls": (1, lambda m: m.model_copy(update={"tool_calls": []})),
    "reasoning": (1, lambda m: m.model_copy(update={"additional_kwargs": {"reasoning_content": "oh"}})),
    "no reasoning": (1, lambda m: m.model_copy(update={"additional_kwargs": {}})),
    "receipt": (1, lambda m: m.model_copy(update={"response_metadata": receipt("cd" * 32)})),
    "no receipt": (1, lambda m: m.model_copy(update={"response_metadata": {}})),
    "result": (2, lambda m: m.model_copy(update={"content": "lost"})),
    "result of another call": (2, lambda m: m.model_copy(update={"tool_call_id": "c2"})),
    "result of no call": (2, lambda m: m.model_copy(update={"tool_call_id": "c9"})),
    "result's name": (2, lambda m: m.model_copy(update={"name": "peek"})),
    "blocks of a result": (3, lambda m: m.model_copy(update={"content": ["a", {"b": 2}]})),
    "text that spells a block": (4, lambda m: m.model_copy(update={"content": json.dumps(m.content)})),
    "block": (4, lambda m: m.model_copy(update={"content": [{"type": "text", "text": "there"}]})),
    "reasoning block": (4, lambda m: m.model_copy(update={"content": [
        {"type": "text", "text": "here"}, {"type": "reasoning", "reasoning": "no"}]})),
    "block of a question": (5, lambda m: m.model_copy(update={"content": [{"type": "text", "text": "brick"}]})),
    "role of a note": (6, lambda m: m.model_copy(update={"role": "judge"})),
    "note": (6, lambda m: m.model_copy(update={"content": "an aside"})),
    "unreadable call": (7, lambda m: m.model_copy(update={"invalid_tool_calls": [
        {"name": "f", "args": "[", "id": "i", "error": None}]})),
    "summary": (8, lambda m: m.model_copy(update={"additional_kwargs": {"lc_source": "elsewhere"}})),
    "stream": (10, lambda m: m.model_copy(update={"content": stand_in("log", 7, "1" * 64)})),
}


@pytest.mark.parametrize("at", [0, 20, 39], ids=["at the beginning", "in the middle", "at the end"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.thorough(but=8)
def test_a_change_anywhere_in_a_long_history_is_noticed(edit: str, at: int):
    seen, messages, (within, change) = Seen(), history(40), EDITS[edit]
    given(seen, messages)
    assert given(seen, messages)[2] == len(messages)
    number = 1 + 12 * at + within
    edited = [*messages]
    edited[number] = change(messages[number])
    said, keys, recognised = given(seen, edited)
    assert recognised == 0 and repr([*said]) == repr(read(edited)) != repr(read(messages))
    assert [*keys] == chain(START, read(edited))
    if edit not in ("receipt", "no receipt", "summary"):  # these the digests leave out, and the search looks at them
        assert keys[-1] != chain(START, read(messages))[-1]


@pytest.mark.parametrize("of", ["ids", "usage", "name of an answer"])
def test_what_is_not_read_is_not_compared(of: str):
    seen, messages = Seen(), history(4)
    given(seen, messages)
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    other = {"ids": {"id": "9"}, "usage": {"usage_metadata": usage}, "name of an answer": {"name": "agent"}}[of]
    edited = [message.model_copy(update=other) if type(message) is AIMessage and isinstance(message.content, str)
              else message for message in messages]
    assert given(seen, edited)[2] == len(messages)


def edited(messages: list[BaseMessage], chance: random.Random) -> list[BaseMessage]:
    """The messages with one thing done to them that people do to a history, or nothing."""
    messages, at = [*messages], chance.randrange(1, len(messages))
    match chance.randrange(9):
        case 0:
            del messages[at]
        case 1:
            messages[at - 1], messages[at] = messages[at], messages[at - 1]
        case 2:
            messages = messages[:at]
        case 3:
            messages = messages[at:]
        case 4:
            messages.insert(at, HumanMessage("by the way"))
        case 5:
            within, change = EDITS[chance.choice([*EDITS])]
            like = some(0)[within]
            numbers = [number for number, message in enumerate(messages) if type(message) is type(like)
                       and bool(getattr(message, "tool_calls", ())) == bool(getattr(like, "tool_calls", ()))
                       and type(message.content) is type(like.content)]
            for number in numbers[-1:]:
                messages[number] = change(messages[number])
        case 6:
            messages[at] = HumanMessage(messages[at].content if isinstance(messages[at].content, str) else "blocks")
    return messages


@pytest.mark.thorough
def test_recognised_or_read_in_full_is_the_same_whatever_is_done_to_a_history():
    """The messages, their keys, and what they go on from, of histories that are edited, cut and gone on with."""
    quickly = found = 0
    for seed in range(20):
        chance, seen = random.Random(seed), Seen()
        kept = [history(3)]
        for _ in range(30):
            messages = [*kept[-1]] if chance.random() < 0.5 else edited(history(1) + chance.choice(kept)[1:], chance)
            messages += some(chance.randrange(4))[:chance.randrange(4)]
            kept = [*kept[-4:], messages]
            said, keys, recognised = given(seen, messages)
            quickly += recognised > 0
            in_full = read(messages)
            whole = chain(START, in_full)
            reachable = {key: boundary for key in chance.sample(whole, min(3, len(whole)))
                         for boundary in [boundary_of(key, whole, in_full)]}
            for state in ("ab" * 32, "01" * 32):  # the receipts of some answers lead to longer histories
                if chance.random() < 0.3:
                    key = bytes.fromhex(state)
                    reachable[key] = boundary_of(key, whole, in_full, chance.randrange(1, len(in_full) + 1))
            if chance.random() < 0.3 and any(message.stream for message in in_full):
                at = max(number for number, message in enumerate(in_full) if message.stream)
                reachable[b"z" * 32] = boundary_of(b"z" * 32, whole, in_full, at + 1)
            plain, quick = ([(count, boundary.key, [*longer]) for count, boundary, longer in fitting(reachable, *of)]
                            for of in ((Keys(START, in_full), in_full), (keys, said)))
            assert quick == plain
            found += len(plain)
            assert keys.last_stream == max((at + 1 for at, one in enumerate(in_full) if one.stream), default=0)
            assert (len(keys), keys[-1], [*keys], [*said]) == (len(whole), whole[-1], whole, in_full)
            part = slice(*sorted(chance.choices(range(len(in_full)), k=2)))
            assert seen.history("t", afresh(messages))[part] == in_full[part]
    assert quickly > 200 and found > 1000, (quickly, found)


def boundary_of(key: bytes, keys: list[bytes], said: list[Message], count: int | None = None) -> Boundary:
    """The boundary behind so many of these messages; by default where that key is."""
    held = said[:keys.index(key) if count is None else count]
    system, rest = split(held)
    ledger = b"".join(message.digest for message in rest if not message.summary)
    return Boundary(key, keys[0], heading(system), ledger[-16 * LEDGER:], len(held), held[-1].role if held else "",
                    stream=bool(held) and held[-1].stream)


@pytest.mark.parametrize("named", [True, False])
def test_only_what_is_new_is_read(named: bool, chat: LocretChatModel, monkeypatch: pytest.MonkeyPatch):
    """Work is counted, not timed: messages that are read, digests that are made, characters that are rendered."""
    counted: list[int] = []

    def counting(messages: Sequence[BaseMessage], first: int = 0, stop: int | None = None) -> list[Message]:
        out = read(messages, first, stop)
        counted.append(len(out))
        return out

    monkeypatch.setattr(seen, "read", counting)
    fed = []
    for length in (10, 400):
        messages: list[BaseMessage] = [
            message for number in range(length // 2)
            for message in (HumanMessage(f"{length} {number}"), AIMessage("Noted."))]
        for turn in range(4):
            messages.append(HumanMessage(f"and {turn}?"))
            counted.clear()
            reply = chat.invoke(afresh(messages), **({"thread_id": f"of {length}"} if named else {}))
            messages.append(reply)
            if turn:
                fed.append((sum(counted), reply.response_metadata["locret"]["source"]))
    assert {source for _, source in fed} == {"live"}
    assert max(count for count, _ in fed) <= 5 and fed[:3] == fed[3:]  # the answer and the question; the first messages


def test_without_a_thread_the_memory_that_holds_most_goes_on(chat: LocretChatModel):
    """Of two that hold beginnings of the same messages."""
    fed = []
    for options in ({}, {"thread_id": "t"}):
        said: list[BaseMessage] = []
        for text in ("one", "two", "three"):
            said.append(HumanMessage(text))
            if text == "three" and not options:
                chat.invoke(said[:1])  # in a memory of its own: the other one has gone on
            said.append(chat.invoke(said, **options))
        fed.append(said[-1].response_metadata["locret"]["fed"])
    assert fed[0] == fed[1]


def test_a_result_belongs_to_the_newest_calls_before_it():
    """Also where those were recognised, and the older ones have the same ids."""
    messages = [AIMessage("", tool_calls=[call({}, "c1")]), ToolMessage("a", tool_call_id="c1"),
                AIMessage("", tool_calls=[call({}, "c9"), call({}, "c1")]), ToolMessage("b", tool_call_id="c1")]
    assert [message.answers for message in read(messages)] == [-1, 0, -1, 1]
    assert [message.answers for message in read(messages, 3)] == [1]


def test_a_history_is_a_sequence():
    said = read(some(1))
    history = History(len(said), said[5:], lambda first, stop: said[first:stop], [], lambda known: None)
    for part in (slice(None), slice(2, 7), slice(None, None, -1), slice(8, 1, -3), slice(9, 2), slice(1, 99, 4)):
        assert history[part] == said[part]
    assert history[-1] is said[-1] and history[0] is said[0] and [*history] == said


def test_nothing_is_kept_of_the_text_and_little_of_anything():
    seen = Seen()
    for number in range(THREADS + 8):
        messages: list[BaseMessage] = [HumanMessage("a secret word" * 1000)]
        for turn in range(EACH + 2):
            messages += [AIMessage(f"{turn}"), HumanMessage(f"{number}")]
            given(seen, messages, f"t{number}")
    kept = seen._beginnings
    assert len(kept) == THREADS and {len(each) for each in kept.values()} == {EACH} and "secret" not in repr(kept)
    assert sum(sys.getsizeof(part) for each in kept.values() for digests, known in each.items()
               for part in (*digests, known, known.key, known.receipts, known.streams)) < 400_000
    seen.forget("t70")
    assert len(kept) == THREADS - 1


def test_of_more_receipts_that_lead_elsewhere_than_are_kept_nothing_is():
    """Then every call reads all, as it would without."""
    seen = Seen()
    messages: list[BaseMessage] = [AIMessage("x", response_metadata=receipt("ab" * 32))] * (MOST_RECEIPTS + 1)
    given(seen, messages)
    assert given(seen, messages)[2] == 0 and given(seen, messages[:-1])[2] == 0 and given(seen, messages[:-1])[2]


class Own(HumanMessage):
    """Somebody's own class, which may give its text in a way of its own."""


@pytest.mark.parametrize("odd", [
    Own("mine"), HumanMessage("x").model_copy(update={"type": "developer"}),
    AIMessage("", tool_calls=[call({"when": {1, 2}})])], ids=["own class", "own type", "objects in a call"])
def test_a_message_that_cannot_be_compared_is_read_in_full(odd: BaseMessage):
    seen, messages = Seen(), [HumanMessage("hello"), odd, HumanMessage("hello again")]
    for _ in range(2):
        said = seen.history("t", messages)
        keys = Keys(START, said)
        assert keys.known is None and [*said] == read(messages)


def test_messages_that_change_while_they_are_read_are_not_recognised(monkeypatch: pytest.MonkeyPatch):
    kept, message = Seen(), HumanMessage("one")

    def read_and_change(messages: Sequence[BaseMessage], first: int = 0, stop: int | None = None) -> list[Message]:
        message.content = "two"
        return read(messages, first, stop)

    with monkeypatch.context() as patch:
        patch.setattr(seen, "read", read_and_change)
        Keys(START, kept.history("t", [message]))
    for text in ("one", "two"):
        assert kept.history("t", [HumanMessage(text)]).known(START) is None


def test_threads_and_tools_have_keys_of_their_own():
    """The same messages in another thread, or behind another start, are not taken for those of this one."""
    seen, messages = Seen(), history(2)
    given(seen, messages)
    assert given(seen, messages, "other")[2] == 0
    said = seen.history("t", afresh(messages))
    assert said.known(b"o" * 32) is None
    assert [*Keys(b"o" * 32, said)] == chain(b"o" * 32, read(messages))


@pytest.mark.parametrize("thread", ["t", None])
def test_a_model_that_recognises_answers_as_one_that_reads_all(chat: LocretChatModel, thread: str | None,
                                                               monkeypatch: pytest.MonkeyPatch):
    """Receipts and answers of two threads that are told the same: histories that grow, are edited and cut."""
    def in_full(self: Seen, name: str | None, messages: Sequence[BaseMessage]) -> list[Message]:
        return read([*messages])

    def runs() -> list[Any]:
        chance, out = random.Random(3), list[Any]()
        messages: list[BaseMessage] = [SystemMessage("be brief"), HumanMessage("hello there")]
        kept = [messages]
        for turn in range(14):
            reply = chat.invoke(afresh(messages), thread_id=thread)
            out.append((reply.content, {name: value for name, value in reply.response_metadata["locret"].items()}))
            kept.append([*messages, reply])
            messages = [*kept[-1 if chance.random() < 0.6 else chance.randrange(len(kept))]]
            if chance.random() < 0.2:
                at = chance.randrange(1, len(messages))
                messages[at] = HumanMessage(f"changed {turn}")
            messages.append(HumanMessage(f"and {turn}?"))
        return out

    quick = runs()
    chat.close() if thread is None else chat.forget_thread(thread)
    with monkeypatch.context() as patch:
        patch.setattr(Seen, "history", in_full)
        assert runs() == quick
    assert {receipt["source"] for _, receipt in quick} >= {"live"}


def test_a_list_of_messages_becomes_the_prompt_that_langchain_makes_of_it(chat: LocretChatModel):
    messages = history(1)
    assert chat_model._as_prompt(messages) == chat._convert_input(messages)
    for other in ("text", [("human", "hi")], [*messages, {"role": "user", "content": "hi"}], ()):
        assert chat_model._as_prompt(other) is other
