"""Sessions over the server's endpoints and over LangChain, in which every answer is judged: what came back, what the
model was shown, and how much was read."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    message_chunk_to_message,
)
from template_lab.forms import Call, Form
from template_lab.scripted import MODEL, Served, Subject
from template_lab.verdicts import Failed, NotAsked

MARGIN, BETWEEN = 64, 32  # tokens that may be written around what is new, and around each new message beyond one
Json = dict[str, Any]
_AGAIN = {"log", "rebuild"}


def long(number: int, what: str = "answer") -> str:
    """A text of about 75 tokens, so that one that is read twice is more than the margin."""
    return " ".join(f"In {what} {number} line {line} tells of a grey cat and an old mill by the sea."
                    for line in range(3))


def one_of(form: Form, *calls: Call) -> str:
    """The reply that makes these calls. Raises NotAsked."""
    reply = form.calls(*calls)
    if reply is None:
        raise NotAsked
    return reply


def expect_held(subject: Subject, receipt: Mapping[str, Any], fresh: Sequence[str], *, cold: bool = False
                ) -> None:
    """Raises Failed: more than the new messages was read, or memory was not where it should be.

    Args:
        fresh: the text of each new message. cold: the memory was stored, and nothing of it is in this process.
    """
    fed, source, new = receipt.get("fed"), receipt.get("source"), sum(len(subject.script.ids(text)) for text in fresh)
    told = [receipt.get("why"), (receipt.get("warnings") or {}) if not isinstance(receipt.get("warnings"), list) else [
        text for text in receipt["warnings"] if "read again" in text or "lost" in text] or None]
    why = "; ".join(str(each) for each in told if each)
    if not isinstance(fed, int) or source in _AGAIN or source == "new":
        raise Failed("reread", f"fed {fed} where {new} are new, source {source}; {why}")
    if receipt.get("why"):
        raise Failed("reread", f"from an older boundary, fed {fed}: {why}")
    if fed > new + MARGIN + BETWEEN * (len(fresh) - 1):
        raise Failed("restated", f"fed {fed} where {new} are new, source {source}; {why}")
    if cold and source != "snapshot":
        raise Failed("reread", f"source {source}, expected snapshot; fed {fed}")


def expect_shown(subject: Subject, texts: Sequence[str]) -> None:
    """Raises Failed: the model was not shown one of these texts."""
    for text in texts:
        if text.strip() and text.strip() not in subject.script.seen:
            raise Failed("wrong", f"the model was not shown {text.strip()[:60]!r}")


def thinks(content: str | None) -> bool:
    """Whether a content has marks of a thought."""
    return any(mark in (content or "") for mark in (
        "think>", "thought>", "THINKING|>", "THINK]", "<|channel|>", "analysis", "assistantfinal"))


def expect_answer(found: str | None, reasoning: str | None, answer: str, thought: str = "") -> None:
    """Raises Failed: it is not that answer, or not that thought."""
    content = found or ""
    if content != answer:
        raise Failed("thought" if thinks(content) or (thought and thought in content) else "wrong",
                     f"content is {content!r:.100}, expected {answer!r:.60}")
    if thought and (reasoning or "").strip() != thought:
        raise Failed("wrong", f"reasoning_content is {reasoning!r:.80}, expected {thought!r:.60}")
    if not thought and (reasoning or "").strip():
        raise Failed("wrong", f"reasoning_content is {reasoning!r:.80}, expected none")


def expect_calls(found: Sequence[Call], calls: Sequence[Call], content: str | None) -> None:
    """Raises Failed: these are not those calls, or text stands beside them."""
    if [*found] != [*calls]:
        raise Failed("wrong", f"calls are {[*found]}, expected {[*calls]}; content {content!r:.120}")
    if calls and (content or "").strip():
        raise Failed("thought" if thinks(content) else "wrong",
                     f"content beside calls is {content!r:.120}, expected none")


def body_of(response: Any) -> Json:
    """What a request came back with. Raises Failed: it was refused, or failed."""
    try:
        body = response.json()
    except ValueError:
        body = {}
    if response.status_code != 200:
        error = body.get("error") or {}
        raise Failed("refused" if response.status_code < 500 else "failed",
                     f"{response.status_code} {error.get('message', response.text)}")
    return body


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def made(*calls: Call, name: str = "call") -> Json:
    """An answer that makes these calls, as some other model made them."""
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": f"{name}_{at:03}aZ", "type": "function", "function": {"name": tool, "arguments": json.dumps(given)}}
        for at, (tool, given) in enumerate(calls)]}


def result(answer: Json, number: int, text: str) -> Json:
    """The result of a call of that answer."""
    return {"role": "tool", "tool_call_id": answer["tool_calls"][number]["id"], "content": text}


class Chat:
    """A chat whose whole history is given every time.

    Args:
        held: how many messages of that history the memory holds already.
    """

    def __init__(self, subject: Subject, served: Served, session: str, *, tools: Sequence[Json] = (),
                 history: Sequence[Json] = (), held: int = 0):
        self.subject, self._served, self._session = subject, served, session
        self._tools, self.history, self._held = tools, [*history], held

    def turn(self, *new: Json, reply: str, answer: str = "", thought: str = "", calls: Sequence[Call] = (),
             finish: str | None = None, cold: bool = False, **body: Any) -> Json:
        """The answer, in the history then. Raises Failed."""
        subject = self.subject
        subject.script.say(reply)
        self.history += new
        response = self._served.http.post("/v1/chat/completions", json={
            "model": MODEL, "messages": self.history, "session_id": self._session, "max_tokens": 600,
            **({"tools": [*self._tools]} if self._tools else {}), **body})
        given = body_of(response)
        message, receipt = given["choices"][0]["message"], given["locret"]
        if self._held:
            expect_held(subject, receipt, [" ".join(texts_of(each)) for each in self.history[self._held:]], cold=cold)
        expect_shown(subject, [text for each in self.history for text in texts_of(each)])
        found = [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                 for call in message.get("tool_calls") or ()]
        if finish != "length":
            expect_calls(found, calls, message["content"])
            expect_answer(message["content"], message.get("reasoning_content"), answer, thought)
        expected = finish or ("tool_calls" if calls else "stop")
        if (ended := given["choices"][0]["finish_reason"]) != expected:
            raise Failed("wrong", f"finish_reason is {ended!r}, expected {expected!r}; content "
                                  f"{message['content']!r:.80}, calls {found}")
        kept = {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
        self.history.append(kept)
        self._held = len(self.history)
        return message


def texts_of(message: Json) -> list[str]:
    """The texts of a message that a model must be shown, and that are new where it is."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [message.get("content") or "", *(call["name"] for call in calls),
            *(str(value) for call in calls for value in json.loads(call["arguments"]).values())]


class Responses:
    """`/v1/responses`, of which only what is new is given."""

    def __init__(self, subject: Subject, served: Served):
        self.subject, self._served = subject, served

    def ask(self, said: str | list[Json], *, reply: str, answer: str, held: bool, thought: str = "",
            shown: Sequence[str] = (), cold: bool = False, **body: Any) -> str:
        """Its id. Raises Failed.

        Args:
            thought: of the reply; an item of reasoning has it, if there is one.
        """
        self.subject.script.say(reply)
        given = body_of(self._served.http.post("/v1/responses", json={
            "model": MODEL, "input": said, "max_output_tokens": 600, **body}))
        texts = [said] if isinstance(said, str) else [item["output"] for item in said]
        if held:
            expect_held(self.subject, given["locret"], texts, cold=cold)
        expect_shown(self.subject, [*texts, *shown])
        messages = [item for item in given["output"] if item["type"] == "message"]
        thoughts = [part["text"] for item in given["output"] if item["type"] == "reasoning"
                    for part in item.get("content") or item.get("summary") or ()]
        expect_answer("".join(part["text"] for item in messages for part in item["content"]),
                      "".join(thoughts) or thought, answer, thought)
        if given["status"] != "completed":
            raise Failed("wrong", f"status is {given['status']!r}, expected 'completed'")
        return given["id"]


class Thread:
    """A thread of a LocretChatModel, which is given the whole history every time."""

    def __init__(self, subject: Subject, model: Any, name: str, *, tools: Sequence[Json] = (),
                 history: Sequence[BaseMessage] = (), held: int = 0):
        self.subject, self._name, self.history, self._held = subject, name, [*history], held
        self._model = model.bind_tools([*tools]) if tools else model

    def turn(self, *new: BaseMessage | str, reply: str, answer: str = "", thought: str = "",
             calls: Sequence[Call] = (), way: str = "invoke", cold: bool = False, shown: Sequence[str] = ()
             ) -> AIMessage:
        """The answer, in the history then. Raises Failed, and as the model."""
        subject, config = self.subject, {"configurable": {"thread_id": self._name}}
        subject.script.say(reply)
        self.history += [HumanMessage(each) if isinstance(each, str) else each for each in new]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if way == "stream":
                message = add(*self._model.stream(self.history, config))
            elif way == "ainvoke":
                message = asyncio.run(self._model.ainvoke(self.history, config))
            else:
                message = self._model.invoke(self.history, config)
        again = [str(each.message) for each in warned if type(each.message).__name__ == "RebuildWarning"]
        if again:
            raise Failed("reread", f"warned: {again[0]}")
        if self._held:
            expect_held(subject, message.response_metadata["locret"],
                        [each.text for each in self.history[self._held:]], cold=cold)
        expect_shown(subject, [*shown, *(each.text for each in self.history
                                         if not each.text.startswith("[absorbed stream"))])
        expect_calls([(call["name"], call["args"]) for call in message.tool_calls], calls, message.text)
        expect_answer(message.text, message.additional_kwargs.get("reasoning_content"), answer, thought)
        self.history.append(message)
        self._held = len(self.history)
        return message


def add(first: AIMessageChunk, *rest: AIMessageChunk) -> AIMessage:
    """The chunks of a stream as one message, as agents keep it."""
    return message_chunk_to_message(sum(rest, first))


def tool_result(message: AIMessage, number: int, text: str) -> ToolMessage:
    return ToolMessage(text, tool_call_id=message.tool_calls[number]["id"])
