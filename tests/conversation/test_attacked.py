"""What attacks found: each is tried again in the words of its attack."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from locret_stream.conversation.probes import Probes
from locret_stream.conversation.render import ChatTemplate
from locret_stream.conversation.replies import Reply, response_template
from locret_stream.text import ChatFrame, TextCodec
from tests.conversation.templates import CALLS, CHATML, EACH, END, GEN, SAID, TEMPLATES
from tests.conversation.test_fitting import made, system, user
from tests.langchain.support import Script, scripted, tokenizer
from tests.serving.support import serving

TOOL = {"type": "function", "function": {"name": "look"}}  # OpenAI makes all else optional
DEMANDING = "{% for t in tools or [] %}{{ t.function.description + (t.function.parameters.properties | tojson) }}" + END


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted() as script:
        script._begin = lambda recent: "Noted."  # type: ignore[method-assign]
        yield script


@pytest.mark.parametrize("flags", [(), ("/quiet",)])
def test_a_run_of_white_space_takes_no_longer_than_its_length(flags: tuple[str, ...]):
    for text in ("a" + " " * 300_000 + "b", " " * 300_000 + "/quiet" + "\n" * 300_000, "/quiet " * 100_000):
        begun, probes = time.perf_counter(), Probes(flags)
        assert "".join(piece.text for piece in probes.pieces(probes.hide_content(text))) == text
        assert time.perf_counter() - begun < 2


def test_a_reply_of_newlines_takes_no_longer_than_one_of_words():
    template = response_template(tokenizer(), None, "", TEMPLATES["opened thought"] + CALLS)

    def taken(piece: str) -> float:
        begun, reply = time.perf_counter(), Reply(template, "", [])
        for _ in range(2000):
            list(reply.feed(piece))
        return time.perf_counter() - begun

    assert taken("\n") < 5 + 10 * taken("word ")


def test_a_stop_string_in_what_was_kept_back_ends_the_answer_and_nothing_behind_it_is_held(
        script: Script, tmp_path: Path):
    """Where the template knows the end of a thought alone, all is kept back that may be one."""
    script._begin = lambda recent: "One two STOP secret three."  # type: ignore[method-assign]
    with serving(tmp_path, template=TEMPLATES["thoughts out"]) as served:
        found = served.http.post("/v1/chat/completions", json={
            "messages": [{"role": "user", "content": "Hi."}], "session_id": "s", "stop": ["STOP"]}).json()
        assert found["choices"][0]["message"]["content"].strip() == "One two"
        assert found["choices"][0]["finish_reason"] == "stop"
        assert "secret" not in served.held("s") and "One two" in served.held("s")


@pytest.mark.parametrize("template", [
    DEMANDING + CHATML, "{% for t in tools or [] %}{{ t.name.upper() }}" + END + EACH + SAID + END + GEN],
    ids=["description and parameters", "another form"])
def test_tools_as_openai_allows_them_are_told(template: str, script: Script, tmp_path: Path):
    with serving(tmp_path, template=template) as served:
        found = served.http.post("/v1/chat/completions", json={
            "messages": [{"role": "user", "content": "Hi."}], "session_id": "s", "tools": [TOOL]})
        assert found.status_code == 200, found.text
        if template != DEMANDING + CHATML:
            assert '"name": "look"' in served.held("s")


def test_a_system_text_that_changed_once_stays_changed_however_long_the_history_grows(script: Script, tmp_path: Path):
    with serving(tmp_path, template=CHATML) as served:
        history: list[dict[str, Any]] = []
        for turn in range(14):
            rule = {"role": "system", "content": "Be kind." if turn < 2 else "Be brief."}
            history.append({"role": "user", "content": f"Turn {turn}."})
            found = served.http.post("/v1/chat/completions", json={
                "messages": [rule, *history], "session_id": "s"}).json()
            history.append(found["choices"][0]["message"])
            assert found["locret"]["source"] == ("live" if turn else "new"), (turn, found["locret"])
        held = served.held("s")
        assert held.count("Be kind.") == held.count("Be brief.") == 1


def test_receipts_count_the_messages_given_whatever_was_written_between(script: Script, tmp_path: Path):
    with serving(tmp_path, template=TEMPLATES["in turn"]) as served:
        def ask(*messages: dict[str, Any]) -> dict[str, Any]:
            return served.http.post("/v1/chat/completions", json={"messages": [*messages], "session_id": "s"}).json()

        first = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "One."}]
        answer = ask(*first)["choices"][0]["message"]
        for rule in ("Be kind.", "Be brief."):
            found = ask({"role": "system", "content": rule}, first[1], answer, {"role": "user", "content": "x"},
                        {"role": "user", "content": "y"})
            assert found["locret"]["otherwise"] == {"4": "behind 'OK.'"}, rule


def test_an_empty_option_is_no_control_token():
    codec = TextCodec(tokenizer())
    template = ChatTemplate(tokenizer(), codec, ChatFrame(codec, tokenizer(), template="{{ identity }}" + CHATML))
    for value in ("", "a", {"b": ["c"]}):
        assert template.with_options({"identity": value}).render([system(), user()]).whole


def test_results_of_calls_that_are_named_by_ids_are_both_results():
    from tests.conversation.test_fitting import TALKS
    from tests.conversation.test_fitting import TOOL as WHOLE

    _, template = made("names by id")
    assert not template.render(TALKS["two calls"], (WHOLE,)).otherwise
