"""How much two texts have in common: F1 of words, and ROUGE-L in the two ways that the benchmarks compute it. Knows no
benchmark.

Every function takes the answer that was found first and the expected one second, and gives a share in [0, 1].
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ASCII_PUNCTUATION = set(string.punctuation)
# The Chinese punctuation of LongBench and ∞Bench, by code point. What is not in it ('《', '〈', '〉', '．', '·') stays
# in an answer there, so it does here.
_CHINESE_PUNCTUATION = _ASCII_PUNCTUATION | {chr(point) for first, last in (
    (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64), (0x3001, 0x3003),
    (0x300B, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0x2013, 0x2014), (0x2018, 0x2019),
    (0x201B, 0x201F), (0x2026, 0x2027), (0xFE4F, 0xFE4F)) for point in range(first, last + 1)}


def answer_words(text: str, *, lower: bool = True) -> list[str]:
    """The words of an answer as SQuAD compares them (arXiv:1606.05250): in lower case, without punctuation and without
    "a", "an" and "the"."""
    text = text.lower() if lower else text
    bare = "".join(c for c in text if c not in _ASCII_PUNCTUATION)
    return re.sub(r"\b(?:a|an|the)\b", " ", bare).split()


def chinese_bare(text: str) -> str:
    """In lower case, without Chinese and ASCII punctuation and without spaces."""
    return "".join("".join(c for c in text.lower() if c not in _CHINESE_PUNCTUATION).split())


def chinese_tokens(text: str) -> list[str]:
    """One token for each character; letters and digits of ASCII that stand together are one token."""
    return re.findall(r"[A-Za-z0-9]+|\S", text)


def f1(found: Sequence[str], expected: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the tokens; a token counts as often as it is on both sides."""
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected)) if common else 0.0


def qa_f1(found: str, expected: str) -> float:
    """F1 of the words of two answers (SQuAD)."""
    return f1(answer_words(found), answer_words(expected))


def rouge(found: str, expected: str) -> float:
    """ROUGE-L as in the package `rouge` 1.0.1, which LongBench uses: sentences end at every full stop, and the set of
    different words in a longest common subsequence of any two sentences counts.

    An empty side is 0. Texts of any length are compared; `rouge` runs out of stack on sentences of about a thousand
    words, for which LongBench then notes 0.
    """
    sides = [[part.split() or [""] for part in text.split(".") if part] for text in (found, expected)]
    if not all(sides):
        return 0.0
    theirs, ours = sides
    common = {sentence[at] for sentence in ours for other in theirs
              for at in _common(sentence, other, keep_expected=True)}
    precision, recall = (len(common) / len({word for sentence in side for word in sentence}) for side in sides)
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l(found: str, expected: str) -> float:
    """ROUGE-L as in the package `rouge-score` 0.1.2 without stemming: F of the longest common subsequence."""
    theirs, ours = _rouge_tokens(found), _rouge_tokens(expected)
    return _f(len(_common(ours, theirs)), len(theirs), len(ours))


def rouge_l_sum(found: str, expected: str) -> float:
    """ROUGE-Lsum as in `rouge-score` 0.1.2 without stemming: a sentence is a line, each expected line is compared with
    all lines of the answer, and no token counts more often than it is on either side."""
    theirs, ours = ([_rouge_tokens(line) for line in text.split("\n") if line] for text in (found, expected))
    left = Counter(token for line in theirs for token in line)
    hits = 0
    for line in ours:
        for at in sorted({at for other in theirs for at in _common(line, other)}):
            if left[line[at]] > 0:
                left[line[at]] -= 1
                hits += 1
    return _f(hits, sum(map(len, theirs)), sum(map(len, ours)))


def _f(common: int, found: int, expected: int) -> float:
    return 2 * common / (found + expected) if common else 0.0


def _rouge_tokens(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _common(expected: Sequence[str], found: Sequence[str], *, keep_expected: bool = False) -> list[int]:
    """The indices of `expected`, ascending, of a longest common subsequence with `found`.

    There may be several subsequences. They are read from the end; where either a token of `expected` or one of `found`
    could be skipped, the expected one is skipped (as in `rouge-score`), or with `keep_expected` the found one (as in
    `rouge`).
    """
    lengths = [[0] * (len(found) + 1)]
    for token in expected:
        above, row = lengths[-1], [0]
        for j, other in enumerate(found):
            row.append(above[j] + 1 if token == other else max(above[j + 1], row[j]))
        lengths.append(row)
    at, i, j = [], len(expected), len(found)
    while i and j:
        fewer_expected, fewer_found = lengths[i - 1][j], lengths[i][j - 1]
        if expected[i - 1] == found[j - 1]:
            i, j = i - 1, j - 1
            at.append(i)
        elif fewer_found > fewer_expected or (keep_expected and fewer_found == fewer_expected):
            j -= 1
        else:
            i -= 1
    return at[::-1]
