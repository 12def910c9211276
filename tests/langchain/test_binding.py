"""The memory that a turn uses is that of exactly the messages given, or of a history whose end they provably are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.runnables import ConfigurableField

from langchain_locret import LocretChatModel, RebuildWarning
from locret_stream import Store
from locret_stream.conversation.messages import Message, digest
from tests.langchain.support import Script, held, model, receipt, rendered, runtime, scripted, thread, tokenizer

A = thread("a")


def talk(chat: LocretChatModel, *said: str, history: list[BaseMessage] | None = None,
         config: dict = A) -> list[BaseMessage]:
    """The history once each of these human messages was answered."""
    history = list(history or [SystemMessage("Be brief.")])
    for one in said:
        history += [HumanMessage(one)]
        history += [chat.invoke(history, config)]
    return history


def tokens(text: str) -> int:
    return len(tokenizer().encode(text, add_special_tokens=False))


def test_each_turn_feeds_what_is_new_and_memory_is_the_rendered_conversation(chat: LocretChatModel):
    history: list[BaseMessage] = [SystemMessage("Be brief.")]
    for number in range(12):
        history.append(HumanMessage(f"turn {number}: " + "word " * (7 * number)))
        answer = chat.invoke(history, A)
        new = rendered([history[-1]]) + "<|im_start|>assistant\n"
        said = receipt(answer)
        assert (said["source"], said["fed"]) == (("live", tokens(new)) if number else
                                                 ("new", tokens(rendered(history[:2]) + "<|im_start|>assistant\n")))
        usage = answer.usage_metadata
        assert usage["input_tokens"] == said["reused"] + said["fed"]
        assert usage["input_token_details"]["cache_read"] == said["reused"]
        history.append(answer)
        assert held(chat, "a") == rendered(history)


def test_regenerating_goes_back_to_the_prompt(chat: LocretChatModel):
    history = talk(chat, "one", "two " * 100)
    again = chat.invoke(history[:-1], A)
    assert again.text == history[-1].text
    assert receipt(again)["source"] == "snapshot" and receipt(again)["fed"] == tokens("<|im_start|>assistant\n")
    assert held(chat, "a") == rendered(history)


def test_an_edited_question_goes_back_to_the_answer_before_it(chat: LocretChatModel):
    history = talk(chat, "one", "two", "three")
    edited = [*history[:3], HumanMessage("2")]
    answer = chat.invoke(edited, A)
    assert receipt(answer)["source"] == "snapshot" and receipt(answer)["reused"] == tokens(rendered(history[:3]))
    assert held(chat, "a") == rendered([*edited, answer])
    # and a history may go back to the other branch
    back = talk(chat, "four", history=history)
    assert receipt(back[-1])["source"] == "snapshot" and held(chat, "a") == rendered(back)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_an_edited_older_message_is_never_answered_from_the_memory_of_the_old_one(chat: LocretChatModel, place: int):
    history = talk(chat, "one", "two")
    kind = type(history[place])
    edited = [*history[:place], kind("EDITED"), *history[place + 1:], HumanMessage("three")]
    if place == 0:
        chat = chat.model_copy(update={"on_change": "reread"})  # else it becomes a late message: test_late
        with pytest.warns(RebuildWarning, match="what memory held beyond them is lost: the system prompt is another"):
            answer = chat.invoke(edited, A)
        assert receipt(answer)["why"] == "the system prompt is another"
    else:
        answer = chat.invoke(edited, A)
    assert receipt(answer)["source"] == ("rebuild" if place < 2 else "snapshot")
    assert held(chat, "a") == rendered([*edited, answer])


def test_an_answer_that_is_not_its_own_is_read(chat: LocretChatModel):
    history = talk(chat, "one")
    given = [*history[:-1], AIMessage("something else", response_metadata=history[-1].response_metadata),
             HumanMessage("two")]
    answer = chat.invoke(given, A)
    assert receipt(answer)["source"] == "snapshot"
    assert held(chat, "a") == rendered([*given, answer])


def test_a_trimmed_history_goes_on_with_all_that_is_remembered(chat: LocretChatModel):
    history = talk(chat, "the first thing", "two", "three")
    for kept in (history[-1:], history[-3:], [history[0], *history[-1:]], history[3:]):
        answer = chat.invoke([*kept, HumanMessage("four")], A)
        assert receipt(answer)["source"] in ("live", "snapshot")
        assert held(chat, "a") == rendered([*history, HumanMessage("four"), answer])
    longer = [*history, HumanMessage("four"), answer]
    cut = trim_messages([*longer, HumanMessage("five")], max_tokens=4, token_counter=len, include_system=True,
                        strategy="last", start_on="human")
    assert len(cut) < len(longer)
    last = chat.invoke(cut, A)
    assert held(chat, "a") == rendered([*longer, HumanMessage("five"), last])
    # regenerating in a trimmed history
    again = chat.invoke(cut, A)
    assert receipt(again)["source"] == "snapshot"
    assert held(chat, "a") == rendered([*longer, HumanMessage("five"), again])


@pytest.mark.filterwarnings("ignore::langchain_locret.RebuildWarning")
def test_what_is_left_of_a_trimmed_history_must_be_its_end(chat: LocretChatModel):
    chat = chat.model_copy(update={"on_change": "reread"})
    history = talk(chat, "one", "two", "three")
    for left in ([history[1], *history[3:]],                        # a hole
                 [HumanMessage("forged"), history[-1]],             # another message before the answer
                 [SystemMessage("Be long."), history[-1]],          # another system prompt
                 [history[-2], AIMessage("x", response_metadata=history[-1].response_metadata)]):
        messages = [*left, HumanMessage("four")]
        answer = chat.invoke(messages, A)
        assert receipt(answer)["source"] == "rebuild", messages
        assert held(chat, "a") == rendered([*messages, answer])


def test_a_summary_in_place_of_older_messages_is_passed_over(chat: LocretChatModel):
    history = talk(chat, "one", "two", "three")
    summary = HumanMessage("They counted.", additional_kwargs={"lc_source": "summarization"})
    answer = chat.invoke([history[0], summary, *history[3:], HumanMessage("four")], A)
    assert receipt(answer)["source"] == "live"
    assert held(chat, "a") == rendered([*history, HumanMessage("four"), answer])
    # an answer behind no message that is held is read like any other message
    answer = chat.invoke([summary, HumanMessage("five")], A)
    assert held(chat, "a") == rendered([summary, HumanMessage("five"), answer])


def test_other_tools_are_another_conversation(chat: LocretChatModel):
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    history = talk(chat, "one")
    chat = chat.model_copy(update={"on_change": "reread"})
    with pytest.warns(RebuildWarning, match="the tools, or how the template is used, are others"):
        called = chat.bind_tools([add]).invoke([*history, HumanMessage("two")], A)
    assert receipt(called)["source"] == "rebuild" and called.tool_calls[0]["name"] == "add"
    assert receipt(called)["why"] == "the tools, or how the template is used, are others"
    results = [*history, HumanMessage("two"), called, ToolMessage("5", tool_call_id=called.tool_calls[0]["id"])]
    done = chat.bind_tools([add]).invoke(results, A)
    assert done.text == "Done." and receipt(done)["source"] == "live"


@pytest.mark.parametrize("text", ["", "Yes.", 'a "b" \\ /', "\n\t\x00\x7f", "é ß 中 😀", "\ud800", "\u2028"])
def test_a_digest_is_of_the_message_as_json(text: str):
    for message in (Message("user", text), Message("assistant", "x", reasoning=text, answers=-1),
                    Message("tool", text, call_id="7", answers=3, name=text), Message("a-b_1", text, name="n")):
        plain = [message.role, message.content, message.reasoning, [], message.name, message.answers]
        assert message.digest == digest(json.dumps(plain, separators=(",", ":")).encode())[:16]


def test_parallel_results_answer_their_own_calls(chat: LocretChatModel):
    """A message's digest covers which call a result answers, and not the ids of calls."""
    def answered(first: str, second: str, swap: bool = False) -> AIMessage:
        calls = [{"name": "look", "args": {"at": at}, "id": call_id} for at, call_id in (("x", first), ("y", second))]
        results = [ToolMessage(f"at {call_id}".replace(call_id, "there"), tool_call_id=call_id)
                   for call_id in ((second, first) if swap else (first, second))]
        return chat.invoke([HumanMessage("go"), AIMessage("", tool_calls=calls), *results], A)

    assert receipt(answered("1", "2"))["source"] == "new"
    assert receipt(answered("other", "names"))["source"] == "snapshot"
    assert receipt(answered("1", "2", swap=True))["fed"] > 20


def test_threads_never_share_and_nobody_has_a_memory_of_its_own(chat: LocretChatModel):
    history = talk(chat, "one")
    other = chat.invoke([*history, HumanMessage("two")], thread("b"))
    assert receipt(other)["source"] == "new"
    nobody = chat.invoke([*history, HumanMessage("two")])
    assert receipt(nobody)["source"] == "new"
    more = chat.invoke([*history, HumanMessage("two"), nobody, HumanMessage("three")])
    assert receipt(more)["source"] == "live" and not receipt(more)["saved"]
    assert sorted(row.name for row in chat.shared.runtime.store.list()) == ["langchain/a", "langchain/b"]


def test_memory_survives_a_restart(script: Script, tmp_path: Path):
    with model(tmp_path) as chat:
        history = talk(chat, "one", "two " * 80)
    with model(tmp_path) as chat:
        history += [HumanMessage("three")]
        answer = chat.invoke(history, A)
        assert receipt(answer)["source"] == "snapshot" and receipt(answer)["fed"] < 20
        assert held(chat, "a") == rendered([*history, answer])


def test_another_model_or_budget_reads_everything_again_and_says_why(script: Script, tmp_path: Path, caplog):
    with model(tmp_path) as chat:
        history = talk(chat, "one", "two")
    with model(tmp_path, budget=2048) as chat:
        with pytest.warns(RebuildWarning, match=r'its snapshot cannot be used: .*on_mismatch="rebuild"'):
            answer = chat.invoke([*history, HumanMessage("three")], A)
        assert receipt(answer)["source"] == "rebuild" and "its snapshot cannot be used" in receipt(answer)["why"]
        assert held(chat, "a") == rendered([*history, HumanMessage("three"), answer])
        assert "passed over" in caplog.text
        more = chat.invoke([*history, HumanMessage("three"), answer, HumanMessage("four")], A)
        assert receipt(more)["source"] == "live"


@pytest.mark.parametrize("save", ["turn", "run"])
def test_a_stop_string_leaves_no_unseen_text_in_memory(script: Script, tmp_path: Path, save: str):
    with model(Store(tmp_path, keep_last=64), save=save) as chat:
        history = talk(chat, "one", "two")
        script.say = lambda _: "visible STOP unseen"
        history += [HumanMessage("three")]
        answer = chat.invoke(history, A, stop=["STOP"])
        assert answer.text.strip() == "visible" and answer.response_metadata["finish_reason"] == "stop"
        history += [answer, HumanMessage("four")]
        assert held(chat, "a") == rendered(history[:-1])
        script.say = lambda _: "ok"
        more = chat.invoke(history[-2:], A)  # trimmed: what was before is remembered all the same
        assert held(chat, "a") == rendered([*history, more]) and "STOP" not in held(chat, "a")
        assert receipt(more)["source"] == "live"
        nobody = chat.invoke([HumanMessage("x"), chat.invoke("x", stop=["o"]), HumanMessage("y")])
        assert receipt(nobody)["source"] in ("new", "rebuild")


def test_a_turn_that_fails_costs_a_trimmed_thread_nothing(script: Script, tmp_path: Path):
    """The memory of trimmed messages is saved before a turn that may fail."""
    with model(Store(tmp_path, keep_last=64), save="run") as chat:
        history = talk(chat, "one", "two", "three")
        left = [history[-1], HumanMessage("four")]

        def bad() -> None:
            raise RuntimeError("the model failed")

        script.on_token = bad
        with pytest.raises(RuntimeError, match="the model failed"):
            chat.invoke(left, A)
        script.on_token = lambda: None
        answer = chat.invoke(left, A)
        assert receipt(answer)["source"] == "snapshot"
        assert held(chat, "a") == rendered([*history, left[-1], answer])


def test_what_an_agent_writes_into_its_answers_afterwards_changes_nothing(chat: LocretChatModel):
    history = talk(chat, "one")
    history[-1].name, history[-1].id = "helper", "another"
    history[-1].additional_kwargs["more"] = 1
    history[-1].response_metadata["more"] = 1
    answer = chat.invoke([*history, HumanMessage("two")], A)
    assert receipt(answer)["source"] == "live" and receipt(answer)["fed"] < 20


def test_a_session_that_somebody_else_went_on_with_is_not_mistaken_for_its_messages(script: Script, tmp_path: Path):
    import asyncio

    with model(tmp_path) as chat:
        history = talk(chat, "one")

    async def meddle() -> None:
        async with runtime(tmp_path) as other, other.open("langchain/a") as ctx:
            await ctx.feed("foreign text ")

    asyncio.run(meddle())
    with model(tmp_path) as chat:
        answer = chat.invoke([*history, HumanMessage("two")], A)
        assert held(chat, "a") == rendered([*history, HumanMessage("two"), answer])
        assert receipt(answer)["source"] == "snapshot"


def test_an_answer_cut_for_its_length_goes_on_from_memory(chat: LocretChatModel):
    history = [HumanMessage("a long story about a fox and a hen")]
    answer = chat.invoke(history, A, max_tokens=3)
    assert answer.response_metadata["finish_reason"] == "length" and answer.usage_metadata["output_tokens"] == 3
    history += [answer, HumanMessage("two")]
    more = chat.invoke(history, A)
    assert receipt(more)["source"] == "live" and held(chat, "a") == rendered([*history, more])


def test_copies_of_a_model_share_its_threads(chat: LocretChatModel):
    import copy
    history = talk(chat, "one")
    copies = [copy.deepcopy(chat), chat.model_copy(update={"temperature": 0.5}), chat.with_config(tags=["x"]),
              chat.bind(stop=["zzz"]), chat.configurable_fields(temperature=ConfigurableField(id="heat"))]
    for one in copies:
        history = [*history, HumanMessage("more")]
        answer = one.invoke(history, {"configurable": {"thread_id": "a", "heat": 0.7}})
        assert receipt(answer)["source"] == "live", one
        history.append(answer)


def test_messages_that_went_through_json_are_the_same(chat: LocretChatModel):
    from langchain_core.messages import messages_from_dict, messages_to_dict
    history = talk(chat, "one", "two")
    back = messages_from_dict(json.loads(json.dumps(messages_to_dict(history))))
    answer = chat.invoke([*back, HumanMessage("three")], A)
    assert receipt(answer)["source"] == "live"


STEP = st.tuples(st.sampled_from(["say", "say", "regenerate", "edit", "trim", "restart", "leave"]),
                 st.integers(0, 10**6), st.integers(1, 60))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEP, min_size=4, max_size=14))
@pytest.mark.thorough
def test_any_order_of_turns_uses_the_memory_of_the_messages_given(tmp_path_factory, steps: list):
    """For any sequence of new, repeated, edited and trimmed messages, left calls and restarts."""
    folder = tmp_path_factory.mktemp("store")
    with scripted():
        on = runtime(Store(folder, keep_last=64), max_live=2)
        nodes: list[tuple[list[BaseMessage], list[BaseMessage]]] = [([], [])]  # given; held, with those trimmed
        chat = LocretChatModel(model="scripted", runtime=on)
        for number, (what, pick, size) in enumerate(steps):
            given, whole = nodes[pick % len(nodes)]
            draw = random.Random(pick)
            if what == "restart":
                chat.close()
                chat = LocretChatModel(model="scripted", runtime=runtime(Store(folder, keep_last=64), max_live=2))
                continue
            new = [HumanMessage(f"{number}: " + "x y " * size)]
            if what == "regenerate" and len(given) > 1:
                given, whole, new = given[:-1], whole[:-1], []
            elif what == "edit" and given:
                place = draw.randrange(len(given))
                given = [*given[:place], type(given[place])(f"edited {number}"), *given[place + 1:]]
                whole = given
            elif what == "trim" and len(given) > 2:
                given = given[draw.randrange(1, len(given), 2):]
            given, whole = [*given, *new], [*whole, *new]
            if what == "leave":
                stream = chat.stream(given, thread("t"))
                next(stream)
                stream.close()
                continue
            answer = chat.invoke(given, thread("t"))
            given, whole = [*given, answer], [*whole, answer]
            memory = held(chat, "t")
            if what == "edit":  # memory holds these, or the same behind what was trimmed away once
                assert memory == rendered(given), what
            else:
                assert memory == rendered(whole), what
            nodes.append((given, whole))
        chat.close()
