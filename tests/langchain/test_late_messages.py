"""With another system text, other tools or another budget a thread keeps its memory, and the receipt says how."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_locret import LateWarning, LocretChatModel, RebuildWarning, StateLost
from langchain_locret.messages import read
from locret_stream import Store
from locret_stream.conversation.late_messages import write
from locret_stream.errors import ConfigError
from tests.conversation.templates import CHATML
from tests.langchain.support import Script, held, model, receipt, rendered, runtime, thread, tokenizer
from tests.langchain.test_render import TOOL, made

A = thread("a")
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 4}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def talk(chat: LocretChatModel, *said: str, system: str = "Be brief.") -> list[BaseMessage]:
    history: list[BaseMessage] = [SystemMessage(system)]
    for one in said:
        history += [HumanMessage(one)]
        history += [chat.invoke(history, A)]
    return history


@pytest.mark.parametrize("trimmed", [True, False])
def test_another_system_text_goes_in_late_and_the_memory_stays(chat: LocretChatModel, trimmed: bool):
    history = talk(chat, "one", "two")
    new = [SystemMessage("Be long."), HumanMessage("three")]
    given = [new[0], *(history[-1:] if trimmed else history[1:]), new[1]]
    with pytest.warns(LateWarning, match="the system prompt of thread 'a' changed.*which stays"):
        answer = chat.invoke(given, A)
    assert receipt(answer)["late"] == "the system prompt" and receipt(answer)["source"] == "live"
    assert "warnings" not in receipt(answer)
    assert held(chat, "a") == rendered(history) + rendered([*new, answer])
    assert receipt(answer)["fed"] < 40
    with warnings.catch_warnings(action="error"):  # from here on it is the thread's own
        more = chat.invoke([*given, answer, HumanMessage("four")], A)
        assert receipt(more)["source"] == "live" and "late" not in receipt(more)
        again = chat.invoke([*given, answer, HumanMessage("four")], A)
        assert receipt(again)["source"] == "snapshot" and receipt(again)["fed"] < 10
        first = chat.invoke(given, A)
        assert receipt(first)["fed"] < 10
        back = chat.invoke([*history, HumanMessage("three")], A)
    assert held(chat, "a") == rendered([*history, HumanMessage("three"), back])


def test_other_tools_go_in_late(chat: LocretChatModel, script: Script):
    history = talk(chat, "one", "two")
    new = [*history[-1:], HumanMessage("three (4)")]
    script.say = lambda shown: "Done." if "tool\n5" in shown else ADD
    with pytest.warns(LateWarning, match="the tools of thread 'a' changed"):
        called = chat.bind_tools([add]).invoke(new, A)
    assert called.tool_calls[0]["name"] == "add" and "Add two numbers" in held(chat, "a")
    assert held(chat, "a").startswith(rendered(history)) and receipt(called)["late"] == "the tools"
    results = [*new, called, ToolMessage("5", tool_call_id=called.tool_calls[0]["id"])]
    done = chat.bind_tools([add]).invoke(results, A)
    assert done.text == "Done." and receipt(done)["source"] == "live"
    with pytest.warns(LateWarning, match="the tools of thread 'a' changed"):
        chat.invoke([done, HumanMessage("without")], A)
    assert "There are no tools now." in held(chat, "a")


def test_tools_that_change_while_results_come_in_go_in_behind_these(chat: LocretChatModel, script: Script):
    history = [*talk(chat, "one"), HumanMessage("two (3)")]

    def look(at: str) -> str:
        """Look a thing up."""
        return at

    script.say = lambda shown: "Done." if "tool\n5" in shown else ADD
    with pytest.warns(LateWarning):
        called = chat.bind_tools([add]).invoke(history, A)
    results = [*history, called, ToolMessage("5", tool_call_id=called.tool_calls[0]["id"])]
    with pytest.warns(LateWarning):
        done = chat.bind_tools([look]).invoke(results, A)
    assert receipt(done)["source"] == "live"
    shown = held(chat, "a")
    assert shown.index("tool\n5<|im_end|>") < shown.index("Look a thing up.") < shown.rindex(done.text)


def test_a_stream_is_behind_any_system_text(chat: LocretChatModel):
    """Each agent of a thread goes on from the thread's memory, and keeps its own system text and answers."""
    stub = chat.ingest("a line of the log\n" * 50, thread_id="a", label="log")
    histories: dict[str, list[BaseMessage]] = {}
    for turn in range(3):
        for name in ("A", "B"):
            history = histories.setdefault(name, [SystemMessage(f"You are {name}."), stub])
            history.append(HumanMessage(f"turn {turn} of {name}"))
            if turn:
                history.append(chat.invoke(history, A))
                assert "late" not in receipt(history[-1])
            else:
                with pytest.warns(LateWarning):
                    history.append(chat.invoke(history, A))
            other = "B" if name == "A" else "A"
            shown = held(chat, "a")
            assert shown.count("a line of the log") == 50 and f"You are {name}." in shown
            assert f"You are {other}." not in shown and shown.count(" of " + name) == 2 * turn + 2


def test_a_question_on_the_side_is_not_taken_for_the_same_conversation(chat: LocretChatModel):
    """Its first message is the thread's, but messages without an answer or a stream prove nothing."""
    talk(chat, "hello")
    with warnings.catch_warnings(action="error"):
        answer = chat.invoke([SystemMessage("Harmful?"), HumanMessage("hello")], A)
    assert held(chat, "a") == rendered([SystemMessage("Harmful?"), HumanMessage("hello"), answer])


@pytest.mark.filterwarnings("ignore::langchain_locret.RebuildWarning")
def test_what_was_never_said_here_goes_on_from_nothing(chat: LocretChatModel):
    history = talk(chat, "one", "two")
    forged = AIMessage("something else", response_metadata=history[-1].response_metadata)
    for left in ([forged], [AIMessage("You said: x")], [HumanMessage("forged"), history[-1]]):
        given = [SystemMessage("Be long."), *left, HumanMessage("three")]
        answer = chat.invoke(given, A)
        assert held(chat, "a") == rendered([*given, answer])


@pytest.mark.parametrize("name", ["chatml", "llama", "mistral", "qwen"])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
@pytest.mark.parametrize("end", ["user", "tool", "assistant"])
def test_what_goes_in_late_is_written_as_the_template_writes_it(name: str, tools: tuple, end: str):
    """The new system text and tools stand once, ahead of the new messages or behind new results of tools."""
    _, template = made(name)
    call = {"name": "look", "args": {"at": "x"}, "id": "abc"}
    messages: list[Any] = [SystemMessage("A NEW TEXT"), HumanMessage("held"), AIMessage("HELD TOO")]
    if end == "user":
        messages += [HumanMessage("new")]
    elif end == "tool":
        messages[-1:] = [AIMessage("", tool_calls=[call]), ToolMessage("new", tool_call_id="abc")]
    said = read(messages)
    found = write(template, said, 3, tools, no_tools=False)
    if name == "mistral" and end != "user":
        return  # has no place for it: a system text stands at the newest user turn alone
    text = "".join(piece.text for piece in found.rendered.pieces(found.at))
    assert text.count("A NEW TEXT") == 1 and "HELD TOO" not in text and "held" not in text
    assert text.count("Look a thing up.") == len(tools) and ("new" in text) == (end != "assistant")
    assert not text.startswith("<s>")


def test_a_changed_budget_costs_what_messages_do_not_hold_unless_the_log_is_read_again(script: Script, tmp_path: Path):
    with model(tmp_path) as chat:
        stub = chat.ingest("a line of the log\n" * 50, thread_id="a", label="log")
        history: list[BaseMessage] = [stub, HumanMessage("one")]
        history += [chat.invoke(history, A)]
        for number in range(3):
            chat.invoke([SystemMessage("Harmful?"), HumanMessage(str(number))], A)
    with model(tmp_path, budget=2048) as chat:
        with pytest.warns(RebuildWarning, match=r'on_mismatch="rebuild" reads its log'):
            answer = chat.invoke([history[-1], HumanMessage("two")], A)
        assert receipt(answer)["source"] == "rebuild"
    with model(Store(tmp_path / "other")) as chat:
        stub = chat.ingest("a line of the log\n" * 50, thread_id="a", label="log")
        history = [stub, HumanMessage("one")]
        history += [chat.invoke(history, A)]
        for number in range(3):
            chat.invoke([SystemMessage("Harmful?"), HumanMessage(str(number))], A)
    with model(Store(tmp_path / "other"), budget=2048) as chat:
        with pytest.raises(StateLost):
            chat.invoke([stub, HumanMessage("two")], A)
    for left in ([history[-1]], history, [stub]):
        with model(Store(tmp_path / "other"), budget=2048, on_mismatch="rebuild") as chat:
            answer = chat.invoke([*left, HumanMessage("two")], A)
            assert receipt(answer)["source"] in ("log", "snapshot")
            assert held(chat, "a").count("a line of the log") == 50 and "Harmful" not in held(chat, "a")
            assert held(chat, "a").endswith(rendered([HumanMessage("two"), answer]))


def test_no_hint_names_what_the_model_does_not_take():
    for value in ("late", "reread"):
        LocretChatModel(model="x", on_change=value)
    for value in ("reread", "rebuild"):
        LocretChatModel(model="x", on_mismatch=value)


def test_a_thread_that_knows_of_no_tools_is_not_told_that_there_are_none(script: Script, tmp_path: Path):
    """Telling of tools in another way counts as another beginning."""
    history: list[Any] = [HumanMessage("one")]
    with model(None, on=runtime(Store(tmp_path), template=CHATML), tool_prompt="auto") as chat:
        history += [chat.invoke(history, thread("a")), HumanMessage("two")]
    with model(None, on=runtime(Store(tmp_path), template=CHATML), tool_prompt="template") as chat:
        with pytest.warns(LateWarning, match="how the template is used"):
            answer = chat.invoke(history, thread("a"))
        assert receipt(answer)["late"] == "how the template is used" and "no tools" not in held(chat, "a")


THINKS = ("{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
          "{{- '<think></think>' }}{%- endif %}")
NAMED = "{%- if named is defined %}{{- named }}{%- endif %}"


@pytest.mark.parametrize("how", ["model", "call"])
def test_an_option_of_the_generation_prompt_alone_is_free(script: Script, tmp_path: Path, how: str):
    """However it is given, to the model or with the call, and whatever the thread began with."""
    script._begin = lambda recent: "Noted."  # type: ignore[method-assign]  # whatever the prompt has of the reply
    history: list[Any] = [HumanMessage("one")]
    template, free = f"{tokenizer().chat_template}{THINKS}", {"enable_thinking": False}
    for options in ({}, free, {}):
        given = {"template_options": options} if options else {}
        with model(None, on=runtime(Store(tmp_path), template=template), **(given if how == "model" else {})) as chat:
            answer = chat.invoke(history, thread("a"), **(given if how == "call" else {}))
        history += [answer, HumanMessage("and now?")]
        assert "late" not in receipt(answer) and "why" not in receipt(answer)
    assert receipt(answer)["source"] == "snapshot" and receipt(answer)["fed"] < 20


def test_an_option_that_changes_what_is_held_is_read_again_where_the_model_was_given_it(script: Script, tmp_path: Path):
    """And refused in a call. Moved from the calls to the model, it is what it was."""
    history: list[Any] = [HumanMessage("one")]
    template, named = f"{NAMED}{tokenizer().chat_template}", {"template_options": {"named": "I am Ada."}}
    with model(None, on=runtime(Store(tmp_path), template=template)) as chat:
        history += [chat.invoke(history, thread("a")), HumanMessage("two")]
        with pytest.raises(ConfigError, match="it began with others, and found named"):
            chat.invoke(history, thread("a"), **named)
    with model(None, on=runtime(Store(tmp_path), template=template), **named) as chat:
        with pytest.warns(RebuildWarning, match=r"the options of the chat template .* process was given are others"):
            history += [chat.invoke(history, thread("a")), HumanMessage("three")]
        assert held(chat, "a").count("I am Ada.") == 1
    with model(None, on=runtime(Store(tmp_path), template=template)) as chat:
        answer = chat.invoke(history, thread("a"), **named)
    assert receipt(answer)["source"] == "snapshot" and "why" not in receipt(answer) and receipt(answer)["fed"] < 20


@pytest.mark.parametrize("tools", [(), (add,)])
@pytest.mark.parametrize("asked_by", ["One.", "Two.", "Three."])
@pytest.mark.thorough(but=2)
def test_a_stream_absorbed_behind_another_beginning_is_there_for_whoever_asks(script: Script, tmp_path: Path,
                                                                              tools: tuple, asked_by: str):
    """No answer follows a stream that was absorbed behind a late message, so that no receipt names its boundary."""
    with model(Store(tmp_path)) as chat, warnings.catch_warnings():
        warnings.simplefilter("ignore", LateWarning)
        history: list[Any] = [HumanMessage("one")]
        history += [chat.invoke([SystemMessage("One."), *history], A)]
        history += [chat.ingest("a line of the log\n" * 9, thread_id="a", history=[SystemMessage("Two."), *history],
                                tools=tools)]
        said = [SystemMessage(asked_by), *history, HumanMessage("what?")]
        answer = (chat.bind_tools(tools) if tools else chat).invoke(said, A)
        assert receipt(answer)["source"] == "live" and held(chat, "a").count("a line of the log\n") == 9
        assert ("late" in receipt(answer)) == (asked_by != "Two.")


@pytest.mark.parametrize("trimmed", [False, True])
def test_many_streams_in_a_row_are_all_reached(script: Script, tmp_path: Path, trimmed: bool):
    """They are more than the boundaries that are kept, so that the answer before them has no boundary any more."""
    with model(Store(tmp_path, keep_last=4)) as chat, warnings.catch_warnings():
        warnings.simplefilter("ignore", LateWarning)
        history: list[Any] = [HumanMessage("one")]
        history += [chat.invoke([SystemMessage("One."), *history], A)]
        left = history[1:] if trimmed else [SystemMessage("Two."), *history]
        for number in range(7):
            left += [chat.ingest(f"stream {number}\n" * 5, thread_id="a", history=left)]
        answer = chat.invoke([*left, HumanMessage("what?")], A)
        assert receipt(answer)["source"] == "live" and held(chat, "a").count("stream 6\n") == 5
