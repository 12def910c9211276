"""Bytes as text: which encoding they are in, and what becomes of those that are no text in it. Knows no file, no
connection and no model.

Every face that takes in bytes (files and stdin, uploads, LangChain's streams) reads them through a `Decoder`, so that
the same bytes are the same text, in whatever pieces they come.
"""

from __future__ import annotations

import codecs
import threading
from typing import Any

import msgspec

from locret_stream.errors import ConfigError, InvalidText

# Those of which any pieces give the text of the whole; the names are Python's.
ENCODINGS = ("utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "latin-1", "cp1252",
             "cp1250", "cp1251", "cp437", "cp850", "koi8-r", "cp932", "gb18030")
ERRORS = ("strict", "replace")
_NAMES = {name.replace("-", ""): name for name in ENCODINGS} | {
    "utf8sig": "utf-8", "iso88591": "latin-1", "l1": "latin-1", "windows1252": "cp1252", "windows1250": "cp1250",
    "windows1251": "cp1251", "ibm437": "cp437", "ibm850": "cp850", "windows31j": "cp932", "gbk": "gb18030",
    "gb2312": "gb18030", "cp936": "gb18030"}
_MARKS = {"utf-8": codecs.BOM_UTF8, "utf-32-le": codecs.BOM_UTF32_LE, "utf-32-be": codecs.BOM_UTF32_BE,
          "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}  # the longer one of two that begin alike
_ORDERED = {"utf-16": ("utf-16-le", "utf-16-be"), "utf-32": ("utf-32-le", "utf-32-be")}
_FEW_NULS, _MANY_NULS = 16, 4  # so many, and one character in so many: no text has them


class Charset(msgspec.Struct, frozen=True):
    """How bytes become text.

    Args:
        encoding: one of `ENCODINGS`, in capitals or not, with or without its hyphens.
        errors: "strict": bytes that are no text are refused. "replace": each longest run of bytes that cannot go on is
            read as U+FFFD, as Python does it, and counted.

    Raises:
        ConfigError: another encoding, or another way.
    """

    encoding: str = "utf-8"
    errors: str = "strict"

    def __post_init__(self) -> None:
        name = _NAMES.get(self.encoding.lower().replace("-", "").replace("_", ""))
        if name is None:
            raise ConfigError(f"encoding is {self.encoding!r:.40}; expected one of {', '.join(ENCODINGS)}")
        if self.errors not in ERRORS:
            raise ConfigError(f"errors is {self.errors!r:.40}; expected {' or '.join(ERRORS)}")
        msgspec.structs.force_setattr(self, "encoding", name)

    @property
    def shown(self) -> str:
        """The encoding as people write it."""
        return self.encoding.upper() if self.encoding.startswith("utf") else self.encoding


UTF8 = Charset()


class Decoder:
    """The text of one stream of bytes: `push` each piece, then `end`. After an error of `push` it is of no more use.

    A byte-order mark at the beginning is no text and is left out; later ones are text. The mark of another encoding is
    refused, also with errors="replace": what it stands before would be noise.

    Args:
        name: of the stream, in errors.
        option: how its user gives an option of some name and value; "" where there are no such options.

    Attributes:
        replaced: U+FFFD that stand for bytes which are no text. bytes_replaced: those bytes.
        characters: of text so far.
    """

    def __init__(self, charset: Charset = UTF8, name: str = "the stream", option: str = ""):
        self.charset, self.name, self._option = charset, name, option
        self.replaced = self.bytes_replaced = self.characters = 0
        self._codec: codecs.IncrementalDecoder | None = None
        self._head = b""  # what may be the beginning of a byte-order mark
        self._read = self._nuls = 0
        if not charset.encoding.startswith("utf-"):
            self._codec = self._open(charset.encoding)

    def push(self, piece: bytes) -> str:
        """The text that is certain with this piece. Raises InvalidText."""
        return self._decode(piece, False)

    def end(self) -> str:
        """The rest of the text, or of a part of it behind which comes something else than bytes. Raises InvalidText."""
        return self._decode(b"", True)

    @property
    def warnings(self) -> list[str]:
        """What its user ought to know of text that could be read."""
        if self._nuls < _FEW_NULS or self._nuls * _MANY_NULS < self.characters:
            return []
        return [f"{self.name}: {self._nuls:,} of {self.characters:,} characters are NUL, which no text has; it may be "
                f"UTF-16 without a byte-order mark{self._say(', which {} reads', 'encoding', 'utf-16-le')}"]

    @property
    def receipt(self) -> dict[str, Any]:
        """What a receipt says of it, as JSON holds it: how much was replaced, where that was asked for, and warnings.
        """
        out: dict[str, Any] = {} if self.charset.errors == "strict" else {
            "replaced": self.replaced, "bytes_replaced": self.bytes_replaced}
        return out | ({"warnings": self.warnings} if self.warnings else {})

    def _decode(self, piece: bytes, final: bool) -> str:
        codec, at = self._codec, self._read
        if codec is None:
            piece = self._head = self._head + piece
            if not piece or (not final and any(mark.startswith(piece) and mark != piece for mark in _MARKS.values())):
                return ""
            codec, at = self._begun(piece)
            piece = piece[at:]
        pending = len(codec.getstate()[0])
        _found.runs = _found.size = 0
        try:
            text = codec.decode(piece, final)
        except UnicodeDecodeError as error:
            raise self._not_text(at - pending + error.start, piece) from None
        if final:
            codec.reset()
        self._codec, self._head, self._read = codec, b"", at + len(piece)
        self.replaced += _found.runs
        self.bytes_replaced += _found.size
        self.characters += len(text)
        self._nuls += text.count("\0")
        return text

    def _open(self, encoding: str) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder(encoding)("strict" if self.charset.errors == "strict" else _COUNTED)

    def _begun(self, head: bytes) -> tuple[codecs.IncrementalDecoder, int]:
        """The codec for a stream of these first bytes, and the length of their byte-order mark. Raises InvalidText."""
        encoding = self.charset.encoding
        own: tuple[str, ...] = _ORDERED.get(encoding, (encoding,))
        found = next((name for name in (*own, *_MARKS) if head.startswith(_MARKS[name])), None)
        if found is not None and found not in own:
            family = found.removesuffix("-le").removesuffix("-be")
            by = " (PowerShell's > writes it)" if found == "utf-16-le" else ""
            raise InvalidText(f"{self.name} is {family.upper()}{by}: it begins with that byte-order mark; expected "
                              f"{self.charset.shown} text{self._say(', or {}', 'encoding', family)}")
        if found is None and encoding in _ORDERED:
            raise InvalidText(f"{self.name} has no byte-order mark, which tells the order of {self.charset.shown}; "
                              f"expected one{self._say(', or {} as on Windows', 'encoding', own[0])}"
                              f"{self._say(', or {}', 'encoding', own[1])}")
        return self._open(found or encoding), 0 if found is None else len(_MARKS[found])

    def _not_text(self, at: int, piece: bytes) -> InvalidText:
        encoding, shown = self.charset.encoding, self.charset.shown
        odd = piece.count(0) * _MANY_NULS > len(piece) > 1 and encoding == "utf-8"
        like = f" (it looks like UTF-16 without a byte-order mark{self._say(': {}', 'encoding', 'utf-16-le')})"
        return InvalidText(f"{self.name}: byte {at} is not {shown}{like if odd else ''}; expected {shown} text"
                           f"{self._say(', or {}', 'errors', 'replace')}"
                           f"{self._say(', or {}', 'encoding', '<its own>')}")

    def _say(self, words: str, name: str, value: str) -> str:
        """Words about an option, where there are options."""
        return words.format(self._option.format(name, value)) if self._option else ""


class _Found(threading.local):
    """What the decoding under way on this OS thread replaced: runs of bytes, and their bytes together."""

    runs = 0
    size = 0


_found = _Found()
_COUNTED = "locret-replace-and-count"


def _replace(error: UnicodeError) -> tuple[str, int]:
    """As Python's own "replace", counting: a handler of errors has no other way to tell."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    _found.runs += 1
    _found.size += error.end - error.start
    return "\ufffd", error.end


codecs.register_error(_COUNTED, _replace)
