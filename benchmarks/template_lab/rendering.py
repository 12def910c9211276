"""What a model is shown of whole conversations, against stock `apply_chat_template`, to the character."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from template_lab.forms import ROME, TOOL, Call
from template_lab.scripted import Subject
from template_lab.verdicts import Cells, Failed, NotAsked, judged

from locret_stream.errors import LocretError


def _calls(content: str, *calls: Call) -> AIMessage:
    return AIMessage(content, tool_calls=[{"name": name, "args": given, "id": f"call0000{at}"}
                                          for at, (name, given) in enumerate(calls)])


def _result(text: str, number: int = 0) -> ToolMessage:
    return ToolMessage(text, tool_call_id=f"call0000{number}")


_S, _U, _A = SystemMessage("Be brief."), HumanMessage("Hi there."), AIMessage("Hello.")
_ONE, _TWO, _ASKED = HumanMessage("One."), HumanMessage("Two."), HumanMessage("How is the weather there?")
_THOUGHT = AIMessage("A.", additional_kwargs={"reasoning_content": "Because."})
CONVERSATIONS: dict[str, tuple[list[BaseMessage], bool]] = {  # and whether there is a tool
    "user": ([_U], False),
    "system, user": ([_S, _U], False),
    "system, user, assistant, user": ([_S, _U, _A, HumanMessage("And you?")], False),
    "user, user": ([_ONE, _TWO], False),
    "assistant, assistant": ([_ONE, AIMessage("A."), AIMessage("B."), _TWO], False),
    "assistant first": ([AIMessage("Welcome!"), _TWO], False),
    "system, assistant, user": ([_S, AIMessage("Welcome!"), _TWO], False),
    "ends with an answer": ([_ONE, AIMessage("A.")], False),
    "late system": ([_ONE, AIMessage("A."), SystemMessage("Now in French."), _TWO], False),
    "call, result": ([_ASKED, _calls("", ROME), _result("18 degrees")], True),
    "call, result, answer, user": ([_ASKED, _calls("", ROME), _result("18 degrees"), AIMessage("18."),
                                    HumanMessage("And elsewhere?")], True),
    "two calls": ([HumanMessage("And in both towns?"), _calls("", ROME, ("get_weather", {"city": "Oslo"})),
                   _result("18"), _result("3", 1)], True),
    "text and call": ([_ASKED, _calls("Let me look.", ROME), _result("18 degrees")], True),
    "call without arguments": ([_ASKED, _calls("", ("get_weather", {})), _result("18 degrees")], True),
    "nested arguments": ([_ASKED, _calls("", ("get_weather", {
        "city": ['a"b', "<x>"], "n": 1.5, "ok": True, "none": None})), _result('{"t": "é"}')], True),
    "empty result": ([_ASKED, _calls("", ("get_weather", {"city": "R"})), _result("")], True),
    "tools, no call": ([HumanMessage("Hi")], True),
    "thought": ([_ONE, _THOUGHT, _TWO], False),
    "ends with a thought": ([_ONE, _THOUGHT], False),
    "white space": ([HumanMessage("  One. \n"), AIMessage("\n A. "), HumanMessage("\tTwo. ")], False),
    "thought as text": ([_ONE, AIMessage("<think>\nBecause.\n</think>\n\nA."), _TWO], False),
    "empty user": ([HumanMessage("")], False),
    "empty answer": ([_ONE, AIMessage(""), _TWO], False),
}
_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


def stock(tokenizer: Any, messages: Sequence[BaseMessage], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """What transformers renders; None if the template refuses it."""
    shown = []
    for message in messages:
        one: dict[str, Any] = {"role": _ROLES[message.type], "content": message.text}
        if message.additional_kwargs.get("reasoning_content"):
            one["reasoning_content"] = message.additional_kwargs["reasoning_content"]
        if isinstance(message, AIMessage) and message.tool_calls:
            one["tool_calls"] = [{"type": "function", "id": call["id"], "function": {
                "name": call["name"], "arguments": call["args"]}} for call in message.tool_calls]
        if isinstance(message, ToolMessage):
            one["tool_call_id"] = message.tool_call_id
        shown.append(one)
    try:
        return tokenizer.apply_chat_template(shown, tools=[*tools] or None, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template may raise anything
        return None


def left_out(text: str, messages: Sequence[BaseMessage], tools: Sequence[Mapping[str, Any]]) -> str:
    """The first text of a conversation that a rendering does not show; "" if it shows all but thoughts."""
    texts, names = [tool["function"]["description"] for tool in tools], [tool["function"]["name"] for tool in tools]
    for message in messages:
        texts.append(message.text.strip())
        for call in getattr(message, "tool_calls", ()):
            names.append(call["name"])
            texts += map(_leaf, call["args"].values())
    if few := [name for name in names if text.count(name) < names.count(name)]:
        return few[0]
    return next((each for each in texts if each not in text and json.dumps(each)[1:-1] not in text and json.dumps(
        each, ensure_ascii=False)[1:-1] not in text), "")


def _leaf(value: Any) -> str:
    return _leaf(value[-1]) if isinstance(value, list) else value if isinstance(value, str) else ""


def renderings(subject: Subject, model: Any, cells: Cells, noted: dict[str, str]) -> None:
    """One cell: where both render, and stock transformers leave nothing out, both are equal.

    Args:
        noted: is given differences that count for nothing: white space at the ends of what is said, which is fed as it
            was given, and conversations of which stock transformers leave something out.
    """
    odd, refused = dict[str, str](), dict[str, str]()
    with judged(cells, "rendering.as transformers"):
        for name, (messages, with_tool) in CONVERSATIONS.items():
            tools = [TOOL] if with_tool else []
            theirs = stock(subject.tokenizer, messages, tools)
            if theirs is None:
                continue
            lost = left_out(theirs, messages, tools)
            subject.script.say(subject.form.answer("."))
            bound = model.bind_tools(tools) if tools else model
            try:
                bound.invoke(messages, {"configurable": {"thread_id": f"rendered {name}"}})
            except LocretError as error:
                (noted if lost else refused)[name] = f"refused: {error}"
                continue
            ours = subject.script.seen
            if ours == theirs:
                continue
            at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                      min(len(ours), len(theirs)))
            here = f"at {at} {ours[max(0, at - 20):at + 40]!r}, expected {theirs[max(0, at - 20):at + 40]!r}"
            if lost:
                noted[name] = f"stock leaves out {lost[:40]!r}"
            elif "".join(ours.split()) == "".join(theirs.split()) and name == "white space":
                noted[name] = f"white space {here}"
            else:
                odd[name] = here
        if odd:
            name, where = next(iter(odd.items()))
            raise Failed("differs", f"{', '.join(odd)}; {name} {where}")
        if refused:
            name, why = next(iter(refused.items()))
            raise Failed("refused", f"{', '.join(refused)}; {name} {why}")


def own_answers(subject: Subject, model: Any, cells: Cells) -> None:
    """Two cells: what a model is shown behind an answer, or a call, that it wrote itself is what transformers shows of
    it, but for white space: models begin a text with a space or not."""
    form = subject.form
    said = HumanMessage("Hi there.")
    for name, reply, answer, following, tools in (
            ("own answer", form.answer("Hello."), AIMessage("Hello."), HumanMessage("And you?"), []),
            ("own call", form.calls(ROME), _calls("", ROME), _result("18 degrees"), [TOOL])):
        with judged(cells, f"rendering.{name}"):
            if form.ahead or form.opens or reply is None or (tools and form.source != "template"):
                raise NotAsked  # its thoughts stay in the memory; or the template shows no calls
            bound = model.bind_tools(tools) if tools else model
            config = {"configurable": {"thread_id": name}}
            subject.script.say(reply)
            found = bound.invoke([said], config)
            if tools:
                if len(found.tool_calls) != 1:
                    raise Failed("wrong", f"calls are {found.tool_calls}, expected {ROME}")
                answer.tool_calls[0]["id"] = following.tool_call_id = found.tool_calls[0]["id"]
            theirs = stock(subject.tokenizer, [said, answer, following], tools)
            if theirs is None or left_out(theirs, [said, answer, following], tools):
                raise NotAsked
            subject.script.say(form.answer("."))
            bound.invoke([said, found, following], config)
            ours, theirs = "".join(subject.script.seen.split()), "".join(theirs.split())
            if ours != theirs:
                at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                          min(len(ours), len(theirs)))
                raise Failed("differs", f"at {at} {ours[max(0, at - 20):at + 40]!r}, expected "
                                        f"{theirs[max(0, at - 20):at + 40]!r}")
