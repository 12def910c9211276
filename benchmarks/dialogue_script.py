"""What a user says in a dialogue of many turns: things told once, and other talk around them. Knows no model.

The things come from `locret_stream.evaluation.chat`, whose words no heads were trained with, and from `PREFERENCES`.
Everything is a function of the seed, the numbers and the books.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from locret_stream.evaluation.chat import Told, numbers, tools, words

MOST = 20  # things
PREFERENCES = {
    "breakfast": "smoked trout|buckwheat pancakes|pickled herring",
    "way of travelling": "the sleeper train|hitchhiking", "pastime": "crossword puzzles|jazz records|knitting",
    "birthday treat": "karaoke|fireworks|a puppet show", "ink": "dark green|royal blue|sepia",
}
OPENINGS = ["", "", "By the way: ", "Before I forget it: ", "For later: ", "You may need this one day. "]
TALK = """I spent the morning {doing} and now I am {mood}. How is your day?
Do you think I should go {doing} this weekend, even if it rains?
My neighbour's {animal} kept me awake all night. What would you do?
I feel {mood} today and I do not know why. Cheer me up a little, please.
A friend asked me to go {doing} with her. I have never done it. Is it hard to learn?
I am thinking of getting a {animal}. Is that a good idea for somebody who lives in a small flat?
We had {dish} for dinner and everybody wanted more. What goes well with it?
Thanks, that helps. I was {mood} about it. Let us talk about something else.
Tell me a short joke about a {animal}.
I am {mood} because my train is late again. What can I do to pass the time?
What would you name a {animal} that sleeps all day?
My sister says that {doing} is a waste of time. I disagree. What do you say?""".splitlines()
KNOWLEDGE = """What is the capital of {country}?
Can you explain {concept} in one or two sentences?
How do I make {dish} for four people?
What language do they speak in {country}?
What do I need for {doing}?
Why is {concept} important?
What does a {animal} eat?
I would like to visit {country} next year. What should I see there?
Who discovered {concept}?
How long does a {animal} live?""".splitlines()
PASSAGES = ["What do you think of this?\n\n{text}", "I read this last night:\n\n{text}\n\nWhat is it about?",
            "{text}\n\nDo you like how that is written?", "Please say in one sentence what happens here.\n\n{text}"]
LOGS = ["Does anything look wrong here?\n\n{text}", "This is what the server wrote today:\n\n{text}\n\nIs it healthy?",
        "{text}\n\nWhat does that mean?"]
SLOTS = {name: listed.split("|") for name, listed in {
    "doing": "swimming|painting|hiking|baking|sailing|dancing|gardening|climbing|cycling|singing|skating|sewing",
    "mood": "tired|happy|a bit sad|curious|nervous|very hungry|proud|bored|hopeful|in a hurry",
    "animal": "parrot|cat|tortoise|donkey|rabbit|puppy|goldfish|peacock|lizard|rooster",
    "dish": "risotto|goulash|pea soup|paella|lasagne|apple pie|curry|moussaka|dumplings|ratatouille",
    "country": "Peru|Norway|Kenya|Portugal|Vietnam|Canada|Poland|Morocco|Chile|Iceland|Japan|Greece",
    "concept": "photosynthesis|gravity|inflation|electricity|evolution|plate tectonics|the printing press|vaccination"
               "|the water cycle|radio waves|the theory of relativity|penicillin",
}.items()}
DAEMONS = "sshd cron nginx postfix kernel systemd dockerd mariadbd".split()
LINES = ["accepted connection from 10.0.{a}.{b} port {c}", "job {c} finished in {a} ms", "worker {a} restarted",
         "disk usage at {a} percent", "GET /page/{c} 200 {b} ms", "GET /page/{c} 404 {b} ms",
         "timeout after {a} s, retry {b}", "rotated {a} files", "out of memory: killed process {c}",
         "cache hit ratio {a} percent"]


@dataclass(frozen=True)
class Said:
    """One turn of the user, and what it tells (None: other talk)."""

    text: str
    tells: Told | None = None


def dialogue(seed: int, turns: int, things: int, books: list[str]) -> list[Said]:
    """So many turns, in equal shares of which one thing each is told, at a turn drawn from the share."""
    r = random.Random(f"dialogue {seed}")
    told = _things(r, things)
    places = [r.randrange(turns * n // things, turns * (n + 1) // things) for n in range(things)]
    other: dict[str, None] = {}  # nothing is said twice
    for text in _talk(r, books):
        if not any(one.value.lower() in text.lower() for one in told):
            other[text] = None
        if len(other) == turns:
            break
    said = [Said(text) for text in other]
    for place, one in zip(places, told, strict=True):
        said[place] = Said(_telling(r, one), one)
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


def _talk(r: random.Random, books: list[str]) -> Iterator[str]:
    """Small talk, questions of general knowledge, passages of the books and lines of a log, for ever."""
    split = [book.split() for book in books]
    while True:
        kind = r.random()
        if kind < .25:
            yield _filled(r, r.choice(TALK))
        elif kind < .45:
            yield _filled(r, r.choice(KNOWLEDGE))
        elif kind < .8:
            yield r.choice(PASSAGES).format(text=_passage(r, r.choice(split)))
        else:
            yield r.choice(LOGS).format(text=_log(r))


def _filled(r: random.Random, template: str) -> str:
    return template.format(**{name: r.choice(listed) for name, listed in SLOTS.items()})


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
