"""Conversations to examples: JSONL lines are checked and rendered by the model's own chat template, and the replies are
located exactly.

A line is one JSON object, in one of three forms; other keys are ignored:

    {"prompt": "...", "answer": "..."}                                     and optionally "system"
    {"conversations": [{"from": "human" | "gpt" | "system", "value": "..."}, ...]}          (ShareGPT)
    {"messages": [{"role": "user" | "assistant" | "system", "content": "..."}, ...]}

A message may have "weight": 0 (as in OpenAI's format): a reply that is part of the conversation and makes no labels.

Knows tokenizers and templates; knows neither the model nor the labels.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jinja2
import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from locret_stream.conversation.fitting import Fitting
from locret_stream.conversation.messages import Message as Said
from locret_stream.conversation.messages import unread_part
from locret_stream.errors import ConfigError, InputError, InvalidTokens
from locret_stream.text import Template, Traits
from locret_stream.text.frames import ACKNOWLEDGEMENT

FORMATS = ('{"prompt", "answer"}, {"conversations": [{"from": "human" | "gpt" | "system", "value"}]} or '
           '{"messages": [{"role": "user" | "assistant" | "system", "content"}]}')
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
          "system": "system"}
Message = dict[str, Any]


def background_ids(text: Tensor | Sequence[int], vocab: int) -> Tensor:
    """The token ids [N] of a text about which nothing is asked, int64 on the CPU. Raises InvalidTokens: an id outside
    [0, vocab)."""
    ids = torch.as_tensor(text, dtype=torch.int64, device="cpu").flatten()
    for extreme in (int(ids.min()), int(ids.max())) if len(ids) else ():
        if not 0 <= extreme < vocab:
            raise InvalidTokens(f"the background has token id {extreme}; expected ids from 0 to below the model's "
                                f"vocabulary of {vocab}")
    return ids


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """One conversation as ids.

    Args:
        ids: [T] int64 on the CPU; a list becomes one.
        answer_spans: (start, end) of every reply in order, its end-of-turn token included: the rows start-1 .. end-2
            predict it. 1 <= start < end <= T, not overlapping.
        where: file:line, for messages.
        template: [T] bool, the tokens that the chat template wrote, and not a message; None: not known.

    Raises:
        InputError: ids, spans or template are of another form.
    """

    ids: Tensor
    answer_spans: tuple[tuple[int, int], ...]
    where: str = ""
    template: Tensor | None = None

    def __post_init__(self) -> None:
        ids = torch.as_tensor(self.ids)
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool or (ids < 0).any():
            raise InputError(f"{self.where or 'example'}: found ids of shape {tuple(ids.shape)} and {ids.dtype}; "
                             "expected a flat list of token ids, 0 or more")
        object.__setattr__(self, "ids", ids.to("cpu", torch.int64))
        spans = tuple((int(start), int(end)) for start, end in self.answer_spans)
        object.__setattr__(self, "answer_spans", spans)
        before = 1
        for start, end in spans:
            if not before <= start < end <= len(ids):
                raise InputError(f"{self.where or 'example'}: found answer span ({start}, {end}) of {len(ids)} tokens; "
                                 f"expected {before} <= start < end <= {len(ids)}, in order")
            before = end
        if not spans:
            raise InputError(f"{self.where or 'example'}: found no answer span; expected at least one")
        if self.template is not None and (self.template.shape != ids.shape or self.template.dtype != torch.bool):
            raise InputError(f"{self.where or 'example'}: found a template of {tuple(self.template.shape)} and "
                             f"{self.template.dtype}; expected bool for each of the {len(ids)} ids")

    @property
    def answer_tokens(self) -> int:
        """Tokens of all replies together."""
        return sum(end - start for start, end in self.answer_spans)

    def expect_vocabulary(self, vocab: int) -> None:
        """Raises InvalidTokens: an id is `vocab` or more."""
        largest = int(self.ids.max())
        if largest >= vocab:
            raise InvalidTokens(f"{self.where or 'example'}: found token id {largest}; expected ids below the "
                                f"model's vocabulary of {vocab}")

    def digest(self) -> bytes:
        """16 bytes that name the content, the same on every machine; `where` is no part of it."""
        content = self.ids.numpy().astype("<i8").tobytes() + repr(self.answer_spans).encode()
        return hashlib.blake2b(content, digest_size=16).digest()


class _Pair(msgspec.Struct):
    prompt: str
    answer: str
    system: str | None = None


class _Said(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from")


class _ShareGPT(msgspec.Struct):
    conversations: list[_Said]


class _Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str
    weight: Literal[0, 1] = 1


class _Messages(msgspec.Struct):
    messages: list[_Turn]


def _expect_text(messages: Any, where: str) -> None:
    """Raises InputError: a message has parts that are no text."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for at, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in (None, "text"):
                raise InputError(unread_part(f"{where}: message {number}", at, kind))


def parse_line(line: bytes, where: str) -> list[Message]:
    """One JSONL line to chat messages, cut after the last reply.

    Raises:
        InputError: naming `where`, what was found and what was expected.
    """
    weightless: set[int] = set()
    try:
        decoded = msgspec.json.decode(line)
        if not isinstance(decoded, dict):
            raise InputError(f"{where}: found a JSON {type(decoded).__name__}; expected one object per line: {FORMATS}")
        if "conversations" in decoded:
            said = msgspec.convert(decoded, _ShareGPT).conversations
            turns = [(_ROLES.get(turn.speaker), turn.value, turn.speaker) for turn in said]
        elif "messages" in decoded:
            _expect_text(decoded["messages"], where)
            converted = msgspec.convert(decoded, _Messages).messages
            turns = [(turn.role, turn.content, turn.role) for turn in converted]
            weightless = {number for number, turn in enumerate(converted) if turn.weight == 0}
        elif "prompt" in decoded or "answer" in decoded:
            pair = msgspec.convert(decoded, _Pair)
            turns = [("user", pair.prompt, "prompt"), ("assistant", pair.answer, "answer")]
            if pair.system is not None:
                turns.insert(0, ("system", pair.system, "system"))
        else:
            raise InputError(f"{where}: found keys {sorted(decoded)}; expected {FORMATS}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where}: {error}; expected {FORMATS}") from error
    messages: list[Message] = []
    for number, (role, content, name) in enumerate(turns):
        if role is None:
            raise InputError(f"{where}: turn {number} is from {name!r}; expected one of {', '.join(_ROLES)}")
        if not content.strip():
            raise InputError(f"{where}: the text of turn {number} ({name}) is empty; expected some")
        messages.append({"role": role, "content": content} | ({"weight": 0} if number in weightless else {}))
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if len(messages) < 2:
        raise InputError(f"{where}: found no reply that follows anything; expected at least one assistant turn "
                         "after another turn")
    return messages


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[str, list[Message]]]:
    """Yield (file:line, messages) of every line that is not blank.

    Raises:
        ConfigError: no such file.
        InputError: a malformed line, or no line at all.
    """
    path, empty = Path(path), True
    if not path.exists() or path.is_dir():
        raise ConfigError(f"no such file: {path}; expected a JSONL of {FORMATS}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                empty = False
                yield f"{path}:{number}", parse_line(line, f"{path}:{number}")
    if empty:
        raise InputError(f"{path}:1: found an empty file; expected a JSONL of {FORMATS}")


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str = "conversation") -> Example:
    """Messages to an Example whose ids are exactly those of `apply_chat_template`, with the exact spans of the replies.

    The template is rendered a second time with every text replaced by a unique mark. The template's own text is what
    stands between the marks, and with the texts put back it must give the first rendering to the letter. This proves
    the position of each reply; a template that rewrites texts is refused. A reply's span begins with the token of its
    first character and ends with the token of the first character behind it, which ends the turn; if nothing follows
    the last reply, the tokenizer's EOS is appended.

    Raises:
        ConfigError: no chat template, or a tokenizer without character offsets.
        InputError: the template refuses the conversation, a reply cannot be located in its rendering, or a text spells
            a control token, which a runtime never reads from a text.
    """
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template; expected one (set tokenizer.chat_template), or Examples "
                          "of ids made by the caller")
    if not tokenizer.is_fast:
        raise ConfigError(f"{type(tokenizer).__name__} gives no character offsets; expected a fast tokenizer")
    messages = _fitted(tokenizer, messages)
    contents = [message["content"] for message in messages]
    nonce = next(f"xq{n}zk" for n in range(10_000) if not any(f"xq{n}zk" in content for content in contents))
    marked = [{**message, "content": f"{nonce}{index}w"} for index, message in enumerate(messages)]
    try:
        text, with_marks = (str(tokenizer.apply_chat_template(list(chat), tokenize=False))
                            for chat in (messages, marked))
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise InputError(f"{where}: the chat template refuses this conversation: {error}") from error
    texts = _locate(text, re.split(f"{nonce}(\\d+)w", with_marks), messages, where)
    replies = {index: span for index, *span in texts if messages[index]["role"] == "assistant"}
    spans = [span for index, span in replies.items() if messages[index].get("weight") != 0]
    if replies[max(replies)][1] == len(text):
        if not tokenizer.eos_token:
            raise InputError(f"{where}: the chat template puts nothing behind the last reply and the tokenizer has no "
                             "EOS; expected a token that ends a reply")
        text += tokenizer.eos_token
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special -= {tokenizer.unk_token_id}
    for number, (begun, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if number not in special:
            continue
        for index in (index for index, start, end in texts if start <= begun < end):
            raise InputError(f"{where}: the text of turn {index} spells {tokenizer.convert_ids_to_tokens(number)!r}, a "
                             "control token of this tokenizer, which a runtime never reads from a text; expected "
                             "texts without one")
    ends = torch.tensor([end for _, end in encoded["offset_mapping"]])
    tokens = []
    for start, end in spans:  # the first token that ends behind `start`, and the first that ends behind `end`
        tokens.append((int((ends > start).int().argmax()), int((ends > end).int().argmax()) + 1))
    begins = torch.tensor([begin for begin, _ in encoded["offset_mapping"]])
    template = torch.ones(len(begins), dtype=torch.bool)
    for _, start, end in texts:
        template &= (ends <= start) | (begins >= end)
    return Example(torch.tensor(encoded["input_ids"]), tuple(tokens), where, template)


def _fitted(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages as a memory is told them: what the template has no place for is shown in another way. What it adds
    for that is no reply to learn."""
    chat = [Said(message["role"], message["content"]) for message in messages]
    fitted = _fitting(tokenizer, str(tokenizer.chat_template)).fit(chat)
    if not fitted.otherwise:
        return messages
    shown: list[Message] = []
    for line in fitted.lines:
        numbers = [number for _, number in line.texts if number is not None]
        one: Message = {"role": line.role, "content": "".join(text for text, _ in line.texts)}
        weight = messages[numbers[-1]].get("weight") if numbers else 0
        shown.append(one if weight is None else {**one, "weight": weight})
    return shown


@functools.lru_cache(maxsize=4)
def _fitting(tokenizer: PreTrainedTokenizerBase, template: str) -> Fitting:
    """One for all conversations of a tokenizer with that template, which is tried out once."""
    return Fitting(Traits(Template(tokenizer)), in_words=False, acknowledgement=ACKNOWLEDGEMENT)


def _locate(text: str, parts: list[str], messages: Sequence[Message], where: str) -> list[tuple[int, int, int]]:
    """(turn, start, end) in characters of every text that the template shows; `parts` of the marked rendering are
    literal, index, literal, index, …, literal."""
    shown = [int(index) for index in parts[1::2]]
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if [index for index in shown if index in replies] != replies:
        raise InputError(f"{where}: the chat template does not copy the replies of turns {replies} once each, in "
                         "order and as they are, so they cannot be located")
    if not text.startswith(parts[0]):
        raise InputError(f"{where}: what the chat template writes first depends on the texts, so replies cannot be "
                         "located")
    position, spans = len(parts[0]), []
    for index, literal in zip(shown, parts[2::2], strict=True):
        content = messages[index]["content"]
        for form in dict.fromkeys((content, content.strip(), content.rstrip(), content.lstrip())):
            if text.startswith(form + literal, position):
                break
        else:
            raise InputError(f"{where}: the chat template rewrites the text of turn {index} or what follows it, so "
                             "replies cannot be located; expected a template that keeps or trims texts")
        spans.append((index, position, position + len(form)))
        position += len(form) + len(literal)
    if position != len(text):
        raise InputError(f"{where}: the chat template writes more after the texts than with marks in their place, so "
                         "replies cannot be located")
    return spans


def with_query(example: Example, tokens: int) -> Example:
    """The example as Locret-Q trains on it (arXiv:2410.01805): one of its replies alone, chosen by the example's
    digest, and in front of everything the `tokens` ids right before that reply, which end the question."""
    choice = int.from_bytes(example.digest()[:8], "big") % len(example.answer_spans)
    start, end = example.answer_spans[choice]
    query = example.ids[max(0, start - tokens):start]
    template = example.template
    if template is not None:
        template = torch.cat([template[max(0, start - tokens):start], template[:end]])
    return replace(example, ids=torch.cat([query, example.ids[:end]]),
                   answer_spans=((start + len(query), end + len(query)),), template=template)


def fit(example: Example, max_tokens: int) -> Example | None:
    """The example in at most max_tokens, or None if its first reply alone leaves too little.

    What follows the last reply is dropped, then replies that end too late, with all that follows them. If not even the
    first one fits, the middle of the text before it is cut out.
    """
    spans = tuple(span for span in example.answer_spans if span[1] <= max_tokens)
    if spans:
        return replace(example, ids=example.ids[:spans[-1][1]], answer_spans=spans,
                       template=None if example.template is None else example.template[:spans[-1][1]])
    start, end = example.answer_spans[0]
    kept = max_tokens - (end - start)
    if kept < 2 or kept < max_tokens // 8:
        return None
    head = (kept + 1) // 2
    both = [None if row is None else torch.cat([row[:head], row[start - (kept - head):end]])
            for row in (example.ids, example.template)]
    assert both[0] is not None
    return replace(example, ids=both[0], answer_spans=((kept, len(both[0])),), template=both[1])


def load_examples(path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Every line of a JSONL, rendered. Raises as `read_jsonl` and `render` do."""
    return [render(tokenizer, messages, where) for where, messages in read_jsonl(path)]


def background_pieces(path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The ids of every conversation of a JSONL about which nothing is asked, as the chat template writes it, with its
    control tokens. Raises as `read_jsonl`; ConfigError: no chat template; InputError: it refuses a conversation."""
    if not tokenizer.chat_template:
        raise ConfigError(f"{path} has conversations, and the tokenizer no chat template; expected one, or plain text")
    for where, messages in read_jsonl(path):
        try:
            text = tokenizer.apply_chat_template(list(_fitted(tokenizer, messages)), tokenize=False)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise InputError(f"{where}: the chat template refuses this conversation: {error}") from error
        yield tokenizer(str(text), add_special_tokens=False, verbose=False)["input_ids"]
