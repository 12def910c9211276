"""Replies that a grammar holds: a call that the caller demands, or JSON that fits a schema, beside tools or alone.

What may not come never comes, so that nothing has to be searched for in the text: the reader knows the form.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from locret_stream.config import Sampling
from locret_stream.constraints import ID, CallForm, Constraint, Constraints, call_grammar, why_not_each
from locret_stream.conversation.call_forms import (
    NO_JSON,
    arguments_of,
    begun_call,
    call_form,
    call_opening,
    closed_thought,
    first_argument,
)
from locret_stream.conversation.call_readers import Called, fitted, tools_by_name
from locret_stream.conversation.messages import Message
from locret_stream.conversation.parts import Call, Part
from locret_stream.conversation.probes import Piece
from locret_stream.conversation.reply_forms import known_marks
from locret_stream.conversation.request import Request
from locret_stream.conversation.threads import Threads
from locret_stream.errors import ConfigError

BESIDE_TOOLS = ("a JSON schema for the answer was given beside tools that the model may call, and this model's calls "
                "cannot be told from JSON, or cannot be held; expected tool_choice='none', or no tools")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Demand:
    """What a caller demands of a reply, settled before anything is read.

    Attributes:
        sampling: fields of `Sampling`.
        opening, begun: the beginning of a call that the prompt writes, as ids and as text.
        form: of the call that the reply is, or may be; None: nothing but a schema holds it, or nothing.
        constraint: what holds it to its schema or grammar, behind what the prompt writes; None: nothing, or a grammar
            that the caller gave, for which it is made with the reply.
        not_held: why a call that was demanded is begun and not held; "" otherwise.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    opening: list[int] = field(default_factory=list)
    begun: str = ""
    form: CallForm | None = None
    constraint: Constraint | None = None
    not_held: str = ""


async def demand_of(threads: Threads, request: Request) -> Demand:
    """What this request demands. Stop strings do not cut a call that is demanded, and nothing comes behind it.

    Raises:
        ConfigError: the template shows no calls; llguidance is not installed; a schema, of the answer or of a tool's
            arguments, that cannot be held; one of the answer beside tools whose calls cannot be told from it.
    """
    schema = request.sampling.get("schema")
    if not request.choice and schema is None:
        return Demand(request.sampling)
    return await asyncio.to_thread(_demand_of, threads, request, schema)


def _demand_of(threads: Threads, request: Request, schema: str | None) -> Demand:
    template, constraints = threads.template_of(request), threads.runtime.constraints
    held = None if schema is None else constraints.begin(Sampling(schema=schema))
    if not request.choice and not (request.tools and template.tells_of_tools):
        close = closed_thought(template, request.tools)  # all that comes is the answer
        return Demand(request.sampling, template.encode([Piece(close, False)], start=False) if close else [], close,
                      constraint=held)
    tools = [tool for tool in request.tools if request.choice in ("", "any", tool["function"]["name"])]
    sampling = {name: value for name, value in request.sampling.items() if name not in ("schema", "grammar")}
    source = str(template.frames.template or threads.runtime.tokenizer.chat_template or "")
    known = known_marks(source, (getattr(threads.runtime.tokenizer, "added_tokens_decoder", None) or {}).values())
    try:
        form = call_form(template, request.tools, known)
    except ConfigError as error:
        if request.choice:
            raise
        raise ConfigError(BESIDE_TOOLS) from error
    if not request.choice:
        assert schema is not None
        if form is None or not _apart_from_json(threads, form):
            raise ConfigError(BESIDE_TOOLS)
        grammar, held = _grammar(threads, tools, form, instead=json.loads(schema))
        return Demand(sampling | {"grammar": grammar}, form=form, constraint=held)
    name = "" if request.choice == "any" else request.choice
    if not_held := constraints.why_not() or (NO_JSON if form is None else _why_not_each(tools, form)):
        if schema is not None:
            raise ConfigError(BESIDE_TOOLS)
        opening = call_opening(template, request.tools, name, known)
        begun = "".join(piece.text for piece in opening)
        return Demand(sampling, template.encode(opening, start=False), begun, not_held=not_held)
    assert form is not None
    sampling = {name: value for name, value in sampling.items() if name not in ("stop", "ignore_eos")}
    if name and (first := first_argument(arguments_of(tools[0]), form)):
        head = [Piece(form.before, form.data), Piece(form.written(name), True)]
        with suppress(ConfigError):  # the arguments do not begin so, or cannot be held, which the other way tells
            return _begun(threads, sampling, tools, form, head, first)
    return _begun(threads, sampling, tools, form, begun_call(template, form, name), [])


def _begun(threads: Threads, sampling: dict[str, Any], tools: Sequence[dict[str, Any]], form: CallForm,
           opening: list[Piece], further: list[Piece]) -> Demand:
    """A call that the prompt begins: `opening`, behind which its grammar is, and `further`, which that lets through."""
    encode, text = threads.template.encode, "".join(piece.text for piece in opening)
    ids = encode(further, start=False)
    grammar, held = _grammar(threads, tools, form, text, ids)
    return Demand(sampling | {"grammar": grammar}, encode(opening, start=False) + ids,
                  text + "".join(piece.text for piece in further), form, held)


def _why_not_each(tools: Sequence[dict[str, Any]], form: CallForm) -> str:
    """Why one of these tools cannot be held to a form that writes its arguments one by one; "": all can be."""
    if form.argument:
        for tool in tools:
            if reason := why_not_each(arguments_of(tool)):
                return (f"the chat template writes each argument between marks, so that {tool['function']['name']!r} "
                        f"cannot be held: {reason}")
    return ""


def _apart_from_json(threads: Threads, form: CallForm) -> bool:
    """Whether no JSON begins as a call does."""
    codec = threads.template.codec
    first = codec.literal(form.before)[0]
    return form.before[0] not in '{["-0123456789tfn' or (not form.data and first in codec.control_ids)


def _grammar(threads: Threads, tools: Sequence[dict[str, Any]], form: CallForm, begun: str = "",
             behind: Sequence[int] = (), instead: Any = None) -> tuple[str, Constraint]:
    """The grammar of a call of one of these tools, and what holds a reply to it behind these ids. Raises ConfigError,
    which names the tool that cannot be held."""
    schemas: dict[str, dict[str, Any]] = {}
    for tool in tools:
        schemas.setdefault(tool["function"]["name"], arguments_of(tool))
    constraints = threads.runtime.constraints
    try:
        grammar = call_grammar(threads.template.codec, schemas, form, begun=begun, instead=instead)
        return grammar, constraints.begin(Sampling(grammar=grammar), behind)
    except (ConfigError, ValueError, TypeError, RecursionError):
        otherwise = "tool_choice='auto'" if instead is None else "no schema of the answer"
        for name, schema in schemas.items():
            _expect_held(constraints, name, schema, otherwise)
        raise


def _expect_held(constraints: Constraints, name: str, schema: dict[str, Any], otherwise: str) -> None:
    try:
        constraints.begin(Sampling(schema=schema))
    except ConfigError as error:
        raise ConfigError(f"the arguments of the tool {name!r}: {error}, or {otherwise}") from error


class HeldReply:
    """One reply that is held to a call, while it is generated; its parts add up to `message`.

    Args:
        tools: that may be called, as OpenAI's function schemas.
        begun: what the prompt wrote of the call; "": it may be JSON, too.

    Attributes:
        calls: the call, once the reply is finished; one that was cut off has no name, and its text as arguments.
    """

    def __init__(self, form: CallForm, tools: Sequence[dict[str, Any]], begun: str):
        self._form, self._tools, self._text = form, tools_by_name(tools), begun
        self._shown = ""  # of a reply that is JSON
        self.calls = list[Call]()

    def feed(self, text: str) -> Iterator[Part]:
        """The part that this text completes: one of JSON, or none."""
        self._text += text
        before, so_far = self._form.before, self._text
        if not before.startswith(so_far) and not so_far.startswith(before):
            new = so_far[len(self._shown):]
            self._shown = so_far
            if new:
                yield Part(new)

    def finish(self) -> Iterator[Part]:
        """The part of the call; the reply ends here."""
        if not self._shown and self._text:
            self.calls.append(self._read() or Call(None, self._text, _new_id(), 0))
            yield Part("", calls=tuple(self.calls))

    @property
    def message(self) -> Message:
        """The reply so far. A call that was cut off is text of it."""
        called = [call for call in self.calls if call.name is not None]
        unreadable = "".join(call.arguments for call in self.calls if call.name is None)
        return Message("assistant", self._shown + unreadable, calls=tuple(
            (call.name or "", json.loads(call.arguments), call.id) for call in called))

    def _read(self) -> Call | None:
        """The call, if it is whole."""
        form = self._form
        for name in sorted(self._tools, key=len, reverse=True):
            if form.argument:
                if (call := self._read_each(name)) is not None:
                    return call
                continue
            head, tail = form.before + form.written(name) + form.between, form.after
            whole = re.fullmatch(rf"{_pattern(form, head)}(?P<arguments>\{{.*\}}){_pattern(form, tail)}", self._text,
                                 re.DOTALL)
            if whole is None:
                continue
            written = whole["arguments"]
            try:
                arguments = json.loads(written)
            except (ValueError, RecursionError):  # deeper, or longer numbers, than Python reads
                continue
            as_text = json.dumps(arguments, ensure_ascii=False)
            if _LONE_SURROGATE.search(as_text):  # JSON can spell half of a surrogate pair
                written = _LONE_SURROGATE.sub("\ufffd", as_text)
            ids = [each for each in whole.groups() if each != whole["arguments"]]
            return Call(name, written, ids[0] if ids else _new_id(), 0)
        return None


    def _read_each(self, name: str) -> Call | None:
        """The call of that tool, with arguments that each stand between marks, if it is whole."""
        form, rest = self._form, self._text
        before, between, after = form.argument or ("", "", "")
        head, arguments = form.before + form.written(name) + form.between, dict[str, Any]()
        if not rest.startswith(head):
            return None
        rest = rest.removeprefix(head)
        while rest.startswith(before) and rest != form.after:
            key, found, value = rest.removeprefix(before).partition(between)
            value, closed, rest = value.partition(after)
            if not found or not closed:
                return None
            arguments[key] = value
        if rest != form.after:
            return None
        called = fitted(Called(name, arguments), self._tools)
        return Call(name, json.dumps(called.arguments, ensure_ascii=False), _new_id(), 0)



def _pattern(form: CallForm, text: str) -> str:
    """A part of a call as a regular expression; its ids are groups."""
    parts = text.split(form.call_id) if form.call_id else [text]
    return f"({ID})".join(map(re.escape, parts))


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
