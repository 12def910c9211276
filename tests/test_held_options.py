"""Which options of a chat template change what a memory holds: those without which it would write a conversation
otherwise, whatever it takes to see that."""

from __future__ import annotations

import pytest

from locret_stream.errors import ConfigError
from locret_stream.text import ChatFrame, TextCodec
from locret_stream.text.held_options import held_options
from tests.langchain.support import tokenizer

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
WHERE = {
    "always": "{% if named %}{{ named }}{% endif %}" + TURNS,
    "with tools": "{% if tools and named %}{{ named }}{% endif %}" + TURNS,
    "with a system text": "{% if messages[0].role == 'system' and named %}{{ named }}{% endif %}" + TURNS,
    "with a call": TURNS.replace("(m.content or '')", "(m.content or '') + (named if m.tool_calls and named else '')"),
    "with a result": TURNS.replace("(m.content or '')", "(m.content or '') + (named if m.role == 'tool' and named "
                                                        "else '')"),
    "with a thought": TURNS.replace("(m.content or '')", "(m.content or '') + (named if m.reasoning_content and named "
                                                         "else '')"),
    "with a thought ahead of a call": TURNS.replace(
        "(m.content or '')", "(m.content or '') + (named if m.reasoning_content and m.tool_calls and named else '')"),
    "with an answer behind a result": TURNS.replace(
        "(m.content or '')", "(m.content or '') + (named if m.role == 'assistant' and m.content and loop.index0 and "
                             "messages[loop.index0 - 1].role == 'tool' and named else '')"),
}


def _held(template: str, **options: object) -> dict[str, object]:
    return held_options(tokenizer(), template + PROMPT, options)


@pytest.mark.parametrize("where", WHERE)
def test_an_option_that_shows_anywhere_but_in_the_prompt_is_held(where):
    assert _held(WHERE[where], named="Ada") == {"named": "Ada"}
    assert _held(WHERE[where], named="") == {}  # as if it were not given


def test_one_that_shows_in_the_prompt_alone_is_not():
    template = TURNS + "{% if add_generation_prompt and named %}{{ named }}{% endif %}"
    assert _held(template, named="Ada") == {} and _held(template) == {}


def test_of_several_those_that_count_are_held():
    template = WHERE["always"] + "{% if add_generation_prompt and other %}{{ other }}{% endif %}"
    assert _held(template, named="Ada", other="Bob") == {"named": "Ada"}


def test_of_two_that_do_the_same_both_are_held():
    """Without either the other one does it."""
    template = "{% if one or other %}{{ 'Ada' }}{% endif %}" + TURNS
    assert _held(template, one=True, other=True) == {"one": True, "other": True}


def test_an_option_that_the_template_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="no option 'nonsense'"):
        _held(WHERE["always"], nonsense=1)


@pytest.mark.parametrize("where", WHERE)
def test_a_frame_is_identified_by_what_is_held(where):
    def settings(template: str, **options: object) -> str:
        return ChatFrame(TextCodec(tokenizer()), tokenizer(), template=template + PROMPT, options=options).settings

    free = WHERE[where] + "{% if add_generation_prompt and free %}{{ free }}{% endif %}"
    assert settings(free) == settings(free, free="x")
    assert settings(free, named="Ada", free="x") == settings(free, named="Ada") != settings(free)
