"""An index of what was read, by words: SQLite's FTS5 ranks passages by BM25. It lies in a temporary file without a
name, which is gone with the process, and is made again from the log whenever it is needed.

It holds the passages as text, so of a session that is encrypted it stays in memory.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from locret_stream.errors import ConfigError
from locret_stream.recall.passages import Cut, Cutter
from locret_stream.recall.words import COMMON, WIDE, Question, as_query, paired, words_of

MOST_WORDS = 64  # of a question: the last ones, as a pasted text comes before what is asked about it
CANDIDATES = 64  # passages of which those that fit are taken
MOST_COMPARED = 16  # of those that fit, to see which words what tells has
MOST_READ = 1024  # passages that are looked at for these
LEAST_SHARE = 0.5  # of the fit of the best passage: others mostly name another thing, which small models confuse
LEAST_FIT = 0.2  # of what a word counts that one passage alone has; repeated questions make their own words common
NEAR = 64  # passages, of which the first may depend on what the last has: far more than begin in one of the longest
COMMON_SHARE = 0.25  # of what BM25 lets these count: in a text of another kind, such as code, they are as rare as names
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


class Candidate(NamedTuple):
    """How well a passage fits, for the order in which it is taken and for whether it is taken at all."""

    rank: float
    fit: float
    passage: Passage


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
        """The passages that fit the words of a question best and have at most `most` tokens together, a line break
        between any two included, in the order in which they were read. Of equal ones the newest is found alone. After
        the best one comes the newest that has as many telling words as any: what was told anew has them too, and may
        fit less well only because it stands among others.

        Words of `COMMON` count less than others, and alone only where no passage has another word of the question. A
        passage that has no word beside those of the question tells nothing. One in which the question itself was asked
        comes behind others: it has all the words, and what it knows is what was answered then. If it ends with the
        question, the passage behind it is read with it. Left out is what fits less than `LEAST_SHARE` as well as the
        best passage, or less than `LEAST_FIT`: it shares only words that many have.

        Args:
            measure: tokens of a text.
        """
        asked = Question(question)
        words = list(dict.fromkeys(reversed(asked.words)))[:MOST_WORDS]
        if not words:
            return []
        with self._lock:
            (count,) = self._db.execute("select count(*) from passages").fetchone()
            found = self._candidates(asked, self._ranked(words))
            found.sort(key=lambda one: -one.rank)  # stable
            least = max(LEAST_SHARE * found[0].rank, LEAST_FIT * _weight_of(1, count)) if found else 0.0
            fitting = [one.passage for one in found if one.fit >= least]
            newest = self._newest_like(fitting, asked, words, count) if fitting else None
        if newest is not None:
            fitting.insert(1, newest)
        chosen, left = list[Passage](), most
        for passage in fitting:
            size = measure(passage.text) + bool(chosen)
            if size <= left and not any(_overlap(passage, one) for one in chosen):
                chosen.append(passage)
                left -= size
        return sorted(chosen)

    def _ranked(self, words: list[str]) -> list[tuple[float, int]]:
        """How well the passages that have some of the words fit them, and their starts, the best first."""
        def fits(some: list[str]) -> list[tuple[float, int]]:
            wanted = " OR ".join(map(as_query, some))
            return self._db.execute("select -rank, rowid from words where words match ? order by rank, rowid desc "
                                    "limit ?", (wanted, MOST_READ)).fetchall()

        telling = [word for word in words if word not in COMMON]
        if len(telling) in (0, len(words)) or not (found := fits(telling)):
            return fits(words)
        whole = {start: fit for fit, start in fits(words)}
        both = [(fit + COMMON_SHARE * (whole.get(start, fit) - fit), start) for fit, start in found]
        return sorted(both, key=lambda row: (-row[0], -row[1]))

    def _newest_like(self, fitting: list[Passage], asked: Question, words: list[str], count: int) -> Passage | None:
        """Of these passages, the one with the most telling words of the question shows which words what tells has. The
        newest passage that has these, too. Passages in which the question was asked do not count: they have all."""
        telling = [passage.start for passage in fitting[:MOST_COMPARED] if not asked.is_asked_in(passage.text)]
        starts = telling or [passage.start for passage in fitting[:MOST_COMPARED]]
        weights, having = dict.fromkeys(starts, 0.0), {start: list[str]() for start in starts}
        within = f"words match ? and rowid in ({', '.join(map(str, starts))})"
        for query in (as_query(word) for word in words if word not in COMMON):
            found = [start for (start,) in self._db.execute(f"select rowid from words where {within}", (query,))]
            if found:
                (many,) = self._db.execute("select count(*) from words where words match ?", (query,)).fetchone()
            for start in found:
                weights[start] += _weight_of(many, count)
                having[start].append(query)
        has = having[max(starts, key=weights.__getitem__)]
        if not has:
            return None
        for start, ids, text in self._db.execute(
                "select start, ids, passages.text from words join passages on passages.start = words.rowid where words "
                "match ? order by words.rowid desc limit ?", (" AND ".join(has), CANDIDATES)):
            if not asked.has_all(words_of(text)) and not asked.is_asked_in(text):
                return Passage(start, np.frombuffer(ids, "<i4").tolist(), text)
        return None

    def _candidates(self, asked: Question, ranked: list[tuple[float, int]]) -> list[Candidate]:
        """The best of these passages, each text once, and how well each fits. Ranked before they are read, as many have
        a common word."""
        found, seen = list[Candidate](), set[str]()
        for fit, start in ranked:
            ids, text = self._db.execute("select ids, text from passages where start = ?", (start,)).fetchone()
            has = words_of(text)
            plain = " ".join(has)
            if plain not in seen and not asked.has_all(has):
                passage = Passage(start, np.frombuffer(ids, "<i4").tolist(), text)
                is_asked = asked.is_asked_in(text)
                answered = self._with_next(passage, asked) if is_asked and asked.ends(has) else passage
                found.append(Candidate(fit / 2 if is_asked else fit, fit if answered else fit / 2, answered or passage))
            seen.add(plain)
            if len(found) == CANDIDATES:
                break
        return found

    def _with_next(self, passage: Passage, asked: Question) -> Passage | None:
        """A passage that ends with a question, and the one right behind it, which may answer; None if that has only
        words of the question again."""
        behind = passage.start + len(passage.ids)
        row = self._db.execute("select ids, text from passages where start = ?", (behind,)).fetchone()
        if row is None or asked.has_all(words_of(row[1])):
            return None
        return Passage(passage.start, passage.ids + np.frombuffer(row[0], "<i4").tolist(), f"{passage.text} {row[1]}")

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
            pairs = paired(text) if WIDE.search(text) else None
            self._db.execute("insert into passages values (?, ?, ?, ?, ?)",
                             (start, seen, np.asarray(ids, "<i4").tobytes(), text, pairs))
            self._db.execute("insert into words (rowid, text) values (?, ?)", (start, pairs or text))
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


def _overlap(one: Passage, other: Passage) -> bool:
    return one.start < other.start + len(other.ids) and other.start < one.start + len(one.ids)


def _weight_of(many: int, count: int) -> float:
    """What BM25 lets a word count that `many` of `count` passages have, where these are of average length."""
    return max(math.log((count - many + 0.5) / (many + 0.5)), 0.0)


def _same(held: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How long two sequences are the same."""
    least = min(len(held), len(other))
    different = np.flatnonzero(held[:least] != other[:least])
    return int(different[0]) if len(different) else least
