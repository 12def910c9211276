"""What libraries for constrained decoding cost and hold: `python benchmarks/constrained.py`, with `--keep NAME` into
benchmarks/results.

Each of --libraries that is installed here gets the same vocabulary as bytes, without its control tokens, and is driven
along the same tokens. Every run is a process of its own, and the libraries take turns over the --repeats:

  import_s, tables_s    seconds to import it (torch is there already), and to read the vocabulary
  compile_ms            of each of the SCHEMAS, the first time
  mask_ms, advance_ms   the mask of the next token, and taking a token: median and longest over the tokens of an
                        instance of each schema, as the tokenizer writes it
  tables_mib, rss_mib   what became resident when the vocabulary was read; and in all, grammars included
  missed                tokens of an instance that was not let through
  coverage              of each of the KEYWORDS: "held" (what fits passes, what does not is stopped), "refused" (an
                        error when it is compiled), "narrow" (something that fits is stopped), "ignored" (something
                        that does not fit passes: the reply is not what was promised)

With --apply: milliseconds of laying a mask over logits [vocab], in torch, by the ways that there are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from timing import MIB, answer, in_turn, resident_bytes, run_case

LIBRARIES = {"outlines_core": "outlines-core", "llguidance": "llguidance", "xgrammar": "xgrammar"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
NODE = {"$ref": "#/$defs/node", "$defs": {"node": _object(
    value=WHOLE, children={"type": "array", "items": {"$ref": "#/$defs/node"}})}}

SCHEMAS: dict[str, tuple[Any, Any]] = {  # by name: a schema, and an instance of it
    "flat": (_object(name=TEXT, age=WHOLE, admin={"type": "boolean"}, score={"type": "number"}),
             {"name": "Ada Lovelace, née Byron", "age": 36, "admin": True, "score": 12.75}),
    "nested": (_object(order=_object(
        state={"enum": ["open", "paid", "sent", "lost"]},
        lines={"type": "array", "minItems": 1, "maxItems": 8, "items": _object(
            article=TEXT, count=WHOLE, tags={"type": "array", "items": {"enum": ["new", "old", "rare"]}})})),
        {"order": {"state": "paid", "lines": [{"article": "a brass lamp", "count": 2, "tags": ["old", "rare"]},
                                              {"article": "rope", "count": 10, "tags": []}]}}),
    "wide": (_object(**{f"field_{n}": (TEXT, WHOLE, {"type": "boolean"})[n % 3] for n in range(50)}),
             {f"field_{n}": ("some text", n, False)[n % 3] for n in range(50)}),
    "recursive": (NODE, {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3, "children": [
        {"value": 4, "children": []}]}]}),
    "any_of": ({"anyOf": [_object(kind={"const": "circle"}, radius={"type": "number"}),
                          _object(kind={"const": "box"}, width=WHOLE, height=WHOLE), {"type": "null"}]},
               {"kind": "box", "width": 30, "height": 4}),
    "pattern": (_object(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                        day={"type": "string", "format": "date"}, mail={"type": "string", "format": "email"}),
                {"code": "QXZ-4821", "day": "2026-03-14", "mail": "ada@example.org"}),
    "bounds": (_object(percent={"type": "integer", "minimum": 0, "maximum": 100},
                       heat={"type": "number", "exclusiveMinimum": -273.15, "maximum": 1000},
                       word={"type": "string", "minLength": 3, "maxLength": 12}),
               {"percent": 87, "heat": -40.5, "word": "mistral"}),
}

_ANY: dict[str, Any] = {}
KEYWORDS: dict[str, tuple[Any, list[Any], list[Any]]] = {  # by name: a schema, what fits it, what does not
    "type": ({"type": ["integer", "null"]}, [1, None], ["a", 1.5]),
    "enum": ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    "const": ({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1, "y"]}]),
    "properties": ({"type": "object", "properties": {"a": WHOLE}}, [{"a": 1}, {}], [{"a": "x"}]),
    "required": ({"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "required": ["b"]},
                 [{"a": 1, "b": 2}, {"b": 2}], [{"a": 1}, {}]),
    "required, not in properties": ({"type": "object", "properties": {"a": WHOLE}, "required": ["b"]},
                                    [{"a": 1, "b": 2}], [{"a": 1}]),
    "additionalProperties: false": ({"type": "object", "properties": {"a": WHOLE}, "additionalProperties": False},
                                    [{"a": 1}], [{"a": 1, "b": 1}]),
    "additionalProperties: schema": ({"type": "object", "additionalProperties": WHOLE}, [{"b": 1}], [{"b": "x"}]),
    "patternProperties": ({"type": "object", "patternProperties": {"^n": WHOLE}, "additionalProperties": False},
                          [{"n1": 1}], [{"n1": "x"}, {"m": 1}]),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, [{"ab": 1}], [{"A": 1}]),
    "minProperties": ({"type": "object", "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    "dependentRequired": ({"type": "object", "properties": {"a": WHOLE, "b": WHOLE},
                           "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 1}, {}], [{"a": 1}]),
    "items": ({"type": "array", "items": WHOLE}, [[], [1, 2]], [["x"]]),
    "prefixItems": ({"type": "array", "prefixItems": [WHOLE, TEXT], "items": False}, [[1, "a"]], [["a", 1]]),
    "minItems": ({"type": "array", "items": WHOLE, "minItems": 2}, [[1, 2]], [[1]]),
    "maxItems": ({"type": "array", "items": WHOLE, "maxItems": 2}, [[1, 2], []], [[1, 2, 3]]),
    "uniqueItems": ({"type": "array", "items": WHOLE, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    "contains": ({"type": "array", "contains": {"const": 1}}, [[2, 1]], [[2]]),
    "minLength": ({"type": "string", "minLength": 3}, ["abc", "日本語"], ["ab"]),
    "maxLength": ({"type": "string", "maxLength": 3}, ["abc", "日本語"], ["abcd"]),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
    "pattern, not anchored": ({"type": "string", "pattern": "b"}, ["abc"], ["acd"]),
    "pattern with lookahead": ({"type": "string", "pattern": "^(?!ab)[a-c]+$"}, ["ba"], ["abc"]),
    "pattern and maxLength": ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 2}, ["ab"], ["abc", "d"]),
    "format: date": ({"type": "string", "format": "date"}, ["2026-03-14"], ["yesterday", "2026-13-14"]),
    "format: date-time": ({"type": "string", "format": "date-time"}, ["2026-03-14T10:00:00Z"], ["noon"]),
    "format: email": ({"type": "string", "format": "email"}, ["ada@example.org"], ["ada"]),
    "format: uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    "format: uri": ({"type": "string", "format": "uri"}, ["https://example.org/a"], ["a b"]),
    "format, unknown": ({"type": "string", "format": "colour"}, ["red"], []),
    "minimum": ({"type": "integer", "minimum": 7}, [7, 123], [6, -1]),
    "maximum": ({"type": "integer", "maximum": 7}, [7, -123], [8, 70]),
    "exclusiveMinimum of number": ({"type": "number", "exclusiveMinimum": 0.5}, [0.51, 3], [0.5, 0, -1]),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, [10, 0], [7]),
    "anyOf": ({"anyOf": [WHOLE, {"const": "x"}]}, [3, "x"], ["y", True]),
    "anyOf beside properties": ({"type": "object", "properties": {"a": WHOLE}, "required": ["a"],
                                 "anyOf": [{"properties": {"a": {"minimum": 5}}}]}, [{"a": 6}], [{"a": 4}, {"a": "x"}]),
    "oneOf": ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, [7, 1], [4]),
    "oneOf, disjoint": ({"oneOf": [WHOLE, TEXT]}, [7, "a"], [True]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [4], [7, 1]),
    "not": ({"type": "integer", "not": {"const": 3}}, [4], [3]),
    "if/then/else": ({"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "if": {"required": ["a"]},
                      "then": {"required": ["b"]}}, [{"a": 1, "b": 1}, {}], [{"a": 1}]),
    "$ref": ({"$defs": {"w": WHOLE}, "type": "array", "items": {"$ref": "#/$defs/w"}}, [[1]], [["x"]]),
    "$ref, recursive": (NODE, [SCHEMAS["recursive"][1]], [{"value": 1, "children": [{"value": "x"}]}]),
    "$ref beside keywords": ({"$defs": {"w": WHOLE}, "$ref": "#/$defs/w", "minimum": 5}, [6], [4]),
    "$anchor": ({"$defs": {"w": {"$anchor": "w", "type": "integer"}}, "items": {"$ref": "#w"}, "type": "array"},
                [[1]], [["x"]]),
    "$ref, elsewhere": ({"$ref": "https://example.org/schema.json"}, [], [1]),
    "unevaluatedProperties": ({"type": "object", "properties": {"a": WHOLE}, "unevaluatedProperties": False},
                              [{"a": 1}], [{"b": 1}]),
    "dependentSchemas": ({"type": "object", "properties": {"a": WHOLE}, "dependentSchemas": {"a": {"required": ["b"]}}},
                         [{}, {"a": 1, "b": 1}], [{"a": 1}]),
    "unknown keyword": ({"type": "integer", "colour": "red"}, [1], ["x"]),
    "no keywords": (_ANY, [1, "x", None, {"a": [True]}], []),
    "true": (True, [1, [2]], []),
    "false": (False, [], [1, None]),
    "title and description": ({"title": "A", "description": "B", "type": "integer", "default": 1}, [1], ["x"]),
}


class Walk:
    """One reply that a library watches over: what may come next, and what came."""

    def __init__(self, fill: Callable[[], Any], take: Callable[[int], bool], may_end: Callable[[], bool]):
        self.fill, self.take, self.may_end = fill, take, may_end


class OutlinesCore:
    """An index of all states by all tokens, made ahead."""

    def __init__(self, pieces: list[bytes], end: int, encode: Callable[[str], list[int]]):
        from outlines_core import Vocabulary
        tokens: dict[bytes, list[int]] = {}
        for number, piece in enumerate(pieces):
            if piece and number != end:
                tokens.setdefault(piece, []).append(number)
        self.vocabulary, self.words = Vocabulary(end, tokens), torch.zeros(1, (len(pieces) + 31) // 32).int()

    def compile(self, schema: str) -> Any:
        from outlines_core import Index
        from outlines_core.json_schema import build_regex_from_schema
        return Index(build_regex_from_schema(schema), self.vocabulary)

    def walk(self, compiled: Any) -> Walk:
        from outlines_core import Guide
        guide, words = Guide(compiled), self.words

        def take(token: int) -> bool:
            if not guide.accepts_tokens([token]):
                return False
            guide.advance(token, return_tokens=False)
            return True

        return Walk(lambda: guide.write_mask_into(words.data_ptr(), words.numel(), words.element_size()), take,
                    guide.is_finished)


class LLGuidance:
    """A lexer of derivatives and an Earley parser, made as the reply goes."""

    def __init__(self, pieces: list[bytes], end: int, encode: Callable[[str], list[int]]):
        from llguidance import LLTokenizer, TokenizerWrapper
        inner = _Vocabulary(pieces, end, encode)
        self.tokenizer = LLTokenizer(TokenizerWrapper(inner), n_vocab=len(pieces), eos_token=end)
        self.words = torch.zeros((len(pieces) + 31) // 32, dtype=torch.int32)

    def compile(self, schema: str) -> Any:
        from llguidance import LLMatcher
        matcher = LLMatcher(self.tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def walk(self, compiled: Any) -> Walk:
        matcher, words = compiled.deep_copy(), self.words
        size = words.numel() * words.element_size()
        return Walk(lambda: matcher.unsafe_compute_mask_ptr(words.data_ptr(), size),
                    lambda token: matcher.try_consume_tokens([token]) == 1, matcher.is_accepting)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, pieces: list[bytes], end: int, encode: Callable[[str], list[int]]):
        self.tokens = [piece or b"<%d>" % number for number, piece in enumerate(pieces)]
        self.special_token_ids = [number for number, piece in enumerate(pieces) if not piece]
        self.eos_token_id, self.bos_token_id, self._encode = end, None, encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("expected text")  # so it asks for text
        return self._encode(text)


class XGrammar:
    """A pushdown automaton with masks of its states, most of them made ahead."""

    def __init__(self, pieces: list[bytes], end: int, encode: Callable[[str], list[int]]):
        import xgrammar
        info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=[end])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.words = xgrammar.allocate_token_bitmask(1, len(pieces))

    def compile(self, schema: str) -> Any:
        return self.compiler.compile_json_schema(schema, strict_mode=False)

    def walk(self, compiled: Any) -> Walk:
        import xgrammar
        matcher, words = xgrammar.GrammarMatcher(compiled), self.words
        return Walk(lambda: matcher.fill_next_token_bitmask(words), matcher.accept_token, matcher.is_completed)


HOW = {"outlines_core": OutlinesCore, "llguidance": LLGuidance, "xgrammar": XGrammar}

# -- one library, in a process of its own ------------------------------------------------------------------------------


def milliseconds(seconds: Iterable[float]) -> dict[str, float]:
    """Their median and their longest, in milliseconds."""
    all_of_them = [1e3 * each for each in seconds] or [0.0]
    return {"median": statistics.median(all_of_them), "longest": max(all_of_them)}


def timed(what: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What it returns, and the seconds that it took."""
    began = time.perf_counter()
    found = what(*arguments)
    return found, time.perf_counter() - began


def written(value: Any) -> str:
    """JSON as most models write it."""
    return json.dumps(value, ensure_ascii=False)


def passes(library: Any, compiled: Any, ids: list[int]) -> bool:
    """Whether a reply of these tokens, and nothing after them, is let through."""
    walk = library.walk(compiled)
    return all(walk.take(token) for token in ids) and walk.may_end()


def verdict(library: Any, encode: Callable[[str], list[int]], keyword: str) -> str:
    """What becomes of a keyword, in a word, and why it was refused."""
    schema, fits, does_not = KEYWORDS[keyword]
    try:
        compiled = library.compile(json.dumps(schema))
    except BaseException as error:  # pyo3's panics are no Exception
        return f"refused ({str(error).strip().splitlines()[0][:90] if str(error).strip() else type(error).__name__})"
    if any(passes(library, compiled, encode(written(value))) for value in does_not):
        return "ignored"
    if not all(passes(library, compiled, encode(written(value))) for value in fits):
        return "narrow"
    return "held"


def of_library(settings: SimpleNamespace) -> dict[str, Any]:
    from locret_stream.named_models import model_path
    from locret_stream.runtime.loading import load_tokenizer
    from locret_stream.text import TextCodec
    codec = TextCodec(load_tokenizer(model_path(settings.model)))
    pieces = [b"" if number in codec.control_ids else codec.piece(number) for number in range(codec.vocab)]
    assert codec.eos_id is not None
    _, import_s = timed(__import__, settings.library)
    start = resident_bytes()
    library, tables_s = timed(HOW[settings.library], pieces, codec.eos_id, codec.encode)
    tables = resident_bytes() - start
    compile_ms, masks, advances, missed, refused = {}, {}, {}, {}, {}
    for name, (schema, instance) in SCHEMAS.items():
        try:
            compiled, seconds = timed(library.compile, json.dumps(schema))
        except BaseException as error:  # pyo3's panics are no Exception
            refused[name] = str(error)[:200]
            continue
        compile_ms[name] = 1e3 * seconds
        walk, filled, taken = library.walk(compiled), [], []
        missed[name] = 0
        for token in codec.encode_text(written(instance)):
            filled.append(timed(walk.fill)[1])
            passed, seconds = timed(walk.take, token)
            if not passed:
                missed[name] = 1
                break
            taken.append(seconds)
        masks[name], advances[name] = filled, taken
    rss = resident_bytes() - start
    coverage = {keyword: verdict(library, codec.encode_text, keyword) for keyword in KEYWORDS} if settings.cover else {}
    return {"import_s": import_s, "tables_s": tables_s, "tables_mib": tables / MIB, "rss_mib": rss / MIB,
            "compile_ms": compile_ms, "mask_ms": {name: milliseconds(each) for name, each in masks.items()},
            "advance_ms": {name: milliseconds(each) for name, each in advances.items()}, "missed": missed,
            "refused": refused, "coverage": coverage, "tokens": {name: len(each) for name, each in masks.items()}}


# -- the process that starts them --------------------------------------------------------------------------------------


def of_all(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of the repeats; the longest of all."""
    def over(name: str) -> dict[str, Any]:
        return {schema: {"median": statistics.median(run[name][schema]["median"] for run in runs),
                         "longest": max(run[name][schema]["longest"] for run in runs)} for schema in runs[0][name]}

    plain = {name: statistics.median(run[name] for run in runs)
             for name in ("import_s", "tables_s", "tables_mib", "rss_mib")}
    return plain | {"compile_ms": {schema: statistics.median(run["compile_ms"][schema] for run in runs)
                                   for schema in runs[0]["compile_ms"]},
                    "mask_ms": over("mask_ms"), "advance_ms": over("advance_ms"),
                    **{name: runs[0][name] for name in ("missed", "refused", "coverage", "tokens")}}


def of_apply(vocab: int, repeats: int) -> dict[str, dict[str, float]]:
    """Laying a mask of bits over logits [vocab]."""
    import numpy as np
    logits = torch.randn(vocab)
    words = torch.randint(-2**31, 2**31 - 1, ((vocab + 31) // 32,), dtype=torch.int32)
    shifts = torch.arange(32, dtype=torch.int32)

    def by_numpy() -> torch.Tensor:
        bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little", count=vocab)
        return logits.masked_fill(torch.from_numpy(bits == 0), -torch.inf)

    def by_shifts() -> torch.Tensor:
        bits = (words[:, None] >> shifts & 1).bool().view(-1)[:vocab]
        return logits.masked_fill(~bits, -torch.inf)

    ways = {"numpy": by_numpy, "shifts": by_shifts}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            spent[name].append(timed(way)[1])
    assert torch.equal(by_numpy(), by_shifts())
    return {name: milliseconds(each) for name, each in spent.items()}


def show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    table = Table("")
    for name in results:
        table.add_column(name, justify="right")

    def row(label: str, value: Callable[[dict[str, Any]], Any]) -> None:
        cells = []
        for each in results.values():
            try:
                found = value(each)
            except KeyError:
                found = "refused"
            cells.append(found if isinstance(found, str) else f"{found:.4g}")
        table.add_row(label, *cells)

    for plain in ("import_s", "tables_s", "tables_mib", "rss_mib"):
        row(plain, lambda each, plain=plain: each[plain])
    for name in SCHEMAS:
        row(f"compile_ms {name}", lambda each, name=name: each["compile_ms"][name])
    for name in SCHEMAS:
        row(f"mask_ms, longest {name}", lambda each, name=name: "{median:.3f}, {longest:.2f}".format(
            **each["mask_ms"][name]) + (" (stopped)" if each["missed"][name] else ""))
    for name in SCHEMAS:
        row(f"advance_ms, longest {name}", lambda each, name=name: "{median:.4f}, {longest:.3f}".format(
            **each["advance_ms"][name]))
    for keyword in KEYWORDS:
        row(keyword, lambda each, keyword=keyword: each["coverage"][keyword].partition(" ")[0])
    Console(file=sys.stderr, width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--models", nargs="+", default=["bundled", "smollm2"], help="whose tokenizers are read")
    parser.add_argument("--apply", action="store_true", help="also time laying a mask over logits")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what the processes are started with
    options = parser.parse_args()
    if options.case:
        answer(of_library)
        return
    here = [name for name in options.libraries if importlib.util.find_spec(name)]
    for name in set(options.libraries) - set(here):
        print(f"{name} is not installed here: left out (pip install {LIBRARIES[name]})", file=sys.stderr)
    if not here:
        parser.error("none of --libraries is installed here")
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"repeats": options.repeats, "libraries": {
        name: importlib.metadata.version(LIBRARIES[name]) for name in here}}
    for model in options.models:
        counted = {name: 0 for name in here}

        def run(name: str, model: str = model, counted: dict[str, int] = counted) -> dict[str, Any]:
            counted[name] += 1
            return run_case(sys.executable, Path(__file__), name, {
                "library": name, "model": model, "threads": options.threads, "cover": counted[name] == 1})

        runs = in_turn(here, options.repeats, run)
        result[model] = {name: of_all(each) for name, each in runs.items()}
        show(result[model])
    if options.apply:
        result["apply_ms"] = {str(vocab): of_apply(vocab, 200) for vocab in (1_536, 49_152, 151_936)}
    from record import record
    record(options.keep or "constrained", result, keep=options.keep is not None)


if __name__ == "__main__":
    main()
