"""Bytes become the same text in whatever pieces they come, and what is no text is refused by its place, or counted."""

from __future__ import annotations

import codecs
import random
from itertools import pairwise

import pytest

from locret_stream.charsets import ENCODINGS, UTF8, Charset, Decoder
from locret_stream.errors import ConfigError, InvalidText

LOG = "04:01 INFO café\nNote that the port of otter is 3390. 🦦\n04:02 INFO fin\n"


def read(data: bytes, cuts: list[int] | range = range(0), charset: Charset = UTF8, option: str = ""
         ) -> tuple[str, int, int]:
    """The text, and what was replaced."""
    decoder = Decoder(charset, "x.log", option)
    text = "".join([decoder.push(data[start:end]) for start, end in pairwise([0, *cuts, len(data)])])
    text += decoder.end()
    assert decoder.characters == len(text)
    return text, decoder.replaced, decoder.bytes_replaced


def refusal(data: bytes, cuts: list[int] | range = range(0), **options: str) -> str:
    with pytest.raises(InvalidText) as refused:
        read(data, cuts, Charset(**options), "--{} {}")
    return str(refused.value)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_replacing_does_as_python_in_any_pieces(encoding: str):
    r = random.Random(encoding)
    marks = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    own = {"utf-16": "utf-16-le", "utf-32": "utf-32-be"}.get(encoding, encoding)
    for _ in range(300):
        data = bytes(r.choice([r.randrange(256), *b"\xe2\x82\xac\xf0\x9f\x98a\0\xd8\xdc\x81"]) for _ in range(
            r.randrange(24)))
        if data.startswith(marks):
            continue
        expected = data.decode(own, "replace")
        if own != encoding:
            data = {"utf-16": codecs.BOM_UTF16_LE, "utf-32": codecs.BOM_UTF32_BE}[encoding] + data
        cuts = sorted(r.randrange(len(data) + 1) for _ in range(3))
        whole = read(data, charset=Charset(encoding, "replace"))
        assert whole[0] == expected
        assert whole == read(data, range(1, len(data)), Charset(encoding, "replace")) == read(
            data, cuts, Charset(encoding, "replace"))
        assert (whole[1] > 0) == (whole[2] > 0) and whole[1] <= whole[2]
        try:
            data.decode(own)
        except UnicodeDecodeError as error:
            assert f"byte {error.start} is not" in refusal(data, cuts, encoding=encoding)
        else:
            assert whole[1:] == (0, 0) and read(data, cuts, Charset(encoding)) == whole


def test_a_genuine_replacement_character_is_not_counted():
    assert read("a\ufffdb".encode() + b"\xff", charset=Charset(errors="replace")) == ("a\ufffdb\ufffd", 1, 1)


@pytest.mark.parametrize("mark, encoding", [
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be")])
def test_a_byte_order_mark_at_the_beginning_is_no_text(mark: bytes, encoding: str):
    data = mark + LOG.encode(encoding)
    for name in (encoding, encoding[:6].rstrip("-")):
        for cuts in (range(0), range(1, len(data)), [2], [3, 5]):
            assert read(data, cuts, Charset(name)) == (LOG, 0, 0), name
    later = "a".encode(encoding) + mark
    assert read(later, charset=Charset(encoding))[0] == "a\ufeff", "a later one is text"


@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_the_mark_of_another_encoding_is_refused_by_its_name(errors: str):
    wide = codecs.BOM_UTF16_LE + LOG.encode("utf-16-le")
    for cuts in (range(0), range(1, len(wide))):
        told = refusal(wide, cuts, errors=errors)
        assert "x.log is UTF-16 (PowerShell's > writes it)" in told and "--encoding utf-16" in told
    assert "x.log is UTF-16: " in refusal(codecs.BOM_UTF16_BE + LOG.encode("utf-16-be"), errors=errors)
    assert "x.log is UTF-32: " in refusal(codecs.BOM_UTF32_LE + LOG.encode("utf-32-le"), errors=errors)
    assert "x.log is UTF-8: " in refusal(codecs.BOM_UTF8 + LOG.encode(), encoding="utf-16", errors=errors)
    assert "x.log is UTF-16" in refusal(wide, encoding="utf-16-be", errors=errors)
    assert "no byte-order mark" in (told := refusal(LOG.encode("utf-16-le"), encoding="utf-16", errors=errors))
    assert "--encoding utf-16-le as on Windows, or --encoding utf-16-be" in told


def test_wide_text_without_a_mark_is_suspected():
    ascii_only = "The door code of falcon is 48213.\n".encode("utf-16-le")  # valid UTF-8, with a NUL in each character
    decoder = Decoder(name="x.log", option="--{} {}")
    for byte in ascii_only:
        decoder.push(bytes([byte]))
    decoder.end()
    (warning,) = decoder.receipt["warnings"]
    assert "34 of 68 characters are NUL" in warning and "--encoding utf-16-le" in warning
    assert "looks like UTF-16 without a byte-order mark: --encoding utf-16-le" in refusal(LOG.encode("utf-16-le"))
    assert "looks like" not in refusal(LOG.encode("latin-1", "replace"))
    binary = Decoder()
    binary.push(b"a log with \0 a few \0 of them, " * 20)
    assert binary.receipt == {}


def test_a_receipt_says_how_much_was_replaced_where_that_was_asked_for():
    for errors, receipt in (("strict", {}), ("replace", {"replaced": 0, "bytes_replaced": 0})):
        decoder = Decoder(Charset(errors=errors))
        decoder.push(b"all is well")
        assert decoder.receipt == receipt
    decoder.push(b"\xf0\x9f\x98")  # one character that was begun, then one that never was
    decoder.push(b"x\xff")
    assert decoder.receipt == {"replaced": 2, "bytes_replaced": 4}


def test_an_end_inside_a_character_leaves_the_rest_to_come():
    for data in ("ä".encode(), codecs.BOM_UTF8 + b"a"):
        decoder = Decoder()
        decoder.push(data[:1])
        with pytest.raises(InvalidText, match="byte 0 is not UTF-8"):
            decoder.end()
        assert decoder.push(data[1:]) + decoder.end() == data.decode("utf-8-sig")


def test_names_of_encodings_and_what_is_none():
    for name, meant in (("UTF8", "utf-8"), ("utf-8-sig", "utf-8"), ("UTF_16LE", "utf-16-le"), ("ISO-8859-1", "latin-1"),
                        ("Windows-1252", "cp1252"), ("gbk", "gb18030")):
        assert Charset(name).encoding == meant
    for wrong in ("", "utf-7", "rot13", "zlib", "idna", "unicode_escape", "x" * 9999):
        with pytest.raises(ConfigError, match=r"encoding is .*; expected one of utf-8, "):
            Charset(wrong)
    for wrong in ("ignore", "", "surrogateescape"):
        with pytest.raises(ConfigError, match=r"errors is .*; expected strict or replace"):
            Charset(errors=wrong)
