"""What a user says in a dialogue of many turns: things told once, and other talk around them. Knows no model.

The things come from `locret_stream.evaluation.chat`, whose words no heads were trained with, and from `PREFERENCES`.
Everything is a function of the seed, the numbers and the books.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from dialogue_talk import CONFIRMING, FINDINGS, KNOWLEDGE, LOGS, PASSAGES, SLOTS, TALK

from locret_stream.evaluation.chat import Told, numbers, tools, words

MOST = 20  # things
PREFERENCES = {
    "breakfast": "smoked trout|buckwheat pancakes|pickled herring",
    "way of travelling": "the sleeper train|hitchhiking", "pastime": "crossword puzzles|jazz records|knitting",
    "birthday treat": "karaoke|fireworks|a puppet show", "ink": "dark green|royal blue|sepia",
}
OPENINGS = ["", "", "By the way: ", "Before I forget it: ", "For later: ", "You may need this one day. "]
DAEMONS = "sshd cron nginx postfix kernel systemd dockerd mariadbd".split()
LINES = ["accepted connection from 10.0.{a}.{b} port {c}", "job {c} finished in {a} ms", "worker {a} restarted",
         "disk usage at {a} percent", "GET /page/{c} 200 {b} ms", "GET /page/{c} 404 {b} ms",
         "timeout after {a} s, retry {b}", "rotated {a} files", "out of memory: killed process {c}",
         "cache hit ratio {a} percent"]


@dataclass(frozen=True)
class Said:
    """One turn of the user, what a scripted assistant replies, and what the turn tells (None: other talk)."""

    text: str
    reply: str
    tells: Told | None = None


def dialogue(seed: int, turns: int, things: int, books: list[str]) -> list[Said]:
    """So many turns, in equal shares of which one thing each is told, at a turn drawn from the share."""
    r = random.Random(f"dialogue {seed}")
    told = _things(r, things)
    places = [r.randrange(turns * n // things, turns * (n + 1) // things) for n in range(things)]
    other: dict[str, Said] = {}  # nothing is said twice
    for one in _talk(r, books):
        if not any(thing.value.lower() in f"{one.text} {one.reply}".lower() for thing in told):
            other[one.text] = one
        if len(other) == turns:
            break
    said = list(other.values())
    for place, thing in zip(places, told, strict=True):
        said[place] = Said(_telling(r, thing), r.choice(CONFIRMING) + _confirmed(thing), thing)
    return said


def _things(r: random.Random, count: int) -> list[Told]:
    """Numbers, names, places, reasons, what tools returned, preferences: no two of the same value."""
    while True:
        made = [*numbers(r, 9), *words(r, 6), *tools(r, 2), *_preferences(r, 3)]
        if len({one.value for one in made}) == MOST:
            return r.sample(made, count)


def _preferences(r: random.Random, count: int) -> list[Told]:
    made = []
    for what in r.sample(list(PREFERENCES), count):
        value = r.choice(PREFERENCES[what].split("|"))
        made.append(Told(f"My preferred {what} is {value}.", f"What is my preferred {what}?", value))
    return made


def _telling(r: random.Random, one: Told) -> str:
    return f"The workshop's tool returned this:\n\n{one.line}" if one.line[0] == "{" else r.choice(OPENINGS) + one.line


def _confirmed(one: Told) -> str:
    """The thing as the assistant repeats it, in the form of an answer to its question: "The seat of Ada is 12."."""
    asked = one.question.rstrip("?").replace("my preferred", "your preferred")
    if asked.startswith("Why is it that "):
        return f"{asked.removeprefix('Why is it that ').capitalize()} because {one.value}."
    what = asked.split(" is ", 1)[1]
    return f"{what[0].upper()}{what[1:]} is {one.value}."


def _talk(r: random.Random, books: list[str]) -> Iterator[Said]:
    """Small talk, questions of general knowledge, passages of the books and lines of a log, for ever."""
    split = [book.split() for book in books]
    while True:
        kind = r.random()
        if kind < .25:
            yield _filled(r, TALK)
        elif kind < .45:
            yield _filled(r, KNOWLEDGE)
        elif kind < .8:
            yield _filled(r, PASSAGES, text=_passage(r, r.choice(split)))
        else:
            log = _log(r)
            yield _filled(r, LOGS, text=log, finding=next(FINDINGS[event] for event in FINDINGS if event in log))


def _filled(r: random.Random, templates: list[tuple[str, str]], **slots: str) -> Said:
    """Of one of the templates (what the user says, the reply)."""
    for rows in SLOTS.values():
        slots |= r.choice(rows)
    return Said(*(template.format(**slots) for template in r.choice(templates)))


def _passage(r: random.Random, book: list[str]) -> str:
    """Some 60 to 160 words from where a sentence begins, where one does."""
    start = r.randrange(max(1, len(book) - 200))
    start = next((at + 1 for at in range(start, min(start + 40, len(book) - 1)) if book[at][-1] in ".?!"), start)
    return " ".join(book[start:start + r.randint(60, 160)])


def _log(r: random.Random) -> str:
    """A few lines of a system's log, a few seconds apart."""
    clock, lines = r.randrange(80_000), []
    for _ in range(r.randint(3, 8)):
        clock += r.randint(1, 40)
        event = r.choice(LINES).format(a=r.randint(1, 99), b=r.randint(1, 250), c=r.randint(100, 999))
        lines.append(f"{clock // 3600:02}:{clock // 60 % 60:02}:{clock % 60:02} {r.choice(DAEMONS)}: {event}")
    return "\n".join(lines)
