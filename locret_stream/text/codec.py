"""One segment to ids, ids to text. Knows the inside of a fast tokenizer; knows no template and no stream of text.

Two tokenizers are made from the user's, which stays as it is:
    real     recognises added tokens in a text; adds nothing before or after
    data     the same vocabulary, in which every control token has a name that no text can spell
Both are deterministic. A *control token* is an added token, special or not, or a token that the tokenizer calls
special; only non-special added tokens of white space alone, or of a single character, are ordinary text (GPT-NeoX and
Gemma write indentation with them). The unknown token is a control token as a word (`<unk>` in a text is spelled out),
and still stands for characters that a tokenizer without byte fallback does not know.

Segments are tokenised alone, so all that treats the edges of a text as special is switched off: `Prepend` and `Strip`
normalisers, `prepend_scheme`, `add_prefix_space`. A segment then gets the tokens that it has in the middle of a text;
only the first word of a text may differ from what the user's tokenizer gives for the whole (`Hello`, not `▁Hello`). A
prefix that every word gets, because the text is split before (T5), belongs to no edge and stays.
"""

from __future__ import annotations

import codecs
import hashlib
import operator
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec
from tokenizers import Tokenizer

from locret_stream.errors import ConfigError, InvalidText, InvalidTokens
from locret_stream.text.segmenter import check_text, cut

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
_SENTENCE = "for each word in a line: a value, 12 of 30"


class TextCodec:
    """A tokenizer that reads text as data. Immutable and safe to share between threads.

    Args:
        tokenizer: a fast tokenizer of transformers; it is read once and never changed.
        vocab: rows of the model's embedding; None: as many as the tokenizer has ids.

    Raises:
        ConfigError: a tokenizer without a `tokenizers` backend, of a kind that cannot be made safe, of another model
            (text would become ids without a row in the model), or one whose tokens cannot be decoded one at a time.

    Attributes:
        vocab: ids are in [0, vocab).
        added_ids: all added tokens. control_ids: ids that no data becomes. special_ids: ids left out of text.
        unk_id, eos_id: int, or None.
        fingerprint: sha256 of the tokenizer's definition, hexadecimal; the same in whatever order a version of
            `tokenizers` writes it, and whatever it writes of what is switched off. fingerprints: this one, and the one
            that earlier libraries gave it.
    """

    def __init__(self, tokenizer: Any, *, vocab: int | None = None):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(f"tokenizer is a {type(tokenizer).__name__}; expected a fast tokenizer "
                              "(PreTrainedTokenizerFast): convert it, or load it with use_fast=True")
        spec = msgspec.json.decode(backend.to_str())
        kind = spec["model"].get("type")
        if kind not in _MODELS:
            raise ConfigError(f"tokenizer model is {kind!r}; expected one of {', '.join(_MODELS)}, as no other can be "
                              "kept from reading text as control tokens")
        spec |= {"truncation": None, "padding": None, "post_processor": None}
        text = msgspec.json.encode(spec)
        self.fingerprint = hashlib.sha256(msgspec.json.encode(_settled(spec), order="sorted")).hexdigest()
        self.fingerprints = self.fingerprint, hashlib.sha256(text).hexdigest()
        self._real = Tokenizer.from_str(text.decode())

        special = set(tokenizer.all_special_ids)
        added = {token["id"]: token for token in spec["added_tokens"]}
        self.special_ids = frozenset(i for i, token in added.items() if token["special"])
        self.added_ids = frozenset(added) | special
        self.control_ids = frozenset(
            i for i in self.added_ids if i in special or i in self.special_ids or not _is_text(added[i]["content"]))
        self.unk_id = _unk_id(spec["model"])
        self.eos_id: int | None = tokenizer.eos_token_id
        ids = self._real.get_vocab(with_added_tokens=True).values()
        self.vocab = max(ids, default=-1) + 1 if vocab is None else vocab

        self._forbidden = self.control_ids - {self.unk_id}
        reach = max((i for i in ids if i not in self._forbidden), default=0)
        if reach >= self.vocab:
            raise ConfigError(f"the tokenizer writes text with ids up to {reach}, and the model has rows for ids below "
                              f"{self.vocab}; expected the model's own tokenizer")
        self._edges = _switch_off_edges(spec)
        _hide(spec, self.control_ids)
        self._data = Tokenizer.from_str(msgspec.json.encode(spec).decode())

        decoders = {part["type"] for part in _parts(spec["decoder"], "decoders")}
        self._byte_level = "ByteLevel" in decoders
        self._strips = "Strip" in decoders
        self.ends_words = "BPEDecoder" in decoders  # a token ends a word with a space, but for the last one of a text
        self._byte_fallback = "ByteFallback" in decoders
        self._pieces: dict[int, bytes] = {}
        self._anchor = None if self._byte_level else self._find_anchor()
        self._expect_readable()

    def encode(self, segment: str, *, trusted: bool = False) -> list[int]:
        """The ids of one segment, without any before or after it.

        Args:
            segment: one segment; it is not cut further.
            trusted: recognise added tokens in the text.

        Raises:
            InvalidText: a lone surrogate.
        """
        if trusted:
            return self.literal(segment)
        ids = self._data.encode(check_text(segment), add_special_tokens=False).ids
        if not self._forbidden.isdisjoint(ids):  # the text contains a name drawn at random in this process
            raise InvalidText("the text spells a hidden name of a control token; expected text from outside")
        return ids

    def encode_text(self, text: str, *, trusted: bool = False) -> list[int]:
        """The ids of a whole text: cut into segments, each encoded alone. Raises InvalidText."""
        return [i for segment in cut(text) for i in self.encode(segment, trusted=trusted)]

    def literal(self, text: str, *, start: bool = False) -> list[int]:
        """The ids of a template's own text, in which added tokens are recognised.

        Args:
            start: the text opens the sequence, so that it gets the tokenizer's prefix, if any.

        Raises:
            InvalidText: a lone surrogate, or an added token without a row in the model.
        """
        ids = self._literal(text, start)
        if beyond := [i for i in ids if i >= self.vocab]:
            raise InvalidText(f"the text spells {self._real.id_to_token(beyond[0])!r}, token {beyond[0]}, and the "
                              f"model has rows for ids below {self.vocab}; expected the model's own tokenizer")
        return ids

    def _literal(self, text: str, start: bool) -> list[int]:
        encoding = self._real.encode(check_text(text), add_special_tokens=False)
        if start or not self._edges:
            return encoding.ids
        unknown = None if self.unk_id is None else self._real.id_to_token(self.unk_id)
        # The text before the first added token is data. The unknown token counts only where its word is spelled.
        head = next((a for i, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)
                     if i in self.added_ids and (i != self.unk_id or text[a:b].strip() == unknown)), len(text))
        rest = self._real.encode(text[head:], add_special_tokens=False).ids if head < len(text) else []
        return (self._data.encode(text[:head], add_special_tokens=False).ids if head else []) + rest

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids as the tokenizer decodes them, without its clean-up of spaces."""
        return self._real.decode(list(ids), skip_special_tokens=skip_special)

    def validate_ids(self, ids: Iterable[int]) -> list[int]:
        """Ids that a user gives, as plain ints. Added tokens are allowed, because no text can spell ids.

        Raises:
            InvalidTokens: names the index of a value that is not an integer (or is a bool), or not in [0, vocab).
        """
        if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable):
            raise InvalidTokens(f"found {type(ids).__name__}; expected a list of token ids")
        return [self._valid(index, i) for index, i in enumerate(ids)]

    def piece(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds in the middle of a text; empty for ids without a token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id)
        return piece

    def first_piece(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token that opens a text, where some tokenizers leave out a leading space."""
        piece = self.piece(token_id)
        if (self._byte_level and not self._strips) or self.ends_words or _is_partial(piece):
            return piece
        return self._real.decode([token_id], skip_special_tokens=False).encode()

    def _valid(self, index: int, value: Any) -> int:
        if type(value) is not int:
            try:
                if isinstance(value, bool):
                    raise TypeError
                value = operator.index(value)
            except TypeError:
                raise InvalidTokens(f"index {index}: found {value!r} of type {type(value).__name__}; "
                                    "expected an integer") from None
        if not 0 <= value < self.vocab:
            raise InvalidTokens(f"index {index}: found {value}; expected a token id in [0, {self.vocab})")
        return value

    def _read_piece(self, token_id: int) -> bytes:
        name = self._real.id_to_token(token_id)
        if name is None:
            return b""
        if self._byte_level:
            letters = [_BYTES[letter] for letter in name if letter in _BYTES]
            return bytes(letters) if len(letters) == len(name) else name.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        before = [] if self._anchor is None else [self._anchor]
        if self.ends_words:  # decoded between two words, as the last word of a text has no space after it
            last = self._real.decode(before, skip_special_tokens=False)
            text = self._real.decode([*before, token_id, *before], skip_special_tokens=False)
            return text[len(self._real.decode(before * 2, skip_special_tokens=False)) - len(last):
                        len(text) - len(last)].encode()
        skip = len(self._real.decode(before, skip_special_tokens=False))
        return self._real.decode([*before, token_id], skip_special_tokens=False)[skip:].encode()

    def _find_anchor(self) -> int | None:
        """A token of letters: after it a token decodes as in the middle of a text."""
        ids = (i for i in range(self._real.get_vocab_size()) if i not in self.added_ids)
        return next((i for i in ids if (text := self._real.decode([i])).isascii() and text.isalpha()), None)

    def _expect_readable(self) -> None:
        """Raises ConfigError unless a test sentence decodes to the same text in three ways: as the tokenizer encodes
        it, as data, and as data token by token."""
        own, ids = self.decode(self._real.encode(_SENTENCE, add_special_tokens=False).ids), self.encode(_SENTENCE)
        if self.decode(ids).strip() != own.strip():
            raise ConfigError(f"the tokenizer reads {_SENTENCE!r} as {own!r}, and a part of a text as "
                              f"{self.decode(ids)!r}; expected one that treats the edges of a text in a known way")
        detokenizer = Detokenizer(self)
        text = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
        if text != self.decode(ids):
            raise ConfigError(f"the tokenizer decodes {self.decode(ids)!r} as a whole and {text!r} token by token; "
                              "expected a decoder that can be streamed")


class Detokenizer:
    """Ids to text, one id at a time, in whole characters.

    Args:
        codec: the codec of the ids.
        skip_special: leave special tokens out of the text; or the ids that are left out.
        start: the ids open a text: tokenizers that put a space before the first word remove it. False keeps every
            space, for ids that follow others.

    All results of `push` and `flush` add up to `codec.decode` of all ids (with `start`), at constant cost per id. One
    exception: where tokens stand for bytes (`<0xE2>`), the tokenizer replaces every byte of a run of them by U+FFFD if
    the run is not UTF-8; here the whole characters of the run were returned already, and only bytes that are not UTF-8
    are replaced, as Unicode recommends.
    """

    def __init__(self, codec: TextCodec, *, skip_special: bool | Collection[int] = True, start: bool = True):
        self._codec, self._start = codec, start
        if isinstance(skip_special, bool):
            skip_special = codec.special_ids if skip_special else ()
        self._skip = frozenset(skip_special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._gap = ""  # the space after the last word, which is part of the text only if another word follows

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty in the middle of a character."""
        if token_id in self._skip:
            return ""
        piece = self._codec.piece(token_id)
        if self._start and piece:
            self._start, piece = False, self._codec.first_piece(token_id)
        text = self._utf8.decode(piece)
        if self._codec.ends_words and text:
            text, self._gap = self._gap + text.removesuffix(" "), " " * text.endswith(" ")
        return text

    @property
    def whole(self) -> bool:
        """Whether the ids so far end with a whole character."""
        return not self._utf8.getstate()[0]

    def flush(self) -> str:
        """The rest of the text: U+FFFD for an incomplete character, or nothing. The next id may begin another text."""
        self._gap = ""
        return self._utf8.decode(b"", True)


def _byte_letters() -> dict[str, int]:
    """The 256 letters that byte-level tokenizers write for bytes: printable Latin-1 as it is, others from U+0100 on."""
    plain = [b for b in range(256) if 33 <= b <= 126 or (161 <= b and b != 173)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _byte_letters()


def _settled(part: Any) -> Any:
    """A part of a definition without what versions of `tokenizers` write or leave out: what is null or false, and the
    number of the format; and with merges as pairs, which were texts once."""
    if isinstance(part, dict):
        return {name: _pairs(value) if name == "merges" else _settled(value) for name, value in part.items()
                if value is not None and value is not False and name != "version"}
    return [_settled(inner) for inner in part] if isinstance(part, list) else part


def _pairs(merges: list[Any]) -> list[Any]:
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]


def _is_text(content: str) -> bool:
    """Whether an added token only stands for ordinary text: white space, or one character."""
    return len(content) == 1 or not content.replace("▁", " ").strip()


def _is_partial(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False


def _unk_id(model: dict[str, Any]) -> int | None:
    if model["type"] == "Unigram":
        return model["unk_id"]
    return model["vocab"].get(model.get("unk_token"))


def _parts(part: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """A component, or the components of a sequence, at any depth."""
    if part is not None and part["type"] == "Sequence":
        for inner in part[key]:
            yield from _parts(inner, key)
    elif part is not None:
        yield part


def _switch_off_edges(spec: dict[str, Any]) -> bool:
    """Remove from a definition all that treats the start or the end of a text as special; whether there was any."""
    changed = False
    normalizers = list(_parts(spec["normalizer"], "normalizers"))
    kept = [part for part in normalizers if part["type"] not in ("Prepend", "Strip")]
    if len(kept) < len(normalizers):
        spec["normalizer"], changed = ({"type": "Sequence", "normalizers": kept} if kept else None), True
    split = False  # whether earlier parts split the text: then every piece gets a prefix, wherever it is
    for part in _parts(spec["pre_tokenizer"], "pretokenizers"):
        scheme = part.get("prepend_scheme", "never")
        if scheme == "first" or (scheme == "always" and not split):
            part["prepend_scheme"], changed = "never", True
        if part.get("add_prefix_space") and not split:
            part["add_prefix_space"], changed = False, True
        split = split or part.get({"Metaspace": "split", "ByteLevel": "use_regex"}.get(part["type"], ""), True)
    return changed


def _hide(spec: dict[str, Any], control: frozenset[int]) -> None:
    """Rename control tokens in a definition, ids unchanged, to names that a text spells only by guessing 128 bits."""
    model, secret = spec["model"], secrets.token_hex(16)
    hidden: dict[str, str] = {}
    for token in spec["added_tokens"]:
        if token["id"] in control:
            token["content"] = f"{secret}-{token['id']}"
    if model["type"] == "Unigram":
        for i in control:
            if i < len(model["vocab"]):
                model["vocab"][i][0] = f"{secret}-{i}"
        return
    for name, i in list(model["vocab"].items()):
        if i in control:
            if model["type"] == "BPE" and name in _BYTES and len(_BYTES.keys() & model["vocab"].keys()) == 256:
                raise ConfigError(f"added token {name!r} is also a letter of the byte alphabet; expected control "
                                  "tokens of their own, as some text cannot be written without that letter")
            hidden[name] = f"{secret}-{i}"
            del model["vocab"][name]
            model["vocab"][hidden[name]] = i
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if model["type"] == "BPE":
        prefix = len(model["continuing_subword_prefix"] or "")
        model["merges"] = [[a, b] for a, b in _pairs(model["merges"])
                           if a not in hidden and b not in hidden and a + b[prefix:] not in hidden]
