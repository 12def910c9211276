"""What a thread has read is read again for the last message; the thread's memory is what it would be without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from langchain_locret import LocretChatModel
from locret_stream import ConfigError, Recall, Store
from locret_stream.context.session import Session
from tests.langchain.support import Script, held, model, receipt, rendered, runtime, thread

A = thread("a")
FACT = "The door code of the library is 48213."
QUESTION = "Which door code has the library?"
LOG = "".join(f"line {number} says that it is cold and wet\n" for number in range(60))


@pytest.fixture
def asides(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each scratch copy read, from the last but few turns on, as text."""
    seen: list[str] = []
    take = Session.take

    async def record(self: Session, ids: list[int], paced: bool = False) -> None:
        await take(self, ids, paced)
        if self.branch is None and not self.owned:
            seen.append(self.services.codec.decode(ids, skip_special=False))

    monkeypatch.setattr(Session, "take", record)
    return seen


@pytest.fixture
def chat(script: Script, tmp_path: Path) -> Iterator[LocretChatModel]:
    with model(None, on=runtime(Store(tmp_path, keep_last=64), recall=True)) as chat:
        yield chat


def told(chat: LocretChatModel, name: str = "a") -> list[BaseMessage]:
    """A thread that was told the fact, and much more."""
    talk: list[BaseMessage] = [HumanMessage(f"Listen. {FACT}")]
    talk.append(chat.invoke(talk, thread(name), recall=False))
    talk.append(HumanMessage(LOG))
    talk.append(chat.invoke(talk, thread(name), recall=False))
    return talk


def test_what_has_the_words_of_a_question_is_read_again(chat: LocretChatModel, asides: list[str]):
    talk = [*told(chat), HumanMessage(QUESTION)]
    answer = chat.invoke(talk, A)
    found = receipt(answer)["recalled"]
    assert FACT in found[0]["text"] and receipt(answer)["source"] == "live"
    texts = "\n".join(one["text"] for one in found)
    assert asides == [
        f"<|im_start|>user\n{texts}<|im_end|>\n<|im_start|>assistant\nOK.<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"]
    assert held(chat, "a") == rendered([*talk, answer]), "the memory has the question and the answer alone"
    assert answer.text == f"You said: {QUESTION}" and answer.usage_metadata["output_tokens"] > 3


def test_a_thread_goes_on_as_if_nothing_had_been_recalled(chat: LocretChatModel):
    for name, recall in (("a", None), ("b", False)):
        talk = told(chat, name)
        for question in (QUESTION, "And again, which door code?"):
            talk.append(HumanMessage(question))
            answer = chat.invoke(talk, thread(name), recall=recall)
            assert receipt(answer)["source"] == "live" and ("recalled" in receipt(answer)) == (recall is None)
            assert receipt(answer)["saved"]
            talk.append(answer)
    assert held(chat, "a") == held(chat, "b") == rendered(talk)


def test_another_process_finds_what_the_first_one_read(script: Script, tmp_path: Path):
    with model(None, on=runtime(Store(tmp_path, keep_last=64), recall=True)) as chat:
        talk = told(chat)
    with model(None, on=runtime(Store(tmp_path, keep_last=64), recall=True)) as chat:
        answer = chat.invoke([*talk, HumanMessage(QUESTION)], A)
        assert receipt(answer)["source"] == "snapshot" and FACT in receipt(answer)["recalled"][0]["text"]
        other = chat.invoke([HumanMessage(QUESTION)], thread("of others"))
        assert "recalled" not in receipt(other), "nothing of another thread is found"


def test_questions_about_one_state_each_recall(chat: LocretChatModel):
    talk = told(chat)
    for number in range(6):
        answer = chat.invoke([*talk, HumanMessage(f"{QUESTION} ({number})")], A)
        assert FACT in receipt(answer)["recalled"][0]["text"]
        assert not any(f"({before})" in one["text"] for before in range(number)
                       for one in receipt(answer)["recalled"]), "what was undone is gone"


def test_a_question_that_the_memory_holds_already_says_so(chat: LocretChatModel):
    """It cannot be read again before a message that was read: the receipt tells."""
    talk = [*told(chat), HumanMessage(QUESTION)]
    chat.invoke(talk, A, recall=False)
    again = receipt(chat.invoke(talk, A))
    assert again["not_recalled"] == "the memory holds the last message already" and "recalled" not in again


def test_results_of_tools_recall_nothing(chat: LocretChatModel):
    call = {"name": "look", "args": {}, "id": "1", "type": "tool_call"}
    talk = [*told(chat), HumanMessage(QUESTION), AIMessage("", tool_calls=[call]),
            ToolMessage("door code library", tool_call_id="1")]
    assert "recalled" not in receipt(chat.invoke(talk, A))


@pytest.mark.parametrize("options", [{"stop": ["code"]}, {"max_tokens": 5}, {"temperature": .7, "seed": 3}], ids=str)
def test_replies_that_end_otherwise(chat: LocretChatModel, options: dict):
    talk = [*told(chat), HumanMessage(QUESTION)]
    answer = chat.invoke(talk, A, **options)
    assert receipt(answer)["recalled"]
    again = [*talk, answer, HumanMessage("so?")]
    last = chat.invoke(again, A)
    assert receipt(last)["fed"] < 40 and held(chat, "a").endswith(rendered([HumanMessage("so?"), last])[-40:])


def test_a_reply_that_ends_at_a_stop_string_keeps_a_memory_that_is_saved_later(script: Script, tmp_path: Path):
    with model(None, on=runtime(Store(tmp_path, keep_last=64), recall=True), save="run") as chat:
        talk = [*told(chat), HumanMessage(QUESTION)]
        talk += [chat.invoke(talk, A, stop=["code"]), HumanMessage("so?")]
        answer = chat.invoke(talk, A, recall=False)
        assert receipt(answer)["source"] == "live" and receipt(answer)["fed"] < 40
        assert held(chat, "a") == rendered([*talk, answer])


def test_streams_give_the_same(chat: LocretChatModel):
    talk = [*told(chat), HumanMessage(QUESTION)]
    chunks = list(chat.stream(talk, A))
    assert "".join(chunk.text for chunk in chunks) == f"You said: {QUESTION}"
    assert chunks[-1].response_metadata["locret"]["recalled"]


def test_one_that_is_left_leaves_nothing(chat: LocretChatModel, script: Script):
    talk = told(chat)
    before = held(chat, "a")
    script.delay = .01
    for _ in range(3):
        for _chunk in chat.stream([*talk, HumanMessage(QUESTION)], A):
            break
    script.delay = 0.0
    answer = chat.invoke([*talk, HumanMessage("Hello?")], A, recall=False)
    assert held(chat, "a") == before + rendered([*talk, HumanMessage("Hello?"), answer])[len(before):]
    assert FACT in receipt(chat.invoke([*talk, HumanMessage(QUESTION)], A))["recalled"][0]["text"]


def test_it_is_off_by_default(script: Script, tmp_path: Path):
    with model(Store(tmp_path)) as chat:
        talk = [*told(chat), HumanMessage(QUESTION)]
        assert "recalled" not in receipt(chat.invoke(talk, A))
        with pytest.raises(ConfigError, match=r"of a runtime that keeps nothing for recall"):
            chat.invoke(talk, A, recall=True)
        answer = chat.invoke(talk, A)
        assert held(chat, "a") == rendered([*talk, answer])


def test_mistakes(script: Script, tmp_path: Path):
    with pytest.raises(ValueError, match="recalls is 'much'; expected True, False or Recall"):
        LocretChatModel(model="bundled", recalls="much")
    with pytest.raises(ValueError, match="recalls was given beside a Runtime"):
        LocretChatModel(model="scripted", runtime=runtime(None), recalls=True)
    first, second = (LocretChatModel(model="bundled", recalls=Recall(tokens=99)) for _ in range(2))
    other = LocretChatModel(model="bundled", recalls=Recall(tokens=98))
    assert first.shared is second.shared and first.shared is not other.shared
    with model(Store(tmp_path)) as chat, pytest.raises(ConfigError, match="recall is 3; expected True or False"):
        chat.invoke("x", A, recall=3)


@pytest.mark.parametrize("said", [1, 3])
def test_an_appended_question_that_a_stop_string_ends_is_kept(chat: LocretChatModel, said: int):
    """The answer is read again as it was given, where the memory was when the question came."""
    told(chat)
    more = [HumanMessage("Note this."), AIMessage("Noted."), HumanMessage(QUESTION)][-said:]
    answer = chat.invoke(more, A, append=True, stop=["code"])
    assert receipt(answer)["recalled"] and "code" not in answer.text and receipt(answer)["saved"]
    after = chat.invoke([HumanMessage("So, what was asked?")], A, append=True, recall=False)
    assert receipt(after)["source"] == "live"
    text = held(chat, "a")
    assert text.count(f"user\n{QUESTION}") == 1 and ("Note this." in text) == (said == 3)


def test_its_usage_is_that_of_what_the_memory_reads(chat: LocretChatModel):
    """The passages, which only the copy read, are in the receipt and in no count."""
    usages = []
    for name, recall in (("a", None), ("b", False)):
        answer = chat.invoke([*told(chat, name), HumanMessage(QUESTION)], thread(name), recall=recall)
        usages.append((answer.usage_metadata, receipt(answer)["fed"]))
        assert ("recalled" in receipt(answer)) == (recall is None)
    assert usages[0] == usages[1]
