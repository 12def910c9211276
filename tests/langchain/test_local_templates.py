"""Which chat templates are proved to write each message by itself, and that they do."""

from __future__ import annotations

import random

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from langchain_locret import LocretChatModel
from locret_stream.conversation.local_templates import messages_ahead
from locret_stream.conversation.messages import Message
from locret_stream.conversation.render import ChatTemplate
from locret_stream.conversation.tool_prompt import ToolPrompt
from locret_stream.errors import ConfigError
from locret_stream.text import ChatFrame, TextCodec
from tests import tiny_tokenizers
from tests.langchain.templates import TEMPLATES as LANGCHAIN
from tests.langchain.templates import TOKENS

EACH = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}"
END = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LOCAL = {
    "chatml": (tiny_tokenizers.CHATML, 2), "qwen2": (tiny_tokenizers.TEMPLATES["qwen2"], 2), "phi3": (
        tiny_tokenizers.TEMPLATES["phi3"], 2), "bundled": (LANGCHAIN["chatml"], 3), "llama": (LANGCHAIN["llama"], 4),
    "first": (EACH + "{% if loop.first %}!{% endif %}{% if messages[0].role == 'system' %}?{% endif %}" + END, 2),
    "last": (EACH + "{% if loop.last %}!{% endif %}" + END, 2),
    "own loop": (EACH + "{% for word in message.content.split() %}{{ loop.index0 }}{{ loop.length }}{% endfor %}"
                 + END, 2),
    "own variable": (EACH + "{% if message.role == 'user' %}{% set mark = '!' %}{% endif %}{{ mark }}" + END, 2),
    "end": (EACH + "{% endfor %}{% if messages[-1].role == 'user' and add_generation_prompt %}{{ '<|im_start|>' }}"
            "{% endif %}", 2),
    "named": ("{% if messages and messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
              "{% set rest = messages %}{% endif %}" + EACH.replace("messages", "rest") + END, 3)}
KEPT = "{% set kept = namespace(n=0) %}"
NOT_LOCAL = {
    "no template": "{% for",
    "no loop": "{{ messages[0].content }}",
    "two loops": EACH + "{% endfor %}" + EACH + END,
    "a loop in a loop": "{% for tool in tools %}" + EACH + "{% endfor %}" + END,
    "number": EACH + "{% if loop.index0 % 2 %}!{% endif %}" + END,
    "length": EACH + "{% if loop.length > 9 %}!{% endif %}" + END,
    "from the end": EACH + "{% if loop.revindex < 9 %}!{% endif %}" + END,
    "count": "{% if messages | length > 9 %}!{% endif %}" + EACH + END,
    "a list kept": "{% set held = [messages] %}" + EACH + "{{ held[0] | length }}" + END,
    "a list chosen": "{% set held = messages or [] %}" + EACH + "{{ held | length }}" + END,
    "a list passed": EACH + "{{ raise_exception(messages) }}" + END,
    "another place": EACH + "{{ messages[2].content }}" + END,
    "the newest ahead": "{% if messages[-1].role == 'user' %}!{% endif %}" + EACH + END,
    "the newest in each": EACH + "{% if messages[-1].role == 'user' %}!{% endif %}" + END,
    "the one before": EACH + "{% if messages[loop.index0 - 1].role == message.role %}+{% endif %}" + END,
    "the one behind": EACH + "{% if messages[loop.index0 + 1].role == 'user' %}!{% endif %}" + END,
    "the prompt in each": EACH + "{% if add_generation_prompt %}!{% endif %}" + END,
    "the prompt in an own loop": EACH + "{% for x in 'ab' %}{{ add_generation_prompt }}{% endfor %}" + END,
    "turned round": "{% set kept = [1, 2] | reverse %}" + EACH + "{% for x in kept %}{{ x }}{% endfor %}" + END,
    "a dict changed": "{% set kept = {'n': 0} %}" + EACH + "{{ dict.update(kept, n=kept.n + 1) or kept.n }}" + END,
    "two beside": EACH + "{{ messages[loop.index0 - 2].role }}" + END,
    "beside in another list": "{% set rest = messages[1:] %}" + EACH.replace("messages", "rest")
                              + "{{ messages[loop.index0 - 1].role }}" + END,
    "beside from an own loop": EACH + "{% for x in 'ab' %}{{ messages[loop.index0 - 1].role }}{% endfor %}" + END,
    "kept": KEPT + EACH + "{% set kept.n = kept.n + 1 %}{{ kept.n }}" + END,
    "cycled": "{% set kept = cycler('a', 'b') %}" + EACH + "{{ kept.next() }}" + END,
    "joined": "{% set kept = joiner('a') %}" + EACH + "{{ kept() }}" + END,
    "used up": "{% set kept = 'abc' | map('upper') %}" + EACH + "{{ kept | first }}" + END,
    "drawn": EACH + "{{ 'abc' | random }}" + END,
    "cut short": EACH + "{% if message.role == 'tool' %}{% break %}{% endif %}" + END,
    "chosen": EACH.replace("in messages", "in messages if message.content") + END,
    "sorted": EACH.replace("in messages", "in messages | reverse") + END,
    "a macro": "{% macro all() %}{{ messages | length }}{% endmacro %}" + EACH + "{{ all() }}" + END,
    "the list again": EACH + "{% for other in messages %}.{% endfor %}" + END,
    "the loop passed": EACH + "{% set here = loop %}{{ here.index0 }}" + END,
    "the loop in the list of an own one": EACH + "{% for x in range(loop.index0) %}.{% endfor %}" + END,
    "the list under the name of a message": EACH.replace("for message", "for messages") + END,
    "another list under its name": "{% set messages = tools %}" + EACH + END,
    "a loop of another list": "{% for message in tools %}{{ message }}" + END}


@pytest.mark.parametrize("name", NOT_LOCAL)
def test_what_cannot_be_proved_is_not_local(name: str):
    assert messages_ahead(NOT_LOCAL[name]) is None


@pytest.mark.parametrize("template", [tiny_tokenizers.TEMPLATES[name] for name in ("mistral", "gemma", "qwen3")])
def test_templates_that_count_or_look_around_are_not_local(template: str):
    assert messages_ahead(template) is None


def made(written: str, tool_prompt: ToolPrompt = "template", **options: object) -> ChatTemplate:
    tokenizer = tiny_tokenizers.wrap(tiny_tokenizers.trained("byte_level"), marks=TOKENS)
    codec = TextCodec(tokenizer)
    frames = ChatFrame(codec, tokenizer)
    frames.template = written  # for frames alone some of these would be refused
    return ChatTemplate(tokenizer, codec, frames, options=options, tool_prompt=tool_prompt)


def conversation(rng: random.Random, size: int, calls: bool) -> list[Message]:
    """Of any order of roles, with texts of which some are equal."""
    said = [Message("system", "Be kind.")] if rng.random() < 0.5 else []
    while len(said) < size:
        role = rng.choice(("user", "assistant", "tool") if calls else ("user", "assistant"))
        text = rng.choice(("Yes.", f"This is number {len(said)}.", "a b c", "<think>so</think> it is"))
        call = ((("look", {"at": len(said)}, "1"),) if calls and role == "assistant" and rng.random() < 0.4 else ())
        result = {"call_id": "1", "answers": 0} if role == "tool" else {}
        said.append(Message(role, text, calls=call, **result))
    return said


@pytest.mark.parametrize("name", LOCAL)
def test_the_last_messages_are_written_as_in_the_whole_conversation(name: str):
    written, ahead = LOCAL[name]
    assert messages_ahead(written) == ahead
    template = made(written)
    rng, shorter = random.Random(name), 0
    calls = "tool_calls" in written
    for _ in range(60):
        said = conversation(rng, rng.randint(2, 14), calls)
        count = rng.randint(1, len(said) - 1)
        shown = template.last_of(said, count)
        first = count - (len(said) - len(shown))
        assert list(shown[first:]) == said[count:]
        shorter += len(shown) < len(said)
        try:
            whole = template.render(said)
        except ConfigError:  # a call that this template has no place for
            continue
        short = template.render(shown)
        at, expected = template.after(shown, first, (), short), template.after(said, count, (), whole)
        assert (at is None) == (expected is None)
        if at is not None and expected is not None:
            assert short.pieces(at) == whole.pieces(expected)
            assert short.pieces(at, short.body) == whole.pieces(expected, whole.body)
            assert [number - first for number in short.left_out if number >= first] == [
                number - count for number in whole.left_out if number >= count]
    assert shorter >= 10


def test_texts_are_measured_and_sorted_as_in_the_whole_conversation():
    written = EACH + "{{ message.content | length }}{{ message.content > messages[0].content }}" + END
    template, said = made(written), conversation(random.Random(3), 120, calls=False)
    shown = template.last_of(said, 110)
    assert len(shown) == 2 + 1 + 10
    short, whole = template.render(shown), template.render(said)
    at, expected = template.after(shown, 3, (), short), template.after(said, 110, (), whole)
    assert at is not None and expected is not None and short.pieces(at) == whole.pieces(expected)


NO_SYSTEM = EACH.replace("%}", "%}{% if message.role != 'system' %}", 1) + "{% endif %}" + END
REFUSED = "{% if message.role == 'system' %}{{ raise_exception('none') }}{% endif %}"


@pytest.mark.parametrize("refused", [False, True])
def test_a_system_text_stays_in_the_first_message_of_a_user(refused: bool):
    """Where the template has no place for it; an assistant may have spoken before the user."""
    template = made(NO_SYSTEM.replace("{% if", REFUSED + "{% if", 1) if refused else NO_SYSTEM, tool_prompt="auto")
    for opening in ([Message("assistant", "How can I help?")], [Message("system", "More.")], []):
        said = [Message("system", "RULES"), *opening]
        for number in range(5):
            said += [Message("user", f"u{number}"), Message("assistant", f"a{number}")]
        if refused and opening and opening[0].role == "system":
            continue  # it has no place at all
        for count in range(len(said) - 3, len(said)):
            shown = template.last_of(said, count)
            first = count - (len(said) - len(shown))
            short, whole = template.render(shown), template.render(said)
            at, expected = template.after(shown, first, (), short), template.after(said, count, (), whole)
            assert at is not None and expected is not None
            assert short.pieces(at) == whole.pieces(expected)


def test_of_other_templates_all_is_rendered():
    for written, options in ((tiny_tokenizers.TEMPLATES["qwen3"], {}),
                             (tiny_tokenizers.CHATML + "{{ x }}", {"x": ["kept"]})):
        template = made(written, **options)
        said = conversation(random.Random(0), 12, calls=False)
        assert template.last_of(said, 11) is said


def test_a_turn_writes_only_the_last_messages(monkeypatch: pytest.MonkeyPatch):
    """However long the history is that comes with it, and what it reads is what a rendering of all would give it."""
    rendered: list[int] = []
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda self, said, *more, **options: (
        rendered.append(len(said)), render(self, said, *more, **options))[1])
    replies: dict[bool, list[object]] = {}
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(ChatTemplate, "last_of", lambda self, said, count, tools=(): said)
        with LocretChatModel(model="bundled", max_tokens=4, max_live=1) as chat:
            said: list[BaseMessage] = [HumanMessage("The port of gateway is 48213."), AIMessage("Noted.")] * 30
            replies[whole] = []
            for question in ("What is the port of gateway?", "And again?", "What is it?"):
                said.append(HumanMessage(question))
                del rendered[:]
                reply = chat.invoke(said, thread_id="one")
                said.append(reply)
                replies[whole].append((reply.content, reply.response_metadata["locret"]))
                if len(said) > 62:
                    assert (max(rendered) <= 3 + 1 + 1) != whole
    assert replies[False] == replies[True]
