"""Constrained replies: which tokens may come next, so that a reply fits a JSON schema or a grammar.

Knows a vocabulary as bytes, and llguidance, which follows a grammar byte by byte; no other file knows that. Knows no
model, no context and no event loop.

A control token is never part of a JSON text: of all tokens only those that are text may come, and an end marker only
where the reply may end. What llguidance would leave out of a schema is refused: nothing is promised that is not held.

Each reply gets a grammar of its own, made in milliseconds (benchmarks/constrained.py), and nothing of it is kept:
copies share an automaton that every reply enlarges, up to a limit, so that a reply could fail for what others said.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from locret_stream.config import Sampling
from locret_stream.errors import ConfigError, ModelError
from locret_stream.text import TextCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_STRICT: dict[str, Any] = {  # in a line, as `json.dumps` writes it: white space without end is JSON, too
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
    "lenient": False, "coerce_one_of": False,
}
# What llguidance may make of one grammar. Hostile ones come to these within 100 MiB and seconds, where its own limits
# let them take three times as much; enums of thousands of texts and patterns with bounds of hundreds stay below.
_LIMITS = {"initial_lexer_fuel": 250_000, "max_lexer_states": 100_000, "max_grammar_size": 50_000}
ID = "[A-Za-z0-9]{9}"  # of a call, where a model writes one
# Of JSON in a line, as UTF-8. 0xF1 and 0xF2 begin no character that Unicode has given out; many tokenizers lack them.
_TEXT_BYTES = frozenset([*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1), 0xF3, 0xF4])


class Constraints:
    """What the replies of one model can be held to. Safe to share between threads; the vocabulary is read once.

    Args:
        codec: of its tokenizer.
        ends: ids that end a reply.
    """

    def __init__(self, codec: TextCodec, ends: Iterable[int]):
        self._codec, self._ends = codec, sorted(end for end in ends if 0 <= end < codec.vocab)
        self._lock = threading.Lock()
        self._read: _Vocabulary | None = None

    def begin(self, sampling: Sampling, begun: Iterable[int] = ()) -> Constraint:
        """What holds one reply to the schema or the grammar of `sampling`, at its beginning, or behind the ids `begun`,
        which the prompt has written.

        Takes milliseconds, and the first time, where the vocabulary is read, about a second for 100,000 tokens.

        Raises:
            ConfigError: llguidance is not installed; a schema or grammar that says something which cannot be held, that
                nothing fits, or that does not begin so; a tokenizer that cannot write every text, or a model without an
                end marker.
        """
        library, vocabulary = _library(), self._vocabulary()
        if sampling.schema is not None:
            what = "schema"
            grammar = library.LLMatcher.grammar_from_json_schema(sampling.schema, overrides=_STRICT)
        else:
            assert sampling.grammar is not None, "settings without a constraint have none"
            what, grammar = "grammar", library.LLMatcher.grammar_from_lark(sampling.grammar)
        matcher = library.LLMatcher(vocabulary.tokenizer, grammar, log_level=0,
                                    limits=library.LLParserLimits(**_LIMITS))
        left_out = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if left_out:
            expected = "a simpler one" if _TOO_LARGE.search(left_out[0]) else "one without that"
            raise ConfigError(f"{what} cannot be held: {_first_line(left_out[0])}; expected {expected}")
        if not all(matcher.consume_token(vocabulary.read(token)) for token in begun):
            raise ConfigError(f"{what} does not let through what was begun; expected another beginning")
        return Constraint(matcher, what, vocabulary)

    def why_not(self) -> str:
        """Why no reply of this model can be held, whatever to; "" where replies can be.

        Raises:
            ConfigError: llguidance is not installed.
        """
        _library()
        try:
            self._vocabulary()
        except ConfigError as error:
            return str(error)
        return ""

    def _vocabulary(self) -> _Vocabulary:
        """Read on first use."""
        with self._lock:
            if self._read is None:
                self._read = self._read_vocabulary()
            return self._read

    def _read_vocabulary(self) -> _Vocabulary:
        codec = self._codec
        if not self._ends:
            raise ConfigError("the model has no end marker, so that a reply could not end where its schema lets it; "
                              "expected a tokenizer with an eos token, or generation_config.eos_token_id")
        apart = codec.control_ids.union(self._ends) | {codec.unk_id}
        pieces = [b"" if token in apart else codec.piece(token) for token in range(codec.vocab)]
        lacking = sorted(_TEXT_BYTES.difference(*(piece for piece in pieces if len(piece) == 1)))
        if lacking:
            raise ConfigError(f"the tokenizer has no token for the byte {bytes(lacking[:1])!r} alone, so that some "
                              "texts cannot be written; expected byte-level BPE, or one with byte fallback")
        return _Vocabulary(codec, pieces, self._ends)


class Constraint:
    """One reply's place in its grammar. One thread uses it at a time.

    Attributes:
        complete: whether the tokens so far fit, and nothing but an end marker may follow.
    """

    def __init__(self, matcher: LLMatcher, what: str, vocabulary: _Vocabulary):
        self._matcher, self._what, self._vocabulary = matcher, what, vocabulary
        self.complete = False
        self._next: Tensor | None = self._follow("cannot be held", "one that some text fits")

    def allowed(self, count: int) -> Tensor:
        """Which ids may come next, [count] bool, on the CPU; `count` is at least the size of the vocabulary.

        Raises:
            ConfigError: the grammar became too large to be followed any further.
        """
        return torch.nn.functional.pad(self._mask, (0, count - self._vocabulary.size))

    @property
    def _mask(self) -> Tensor:
        if self._next is None:
            self._next = self._follow("cannot be followed any further", "a simpler one")
        return self._next

    def take(self, token: int) -> None:
        """Go on behind a token.

        Raises:
            ModelError: it is none of those that may come next.
            ConfigError: the grammar became too large to be followed any further.
        """
        vocabulary = self._vocabulary
        if token >= vocabulary.size or not self._mask[token]:
            raise ModelError(f"the model gives no token a probability that may come next in the {self._what}; expected "
                             "logits that are finite")
        if not self._matcher.consume_token(vocabulary.read(token)):  # a limit that no mask told of
            raise ConfigError(f"{self._what} cannot be followed any further: {_first_line(self._matcher.get_error())}; "
                              "expected a simpler one")
        self._next = None
        self.complete = self._matcher.is_stopped() and self._matcher.is_accepting()

    def _follow(self, failed: str, expected: str) -> Tensor:
        """The mask of the next token, [vocab] bool. Raises ConfigError, in these words: there is none."""
        matcher, vocabulary = self._matcher, self._vocabulary
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        mask = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=vocabulary.size).astype(np.bool_))
        if not matcher.is_accepting():  # where nothing can follow llguidance lets an end marker through, too
            mask[vocabulary.ends] = False
        if matcher.is_error() or not mask.any():
            why = _first_line(matcher.get_error()) if matcher.is_error() else ""
            why = "nothing can follow" if not why or why in _DEAD_ENDS else why
            expected = "a simpler one" if why.startswith("it is too large") else expected
            raise ConfigError(f"{self._what} {failed}: {why}; expected {expected}")
        return mask if vocabulary.same is None else mask[vocabulary.same]


_DEAD_ENDS = "NoExtension", "NoExtensionBias"
_NO_TEXT = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])  # llguidance marks ids that are no text by 0xFF


class _Vocabulary:
    """What llguidance is told of a tokenizer: the bytes of each id, which ids are no text (a grammar may name these),
    and how a text that has to come as it is is written.

    Of ids with the same bytes it is told one, as it would take the others for nothing.

    Args:
        pieces: bytes by id; b"" for ids that are no text.

    Attributes:
        same: [vocab], the id that stands for each; None: each for itself.
    """

    def __init__(self, codec: TextCodec, pieces: list[bytes], ends: list[int]):
        self._codec, self.size, self.ends = codec, len(pieces), ends
        self._first: dict[bytes, int] = {}
        same = [self._first.setdefault(piece, token) if piece else token for token, piece in enumerate(pieces)]
        self.same = None if same == list(range(self.size)) else torch.tensor(same)
        names = {token: codec.decode([token], skip_special=False) for token in codec.control_ids if token < self.size}
        self.special_token_ids = [token for token, piece in enumerate(pieces)
                                  if not piece or same[token] != token or not _NO_TEXT.isdisjoint(piece)]
        self.tokens = list(pieces)
        for token in self.special_token_ids:
            self.tokens[token] = (names.get(token) or f"<unused {token}>").encode()
        self._longest = max(map(len, self._first))
        self.eos_token_id, self.bos_token_id = ends[0], None
        library = _library()
        self.tokenizer: LLTokenizer = library.LLTokenizer(library.TokenizerWrapper(self), n_vocab=self.size,
                                                          eos_token=ends)

    def read(self, token: int) -> int:
        """The id that llguidance knows a token by."""
        return token if self.same is None else int(self.same[token])

    def __call__(self, text: str) -> list[int]:
        """The ids of a text that has to come: as the tokenizer writes it, or, where that changes it, token by token."""
        if not isinstance(text, str):
            raise TypeError("expected text")  # llguidance tries bytes first
        ids, whole = self._codec.encode(text), text.encode()
        if b"".join(self._codec.piece(token) for token in ids) == whole:
            return [self.read(token) for token in ids]
        ids, at = [], 0
        while at < len(whole):
            piece = next(piece for size in range(self._longest, 0, -1) if (piece := whole[at:at + size]) in self._first)
            ids.append(self._first[piece])
            at += len(piece)
        return ids


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call: `before`, the tool's name, `between`, the arguments, `after`.

    Args:
        argument: what stands ahead of the name of each argument, ahead of its value and behind that, which is a text as
            it is, or JSON where the tool takes no text; (): all arguments are one JSON object.
        names: how a name is written: as it is, or as in JSON, with every letter or ASCII alone.
        call_id: what stands in `between` and `after` for an id of nine letters and digits; "": a call has none.
        data: no control token counts in these texts.
    """

    before: str = '<tool_call>\n{"name": "'
    between: str = '", "arguments": '
    after: str = "}\n</tool_call>"
    names: Literal["raw", "json", "ascii"] = "json"
    call_id: str = ""
    data: bool = False
    argument: tuple[str, str, str] | tuple[()] = ()

    def written(self, name: str) -> str:
        """The name of a tool as a call has it."""
        return name if self.names == "raw" else json.dumps(name, ensure_ascii=self.names == "ascii")[1:-1]


def call_grammar(codec: TextCodec, tools: Mapping[str, Mapping[str, Any]], form: CallForm | None = None, *,
                 begun: str = "", instead: Mapping[str, Any] | None = None) -> str:
    """The grammar of replies that call one of these tools.

    Args:
        codec: of the model's tokenizer. Where it has tokens of their own for the marks, these are written.
        tools: JSON schemas of the arguments, by the names of the tools.
        form: how a call is written; None: `{"name": ..., "arguments": ...}` between two marks, in lines.
        begun: what the prompt has written of the call: `form.before`, or with one tool its beginning up to any place
            ahead of the arguments.
        instead: a JSON schema that the reply may fit in place of a call.

    Raises:
        ConfigError: no tools.
    """
    form = form or CallForm()
    if not tools:
        raise ConfigError("found no tools to call; expected at least one")
    rules = [f"body: {' | '.join(f'body_{number}' for number in range(len(tools)))}"]
    for number, (name, schema) in enumerate(tools.items()):
        at, head = len(begun), list[str]()
        for part, data in ((form.before, form.data), (form.written(name), True), (form.between, form.data)):
            head += [_in_form(codec, part[at:], form, data)] if part[at:] else []
            at = max(0, at - len(part))
        rules += [f"body_{number}: {' '.join(head)} arguments_{number} close",
                  *(_each_argument(codec, schema, form, number) if form.argument else
                    [f"arguments_{number}: {_json(schema)}"])]
    rules.append(f"close: {_in_form(codec, form.after, form, form.data)}")
    rules += ["start: body"] if instead is None else ["start: body | answer", f"answer: {_json(instead)}"]
    return "\n".join(rules)


_OF_TEXTS = {"enum", "const", "minLength", "maxLength"}  # what a text between marks can be held to
_NOT_OF_TEXTS = {"pattern", "format", "not", "allOf"}


def why_not_each(schema: Mapping[str, Any]) -> str:
    """Why arguments that are written one by one cannot be held to that schema; "" where they can be."""
    if found := sorted({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "patternProperties"} & schema.keys()):
        return f"its schema has {found[0]!r} beside or in place of a list of arguments"
    for name, inner in (schema.get("properties") or {}).items():
        inner = _resolved(inner, schema)
        either = [_resolved(each, schema) for union in ("anyOf", "oneOf") for each in inner.get(union) or ()]
        beyond = sorted((inner.keys() & _NOT_OF_TEXTS) | {
            key for each in either for key in each.keys() & (_NOT_OF_TEXTS | _OF_TEXTS)})
        if not all(isinstance(value, str) for value in inner.get("enum") or ()):
            beyond.append("enum")
        if beyond and _is_text(inner, schema):
            return f"its argument {name!r} is a text with {beyond[0]!r}"
    return ""


def _each_argument(codec: TextCodec, schema: Mapping[str, Any], form: CallForm, number: int) -> list[str]:
    """Rules of arguments that are written one by one, in the order of the schema."""
    before, between, after = form.argument or ("", "", "")
    required, rules, order = schema.get("required") or [], list[str](), list[str]()
    for at, (name, inner) in enumerate((schema.get("properties") or {}).items()):
        rule, inner = f"argument_{number}_{at}", _resolved(inner, schema)
        ahead, behind, end = (_in_form(codec, part, form, form.data) for part in (before, between, after))
        head = f"{ahead} {_quoted(name)} {behind}"
        choices = inner.get("enum", [inner["const"]] if "const" in inner else None)
        if choices is not None and all(isinstance(choice, str) and after not in choice for choice in choices):
            rules.append(f"{rule}: {head} ({' | '.join(map(_quoted, choices))}) {end}")
        elif not _is_text(inner, schema):
            whole = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            rules.append(f"{rule}: {head} {rule}_value {end}\n{rule}_value: {_json({**inner, **whole})}")
        else:
            least, most = inner.get("minLength", 0), inner.get("maxLength", "")
            text = "(?s:.*)" if (least, most) == (0, "") else f"(?s:.{{{least},{most}}})"
            if end == _quoted(after):
                rules.append(f"{rule}: {head} {rule}_value\n{rule}_value[suffix={end}]: /{text}/")
            else:  # the mark is a token of its own, which the text may spell
                spelled = re.escape(after).replace("/", "\\/")
                rules.append(f"{rule}: {head} {rule}_VALUE {end}\n{rule}_VALUE: /{text}/ & ~/(?s:.*){spelled}(?s:.*)/"
                             .replace(f"{rule}_VALUE", f"{rule}_value".upper()))
        order.append(rule if name in required else f"({rule})?")
    return [f"arguments_{number}: {' '.join(order) or _quoted('')}", *rules]


def _is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    types = types_of(schema, root)
    return not types or "string" in types


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> set[str]:
    """The types that a value of that schema may have, `root` being the schema around it; empty: it says nothing."""
    schema = _resolved(schema, root) if depth else {}
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else {each for each in declared or () if isinstance(each, str)}
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types |= types_of(choice, root, depth - 1) or {"string"}  # a choice that says nothing may be a text
    for value in (*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())) if not types else ():
        types.add(type_of(value))
    return types | ({"null"} if types and schema.get("nullable") else set())


def type_of(value: Any) -> str:
    """The type that JSON schemas know a value of JSON by."""
    return {bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"}.get(
        type(value), "string")


def _resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with what it refers to in `root`. References in a circle say nothing."""
    for _ in range(8):
        if not isinstance(schema, Mapping):
            return {}
        name = schema.get("$ref")
        if not isinstance(name, str):
            return dict(schema)
        inner: Any = root
        for key in name.removeprefix("#/").split("/"):
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        schema = inner
    return {}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _STRICT})}"


def _in_form(codec: TextCodec, text: str, form: CallForm, data: bool) -> str:
    """A part of a call in a grammar; of its own text, the control tokens that the tokenizer recognises, and any id."""
    if data:
        return _quoted(text)
    parts = text.split(form.call_id) if form.call_id else [text]
    return f" /{ID}/ ".join(_written(codec, part) or _quoted("") for part in parts)


def _written(codec: TextCodec, text: str) -> str:
    """A text in a grammar, with the control tokens that the tokenizer recognises in it. Between these it is as it is:
    some tokenizers write a space behind a token, or leave one out."""
    out, rest = list[str](), text
    for token in codec.literal(text):
        if token in codec.control_ids:
            plain, _, rest = rest.partition(codec.decode([token], skip_special=False))
            out += ([_quoted(plain)] if plain else []) + [f"<[{token}]>"]
    return " ".join(out + ([_quoted(rest)] if rest else []))


def _quoted(text: str) -> str:
    return json.dumps(text)


# What llguidance says where it comes to a limit, and what of that names its own settings.
_TOO_LARGE = re.compile(r"too (?:many|big|large)\b|\d items; max|fuel exhausted|precomputation failed|symbols\.len")
_FOR_ITS_CALLER = re.compile(r"; either increase.*| \(limit.*|; (?:max is|try|consider).*|^panic: .*|"
                             "^(?:lexer|parser) error: ", re.IGNORECASE)


def _first_line(error: str) -> str:
    """What is wrong, in a line: of a pattern, what it says and why it cannot be held."""
    lines = error.strip().splitlines() or ["it is not valid"]
    if _TOO_LARGE.search(lines[0]):
        detail = _FOR_ITS_CALLER.sub("", lines[0])[:200].strip(".;: ")
        return "it is too large" + (f" ({detail})" if detail else "")
    why = next((line for line in reversed(lines) if line.startswith("error: ")), "")
    if lines[0].startswith("regex parse error") and len(lines) > 1 and why:
        lines = [f"the pattern {lines[1].strip()[:120]!r}: {why.removeprefix('error: ')}"]
    return lines[0][:300].rstrip(".;: ")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError("replies that fit a schema, and calls that are demanded, need llguidance, which is not "
                          "installed; expected: pip install 'locret-stream[constrained]'") from error
    return llguidance
