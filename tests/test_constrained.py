"""Constrained replies without a model: which tokens may come next, and what is refused.

A reply is drawn by logits that know nothing, so that whatever a grammar lets through comes up. `tests.context` has the
same with models.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from locret_stream.config import Sampling
from locret_stream.constraints import CallForm, Constraint, Constraints, call_grammar
from locret_stream.errors import ConfigError, ModelError
from locret_stream.named_models import model_path
from locret_stream.runtime.loading import load_tokenizer
from locret_stream.sampling import processors, sample
from locret_stream.text import ChatFrame, Detokenizer, TextCodec
from tests import tiny_tokenizers
from tests.kit import examples
from tests.processes import run_python

KINDS = ("byte_level", "metaspace", "json", "bundled")
WHOLE, TEXT = {"type": "integer"}, {"type": "string"}


def closed(**properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@functools.cache
def codec_of(kind: str) -> TextCodec:
    if kind == "bundled":
        return TextCodec(load_tokenizer(model_path("bundled")))
    if kind == "json":  # its tokens straddle structure: `":`, ` {"`, `"},`
        rows = [{"k": {"name": f"né {n}", "tags": ["a", "b"]}, "l": [{"x": n}, "}"]} for n in range(300)]
        trained = tiny_tokenizers.train("byte_level", "\n".join(map(json.dumps, rows)), size=400)
    else:
        trained = tiny_tokenizers.train(kind, tiny_tokenizers.corpus()[:40_000], size=600)
    return TextCodec(tiny_tokenizers.wrap(trained, template=tiny_tokenizers.CHATML))


@functools.cache
def constraints_of(kind: str) -> Constraints:
    return Constraints(codec_of(kind), ends_of(kind))


def ends_of(kind: str) -> list[int]:
    return [codec_of(kind).eos_id, *codec_of(kind).encode_text("<|im_end|>", trusted=True)]


def begin(kind: str, schema: Any = None, **more: Any) -> Constraint:
    return constraints_of(kind).begin(Sampling(schema=schema, **more))


def ids_of(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


def drawn(kind: str, constraint: Constraint, seed: int, most: int = 600) -> tuple[str, bool]:
    """The text of a random reply, and whether it ended by itself. No token of it is a control token, and end markers
    are let through exactly where the text so far may be all of it."""
    codec, ends, noise = codec_of(kind), ends_of(kind), torch.Generator().manual_seed(seed)
    written, detokenizer = "", Detokenizer(codec, skip_special=False, start=False)
    for _ in range(most):
        mask = constraint.allowed(codec.vocab)
        assert not ids_of(mask) & (codec.control_ids - set(ends)), "a control token would become data"
        token = int(torch.randn(codec.vocab, generator=noise).masked_fill(~mask, -torch.inf).argmax())
        constraint.take(token)
        if token in ends:
            return written + detokenizer.flush(), True
        written += detokenizer.push(token)
        if constraint.complete:
            return written + detokenizer.flush(), True
    return written, False


# -- what is promised -------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b c", 'q"}', "né", "日", "<|im_end|>", "\\"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-50, 50), st.text(max_size=4),
                    st.sampled_from(["<tool_call>", '"},{"', "🙂🙃", "\n"]))


def whole_numbers() -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(st.integers(-300, 300), st.integers(0, 500)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)})


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.just({"type": "null"}), st.just({"type": "boolean"}), whole_numbers(),
        st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
            lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}),
        st.sampled_from(["^[A-Z]{2}-[0-9]{3}$", "^(ab|cd){1,3}$", "^[α-ω]{2,4}$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern}),
        st.sampled_from(["date", "uuid", "time"]).map(lambda name: {"type": "string", "format": name}),
        st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
        SCALARS.map(lambda value: {"const": value}))


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Of finite JSON."""
    def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        objects = st.tuples(st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 7)).map(
            lambda pair: closed(**pair[0]) | {"required": [name for n, name in enumerate(pair[0]) if pair[1] >> n & 1]})
        arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda all_of: {"type": "array", "items": all_of[0], "minItems": all_of[1], "maxItems": sum(all_of[1:])})
        either = st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several})
        return st.one_of(objects, arrays, either)
    return st.recursive(leaves(), nested, max_leaves=5)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(schema=schemas(), seed=st.integers(0, 1000))
@pytest.mark.thorough(but=2)
def test_whatever_the_schema_every_reply_fits_it(kind: str, schema: dict[str, Any], seed: int):
    text, ended = drawn(kind, begin(kind, schema), seed)
    assert ended, text
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(value)
    if schema.get("format") == "date":
        jsonschema.FormatChecker(["date"]).check(value, "date")
    assert "\n" not in text, "one line"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_recursive_schema_is_held_to_the_end_or_to_the_cut(kind: str, seed: int):
    schema = {"$ref": "#/$defs/node", "$defs": {"node": closed(
        value={"type": "number"}, children={"type": "array", "items": {"$ref": "#/$defs/node"}})}}
    text, ended = drawn(kind, begin(kind, schema), seed, most=150)
    if ended:
        jsonschema.validate(json.loads(text), schema)
    else:
        assert text.startswith('{"value": ')


TEXTS = ['{"k": "x"}', '{"k": "xy"}', '{"k": "x\\"}"}', '{"k": ["", "né 日本 🙂"]}', '"}"', "12", "1", "true", "[]",
         '{"k": {}, "l": "<|im_end|>"}', '"<tool_call>"', '"\\\\"']


def written_by(kind: str, constraint: Constraint, text: str) -> list[bytes]:
    """Go on by this text, the longest token first: the pieces. Fails where no token of it may come."""
    codec, out = codec_of(kind), list[bytes]()
    while rest := text.encode()[sum(map(len, out)):]:
        named = {token: codec.decode([token], skip_special=False).encode() for token in codec.control_ids}
        known = {token: named.get(token, codec.piece(token)) for token in ids_of(constraint.allowed(codec.vocab))}
        fits = {token: piece for token, piece in known.items() if piece and rest.startswith(piece)}
        assert fits, (rest, sorted(known.values())[:20])
        token = max(fits, key=lambda token: len(fits[token]))
        constraint.take(token)
        out.append(fits[token])
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_exactly_the_tokens_that_lead_to_a_text_that_fits_may_come(kind: str, text: str):
    """Of a few texts it is plain which tokens may come, also those that straddle structure, as `{"`, and those that cut
    a character; and that an end marker may come behind a whole text alone. Where only one thing can follow, it is the
    token by which the tokenizer writes it."""
    codec, whole = codec_of(kind), [each.encode() for each in TEXTS]
    pieces = {token: codec.piece(token) for token in range(codec.vocab) if token not in codec.control_ids}
    constraint, so_far = begin(kind, {"enum": [json.loads(each) for each in TEXTS]}), b""
    straddling = set[bytes]()
    while True:
        left = {each.removeprefix(so_far) for each in whole if each.startswith(so_far)}
        expected = {token for token, piece in pieces.items() if piece and any(rest.startswith(piece) for rest in left)}
        found = ids_of(constraint.allowed(codec.vocab))
        if b"" in left:
            expected |= set(ends_of(kind))
        if left == {b""}:
            assert constraint.complete and found == expected == set(ends_of(kind))
            break
        forced = len({rest[:1] for rest in left}) == 1
        assert found and found <= expected if forced else found == expected, so_far
        straddling |= {pieces[token] for token in found if token in pieces and b'"' in pieces[token][:-1]}
        if so_far == text.encode():
            assert not constraint.complete and text in ("1",)
            break
        rest = text.encode().removeprefix(so_far)
        token = max((token for token in found if token in pieces and rest.startswith(pieces[token])),
                    key=lambda token: len(pieces[token]))
        constraint.take(token)
        so_far += pieces[token]
    assert so_far == text.encode()
    assert kind != "json" or text[0] != "{" or b'":' in straddling


def test_what_has_to_come_is_written_as_the_tokenizer_writes_it():
    """Not letter by letter, though the letters would fit as well."""
    schema = closed(name={"const": "def"}, name_of_them={"const": [1, 2]})
    text = '{"name": "def", "name_of_them": [1, 2]}'
    for kind in KINDS:
        pieces = written_by(kind, begin(kind, schema), text)
        assert pieces == [codec_of(kind).piece(token) for token in codec_of(kind).encode(text)], kind


def test_a_tokenizer_that_changes_text_cannot_spoil_what_has_to_come():
    """One that reads `É` as `é` gives other bytes for what has to come; these are not taken for it."""
    trained = tiny_tokenizers.train("byte_level", tiny_tokenizers.corpus()[:40_000], size=600)
    trained.normalizer = normalizers.Lowercase()
    tokenizer = tiny_tokenizers.wrap(trained, template=tiny_tokenizers.CHATML)
    codec = TextCodec(tokenizer)
    constraint = Constraints(codec, [codec.eos_id]).begin(Sampling(schema={"const": "É is UP"}))
    text = b""
    while not constraint.complete:
        token = min(ids_of(constraint.allowed(codec.vocab)))
        constraint.take(token)
        text += codec.piece(token)
    assert text.decode() == '"É is UP"'


def test_of_tokens_with_the_same_bytes_every_one_may_come():
    """`{` and `<0x7B>` of a tokenizer with byte fallback."""
    codec = codec_of("metaspace")
    twins = [token for token in range(codec.vocab) if codec.piece(token) == b"{" and token not in codec.control_ids]
    assert len(twins) == 2
    for token in twins:
        constraint = begin("metaspace", {"enum": [{}, [], 1]})
        assert set(twins) <= ids_of(constraint.allowed(codec.vocab))
        constraint.take(token)
        assert written_by("metaspace", constraint, "}") and constraint.complete


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_string_every_text_may_come_and_no_control_token(kind: str):
    codec, constraint = codec_of(kind), begin(kind, TEXT)
    data = 'say "hi"\\ <|im_end|> </s> <tool_call>\n naïve 日本語 🙂\x00'
    for token in codec.encode_text(json.dumps(data, ensure_ascii=False)):
        mask = ids_of(constraint.allowed(codec.vocab))
        assert token in mask and not mask & codec.control_ids
        constraint.take(token)
    assert constraint.complete


def test_one_reply_knows_nothing_of_another():
    schema = {"enum": ["one", "two"]}
    first, second = begin("bundled", schema), begin("bundled", schema)
    codec = codec_of("bundled")
    for token in codec.encode_text('"one"'):
        first.take(token)
    assert first.complete and not second.complete
    assert ids_of(second.allowed(codec.vocab)) == ids_of(begin("bundled", schema).allowed(codec.vocab))


def test_rows_of_the_model_that_no_token_has_are_never_chosen():
    codec = codec_of("bundled")
    mask = begin("bundled", TEXT).allowed(codec.vocab + 7)
    assert mask.shape == (codec.vocab + 7,) and not mask[codec.vocab:].any() and mask.any()


@pytest.mark.parametrize("spoilt", [-torch.inf, torch.nan])
def test_logits_that_leave_nothing_are_an_error_and_no_wrong_token(spoilt: float):
    codec = codec_of("bundled")
    constraint, sampling = begin("bundled", {"const": True}), Sampling(schema={"const": True})
    logits = torch.zeros(codec.vocab)
    logits[constraint.allowed(codec.vocab)] = spoilt
    token = sample(logits, [], 0, sampling, processors(sampling), constraint.allowed(codec.vocab))
    if spoilt == -torch.inf:
        with pytest.raises(ModelError, match="no token a probability that may come next in the schema"):
            constraint.take(token)
    else:
        constraint.take(token)  # NaN is the largest, and these are the tokens that may come


KNOBS = [dict(), dict(temperature=1.0), dict(temperature=2.0, top_k=1), dict(temperature=1.0, top_p=0.01),
         dict(temperature=0.5, min_p=0.9), dict(repetition_penalty=1e3), dict(temperature=1e30)]


@pytest.mark.parametrize("knobs", KNOBS)
def test_all_settings_choose_among_what_may_come(knobs: dict[str, Any]):
    """Those that may come are the least probable, so that every setting would rather take another."""
    logits, allowed = torch.linspace(0, 30, 50), torch.zeros(50, dtype=torch.bool)
    allowed[[2, 3, 5]] = True
    sampling = Sampling(**knobs)
    before = logits.clone()
    found = {sample(logits, [5, 5], position, sampling, processors(sampling), allowed) for position in range(40)}
    assert found <= {2, 3, 5} and torch.equal(logits, before)
    assert "temperature" in knobs or found == {5 if not knobs else 3}


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "not": ({"not": {"type": "null"}}, r'Unimplemented keys: \["not"\]'),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "if": ({"if": {"type": "null"}, "then": True}, "if"),
    "contains": ({"type": "array", "contains": WHOLE}, "contains"),
    "deep inside": (closed(a={"type": "array", "items": {"not": {}}}), "not"),
    "made lenient by itself": ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
    "oneOf that overlap": ({"oneOf": [WHOLE, {"type": "integer", "maximum": 5}]}, "oneOf"),
    "coerced by itself": ({"x-guidance": {"coerce_one_of": True}, "oneOf": [WHOLE, {"minimum": 5}]}, "oneOf"),
    "a format": ({"type": "string", "format": "colour"}, "Unknown format: colour"),
    "a type": ({"type": "strin"}, "Invalid type: strin"),
    "a pattern": ({"type": "string", "pattern": "("}, r"the pattern '\(': unclosed group"),
    "lookahead": ({"type": "string", "pattern": "^(?!a)b$"}, r"the pattern '\^\(\?!a\)b\$': look-around"),
    "backreference": (closed(a={"type": "string", "pattern": r"(a)\1"}), "the pattern .*: backreferences"),
    "elsewhere": ({"$ref": "https://example.org/a.json"}, "example.org"),
    "nowhere": ({"$ref": "#/$defs/a"}, "does not exist"),
    "nothing fits": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "nothing fits either": ({"allOf": [TEXT, WHOLE]}, "incompatible types"),
    "nothing fits at all": ({"enum": []}, "empty"),
    "itself": ({"$ref": "#"}, "nothing can follow"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused(name: str):
    schema, why = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"^schema cannot be held: .*{why}.*; expected one"):
        begin("bundled", schema)


@pytest.mark.parametrize(("grammar", "why"), [
    ("start: foo", "unknown name"), ('start: "a', "lexer error"), ("begin: /a/", "no start rule"),
    ("start: <nope>", "unknown special token"), ("start: /a(/", "invalid regex"),
    ('start: %json {"x-guidance": {"lenient": true}, "not": {}}', "Unimplemented keys"),
])
def test_a_grammar_that_cannot_be_held_is_refused(grammar: str, why: str):
    with pytest.raises(ConfigError, match=f"^grammar cannot be held: .*{why}.*; expected one"):
        begin("bundled", grammar=grammar)


def test_a_tokenizer_that_cannot_write_every_text_is_refused():
    with pytest.raises(ConfigError, match=r"no token for the byte .* alone, .*; expected byte-level BPE"):
        begin("unigram", TEXT)


@pytest.mark.parametrize(("byte", "character"), [(0xF1, ""), (0xF2, ""), (0xF3, "a tag"), (0xC3, "é"), (0x7E, "~")])
def test_a_tokenizer_may_lack_bytes_that_begin_no_character(byte: int, character: str, monkeypatch: pytest.MonkeyPatch):
    """Unicode has given out none of those in UTF-8 from F1 and F2 on; SmolLM2's tokenizer has no token for these."""
    codec = codec_of("byte_level")
    piece = type(codec).piece
    monkeypatch.setattr(type(codec), "piece", lambda self, token: piece(self, token).replace(bytes([byte]), b""))
    assert bool(Constraints(codec, [0]).why_not()) == bool(character)


def test_a_model_without_an_end_marker_is_refused():
    with pytest.raises(ConfigError, match=r"no end marker, .*; expected a tokenizer with an eos token"):
        Constraints(codec_of("bundled"), []).begin(Sampling(schema=TEXT))


def test_an_end_marker_that_is_text_elsewhere_is_never_part_of_a_string():
    codec = codec_of("bundled")
    [end] = codec.encode_text(" the")
    constraint = Constraints(codec, [end]).begin(Sampling(schema=TEXT))
    for token in codec.encode_text('"a"'):
        assert end not in ids_of(constraint.allowed(codec.vocab))
        constraint.take(token)
    assert ids_of(constraint.allowed(codec.vocab)) == {end}


class Stuck:
    """What llguidance may come to: a place where nothing can follow, or a limit of its own. It lets an end through."""

    def __init__(self, vocab: int, ends: list[int], error: str, after: int):
        self.vocab, self.ends, self.error, self.left = vocab, ends, error, after

    def compute_bitmask(self) -> bytes:
        mask = np.zeros(self.vocab, dtype=np.uint8)
        mask[self.ends if not self.left else [40, *self.ends]] = 1
        return np.packbits(mask, bitorder="little").tobytes()

    def consume_token(self, token: int) -> bool:
        self.left -= 1
        return True

    def is_error(self) -> bool:
        return not self.left and bool(self.error)

    def get_error(self) -> str:
        return self.error

    def is_accepting(self) -> bool:
        return False

    is_stopped = is_accepting


@pytest.mark.parametrize(("error", "why"), [
    ("", "nothing can follow"), ("NoExtensionBias\n<state>", "nothing can follow"),
    ("too many items in row.", r"it is too large \(too many items in row\)")])
@pytest.mark.parametrize("after", [0, 2])
def test_a_dead_end_is_an_error_and_never_the_end_of_a_reply(error: str, why: str, after: int):
    vocabulary = constraints_of("bundled")._vocabulary()
    stuck = Stuck(vocabulary.size, vocabulary.ends, error, after)
    simpler = "a simpler one" if "too large" in why else "one that some text fits"
    if not after:
        with pytest.raises(ConfigError, match=f"^schema cannot be held: {why}; expected {simpler}$"):
            Constraint(stuck, "schema", vocabulary)
        return
    constraint = Constraint(stuck, "schema", vocabulary)
    for _ in range(after):
        assert ids_of(constraint.allowed(vocabulary.size)) == {40} and not constraint.complete
        constraint.take(40)
    with pytest.raises(ConfigError, match=f"^schema cannot be followed any further: {why}; expected a simpler one$"):
        constraint.allowed(vocabulary.size)


HUGE = {"where one token has to come": ("byte_level", "^-{2,}-{70000}$"),
        "in the middle": ("bundled", r"^\d*(&*)*?&{1000}b?$"), "in a mask": ("bundled", "^(.{0,100}){0,100}$")}


@pytest.mark.parametrize("name", HUGE)
def test_a_pattern_that_becomes_too_large_is_the_caller_s_mistake_and_not_the_model_s(name: str):
    """llguidance comes to its limit when it makes a mask, or when it takes a token that the mask let through."""
    kind, pattern = HUGE[name]
    with pytest.raises(ConfigError, match=r"^schema cannot be (held|followed any further): .*too many expressions.*; "
                                          "expected"):
        for seed in range(3):
            drawn(kind, begin(kind, {"type": "string", "pattern": pattern}), seed)


GREEDY = {
    "repeated": {"schema": {"type": "string", "pattern": "^(a{1000}){1000}$"}},
    "in many words": {"grammar": "start: " + " ".join(f'"{n}"?' for n in range(60_000))},
    "in many states": {"grammar": "start: /((?s:.*)[a-m](?s:.){10}[n-z](?s:.){10})+/"}}
IN_A_PROCESS = """if True:
    import resource, sys, time, torch
    from locret_stream.errors import ConfigError
    from tests.test_constrained import GREEDY, begin
    begin("bundled", {"type": "string"})
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        constraint, generator = begin("bundled", **GREEDY[sys.argv[1]]), torch.Generator().manual_seed(0)
        for _ in range(1000):
            ids = constraint.allowed(constraint._vocabulary.size).nonzero().flatten()
            constraint.take(int(ids[torch.randint(len(ids), (1,), generator=generator)]))
    except ConfigError as error:
        print(error)
    took = time.monotonic() - began
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, took)"""


PLAINLY = re.compile(r"(schema|grammar) cannot be (held|followed any further): it is too large "
                     r"\((?!.*(limit|panic|max)).*\); expected a simpler one$")


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.thorough
def test_a_hostile_grammar_takes_little_memory_and_is_refused_in_plain_words(name: str):
    done = run_python("-c", IN_A_PROCESS, name)
    assert done.returncode == 0, done.stderr
    told, figures = done.stdout.splitlines()
    mib, took_s = map(float, figures.split())
    assert mib < 150 and took_s < 60, (mib, took_s)
    assert PLAINLY.match(told), told


def test_a_list_that_is_too_long_is_refused_in_plain_words():
    with pytest.raises(ConfigError, match=PLAINLY):
        begin("bundled", {"enum": [f"{n:08d}" * 10 for n in range(20_000)]})


@pytest.mark.parametrize("schema", [
    {"enum": [f"name {n}" for n in range(5000)]}, {"type": "integer", "multipleOf": 9973},
    {"type": "string", "pattern": r"^\w{1,500}( \w{1,500})*$"}, {"type": "string", "maxLength": 1_000_000},
    closed(**{f"key {n}": {"type": "string", "maxLength": n + 1} for n in range(300)})])
def test_large_ordinary_schemas_are_held(schema: dict[str, Any]):
    drawn("bundled", begin("bundled", schema), 0, most=100)


def test_without_the_library_one_command_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"llguidance, which is not installed; expected: pip install "
                                          r"'locret-stream\[constrained\]'"):
        Constraints(codec_of("bundled"), ends_of("bundled")).begin(Sampling(schema=TEXT))


# -- settings ---------------------------------------------------------------------------------------------------------


def test_a_schema_is_the_same_as_a_dict_and_as_any_text_of_it():
    schema = closed(b={"const": "é"}, a=WHOLE)
    one = Sampling(schema=schema)
    for other in (json.dumps(schema), json.dumps(schema, indent=2, ensure_ascii=False)):
        assert Sampling(schema=other) == one and hash(Sampling(schema=other)) == hash(one)
    assert json.loads(one.schema) == schema and one.constrained and not Sampling().constrained
    turned = schema | {"properties": dict(reversed(schema["properties"].items()))}
    assert Sampling(schema=turned) != one, "properties come in the order of the schema"


LOOP: dict[str, Any] = {}
LOOP["a"] = LOOP


@pytest.mark.parametrize("schema", ["", "nonsense", "[]", "3", "true", [], 3, True, {"a": object()}, {"a": {1, 2}},
                                    {"minimum": float("nan")}, '{"minimum": NaN}', {"const": "\ud800"}, LOOP,
                                    "[" * 100_000])
def test_what_is_no_schema_is_refused_at_once(schema: Any):
    with pytest.raises(ConfigError, match=r"schema is .*; expected a JSON schema as a dict, or its text"):
        Sampling(schema=schema)


@pytest.mark.parametrize(("options", "why"), [
    (dict(schema=TEXT, grammar="start: /a/"), "both a schema and a grammar"), (dict(grammar=" "), "a Lark grammar"),
    (dict(grammar={}), "a Lark grammar"), (dict(schema=TEXT, ignore_eos=True), "ignore_eos is True for a reply"),
    (dict(grammar="start: /a/", ignore_eos=True), "ignore_eos is True for a reply"),
])
def test_settings_that_contradict_each_other_are_refused(options: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=f"{why}.*; expected|{why}"):
        Sampling(**options)


# -- calls of tools ---------------------------------------------------------------------------------------------------

TOOLS = {"find": closed(word={"type": "string", "maxLength": 4}), 'odd "name"\n': closed(n={"enum": [1, 2]})}


def calls_in(text: str) -> list[dict[str, Any]]:
    found = [json.loads(part.partition("\n</tool_call>")[0]) for part in text.split("<tool_call>\n")[1:]]
    for call in found:
        assert call.keys() == {"name", "arguments"}
        jsonschema.validate(call["arguments"], TOOLS[call["name"]])
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["bundled", "metaspace"])
def test_a_forced_call_is_a_call_and_nothing_else(kind: str, seed: int):
    text, ended = drawn_calls(kind, seed)
    calls = calls_in(text)
    assert ended and len(calls) == 1
    assert text.startswith("<tool_call>\n{") and text.endswith("}\n</tool_call>") and text.count("\n\n") == 0


def drawn_calls(kind: str, seed: int, **options: Any) -> tuple[str, bool]:
    """As `drawn`, for a reply that calls tools: the marks may be tokens of their own."""
    codec, ends, noise = codec_of(kind), ends_of(kind), torch.Generator().manual_seed(seed)
    constraint = begin(kind, grammar=call_grammar(codec, TOOLS, **options))
    ids = list[int]()
    for _ in range(200):
        token = int(torch.randn(codec.vocab, generator=noise).masked_fill(
            ~constraint.allowed(codec.vocab), -torch.inf).argmax())
        constraint.take(token)
        if token in ends:
            return codec.decode(ids, skip_special=False), True
        ids.append(token)
        if constraint.complete:
            return codec.decode(ids, skip_special=False), True
    return codec.decode(ids, skip_special=False), False


def test_the_marks_are_the_tokens_that_the_tokenizer_has_for_them():
    codec = codec_of("bundled")
    constraint = begin("bundled", grammar=call_grammar(codec, TOOLS))
    opening = codec.literal("<tool_call>")
    assert len(opening) == 1 and ids_of(constraint.allowed(codec.vocab)) == set(opening)
    plain = TextCodec(load_tokenizer(model_path("bundled")))
    plain.control_ids -= set(codec.literal("<tool_call></tool_call>"))
    assert "<[" not in call_grammar(plain, TOOLS) and "<[" in call_grammar(codec, TOOLS)


FORMS = {
    "lines": (CallForm(), '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'),
    "no mark": (CallForm('{"name": "', '", "parameters": ', "}", "ascii"), '{"name": "NAME", "parameters": ARGS}'),
    "nothing behind it": (CallForm("", "\n", "", "raw"), "NAME\nARGS"),
    "with an id": (CallForm('[{"name": "', '", "arguments": ', ', "id": "ididididi"}]', call_id="ididididi"),
                   '[{"name": "NAME", "arguments": ARGS, "id": "a1B2c3D4e"}]'),
    "marks are data": (CallForm(data=True), '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'),
}


@pytest.mark.parametrize("begun", ["", "before", "name"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["find", "né🙂日", 'odd "name"\n', "</tool_call>"])
def test_a_call_in_any_form_can_be_begun_anywhere_ahead_of_its_arguments(form: str, name: str, begun: str):
    """And a name is data, whatever it spells."""
    codec, (written, shown) = codec_of("bundled"), FORMS[form]
    head = {"": "", "before": written.before, "name": (written.before + written.written(name) + written.between)[:-1]}
    grammar = call_grammar(codec, {name: closed(a=WHOLE)}, written, begun=head[begun])
    whole = shown.replace("NAME", written.written(name)).replace("ARGS", '{"a": 1}')
    constraint = begin("bundled", grammar=grammar)
    ids = list[int]()
    take = constraint.take
    constraint.take = lambda token: (ids.append(token), take(token))[1]  # type: ignore[method-assign]
    written_by("bundled", constraint, whole.removeprefix(head[begun]))
    assert constraint.complete
    control = [codec.decode([token], skip_special=False) for token in ids if token in codec.control_ids]
    marks = ["<tool_call>", "</tool_call>"] if form == "lines" else []
    assert control == (marks if not begun else marks[1:])


@pytest.mark.parametrize("seed", range(4))
def test_in_place_of_a_call_the_reply_may_be_json(seed: int):
    codec = codec_of("bundled")
    grammar = call_grammar(codec, TOOLS, instead=closed(n=WHOLE))
    for text in ('<tool_call>\n{"name": "find", "arguments": {"word": "ox"}}\n</tool_call>', '{"n": 3}'):
        constraint = begin("bundled", grammar=grammar)
        written_by("bundled", constraint, text)
        assert constraint.complete
    text, ended = drawn_calls("bundled", seed, instead=closed(n=WHOLE))
    assert ended and (calls_in(text) if text.startswith("<tool_call>") else [*json.loads(text)] == ["n"])


def test_what_a_model_cannot_be_held_to_is_known_ahead():
    assert constraints_of("bundled").why_not() == ""
    assert "no token for the byte" in constraints_of("unigram").why_not()
    assert "no end marker" in Constraints(codec_of("bundled"), []).why_not()


def test_a_call_of_no_tool_is_refused():
    with pytest.raises(ConfigError, match="found no tools to call; expected at least one"):
        call_grammar(codec_of("bundled"), {})


def test_the_frame_s_ends_end_constrained_replies():
    """What a runtime gives: the ends of its frame."""
    tokenizer = load_tokenizer(model_path("bundled"))
    codec = TextCodec(tokenizer)
    constraint = Constraints(codec, ChatFrame(codec, tokenizer).eos_ids).begin(Sampling(schema=WHOLE))
    for token, after in itertools.pairwise([*codec.encode_text("12"), None]):
        assert after is None or token in ids_of(constraint.allowed(codec.vocab))
        constraint.take(token)
    assert codec.eos_id in ids_of(constraint.allowed(codec.vocab)) and not constraint.complete
    constraint.take(codec.eos_id)
