"""Words of texts and of questions, as the index compares them. Knows no index."""

from __future__ import annotations

import itertools
import re
import unicodedata

_WORD = re.compile(r"\w+")
_CLITIC = re.compile(r"(?<=\w['’])[^\W\d_]\b|\b[^\W\d_](?=['’]\w\w)")  # "Ann's", "l'eau": a letter that tells nothing
WIDE = re.compile("[\u3005\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
                   "\U00020000-\U0003ffff]+")
COMMON = frozenset("""a about above after again against all am an and any are as at be because been before being below
between both but by can could did do does doing down during each few for from further had has have having he her here
hers herself him himself his how i if in into is it its itself just me more most my myself no nor not now of off on once
only or other our ours ourselves out over own same she should so some such than that the their theirs them themselves
then there these they this those through to too under until up very was we were what when where which while who whom why
will with would you your yours yourself yourselves""".split())  # words that questions have whatever they ask
_END_OF_LINE = "\n\r\u2028\u2029"
_ASKS = "?？؟"
_STATES = ".!。！"


class Question:
    """A question in words.

    Attributes:
        words: all of them, in their order.
    """

    def __init__(self, text: str):
        self.words = words_of(text)
        self._all, self._joined = frozenset(self.words), f" {' '.join(self.words)} "
        # What comes behind the last word: a full stop only where the question ends with one, as a request does.
        ends = _ASKS + _END_OF_LINE + (_STATES if text.rstrip()[-1:] in tuple(_STATES) else "")
        self._pattern = rf"[^\w{_END_OF_LINE}{_STATES}]*([{ends}]|$)"

    def has_all(self, words: list[str]) -> bool:
        """Whether it has all of these words."""
        return self._all.issuperset(words)

    def ends(self, words: list[str]) -> bool:
        """Whether these words end with the question's."""
        return words[-len(self.words):] == self.words

    def is_asked_in(self, text: str) -> bool:
        """Whether a passage has all its words, one behind the other, and then a question mark, or nothing more in that
        line. "Port of ridge is 22" has those of "Port of ridge?", and tells."""
        plain = _plain(text)
        if self._joined not in f" {' '.join(_WORD.findall(plain))} ":
            return False
        words = r"\W+".join(map(re.escape, self.words))
        return re.search(rf"(?<!\w){words}{self._pattern}", plain) is not None


def _plain(text: str) -> str:
    return paired(_CLITIC.sub("", unicodedata.normalize("NFC", text.lower())))


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case, one behind the other."""
    return _WORD.findall(_plain(text))


def as_query(word: str) -> str:
    """What FTS5 looks for; one character alone also begins a pair."""
    return f'"{word}"*' if len(word) == 1 and WIDE.match(word) else f'"{word}"'


def paired(text: str) -> str:
    """Runs of Chinese, Japanese and Korean characters as overlapping pairs, which are found as words are: nothing in a
    run says where its words begin."""
    return WIDE.sub(lambda run: f" {' '.join(map(''.join, itertools.pairwise(run[0]))) or run[0]} ", text)
