"""An index of what was read, by words: SQLite's FTS5 ranks passages by BM25. It lies in a temporary file without a
name, which is gone with the process, and is made again from the log whenever it is needed.

It holds the passages as text, so of a session that is encrypted it stays in memory.
"""

from __future__ import annotations

import itertools
import math
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from locret_stream.errors import ConfigError
from locret_stream.recall.passages import Cut, Cutter

MOST_WORDS = 64  # of a question: the last ones, as a pasted text comes before what is asked about it
CANDIDATES = 64  # passages of which those that fit are taken
MOST_READ = 1024  # passages that are looked at for these
LEAST_SHARE = 0.5  # of the fit of the best passage: others mostly name another thing, which small models confuse
LEAST_FIT = 0.2  # of what a word counts that one passage alone has; repeated questions make their own words common
NEAR = 64  # passages, of which the first may depend on what the last has: far more than begin in one of the longest
_WORD = re.compile(r"\w+")
_CLITIC = re.compile(r"(?<=\w['’])\w\b|\b\w(?=['’]\w\w)")  # "Ann's", "l'eau": a letter that tells nothing alone
_WIDE = re.compile("[\u3005\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
                   "\U00020000-\U0003ffff]+")
COMMON = frozenset("""a about above after again against all am an and any are as at be because been before being below
between both but by can could did do does doing down during each few for from further had has have having he her here
hers herself him himself his how i if in into is it its itself just me more most my myself no nor not now of off on once
only or other our ours ourselves out over own same she should so some such than that the their theirs them themselves
then there these they this those through to too under until up very was we were what when where which while who whom why
will with would you your yours yourself yourselves""".split())  # words of questions whatever is asked, as is common
_TABLES = """
create table passages (start integer primary key, seen integer, ids blob not null, text text not null, paired text);
create view searched as select start, coalesce(paired, text) as text from passages;
create virtual table words using fts5 (text, content='searched', content_rowid='start',
                                       tokenize='porter unicode61 remove_diacritics 2');
"""


class Passage(NamedTuple):
    """What was read from position `start` on: its ids and its text."""

    start: int
    ids: list[int]
    text: str


class _Found(NamedTuple):
    """A passage, how well it fits the words of a question, and which of them it has."""

    fit: float
    passage: Passage
    has: set[str]


class Index:
    """Passages of one stream. Safe to use from several threads, one at a time.

    Args:
        cutter: makes one that begins at a position.
        private: keep it in memory; otherwise it may grow into a temporary file.

    Raises:
        ConfigError: this Python's SQLite has no FTS5.

    Attributes:
        end: position behind the last id that was added.
        bytes: of the temporary file, or in memory: the passages and their words. What is forgotten leaves room in it.
    """

    def __init__(self, cutter: Callable[[int], Cutter], *, private: bool = False):
        self._new_cutter, self._private, self._lock = cutter, private, threading.Lock()
        self._cutter, self.end, self.bytes = cutter(0), 0, 0
        self._db = self._connect()
        try:
            self._db.executescript(_TABLES)
        except sqlite3.OperationalError as error:
            self._db.close()
            raise ConfigError(f"recall needs SQLite with FTS5, and this Python's has {error}; expected another build "
                              "of Python, or no recall") from error

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(":memory:" if self._private else "", check_same_thread=False)
        db.execute("pragma synchronous = off")
        db.execute("pragma journal_mode = off")
        if self._private:
            db.execute("pragma temp_store = memory")  # what it sorts would go into a file
        return db

    def add(self, ids: Sequence[int]) -> None:
        """Append ids behind `end`."""
        with self._lock:
            self._write(self._cutter.push(ids))
            self.end += len(ids)

    def search(self, question: str, most: int, measure: Callable[[str], int]) -> list[Passage]:
        """The passages that fit the words of a question best and have at most `most` tokens together, in the order in
        which they were read. Of equally good ones the newer is better, of equal ones the newest is found alone.

        The words of `COMMON` count where the question has no others. A passage that has no word beside those of the
        question tells nothing, and one in which the question itself was asked counts half: it has all the words, and
        what it knows is what was answered then. One that has some of the words that a better one has, and lacks
        others, is mostly about another thing, and counts less (`_worth`). Left out is what fits less than
        `LEAST_SHARE` as well as the best passage, or less than `LEAST_FIT`: it shares only common words.

        Args:
            measure: tokens of a text.
        """
        asked = _words(question)
        words = [word for word in asked if word not in COMMON] or asked
        terms = [f'"{word}"*' if len(word) == 1 and _WIDE.match(word) else f'"{word}"'
                 for word in list(dict.fromkeys(reversed(words)))[:MOST_WORDS]]
        if not terms:
            return []
        with self._lock:
            found = self._candidates(asked, terms)
            (count,) = self._db.execute("select count(*) from passages").fetchone()
            weights = {term: _weight(count, self._count(term)) for term in terms}
        if not found:
            return []
        least = max(LEAST_SHARE * found[0].fit, LEAST_FIT * _weight(count, 1))
        return sorted(_choose(found, weights, least, most, measure))

    def _candidates(self, asked: list[str], terms: list[str]) -> list[_Found]:
        """The best passages for the words of a question, each text once, the best first. Ranked before they are read,
        as many have a common word."""
        rows = self._db.execute(
            "select fit, start, ids, text from (select rowid, -rank as fit from words where words match ? "
            "order by rank, rowid desc limit ?) join passages on start = rowid order by fit desc, start desc",
            (" OR ".join(terms), MOST_READ)).fetchall()
        whole, found, seen = " ".join(asked), list[_Found](), set[str]()
        for fit, start, ids, text in rows:
            words = _words(text)
            plain = " ".join(words)
            if plain not in seen and not set(words) <= set(asked):
                found.append(_Found(fit / 2 if whole in plain else fit,
                                    Passage(start, np.frombuffer(ids, "<i4").tolist(), text), set()))
            seen.add(plain)
            if len(found) == CANDIDATES:
                break
        starts = [one.passage.start for one in found]
        places = ", ".join("?" * len(starts))
        for term in terms:  # SQLite says of a passage how well it fits, but not which words it has
            having = {start for (start,) in self._db.execute(
                f"select rowid from words where words match ? and rowid in ({places})", (term, *starts))}
            for one in found:
                if one.passage.start in having:
                    one.has.add(term)
        return sorted(found, key=lambda one: -one.fit)  # stable

    def _count(self, term: str) -> int:
        """How many passages have a word."""
        (count,) = self._db.execute("select count(*) from words where words match ?", (term,)).fetchone()
        return int(count)

    def truncate(self, end: int) -> None:
        """Forget all ids from position `end` on."""
        with self._lock:
            if end < self.end:
                self._cut_back(end)

    def keep_shared(self, ids: NDArray[np.int32]) -> int:
        """Forget all but the first ids that are those of `ids` [n], too; returns `end`. With the rest of them added it
        holds these and no others, and what is the same is not cut again."""
        with self._lock:
            self._cut_back(self._shared(ids))
            return self.end

    def copy(self) -> Index:
        """Another index of the same passages, which goes on by itself."""
        twin = Index(self._new_cutter, private=self._private)
        with self._lock:
            self._db.backup(twin._db)
            twin._cutter, twin.end, twin.bytes = self._new_cutter(self._cutter.start), self.end, self.bytes
            twin._cutter.push(self._cutter.ids)
        return twin

    def close(self) -> None:
        """Drop everything. Idempotent."""
        with self._lock:
            self._db.close()
            self.bytes = 0

    def _write(self, cuts: Iterable[Cut]) -> None:
        for start, ids, text, seen in cuts:
            paired = _paired(text) if _WIDE.search(text) else None
            self._db.execute("insert into passages values (?, ?, ?, ?, ?)",
                             (start, seen, np.asarray(ids, "<i4").tobytes(), text, paired))
            self._db.execute("insert into words (rowid, text) values (?, ?)", (start, paired or text))
        self._db.commit()
        (pages,), (size,) = (self._db.execute(f"pragma page_{what}").fetchone() for what in ("count", "size"))
        self.bytes = pages * size

    def _cut_back(self, end: int) -> None:
        """Drop the passages whose ends depend on what is behind `end`, and cut what is left of them again."""
        (begin,) = self._db.execute("select min(start) from (select start, seen from passages where start < ? "
                                    "order by start desc limit ?) where seen > ?", (end, NEAR, end)).fetchone()
        if begin is None:
            begin = self._cutter.start if end >= self._cutter.start else 0
        ids = self._ids_from(begin)[:end - begin]
        for start, text in self._db.execute("select start, text from searched where start >= ?", (begin,)).fetchall():
            self._db.execute("insert into words (words, rowid, text) values ('delete', ?, ?)", (start, text))
        self._db.execute("delete from passages where start >= ?", (begin,))
        self._cutter, self.end = self._new_cutter(begin), end
        self._write(self._cutter.push(ids))

    def _ids_from(self, start: int) -> list[int]:
        """All ids from the passage that begins there on."""
        rows = self._db.execute("select ids from passages where start >= ? order by start", (start,)).fetchall()
        return np.frombuffer(b"".join(blob for (blob,) in rows), "<i4").tolist() + self._cutter.ids

    def _shared(self, ids: NDArray[np.int32]) -> int:
        """How many of the first ids are those that are held."""
        for start, blob in self._db.execute("select start, ids from passages order by start"):
            held = np.frombuffer(blob, "<i4")
            other = ids[start:start + len(held)]
            if len(other) < len(held) or (other != held).any():
                return start + _same(held, other)
        return self._cutter.start + _same(np.asarray(self._cutter.ids, "<i4"), ids[self._cutter.start:])


def _words(text: str) -> list[str]:
    return _WORD.findall(_paired(_CLITIC.sub("", unicodedata.normalize("NFC", text.lower()))))


def _paired(text: str) -> str:
    """Runs of Chinese, Japanese and Korean characters as overlapping pairs, which are found as words are: nothing in a
    run says where its words begin."""
    return _WIDE.sub(lambda run: f" {' '.join(map(''.join, itertools.pairwise(run[0]))) or run[0]} ", text)


def _weight(count: int, having: int) -> float:
    """What BM25 lets a word count that `having` of `count` passages have, where these are of average length."""
    return max(1e-6, math.log((count - having + 0.5) / (having + 0.5)))


def _choose(found: list[_Found], weights: dict[str, float], least: float, most: int,
            measure: Callable[[str], int]) -> Iterator[Passage]:
    """One passage after the other, each the one that is worth most beside those before it, and `least` at least, as
    long as there is room. Of equally good ones the first."""
    told, left = list[set[str]](), most
    while found:
        worths = [_worth(one, told, weights) for one in found]
        worth = max(worths)
        if worth < least:
            return
        best = found.pop(worths.index(worth))
        size = measure(best.passage.text)
        if size <= left:
            yield best.passage
            told.append(best.has)
            left -= size


def _worth(one: _Found, told: list[set[str]], weights: dict[str, float]) -> float:
    """How well a passage fits beside better ones, which have the words `told`: its fit, less the share of its words
    that one of them has, too, times the share of the words of that one that it lacks. Beside "The key of Ann is 7"
    little is left of "The key of Bob is 8" for the key of Ann, but all of a later "From today on the key of Ann is 9".
    """
    def weight(words: set[str]) -> float:
        return sum(weights[word] for word in words)

    repeated = (weight(one.has & other) / weight(one.has) * weight(other - one.has) / weight(other)
                for other in told if other) if one.has else ()
    return one.fit * (1 - max(repeated, default=0.0))


def _same(held: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How long two sequences are the same."""
    least = min(len(held), len(other))
    different = np.flatnonzero(held[:least] != other[:least])
    return int(different[0]) if len(different) else least
