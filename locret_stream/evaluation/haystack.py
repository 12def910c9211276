"""The text that facts are planted in: sources of Python's standard library. Knows nothing of models, tokens or tensors.

A module is either trained on or streamed, never both. A stream is a function of its seed alone.
"""

from __future__ import annotations

import functools
import os
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from locret_stream.evaluation.facts import FORMS, HELD_OUT_FORMS, Fact, make_facts
from locret_stream.evaluation.words import is_held_out

_SKIPPED = re.compile(r"(^|/)(site-packages|lib2to3|encodings|__pycache__|pydoc_data|idlelib)(/|$)")
_TESTS = re.compile(r"(^|/)(test|tests)(/|$)")
MAX_MODULE_BYTES = 200_000


@functools.cache
def _stdlib_modules(tests: bool) -> tuple[str, ...]:
    """Listed once, because an installation of Python has tens of thousands of files, most of them of other packages."""
    root, modules = Path(sysconfig.get_path("stdlib")), []
    for folder, inner, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        inner[:] = [name for name in inner if not _SKIPPED.search((relative / name).as_posix())]
        modules += [(relative / name).as_posix() for name in names if name.endswith(".py")]
    return tuple(sorted(name for name in modules if not _SKIPPED.search(name) and bool(_TESTS.search(name)) == tests
                        and (root / name).is_file() and (root / name).stat().st_size <= MAX_MODULE_BYTES))


def training_modules() -> list[str]:
    """Paths, relative to the standard library, of the modules that models may be trained on; no tests."""
    return [name for name in _stdlib_modules(tests=False) if not is_held_out(name, one_in=2)]


def held_out_modules(tests: bool = True) -> list[str]:
    """Paths of all other modules, and with `tests` of half of the standard library's own tests."""
    names = _stdlib_modules(tests=False) + (_stdlib_modules(tests=True) if tests else ())
    return [name for name in names if is_held_out(name, one_in=2)]


def read_module(name: str) -> str:
    """The source of the module at such a path; long runs of blank lines are shortened."""
    text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8", errors="replace")
    return re.sub(r"\n{3,}", "\n\n", text)


def stdlib_lines(seed: int, modules: Sequence[str] | None = None) -> Iterator[str]:
    """Lines of the held-out modules (or of `modules`), file by file in an order drawn from `seed`, without end."""
    rng = random.Random(f"modules {seed}")
    names = list(held_out_modules() if modules is None else modules)
    while True:
        rng.shuffle(names)
        for name in names:
            yield from read_module(name).splitlines(keepends=True)


def cut(text: Iterable[str], size: int, measure: Callable[[str], int]) -> Iterator[str]:
    """Pieces of `text` until they measure `size` together. What is behind them stays in an iterator."""
    pieces, read = iter(text), 0
    while read < size and (piece := next(pieces, None)) is not None:
        yield piece
        read += measure(piece)


def plant(text: Iterable[str], sentences: Sequence[str], places: Sequence[float], measure: Callable[[str], int] = len
          ) -> Iterator[tuple[str, int | None]]:
    """Pieces of `text` with `sentences[i]` on a line of its own once `places[i]` has been read.

    Args:
        text: pieces, as a rule lines; a sentence goes between two of them, never inside one.
        places: how much of `text` goes before each sentence, as counted by `measure`.

    Yields:
        (piece, None) for text and (sentence, i) for a planted one. Sentences whose place is behind the end of `text`
        come last.
    """
    order = sorted(range(len(sentences)), key=lambda i: places[i])
    read, due, last = 0, 0, "\n"
    for piece in text:
        while due < len(order) and places[order[due]] <= read:
            yield _on_its_own_line(sentences[order[due]], last), order[due]
            last, due = "\n", due + 1
        yield piece, None
        read += measure(piece)
        last = piece or last
    for i in order[due:]:
        yield _on_its_own_line(sentences[i], last), i
        last = "\n"


def _on_its_own_line(sentence: str, before: str) -> str:
    return ("" if before.endswith("\n") else "\n") + sentence.rstrip("\n") + "\n"


def line_measure(count: Callable[[str], int]) -> Callable[[str], int]:
    """A measure of lines, given a count of tokens; it remembers its results. Blank lines measure 0: they join the
    newline before them into one token, so a stream is never shorter in tokens than it measures."""
    return functools.lru_cache(maxsize=4096)(lambda line: count(line) if line.strip() else 0)


@dataclass(frozen=True)
class PlantedStream:
    """A finite stream: `size` of text (as counted by `measure`) with facts, which are asked, and decoys of the same
    form, which never are. Iterating yields pieces of text, the same ones every time."""

    facts: Sequence[Fact]
    decoys: Sequence[Fact]
    size: int
    seed: int
    lines: Callable[[], Iterable[str]]
    measure: Callable[[str], int] = len

    @property
    def places(self) -> list[float]:
        """How much text goes before each fact, then before each decoy."""
        rng = random.Random(f"places {self.seed}")
        return [rng.random() * self.size for _ in range(len(self.facts) + len(self.decoys))]

    def __iter__(self) -> Iterator[str]:
        sentences = [fact.sentence for fact in (*self.facts, *self.decoys)]
        text = cut(self.lines(), self.size, self.measure)
        return (piece for piece, _ in plant(text, sentences, self.places, self.measure))


def planted_stream(seed: int, size: int, *, facts: int = 12, decoys: int = 110,
                   forms: Sequence[str] = (*FORMS, *HELD_OUT_FORMS), measure: Callable[[str], int] = len,
                   lines: Callable[[], Iterable[str]] | None = None) -> PlantedStream:
    """The demo's stream number `seed`: held-out entities in held-out sources of the standard library. Sentence forms
    are drawn both from those of the training and from those held out of it."""
    rng = random.Random(f"facts {seed}")
    asked = make_facts(rng, facts, forms=forms)
    unasked = make_facts(rng, decoys, forms=forms, taken=asked, share=0.25)
    return PlantedStream(asked, unasked, size, seed, lines or (lambda: stdlib_lines(seed)), measure)
