"""Settings and options that cannot work are refused in words; nothing secret is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_locret import LocretChatModel
from locret_stream import ConfigError, InputError, Store
from tests.langchain.support import held, receipt, runtime, thread


@pytest.mark.parametrize("seconds", ["5", 0, -1, True])
def test_a_timeout_that_cannot_be_is_refused(chat: LocretChatModel, seconds: Any):
    with pytest.raises(ConfigError, match="timeout"):
        chat.invoke("hello", thread("a"), timeout=seconds)


def test_what_belongs_to_a_runtime_or_a_store_is_not_given_beside_it(tmp_path: Path):
    """They would be ignored: with a key, for example, threads would be stored in plain text all the same."""
    for name, value in (("key", "ab" * 32), ("boundaries", 3)):
        with pytest.raises(ValueError, match=f"{name} was given beside a Store"):
            LocretChatModel(store=Store(tmp_path), **{name: value})
    for name, value in (("budget", 5), ("store", str(tmp_path)), ("policy", "h2o"), ("max_live", 2)):
        with pytest.raises(ValueError, match=f"{name} was given beside a Runtime"):
            LocretChatModel(runtime=runtime(tmp_path), **{name: value})


def test_a_policy_with_heads_and_none_given_is_told_so_at_once(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match='policy="keydiff"'):
        LocretChatModel(model=str(tmp_path), policy="locret")
    assert LocretChatModel(model=str(tmp_path)).profile  # takes one without


@pytest.mark.parametrize("messages", [
    [], [HumanMessage([{"type": "text-plain", "url": "https://example.org/x.txt", "mime_type": "text/plain"}])],
    [HumanMessage([{"type": "reasoning", "reasoning": "because"}])],
    [HumanMessage("x"), AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "1"}]),
     ToolMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], tool_call_id="1")],
    [HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])],
    [HumanMessage("\ud800")], [SystemMessage("x\ud800"), HumanMessage("y")]])
@pytest.mark.thorough(but=2)
def test_messages_that_cannot_be_read_are_refused_and_change_nothing(chat: LocretChatModel, messages: list):
    history: list[Any] = [HumanMessage("one")]
    history += [chat.invoke(history, thread("a"))]
    before = held(chat, "a")
    with pytest.raises(InputError):
        chat.invoke(messages, thread("a"))
    answer = chat.invoke([*history, HumanMessage("two")], thread("a"))
    assert held(chat, "a").startswith(before) and receipt(answer)["source"] in ("live", "snapshot")


@pytest.mark.parametrize("options", [
    {"temperature": -1}, {"top_p": 2.0}, {"max_tokens": 0}, {"timeout": 0}, {"timeout": -1.0}, {"seed": 1.5},
    {"store": 5}, {"runtime": "x"}, {"budget": -1}, {"boundaries": 0}, {"key": "ab"}, {"policy": "locrett"},
    {"temprature": 0.5}, {"save": "never"}])
def test_settings_that_cannot_work_are_refused_in_words(options: dict):
    with pytest.raises((ConfigError, ValueError), match=r"expected|valid|not permitted|Input should be"):
        LocretChatModel(model="bundled", **options).invoke("x")


def test_tools_that_are_not_bound_cannot_be_chosen(chat: LocretChatModel):
    def look(at: str) -> str:
        """Look."""
        return at

    with pytest.raises(ConfigError, match="no tools are bound"):
        chat.invoke("x", tool_choice="any")
    for choice in ("other", {"type": "function", "function": {"name": "other"}}, 7):
        with pytest.raises(ConfigError, match=r"tool_choice is .*; expected one of the tools \['look'\]"):
            chat.bind_tools([look], tool_choice=choice)


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_nothing_secret_is_shown(tmp_path: Path, where: str, monkeypatch):
    monkeypatch.setenv("LOCRET_KEY", "ab" * 32) if where == "environment" else None
    chat = LocretChatModel(model="bundled", store=str(tmp_path), key="ab" * 32 if where == "argument" else None)
    for shown in (repr(chat), str(chat), str(chat._identifying_params), str(chat.model_dump())):
        assert "abab" not in shown
    chat.invoke([HumanMessage("the password is 4182")], thread("private"))
    chat.close()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"private" not in path.read_bytes()


def test_options_that_are_not_known_are_refused(chat: LocretChatModel):
    with pytest.raises(ConfigError, match="unknown option 'temprature'; expected some of"):
        chat.invoke("hello", thread("a"), temprature=0.5)
