"""Facts of many kinds for training heads: each as sentences that tell it, a question, and the answer. Knows no model.

Every kind has several wordings, and all words come from lists that evaluation does not use
(`tests/making/test_facts.py` compares them). Everything random comes from the `random.Random` that the caller
passes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from locret_stream.making.words import (
    ANIMALS,
    EVENTS,
    FIRST,
    FOLDERS,
    HAPPENED,
    JOBS,
    LAST,
    MONTHS,
    NOUNS,
    OBJECTS,
    OPTIONS,
    OWNERS,
    PETS,
    PLACES,
    QUANTITIES,
    REASONS,
    ROLES,
    ROOMS,
    SERVICES,
    SETTINGS,
    SPOTS,
    TASKS,
    TASTES,
    TITLES,
    VERBS,
)

Style = Literal["prose", "log", "json", "code"]


@dataclass(frozen=True, slots=True)
class MadeFact:
    """Something that is told once and asked later.

    Args:
        told: one sentence or line, or two of which the second lies up to three sentences behind the first.
        question: as a user asks. answer: one sentence that repeats the question's words and ends with `value`.
        value: what has to be remembered.
        style: what kind of text the sentences belong in.
    """

    told: tuple[str, ...]
    question: str
    answer: str
    value: str
    style: Style = "prose"


def quantity(r: random.Random) -> MadeFact:
    what, of, value = r.choice(QUANTITIES), _owner(r), _number(r)
    told = r.choice([f"The {what} of {of} is {value}.", f"The {what} for {of} is {value}.",
                     f"For {of}, the {what} is {value}.", f"Remember that the {what} of {of} is {value}.",
                     f"They wrote down the {what} of {of}, which is {value}.",
                     f"{_capital(of)} has the {what} {value}.", f"It turned out that the {what} of {of} was {value}."])
    return MadeFact((told,), f"What is the {what} of {of}?", f"The {what} of {of} is {value}.", value)


def office(r: random.Random) -> MadeFact:
    role, of, value = r.choice(ROLES), r.choice(OWNERS), _person(r)
    told = r.choice([f"The {role} of {of} is {value}.", f"{value} is the {role} of {of}.",
                     f"{_capital(of)} has a new {role}, {value}.", f"Since last week {value} works as {role} of {of}.",
                     f"They chose {value} as the {role} of {of}."])
    return MadeFact((told,), f"Who is the {role} of {of}?", f"The {role} of {of} is {value}.", value)


def whereabouts(r: random.Random) -> MadeFact:
    what, where, who = r.choice(OBJECTS), r.choice(ROOMS), r.choice(FIRST)
    told = r.choice([f"The {what} is in the {where}.", f"{who} put the {what} in the {where}.",
                     f"The {what} was moved to the {where}.", f"You will find the {what} in the {where}.",
                     f"In the end the {what} turned up in the {where}."])
    return MadeFact((told,), f"Where is the {what}?", f"The {what} is in the {where}.", where)


def spot(r: random.Random) -> MadeFact:
    what, value = r.choice(OBJECTS), r.choice(SPOTS)
    told = r.choice([f"The {what} is kept {value}.", f"They left the {what} {value}.",
                     f"I saw the {what} {value}.", f"Look for the {what} {value}."])
    return MadeFact((told,), f"Where is the {what} now?", f"The {what} is {value}.", value)


def date(r: random.Random) -> MadeFact:
    what, value = r.choice(EVENTS), f"{r.choice(MONTHS)} {r.randint(1, 28)}"
    told = r.choice([f"The {what} is on {value}.", f"The {what} takes place on {value}.",
                     f"Mark {value} for the {what}.", f"They moved the {what} to {value}.",
                     f"The date of the {what} is {value}."])
    return MadeFact((told,), f"When is the {what}?", f"The {what} is on {value}.", value)


def reason(r: random.Random) -> MadeFact:
    what, value, verb = r.choice(EVENTS), r.choice(REASONS), r.choice(["cancelled", "postponed", "moved indoors"])
    told = r.choice([f"The {what} was {verb} because {value}.", f"Because {value}, the {what} was {verb}.",
                     f"They told us that the {what} was {verb} because {value}."])
    return MadeFact((told,), f"Why was the {what} {verb}?", f"The {what} was {verb} because {value}.", value)


def cause(r: random.Random) -> MadeFact:
    what, value = r.choice(HAPPENED), r.choice(REASONS)
    told = r.choice([f"{_capital(what)} because {value}.", f"{_capital(value)}, and that is why {what}.",
                     f"The reason that {what} was that {value}."])
    return MadeFact((told,), f"What is the reason that {what}?", f"{_capital(what)} because {value}.", value)


def decision(r: random.Random) -> MadeFact:
    what, value = r.choice(TASKS), r.choice(OPTIONS)
    told = r.choice([f"We decided to use {value} for {what}.", f"For {what} we will go with {value}.",
                     f"After a long discussion the team chose {value} for {what}.",
                     f"Decision: {what} will be built with {value}."])
    return MadeFact((told,), f"What did we decide to use for {what}?", f"We decided to use {value} for {what}.", value)


def preference(r: random.Random) -> MadeFact:
    what = r.choice(list(TASTES))
    value = r.choice(TASTES[what].split("|"))
    told = r.choice([f"My favourite {what} is {value}.", f"By the way, my favourite {what} is {value}.",
                     f"I like {value} best, it is my favourite {what}.",
                     f"Please keep in mind that my favourite {what} is {value}."])
    return MadeFact((told,), f"What is my favourite {what}?", f"Your favourite {what} is {value}.", value)


def home(r: random.Random) -> MadeFact:
    """Told by two sentences, of which the second names nobody."""
    who, job, value = f"{r.choice(FIRST)} {r.choice(LAST)}", r.choice(JOBS), r.choice(PLACES)
    they = r.choice(["She", "He"])
    second = r.choice([f"{they} lives in {value}.", f"{they} moved to {value} last year.",
                       f"{they} has a small house in {value}."])
    return MadeFact((f"{who} is a {job}.", second), f"Where does {who} live?", f"{who} lives in {value}.", value)


def pet(r: random.Random) -> MadeFact:
    """Told by two sentences that may lie apart."""
    who, animal, value = r.choice(FIRST), r.choice(ANIMALS), r.choice(PETS)
    second = r.choice([f"The {animal} is called {value}.", f"The name of the {animal} is {value}.",
                       f"They named the {animal} {value}."])
    return MadeFact((f"{who} has a {animal}.", second), f"What is the name of {who}'s {animal}?",
                    f"The name of {who}'s {animal} is {value}.", value)


def saying(r: random.Random) -> MadeFact:
    value, what = f"{r.choice(TITLES)} {r.choice(LAST)}", r.choice(EVENTS)
    words = r.choice([f"the {what} was too expensive", f"the {what} should begin earlier",
                      f"the {what} needs more chairs", f"the {what} was a great success"])
    told = r.choice([f"{value} said that {words}.", f'"{_capital(words)}," said {value}.',
                     f"It was {value} who said that {words}."])
    return MadeFact((told,), f"Who said that {words}?", f"{value} said that {words}.", value)


def failure(r: random.Random) -> MadeFact:
    service, value = r.choice(SERVICES), f"{r.choice('ECWX')}{_number(r, 4)}"
    time = f"2026-{r.randint(1, 12):02}-{r.randint(1, 28):02} {r.randint(0, 23):02}:{r.randint(0, 59):02}:07"
    told = r.choice([f"{time} ERROR {service}: request failed with code {value}",
                     f"{time} {service}[{r.randint(100, 9999)}]: fatal: error code {value}",
                     f"{time} CRITICAL the {service} service stopped, error {value}"])
    return MadeFact((told,), f"With which error code did the {service} service fail?",
                    f"The {service} service failed with error code {value}.", value, "log")


def status(r: random.Random) -> MadeFact:
    job, host = _number(r, 4), f"{r.choice(PLACES).lower()}-{r.randint(1, 40)}"
    time = f"2026-{r.randint(1, 12):02}-{r.randint(1, 28):02}T{r.randint(0, 23):02}:{r.randint(0, 59):02}:41Z"
    told = r.choice([f"{time} INFO scheduler: job {job} assigned to host {host}",
                     f"{time} job={job} state=running host={host}"])
    return MadeFact((told,), f"Which host runs job {job}?", f"Job {job} runs on host {host}.", host, "log")


def record(r: random.Random) -> MadeFact:
    city, name = r.choice(PLACES), r.choice(["temperature", "population", "altitude", "humidity", "visitors"])
    value = _number(r, r.randint(2, 5))
    other = {"station": r.randint(10, 99), "unit": r.choice(["metric", "local"]), "ok": True}
    told = json.dumps({"tool": r.choice(["lookup", "get_report", "query"]), "city": city, name: int(value), **other})
    return MadeFact((told,), f"What is the {name} of {city}?", f"The {name} of {city} is {value}.", value, "json")


def asset(r: random.Random) -> MadeFact:
    what, name, value = r.choice(OBJECTS), r.choice(QUANTITIES), _number(r)
    made = {"asset": what, "checked": r.random() < 0.5, name.replace(" ", "_"): value, "count": r.randint(1, 99)}
    keys = r.sample(list(made), len(made))
    return MadeFact((json.dumps({key: made[key] for key in keys}),), f"What is the {name} of the {what}?",
                    f"The {name} of the {what} is {value}.", value, "json")


def order(r: random.Random) -> MadeFact:
    number, what, value = _number(r, 4), r.choice(OBJECTS), r.choice(FIRST) + " " + r.choice(LAST)
    told = json.dumps({"order": int(number), "item": what, "quantity": r.randint(1, 9), "customer": value},
                      indent=r.choice([None, 2]))
    return MadeFact((told,), f"Who is the customer of order {number}?", f"The customer of order {number} is {value}.",
                    value, "json")


def place_in_code(r: random.Random) -> MadeFact:
    name = f"{r.choice(VERBS)}_{r.choice(NOUNS)}"
    value = f"{r.choice(FOLDERS)}/{r.choice(NOUNS)}_{r.choice(VERBS)}.py"
    told = r.choice([f"# {name} is defined in {value}", f"# see {value} for {name}", f"# moved {name} to {value}"])
    return MadeFact((told,), f"In which file is {name}?", f"{name} is in {value}.", value, "code")


def setting(r: random.Random) -> MadeFact:
    name, of, value = r.choice(SETTINGS), r.choice(SERVICES), str(r.randint(2, 9000))
    told = r.choice([f"{of}_config.{name} = {value}", f"# {name} of the {of} service is {value}",
                     f"{of}.set_option(\"{name}\", {value})"])
    return MadeFact((told,), f"What is {name} of the {of} service?", f"{name} of the {of} service is {value}.", value,
                    "code")


KINDS: tuple[Callable[[random.Random], MadeFact], ...] = (
    quantity, office, whereabouts, spot, date, reason, cause, decision, preference, home, pet, saying, failure, status,
    record, asset, order, place_in_code, setting)


def facts(r: random.Random, count: int, style: Style | None = None) -> list[MadeFact]:
    """That many facts of different questions; more numbers and offices than of any other kind.

    Args:
        style: of text that they lie in; those of prose fit in any.
    """
    fitting = [kind for kind in KINDS if style in (None, kind(random.Random(0)).style)]
    prose = [kind for kind in KINDS if kind(random.Random(0)).style == "prose"]
    made: dict[str, MadeFact] = {}
    while len(made) < count:
        fact = r.choice(fitting if r.random() < 0.6 else [*prose, quantity, quantity, office])(r)
        made.setdefault(fact.question, fact)
    return list(made.values())


def _owner(r: random.Random) -> str:
    return r.choice([r.choice(OWNERS), f"{r.choice(TITLES)} {r.choice(LAST)}", f"{r.choice(FIRST)} {r.choice(LAST)}",
                     f"the {r.choice(OBJECTS)}", f"the town of {r.choice(PLACES)}"])


def _person(r: random.Random) -> str:
    return r.choice([f"{r.choice(FIRST)} {r.choice(LAST)}", f"{r.choice(TITLES)} {r.choice(LAST)}"])


def _number(r: random.Random, digits: int = 0) -> str:
    digits = digits or r.randint(3, 6)
    return str(r.randint(10 ** (digits - 1), 10 ** digits - 1))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
