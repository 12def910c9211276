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
    COLOURS,
    EVENTS,
    FIRST,
    FOLDERS,
    HAPPENED,
    HOURS,
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
    STREETS,
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
                     f"{_capital(of)} has the {what} {value}.", f"It turned out that the {what} of {of} was {value}.",
                     f"{value} is what the books give as the {what} of {of}.",
                     f"{value} was entered as the {what} of {of}.", f"{_capital(what)} of {of}: {value}.",
                     f"| {of} | {what} | {value} |"])
    return MadeFact((told,), f"What is the {what} of {of}?", f"The {what} of {of} is {value}.", value)


def office(r: random.Random) -> MadeFact:
    role, of, value = r.choice(ROLES), r.choice(OWNERS), _person(r)
    told = r.choice([f"The {role} of {of} is {value}.", f"{value} is the {role} of {of}.",
                     f"{_capital(of)} has a new {role}, {value}.", f"Since last week {value} works as {role} of {of}.",
                     f"They chose {value} as the {role} of {of}.", f"{_capital(role)} of {of}: {value}.",
                     f"{value}, who is the {role} of {of}, sends regards.", f"| {of} | {role} | {value} |",
                     f"{value} was made {role} of {of} in spring.",
                     f"{_capital(of)} is looked after by {value}, the {role}."])
    return MadeFact((told,), f"Who is the {role} of {of}?", f"The {role} of {of} is {value}.", value)


def whereabouts(r: random.Random) -> MadeFact:
    what, where, who = r.choice(OBJECTS), r.choice(ROOMS), r.choice(FIRST)
    told = r.choice([f"The {what} is in the {where}.", f"{who} put the {what} in the {where}.",
                     f"The {what} was moved to the {where}.", f"You will find the {what} in the {where}.",
                     f"In the end the {what} turned up in the {where}.",
                     f"In the {where} there is the {what}, still wrapped.",
                     f"If anybody asks for the {what}, it has been locked away in the {where}."])
    return MadeFact((told,), f"Where is the {what}?", f"The {what} is in the {where}.", where)


def spot(r: random.Random) -> MadeFact:
    what, value = r.choice(OBJECTS), r.choice(SPOTS)
    told = r.choice([f"The {what} is kept {value}.", f"They left the {what} {value}.",
                     f"I saw the {what} {value}.", f"Look for the {what} {value}.",
                     f"{_capital(value)} is where the {what} was found.", f"For years the {what} lay {value}.",
                     f"Somebody must have put the {what} {value}.", f"The {what}, as always, stands {value}."])
    return MadeFact((told,), f"Where is the {what} now?", f"The {what} is {value}.", value)


def date(r: random.Random) -> MadeFact:
    what, value = r.choice(EVENTS), f"{r.choice(MONTHS)} {r.randint(1, 28)}"
    told = r.choice([f"The {what} is on {value}.", f"The {what} takes place on {value}.",
                     f"Mark {value} for the {what}.", f"They moved the {what} to {value}.",
                     f"The date of the {what} is {value}.", f"{value}: {what}.",
                     f"On {value}, if nothing comes between, we have the {what}."])
    return MadeFact((told,), f"When is the {what}?", f"The {what} is on {value}.", value)


def reason(r: random.Random) -> MadeFact:
    what, value, verb = r.choice(EVENTS), r.choice(REASONS), r.choice(["cancelled", "postponed", "moved indoors"])
    told = r.choice([f"The {what} was {verb} because {value}.", f"Because {value}, the {what} was {verb}.",
                     f"They told us that the {what} was {verb} because {value}.",
                     f"Since {value}, the {what} had to be {verb}.",
                     f"The {what} was {verb}, and the only reason was that {value}.",
                     f"{_capital(value)}, so the {what} was {verb}."])
    return MadeFact((told,), f"Why was the {what} {verb}?", f"The {what} was {verb} because {value}.", value)


def cause(r: random.Random) -> MadeFact:
    what, value = r.choice(HAPPENED), r.choice(REASONS)
    told = r.choice([f"{_capital(what)} because {value}.", f"{_capital(value)}, and that is why {what}.",
                     f"The reason that {what} was that {value}.", f"{_capital(value)}, so {what}.",
                     f"As {value}, {what}.", f"{_capital(what)}, for {value}.",
                     f"{_capital(what)}. After all, {value}.", f"{_capital(value)}; this explains why {what}."])
    return MadeFact((told,), f"What is the reason that {what}?", f"{_capital(what)} because {value}.", value)


def decision(r: random.Random) -> MadeFact:
    what, value = r.choice(TASKS), r.choice(OPTIONS)
    told = r.choice([f"We decided to use {value} for {what}.", f"For {what} we will go with {value}.",
                     f"After a long discussion the team chose {value} for {what}.",
                     f"Decision: {what} will be built with {value}.", f"- {what}: {value} (agreed by all)",
                     f"{value} was picked for {what}, after two other proposals had been dropped."])
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


def hour(r: random.Random) -> MadeFact:
    what, value = r.choice(EVENTS), r.choice(HOURS)
    told = r.choice([f"The {what} begins {value}.", f"Be there in time: the {what} starts {value}.",
                     f"Doors open earlier, but the {what} itself begins {value}.",
                     f"{_capital(value)} is when the {what} begins.", f"{_capital(what)}, beginning {value}."])
    return MadeFact((told,), f"At what time does the {what} begin?", f"The {what} begins {value}.", value)


def cost(r: random.Random) -> MadeFact:
    what, done = r.choice(OBJECTS), r.choice(["repaired", "cleaned", "insured", "sold"])
    amount = f"{r.randint(1, 19)},{r.randint(0, 999):03}" if r.random() < 0.3 else _number(r, r.randint(2, 3))
    value = r.choice([f"${amount}", f"{amount} euros", f"{amount} crowns"])
    told = r.choice([f"The {what} was {done} for {value}.", f"For {value} they had the {what} {done}.",
                     f"Having the {what} {done} came to {value} in all.", f"| {what} | {done} | {value} |"])
    return MadeFact((told,), f"For how much was the {what} {done}?", f"The {what} was {done} for {value}.", value)


def colour(r: random.Random) -> MadeFact:
    what, where, value = r.choice(OBJECTS), r.choice(OWNERS), r.choice(COLOURS)
    told = r.choice([f"The {what} of {where} was painted {value}.", f"{_capital(where)} owns a {what}, all {value}.",
                     f"A {value} {what} belongs to {where}.",
                     f"They wanted another colour, yet {where} had the {what} painted {value}."])
    return MadeFact((told,), f"What colour is the {what} of {where}?", f"The {what} of {where} is {value}.", value)


def address(r: random.Random) -> MadeFact:
    who, value = _person(r), f"{r.randint(2, 180)} {r.choice(STREETS)}"
    told = r.choice([f"{who} can be reached at {value}.", f"Letters for {who} go to {value}.",
                     f"{who}, {value}, second door on the left.", f"At {value} you will meet {who}.",
                     f"Address of {who}: {value}."])
    return MadeFact((told,), f"What is the address of {who}?", f"The address of {who} is {value}.", value)


def kin(r: random.Random) -> MadeFact:
    who, relation = f"{r.choice(FIRST)} {r.choice(LAST)}", r.choice(["sister", "uncle", "neighbour", "cousin", "boss"])
    value = r.choice([name for name in FIRST if not who.startswith(name)])
    told = r.choice([f"{who} has a {relation} by the name of {value}.", f"{value} is {who}'s {relation}.",
                     f'"And this is {value}, the {relation} of {who}," she went on.',
                     f"{who} came with {value}, a {relation}."])
    return MadeFact((told,), f"What is the name of {who}'s {relation}?", f"The name of {who}'s {relation} is {value}.",
                    value)


def reply(r: random.Random) -> MadeFact:
    """A question and its answer in a dialogue: the second sentence names neither."""
    role, of, value = r.choice(ROLES), r.choice(OWNERS), _person(r)
    first, second = r.choice([(f'"And who is the {role} of {of}?"', f'"That is {value}," came the answer.'),
                              (f"Everybody asked about the {role} of {of}.", f"In the end it was {value} who got it."),
                              (f"{_capital(of)} has been without a {role} for long.", f"Now {value} does this work.")])
    return MadeFact((first, second), f"Who is the {role} of {of}?", f"The {role} of {of} is {value}.", value)


def version(r: random.Random) -> MadeFact:
    of, value = r.choice(SERVICES), f"{r.randint(0, 12)}.{r.randint(0, 30)}.{r.randint(0, 9)}"
    told = r.choice([f"The {of} service runs version {value}.", f"Changed in version {value} of the {of} service.",
                     f"With {value} the {of} service got its last release.", f"{of} ({value})",
                     f"NB: the {of} service was upgraded to {value}."])
    return MadeFact((told,), f"Which version of the {of} service is there?",
                    f"The version of the {of} service is {value}.", value)


def command(r: random.Random) -> MadeFact:
    task, value = r.choice(TASKS), f"{r.choice(VERBS)}-{r.choice(NOUNS)} --{r.choice(SETTINGS).replace('_', '-')}"
    told = r.choice([f"To restart {task}, type `{value}`.", f"`{value}` restarts {task}.",
                     f"If {task} hangs, it is restarted by `{value}`.", f"Restart of {task}: `{value}`"])
    return MadeFact((told,), f"Which command restarts {task}?", f"The command that restarts {task} is {value}.", value)


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


def copy(r: random.Random) -> MadeFact:
    of, value = r.choice(SERVICES), f"/srv/{r.choice(FOLDERS)}/{r.choice(NOUNS)}-{_number(r, 3)}"
    told = r.choice([f"{of}: backup written to {value} in 14 s", f"INFO backup target={value} source={of} ok",
                     f"{value} <- {of} (backup)"])
    return MadeFact((told,), f"Where is the backup of {of}?", f"The backup of {of} is in {value}.", value, "log")


def row(r: random.Random) -> MadeFact:
    """A table's head and a row."""
    of, name, value = r.choice(PLACES), r.choice(QUANTITIES), _number(r)
    told = r.choice([f"place,{name},checked\n{of},{value},yes", f"place | {name}\n{of} | {value}",
                     f"{name:<18} place\n{value:<18} {of}"])
    return MadeFact((told,), f"What is the {name} of {of}?", f"The {name} of {of} is {value}.", value, "json")


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
    quantity, office, whereabouts, spot, date, reason, cause, decision, preference, home, pet, saying, hour, cost,
    colour, address, kin, reply, version, command, failure, status, record, asset, order, copy, row, place_in_code,
    setting)


def facts(r: random.Random, count: int, style: Style | None = None) -> list[MadeFact]:
    """That many facts of different questions; more numbers and offices than of any other kind.

    Args:
        style: of text that they lie in; those of prose fit in any.
    """
    fitting = [kind for kind in KINDS if style in (None, kind(random.Random(0)).style)]
    prose = [kind for kind in KINDS if kind(random.Random(0)).style == "prose"]
    made: dict[str, MadeFact] = {}
    while len(made) < count:
        fact = r.choice(fitting if r.random() < 0.6 else [*prose, *[quantity] * 4, office, office])(r)
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
