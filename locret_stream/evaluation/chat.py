"""Facts in plain sentences with questions as people ask a chat model, whose free answers count where they contain what
was told. Knows no model. No word, relation or wording is one that `making` trains heads with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from locret_stream.evaluation.haystack import cut, plant
from locret_stream.evaluation.published import Question

ANSWER_TOKENS = 32
METRIC = "ruler/string_match_all"  # the answer contains it, whatever its case

RELATIONS = """door code of the library|pass key of the museum|phone extension of Doctor Alvarez|seat number of Maria
serial number of the telescope|account number of Mr. Hopkins|locker number of Samuel|order number of the piano
room number of Professor Lin|flight number of Captain Anders|alarm code of the gallery|price of the red carpet
badge number of Nurse Okafor|box number of the witness|voucher number of the theatre|file number of the Baxter case
platform number of the night express|gate code of the observatory""".replace("\n", "|").split("|")
WOMEN = "Amara Beatrix Chiara Dagny Emeka Fatima Ghislaine Hedda Ioana Jolanta".split()
FAMILIES = "Achterberg Bellweather Castellano Dunmore Ekström Fairbanks Garrison Hathaway Ivanova Jorgensen".split()
OFFICES = """mayor of Port Ellery|owner of the circus|captain of the Meridian|teacher of the choir|editor of the Gazette
guide of the expedition|sponsor of the hospital|driver of the blue bus""".replace("\n", "|").split("|")
THINGS = """spare key|ruby necklace|old contract|metal detector|first edition|green suitcase|passport|wedding cake
""".strip().split("|")
SPOTS = """under the stairs|behind the clock|in the glove box|on the top shelf|below the stage|in the laundry basket
inside the piano|next to the fountain""".replace("\n", "|").split("|")
CAUSES = {
    "the ferry came late": "the captain had overslept", "the lights went out": "a squirrel bit through the cable",
    "the shop closed early": "the baker ran out of flour", "Ekström left the party": "his shoes were too tight",
    "the film was never shown": "the last reel had burned", "the well was covered": "a calf had fallen into it",
}
MACHINES = "lathe press drill turbine furnace crusher mixer elevator".split()
NEEDLES = """aardvark|bagpipe|catapult|dumbbell|eggplant|figurine|gondola|haystack|icicle|jackpot|keyhole|labyrinth
""".strip().split("|")


@dataclass(frozen=True)
class Told:
    """A line of the stream, and the question about it."""

    line: str
    question: str
    value: str

    def asked(self) -> Question:
        return Question(self.question, (self.value,), METRIC, ANSWER_TOKENS)


def numbers(r: random.Random, count: int) -> list[Told]:
    """Numbers of five digits, each of another relation."""
    made = []
    for what in r.sample(RELATIONS, count):
        value = str(r.randint(10_000, 99_999))
        line = r.choice([f"The {what} is {value}.", f"I was told that the {what} is {value}.",
                         f"Let it be known that the {what} is {value}."])
        made.append(Told(line, f"What is the {what}?", value))
    return made


def words(r: random.Random, count: int) -> list[Told]:
    """Names, places and reasons of several words."""
    made: list[Told] = []
    for office in r.sample(OFFICES, count):
        value = f"{r.choice(WOMEN)} {r.choice(FAMILIES)}"
        made.append(Told(f"The {office} is {value}.", f"Who is the {office}?", value))
    for thing in r.sample(THINGS, count):
        value = r.choice(SPOTS)
        made.append(Told(f"The {thing} is hidden {value}.", f"Where is the {thing}?", value))
    for event in r.sample(list(CAUSES), min(count, len(CAUSES))):
        made.append(Told(f"It is because {CAUSES[event]} that {event}.", f"Why is it that {event}?", CAUSES[event]))
    return r.sample(made, count)


def tools(r: random.Random, count: int) -> list[Told]:
    """What a tool returned, as JSON."""
    made = []
    for machine in r.sample(MACHINES, count):
        value = str(r.randint(1_000, 99_999))
        made.append(Told(json.dumps({"machine": machine, "status": r.choice(["running", "stopped"]),
                                     "serial": value, "hours": r.randint(1, 900)}),
                         f"What is the serial of the {machine}?", value))
    return made


def needles(r: random.Random, count: int) -> list[Told]:
    """The needles of RULER (arXiv:2404.06654, appendix B), in its words."""
    made = []
    for key in r.sample(NEEDLES, count):
        value = str(r.randint(1_000_000, 9_999_999))
        made.append(Told(f"One of the special magic numbers for {key} is: {value}.",
                         f"What is the special magic number for {key} mentioned in the provided text?", value))
    return made


def updates(r: random.Random, count: int) -> list[list[Told]]:
    """Numbers that change: of each its old and its new value, in the order in which they are told."""
    made = []
    for what in r.sample(RELATIONS, count):
        old, new = r.sample(range(10_000, 99_999), 2)
        question = f"What is the {what} now?"
        made.append([Told(f"The {what} is {old}.", question, str(old)),
                     Told(f"From today on the {what} is {new}.", question, str(new))])
    return made


def in_text(told: Sequence[Sequence[Told]], r: random.Random, text: Iterable[str], length: int,
            measure: Callable[[str], int]) -> Iterator[tuple[str, bool]]:
    """(line, whether an answer follows from it) of a text of about `length` with all lines in it, at places drawn from
    `r`; of a group the last line comes last, and it alone is needed."""
    lines, places, needed = list[str](), list[float](), list[bool]()
    size = max(0, length - sum(measure(one.line) for group in told for one in group))
    for group in told:
        at = sorted(r.random() * size for _ in group)
        for one, place in zip(group, at, strict=True):
            lines.append(one.line)
            places.append(place)
            needed.append(one is group[-1])
    for line, number in plant(cut(text, size, measure), lines, places, measure):
        yield line, number is not None and needed[number]


MADE: dict[str, Callable[[random.Random], list[list[Told]]]] = {
    "chat_numbers": lambda r: [[one] for one in numbers(r, 4)],
    "chat_words": lambda r: [[one] for one in words(r, 3)],
    "chat_tools": lambda r: [[one] for one in tools(r, 2)],
    "chat_needles": lambda r: [[one] for one in needles(r, 2)],
    "chat_updates": lambda r: updates(r, 2),
}
"""By name of the task the groups of lines of a stream; what is asked is the last line of each group."""
