"""The texts that facts lie in: books, source code, logs and JSON of tools. Knows nothing of models or tokens.

A text is a sequence of pieces (sentences or lines), each with the white space that ends it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from locret_stream.charsets import Decoder
from locret_stream.errors import InputError
from locret_stream.evaluation.haystack import read_module, training_modules
from locret_stream.making.facts import Style
from locret_stream.making.words import FIRST, LAST, PLACES, SERVICES

LEAST_SENTENCES = 100
_SENTENCE = re.compile(r"(?<=[.;!?])\s+")
_EVENTS = ("connection opened from 10.{a}.{b}.{c}", "request GET /v1/items/{n} 200 in {m} ms", "cache miss for key {n}",
           "retrying in {m} ms", "flushed {n} rows to disk", "heartbeat from node {a}", "token refreshed for user {n}",
           "slow query took {m} ms", "scheduled task {n} finished", "disk usage at {b} percent")


class Texts:
    """Sources of pieces by style.

    Args:
        books: files of prose, of which each conversation reads a part that begins anywhere.
        decoders: of each of them; None: UTF-8, strictly.

    Raises:
        InputError: a book with fewer than 100 sentences of 20 to 400 characters, or that is no text.
    """

    def __init__(self, books: list[Path], decoders: Sequence[Decoder] | None = None):
        decoders = decoders or [Decoder(name=str(path)) for path in books]
        self._books = [_sentences(path, decoder) for path, decoder in zip(books, decoders, strict=True)]
        self._modules = training_modules()

    def pieces(self, style: Style, r: random.Random) -> Iterator[str]:
        """Pieces of one style without end."""
        if style == "prose":
            book = r.choice(self._books)
            at = r.randrange(len(book))
            while True:
                yield book[at % len(book)] + (" " if r.random() < 0.9 else "\n\n")
                at += 1
        elif style == "code":
            while True:
                yield from read_module(r.choice(self._modules)).splitlines(keepends=True)
        elif style == "log":
            while True:
                yield _log_line(r)
        else:
            while True:
                yield _json_line(r)


def _sentences(path: Path, decoder: Decoder) -> list[str]:
    text = decoder.push(path.read_bytes()) + decoder.end()
    text = re.sub(r"\s+", " ", text)
    sentences = [one for one in _SENTENCE.split(text) if 20 < len(one) < 400]
    if len(sentences) < LEAST_SENTENCES:
        raise InputError(f"{path}: found {len(sentences)} sentences of 20 to 400 characters; expected at least "
                         f"{LEAST_SENTENCES}, as in a book")
    return sentences


def _log_line(r: random.Random) -> str:
    time = f"2026-{r.randint(1, 12):02}-{r.randint(1, 28):02} {r.randint(0, 23):02}:{r.randint(0, 59):02}"
    event = r.choice(_EVENTS).format(a=r.randint(1, 99), b=r.randint(1, 99), c=r.randint(1, 255),
                                     n=r.randint(100, 99_999), m=r.randint(1, 3_000))
    return f"{time}:{r.randint(0, 59):02} {r.choice(('INFO', 'INFO', 'DEBUG', 'WARN'))} {r.choice(SERVICES)}: {event}\n"


def _json_line(r: random.Random) -> str:
    made = {"id": r.randint(100, 9_999), "kind": r.choice(("visit", "invoice", "reading", "ticket")),
            "place": r.choice(PLACES), "by": f"{r.choice(FIRST)} {r.choice(LAST)}", "value": r.randint(1, 9_999),
            "open": r.random() < 0.5}
    keys = r.sample(list(made), r.randint(3, len(made)))
    return json.dumps({key: made[key] for key in keys}) + "\n"
