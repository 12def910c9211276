"""Behind answers and calls that a model wrote itself, it is shown what transformers shows of them, but for white space:
it begins an answer with a space or without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conversation.templates import TEMPLATES
from tests.conversation.test_dead_ends import TOOL, chat, said, user
from tests.langchain.support import Script, tokenizer
from tests.serving.support import serving

# What the model wrote of a thought stays in its memory, and a system text that is told late stands where it came.
CHATS = [name for name in TEMPLATES if name not in ("opened thought", "reminder", "named results")]
LOOPS = ["calls", "one call", "first call", "named results"]
CALL = {"name": "look", "arguments": {"at": "the shed"}}


def stock(name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    return str(tokenizer().apply_chat_template(messages, tools=tools or [], chat_template=TEMPLATES[name],
                                               tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.thorough(but=6)
def test_an_answer(name: str, script: Script, tmp_path: Path):
    history = [user("One.")]
    with serving(tmp_path, template=TEMPLATES[name]) as served:
        for text in ("Two.", "Three."):
            history += [said(chat(served, history)), user(text)]
        chat(served, history)
        asked = [{"role": each["role"], "content": each["content"]} for each in history]
        assert "".join(served.held("s").split()).startswith("".join(stock(name, asked).split()))


@pytest.mark.parametrize("demanded", [False, True], ids=["", "demanded"])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.thorough(but=3)
def test_a_call(name: str, demanded: bool, script: Script, tmp_path: Path):
    """One that is demanded is held to the tool's schema, and ends without any mark of the model's."""
    history = [user("Where is it?")]
    with serving(tmp_path, template=TEMPLATES[name]) as served:
        call = f"<tool_call>{json.dumps(CALL)}</tool_call>"
        script.replies = [call[call.index("the shed"):] if demanded else call]  # type: ignore[attr-defined]
        answer = said(chat(served, history, tools=[TOOL], **({"tool_choice": "required"} if demanded else {})))
        assert [call["function"]["name"] for call in answer["tool_calls"]] == ["look"], answer
        history += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "Here."}]
        chat(served, history, tools=[TOOL])
        shown = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "1", "function": CALL}]}
        expected = stock(name, [history[0], shown, history[2]], [TOOL])
        held = served.held("s")
        assert "".join(held.split()).startswith("".join(expected.split())), f"{held!r}, expected {expected!r}"
