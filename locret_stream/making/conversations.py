"""One conversation: a text with facts in it, read in one or more user's turns, or talk that tells them, and questions
about the facts. Knows how long texts are by a function of the caller's, and no model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from locret_stream.making.facts import MadeFact, Style, facts
from locret_stream.making.talk import Turn, talk
from locret_stream.making.texts import Texts

STYLES: tuple[Style | None, ...] = (  # None: talk
    "prose", "prose", "prose", "prose", "code", "log", "json", None, None, None, None, None)
ACKNOWLEDGEMENTS = ("OK.", "OK.", "OK.", "Understood.", "Noted.", "I have read it.", "Thank you, I will remember that.")
TURNS = 8  # of talk in which as much is asked early as in one turn of a text
SYSTEMS = ("You are a helpful assistant.", "You remember what you are told.",
           "You answer questions about long texts.")


@dataclass(frozen=True, slots=True)
class Making:
    """How conversations are made.

    Args:
        tokens: (least, most) of the text; lengths are drawn with equal chances for each doubling.
        facts: (least, most) in one conversation.
        asked_early: chance that a part of the facts is asked before the text goes on.
        system: chance of a system message.
    """

    tokens: tuple[int, int] = (500, 4000)
    facts: tuple[int, int] = (3, 8)
    asked_early: float = 0.25
    system: float = 0.15


@dataclass(frozen=True, slots=True)
class Question:
    """A question in a conversation: the number of the message that answers it, and what it is about."""

    message: int
    fact: MadeFact


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages ({"role", "content"}, and "weight": 0 for replies that teach nothing), and the questions among
    them.

    Args:
        telling: (number of a user's message, fact) where that message and its reply tell the fact, or a part of it,
            and nothing else; facts that are in no such message lie in texts.
    """

    messages: list[dict[str, Any]]
    questions: list[Question]
    telling: list[tuple[int, MadeFact]] = field(default_factory=list)

    def without(self, wrong: set[int]) -> Conversation:
        """The same without the questions whose answers are these messages, and without the facts that only these ask
        for: what is told and attended to by no answer would teach heads to drop what is told."""
        lost = {one.fact for one in self.questions} - {
            one.fact for one in self.questions if one.message not in wrong}
        dropped = {number - back for number in wrong for back in (0, 1)}
        dropped |= {number + on for number, fact in self.telling if fact in lost for on in (0, 1)}
        in_texts = [sentence for fact in lost - {fact for _, fact in self.telling} for sentence in fact.told]
        messages = [message if message["role"] != "user" else {**message, "content": _cut(message["content"], in_texts)}
                    for message in self.messages]
        dropped |= {number + on for number, message in enumerate(messages) if not message["content"] for on in (0, 1)}
        kept = [number for number in range(len(messages)) if number not in dropped]
        place = {number: at for at, number in enumerate(kept)}
        return Conversation([messages[number] for number in kept],
                            [Question(place[one.message], one.fact) for one in self.questions if one.message in place],
                            [(place[number], fact) for number, fact in self.telling if number in place])


def _cut(text: str, sentences: list[str]) -> str:
    """The text without these sentences, each once, with the white space behind it."""
    for sentence in sentences:
        before, found, behind = text.partition(sentence)
        text = before + behind.lstrip() if found else text
    return text.strip()


def conversation(texts: Texts, r: random.Random, measure: Callable[[str], int], making: Making = Making()
                 ) -> Conversation:
    """A conversation drawn from `r`.

    Args:
        measure: tokens of a piece of text.
    """
    style = r.choice(STYLES)
    least, most = making.tokens
    length = round(math.exp(r.uniform(math.log(least), math.log(most))))
    told = facts(r, r.randint(*making.facts), style)
    if style is None:
        turns, early = talk(texts, r, measure, length, told), making.asked_early / TURNS
    else:
        turns, early = _read(style, texts, r, measure, length, told), making.asked_early
    messages: list[dict[str, Any]] = []
    questions: list[Question] = []
    telling: list[tuple[int, MadeFact]] = []
    if r.random() < making.system:
        messages.append({"role": "system", "content": r.choice(SYSTEMS)})
    known: list[MadeFact] = []
    for number, turn in enumerate(turns, 1):
        if turn.tells is not None:
            telling.append((len(messages), turn.tells))
        messages += [{"role": "user", "content": turn.text.strip()},
                     {"role": "assistant", "content": turn.reply, "weight": 0}]
        known += turn.facts
        last = number == len(turns)
        if last or (known and r.random() < early):
            asked = list(known) if last else r.sample(known, r.randint(1, len(known)))
            r.shuffle(asked)
            for fact in asked:
                messages += [{"role": "user", "content": fact.question}, {"role": "assistant", "content": fact.answer}]
                questions.append(Question(len(messages) - 1, fact))
            known = [fact for fact in known if fact not in asked or r.random() < 0.3]  # some are asked again
    return Conversation(messages, questions, telling)


def _read(style: Style, texts: Texts, r: random.Random, measure: Callable[[str], int], length: int,
          told: list[MadeFact]) -> list[Turn]:
    """A text with the facts in it, in one to three turns."""
    filling: list[str] = []
    source, size = texts.pieces(style, r), sum(measure(sentence) for fact in told for sentence in fact.told)
    while size < length:
        filling.append(next(source))
        size += measure(filling[-1])
    turns = max(1, min(r.choice((1, 1, 2, 3)), len(filling)))
    ends = [*sorted(r.sample(range(1, len(filling)), turns - 1)), len(filling)] if turns > 1 else [len(filling)]
    placed: dict[int, list[str]] = {}  # in front of the piece of that number
    complete: dict[int, list[MadeFact]] = {}
    for fact in told:
        at = r.randrange(len(filling) + 1)
        for sentence in fact.told:
            placed.setdefault(at, []).append(sentence)
            last, at = at, min(len(filling), at + r.randint(0, 3))
        turn = next(number for number, end in enumerate(ends) if last <= end - (number < turns - 1))
        complete.setdefault(turn, []).append(fact)
    parts, begin = [], 0
    for number, end in enumerate(ends):
        text = ""
        for at in range(begin, end + (number == turns - 1)):
            for sentence in placed.get(at, ()):
                text += _set_in(sentence, text, style)
            text += filling[at] if at < end else ""
        if text.strip():  # source code may have a turn of blank lines
            parts.append(Turn(text, r.choice(ACKNOWLEDGEMENTS), tuple(complete.get(number, []))))
        begin = end
    return parts


def _set_in(sentence: str, before: str, style: Style) -> str:
    """The sentence with white space around it as its surroundings need."""
    if style == "prose":
        return ("" if not before or before[-1].isspace() else " ") + sentence + " "
    return ("" if not before or before.endswith("\n") else "\n") + sentence + "\n"
