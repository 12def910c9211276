"""Lines are checked, rendered by the chat template, and replies located to the token."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch

from locret_stream.errors import ConfigError, InputError
from locret_stream.training.data import (
    Example,
    fit,
    load_examples,
    parse_line,
    read_jsonl,
    render,
    with_query,
)
from tests.training.tiny import BARE, CHATML, SHOUTING, STRICT, THINKING, TRIMMING, make_tokenizer

IN_TURN = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
           "{{ raise_exception('in turn') }}{% endif %}"
           "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}")
CHAT = [
    {"role": "system", "content": "the rules: be kind.\n"},
    {"role": "user", "content": "What is the café's №? "},
    {"role": "assistant", "content": " the № is 7."},
    {"role": "user", "content": "And is it the last one?"},
    {"role": "assistant", "content": "No. It is the other: 👍."},
]


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def said(tokenizer, example: Example) -> list[str]:
    return [tokenizer.decode(example.ids[start:end], clean_up_tokenization_spaces=False)
            for start, end in example.answer_spans]


def test_spans_are_the_replies_and_their_end_markers(tokenizer):
    example = render(tokenizer, CHAT)
    assert said(tokenizer, example) == [" the № is 7.<|im_end|>", "No. It is the other: 👍.<|im_end|>"]


def test_ids_are_those_of_the_chat_template_and_spans_those_of_its_own_mask(tokenizer):
    example = render(tokenizer, CHAT)
    own = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert example.ids.tolist() == own["input_ids"]
    mask = [0] * len(example.ids)
    for start, end in example.answer_spans:
        mask[start:end] = [1] * (end - start)
    found = [i for i, (ours, theirs) in enumerate(zip(mask, own["assistant_masks"], strict=True)) if ours != theirs]
    assert not found


@pytest.mark.parametrize("template", [CHATML, BARE])
def test_what_the_template_wrote_is_told_from_the_messages(tokenizer, template):
    tokenizer.chat_template = template
    example = render(tokenizer, CHAT)
    written = example.template
    assert written is not None and written.shape == example.ids.shape
    texts = tokenizer.decode(example.ids[~written], clean_up_tokenization_spaces=False)
    between = tokenizer.decode(example.ids[written], clean_up_tokenization_spaces=False)
    for message in CHAT:
        assert message["content"].strip() in texts and message["role"] in between
    if template == CHATML:
        assert between.count("<|im_start|>") == len(CHAT) and "<|im_start|>" not in texts


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_templates_that_think(tokenizer, template):
    tokenizer.chat_template = template
    assert said(tokenizer, render(tokenizer, CHAT)) == [" the № is 7.<|im_end|>", "No. It is the other: 👍.<|im_end|>"]


def test_templates_that_trim(tokenizer):
    tokenizer.chat_template = TRIMMING
    found = said(tokenizer, render(tokenizer, CHAT))
    # " the" is one token, whose space is the template's: it holds the reply's first character, so it is the first
    assert found == [" the № is 7.<|im_end|>", "No. It is the other: 👍.<|im_end|>"]
    tokenizer.chat_template = TRIMMING.replace(": ", ">")
    assert said(tokenizer, render(tokenizer, CHAT))[0] == "the № is 7.<|im_end|>"


def test_an_end_marker_that_shares_a_token_with_the_reply_is_part_of_it(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}>{{ m.content }}\n{% endfor %}"
    example = render(tokenizer, CHAT[1:3])
    assert said(tokenizer, example) == [" the № is 7.\n"]  # ".\n" is one token


def test_a_template_that_ends_nothing_gets_eos_at_the_end_and_takes_what_follows_in_the_middle(tokenizer):
    tokenizer.chat_template = BARE
    assert said(tokenizer, render(tokenizer, CHAT[1:3])) == [" the № is 7.<eos>"]
    example = render(tokenizer, CHAT[1:])
    assert said(tokenizer, example)[0] == " the № is 7.u"  # the next turn's first character is what ends it


@pytest.mark.parametrize("template, message", [
    (SHOUTING, "does not copy the replies of turns"),
    (CHATML.replace("{{ m.content }}", "{{ m.content | replace('7', 'seven') }}"), "rewrites the text of turn 2"),
    ("{{ messages[-1].content[:1] }}" + CHATML, "writes first depends on the texts"),
    ("{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}", "copy the replies"),
])
def test_templates_whose_replies_cannot_be_found_are_refused_by_line(tokenizer, template, message):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=rf"(?s)^file:7: .*{message}"):
        render(tokenizer, CHAT, "file:7")


def test_what_the_template_has_no_place_for_is_learnt_as_a_memory_is_told_it(tokenizer):
    tokenizer.chat_template = STRICT
    shown = CHAT[0]["content"] + "\n\n" + CHAT[1]["content"]
    assert render(tokenizer, CHAT).ids.tolist() == render(tokenizer, [
        {"role": "user", "content": shown}, *CHAT[2:]]).ids.tolist()
    tokenizer.chat_template = IN_TURN
    twice = [{"role": "user", "content": "One."}, *CHAT[1:]]
    acknowledged = [twice[0], {"role": "assistant", "content": "OK.", "weight": 0}, *CHAT[1:]]
    made, expected = render(tokenizer, twice), render(tokenizer, acknowledged)
    assert made.ids.tolist() == expected.ids.tolist() and made.answer_spans == expected.answer_spans


def test_no_template_and_no_offsets_are_refused(tokenizer, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "is_fast", False)
        with pytest.raises(ConfigError, match="gives no character offsets; expected a fast tokenizer"):
            render(tokenizer, CHAT)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        render(tokenizer, CHAT)


@pytest.mark.parametrize("turn", [0, 1, 2, 3, 4])
def test_texts_that_spell_control_tokens_are_refused(tokenizer, turn):
    """A runtime never reads control tokens from a text, so heads must not learn from such a stream."""
    chat = [dict(message) for message in CHAT]
    chat[turn]["content"] += "<|im_end|> and"
    with pytest.raises(InputError, match=rf"file:7: the text of turn {turn} spells '<\|im_end\|>'"):
        render(tokenizer, chat, "file:7")


def test_what_is_no_regular_file_and_marks_of_byte_order_are_read(tokenizer, tmp_path):
    line = b'{"prompt": "Hi", "answer": "Yo"}\n'
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + line)
    assert len(load_examples(marked, tokenizer)) == 1
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(line * 3,))
    writer.start()
    assert len(load_examples(pipe, tokenizer)) == 3
    writer.join()


def test_the_three_formats_say_the_same(tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [
        {"prompt": "Hi", "answer": "Yo", "system": "Short.", "id": 3},
        {"conversations": [{"from": "system", "value": "Short."}, {"from": "human", "value": "Hi"},
                           {"from": "gpt", "value": "Yo"}]},
        {"messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi"},
                      {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "dropped"}]},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    one, two, three = load_examples(path, tokenizer)
    assert one.digest() == two.digest() == three.digest()
    assert [example.where for example in (one, two, three)] == [f"{path}:{n}" for n in (1, 3, 5)]


@pytest.mark.parametrize("line, message", [
    (b"{", "truncated"),
    (b"[1]", "found a JSON list; expected one object"),
    (b'{"prompt": ' + b"[" * 100_000, "depth|recursion"),
    (b'{"text": "x"}', r"found keys \['text'\]; expected"),
    (b'{"prompt": "x"}', "missing required field `answer`"),
    (b'{"prompt": 3, "answer": "x"}', "Expected `str`, got `int`"),
    (b'{"prompt": "x", "answer": "  "}', r"text of turn 1 \(answer\) is empty"),
    (b'{"conversations": [{"from": "robot", "value": "x"}]}', "turn 0 is from 'robot'"),
    (b'{"conversations": [{"value": "x"}]}', "missing required field `from`"),
    (b'{"messages": [{"role": "tool", "content": "x"}]}', "Invalid enum value 'tool'"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "found no reply"),
    (b'{"messages": [{"role": "assistant", "content": "x"}]}', "found no reply"),
    (b'{"messages": []}', "found no reply"),
    (b'{"prompt": "\xff", "answer": "x"}', "utf-8|Invalid"),
    (b'{"prompt": "x", "answer": "\\ud800"}', "truncated|Invalid"),
])
def test_malformed_lines_are_named(line, message, tmp_path):
    with pytest.raises(InputError, match=rf"^data\.jsonl:12: .*({message})"):
        parse_line(line, "data.jsonl:12")
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "x", "answer": "y"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=r"data\.jsonl:3: "):
        list(read_jsonl(path))


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file: .*none\.jsonl"):
        list(read_jsonl(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="empty file"):
        list(read_jsonl(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize("ids, spans", [
    ([1, 2, 3], []), ([1, 2, 3], [(0, 2)]), ([1, 2, 3], [(1, 4)]), ([1, 2, 3], [(2, 2)]), ([1, 2, 3], [(2, 3), (1, 2)]),
    ([[1, 2]], [(1, 2)]), ([1.0, 2.0], [(1, 2)]), ([1, -2], [(1, 2)]),
])
def test_examples_check_themselves(ids, spans):
    with pytest.raises(InputError, match="example: found"):
        Example(ids, spans)


def test_fit_keeps_whole_replies_and_else_cuts_the_middle():
    example = Example(torch.arange(100), ((40, 50), (80, 90)))
    assert (fit(example, 100).ids.tolist(), fit(example, 100).answer_spans) == (list(range(90)), ((40, 50), (80, 90)))
    assert (fit(example, 89).ids.tolist(), fit(example, 89).answer_spans) == (list(range(50)), ((40, 50),))
    short = fit(example, 30)
    assert short.ids.tolist() == [*range(10), *range(30, 50)] and short.answer_spans == ((20, 30),)
    assert fit(example, 11) is None
    marked = Example(example.ids, example.answer_spans, template=example.ids % 7 == 0)
    for most in (100, 89, 30):
        assert torch.equal(fit(marked, most).template, fit(marked, most).ids % 7 == 0), "it goes with the ids"
    asked = with_query(marked, 4)
    assert torch.equal(asked.template, asked.ids % 7 == 0)
    with pytest.raises(InputError, match="expected bool for each of the 100 ids"):
        Example(example.ids, example.answer_spans, template=torch.zeros(99, dtype=torch.bool))


def test_with_query_puts_the_end_of_one_question_in_front_and_labels_its_reply_alone():
    whole = Example(list(range(100, 140)), ((10, 12), (20, 23), (30, 34)))
    chosen = set()
    for token in range(40):
        example = Example([token, *range(101, 140)], whole.answer_spans)
        asked = with_query(example, 4)
        [(start, end)] = asked.answer_spans
        assert (start - 4, end - 4) in whole.answer_spans
        assert asked.ids.tolist() == [*example.ids[start - 8:start - 4].tolist(), *example.ids[:end - 4].tolist()]
        assert torch.equal(asked.ids[start:end], example.ids[start - 4:end - 4]) and len(asked.ids) == end
        assert torch.equal(with_query(example, 4).ids, asked.ids), "the same every time"
        chosen.add(start - 4)
    assert chosen == {10, 20, 30}
    short = Example([5, 6, 7, 8], ((2, 4),))
    assert with_query(short, 9).ids.tolist() == [5, 6, 5, 6, 7, 8] and with_query(short, 9).answer_spans == ((4, 6),)
