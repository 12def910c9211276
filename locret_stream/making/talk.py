"""Talk between a user and an assistant, turn by turn: chatter, general knowledge, passages, logs and source code with
their replies, and among them the turns that tell facts. Knows no model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from locret_stream.making.facts import MadeFact
from locret_stream.making.texts import Texts
from locret_stream.making.words import FIRST, OBJECTS, PLACES, TASKS

CHATTER = [
    ("{first} came by this afternoon and stayed for hours. We laughed a lot.", "It sounds as if you had a good time."),
    ("The bus to {place} was full again, so I walked.", "Walking keeps you fit. I hope that the weather was kind."),
    ("I slept badly. Do you have any advice?", "Go to bed at the same time every day, and leave your phone elsewhere."),
    ("Can you recommend something for a rainy {day}?", "Invite a friend for tea, or tidy a shelf that annoys you."),
    ("I have been looking for a {object} all week.", "Try the flea market. The best ones are often found early."),
    ("{first} wants to borrow my {object}. Should I agree?", "If you trust {first}, yes. Agree on a day to return it."),
    ("We are painting the living room, and I have paint in my hair.", "A little oil and patience will get it out."),
    ("On {day} I have to give a short speech, and my hands are shaking already.",
     "Breathe slowly, speak to one friendly face, and finish earlier than planned."),
    ("It is so hot here that the candles bend.", "Close the shutters by day and open everything at night."),
    ("Let me think about that for a while.", "Of course. I am here whenever you want to go on."),
    ("That was helpful.", "I am glad to hear it."),
    ("I keep mixing up left and right when somebody gives me directions.", "You could wear a ring on one hand."),
    ("What would be a nice present for {first}?", "Something that can be shared, such as tickets for a play."),
    ("I finished {task} today, finally.", "Well done. Take the evening off."),
    ("My team is stuck with {task}. Any general advice?", "Cut it into parts that can be tested alone."),
    ("Write me a two line poem about a {object}.",
     "Quiet it stands in the evening light,\nmy {object}, worn and polished bright."),
    ("How do I say no to {first} without being rude?", "Thank {first} for asking, say no in one sentence, and stop."),
    ("The path behind {place} is closed, they are felling trees.", "Then the long way round is the safer one."),
    ("I had a strange dream about a talking {object}.", "Dreams borrow what is lying about. What did it say?"),
    ("Good morning!", "Good morning! What shall we do today?"),
]
KNOWLEDGE = [
    ("What is the symbol of {element}?", "The symbol of {element} is {symbol}."),
    ("Which element has the symbol {symbol}?", "{symbol} is the symbol of {element}."),
    ("How many sides does a {figure} have?", "A {figure} has {sides} sides."),
    ("What do you call a young {parent}?", "A young {parent} is called a {young}."),
    ("How many {small} are in a {large}?", "There are {count} {small} in a {large}."),
    ("To which family does the {instrument} belong?", "The {instrument} belongs to the {family}."),
    ("Can you explain to a child what a {instrument} sounds like?", "It is one of the {family}; listen to one."),
    ("Is {planet} larger than the Earth?", "{answer}, {planet} is {than} than the Earth."),
]
ROWS = [
    "element symbol: copper Cu, tin Sn, lead Pb, gold Au, silver Ag, sodium Na, iron Fe, helium He, nickel Ni, zinc Zn",
    "figure sides: hexagon six, octagon eight, pentagon five, square four, triangle three, decagon ten",
    "parent young: sheep lamb, goose gosling, swan cygnet, frog tadpole, kangaroo joey, deer fawn, bear cub, eel elver",
    "small large count: hours day 24, minutes hour 60, grams kilogram 1,000, ounces pound 16, eggs dozen twelve",
    "instrument family: oboe woodwinds, trombone brass, cello strings, flute woodwinds, tuba brass, viola strings",
    "planet answer than: Mars No smaller, Saturn Yes larger, Neptune Yes larger, Venus No smaller, Mercury No smaller",
    "day: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
]
PASSAGES = [
    ("Here is a page that I liked.\n\n{text}", "Thank you for sharing it. I like how calm it is."),
    ("{text}\n\nWould you go on reading?", "I would, because I want to know how it ends."),
    ("Listen to this:\n\n{text}", "It has a voice of its own. Who wrote it?"),
    ("Could you shorten this?\n\n{text}", "In short: something begins, somebody hesitates, and it goes on."),
]
LINES = {
    "log": [("Our monitoring printed this.\n\n{text}", "I see nothing in it that needs you at once."),
            ("{text}\n\nDo I have to worry?", "No, these are ordinary messages.")],
    "json": [("The call returned:\n\n{text}", "I have read the result."),
             ("{text}\n\nThat is what came back.", "It came back complete.")],
    "code": [("Please read this code.\n\n{text}", "It is easy to follow. I would add a test."),
             ("```\n{text}\n```\nIs that readable?", "The names are clear, and the parts are small.")],
}
OPENINGS = ("", "", "", "Something else: ", "Just so you know: ", "One more thing. ", "Note this, please. ", "Listen. ")
SHOWING = {
    "log": ("This line came in a minute ago:\n\n{line}", "{line}"),
    "json": ("The tool answered this:\n\n{line}", "Result of the call:\n{line}", "{line}"),
    "code": ("I wrote this down in the code:\n\n{line}", "{line}"),
}
SHORT = ("OK.", "Noted.", "I see.", "Understood.", "Thanks, I will keep it in mind.", "Good to know.")
REPEATING = ("Noted: {answer}", "Thank you. {answer}", "Got it. {answer}", "All right, so: {answer}", "{answer}")


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how the assistant replies.

    Args:
        facts: those that are wholly told when the turn ends, and were not before.
        tells: the fact that the turn tells, or begins to tell, if it tells nothing else.
    """

    text: str
    reply: str
    facts: tuple[MadeFact, ...] = ()
    tells: MadeFact | None = None


def talk(texts: Texts, r: random.Random, measure: Callable[[str], int], length: int, told: list[MadeFact]
         ) -> list[Turn]:
    """Turns of about `length` together, among them those that tell the facts, at places drawn from `r`."""
    telling = [_telling(r, fact) for fact in told]
    size = sum(measure(turn.text) + measure(turn.reply) for turns in telling for turn in turns)
    turns: list[Turn] = []
    source = _chatter(texts, r)
    while size < length or not turns:
        turns.append(next(source))
        size += measure(turns[-1].text) + measure(turns[-1].reply)
    placed = sorted(((r.randrange(len(turns) + 1), some) for some in telling), key=lambda one: one[0], reverse=True)
    for at, some in placed:  # from the end, so that the places before stay what they are
        turns[at:at] = some
    return turns


def _telling(r: random.Random, fact: MadeFact) -> list[Turn]:
    """One turn, or two for a fact of two sentences."""
    if fact.style != "prose":
        line = r.choice(SHOWING[fact.style]).format(line=fact.told[0])
        return [Turn(line, _confirmed(r, fact), (fact,), fact)]
    opening, sentences = r.choice(OPENINGS), list(fact.told)
    if len(sentences) == 2 and r.random() < 0.5:
        return [Turn(opening + sentences[0], r.choice(SHORT), (), fact),
                Turn(sentences[1], _confirmed(r, fact), (fact,), fact)]
    behind = f" {_filled(r, CHATTER).text}" if r.random() < 0.2 else ""
    return [Turn(opening + " ".join(sentences) + behind, _confirmed(r, fact), (fact,), fact)]


def _confirmed(r: random.Random, fact: MadeFact) -> str:
    return r.choice(SHORT) if r.random() < 0.4 else r.choice(REPEATING).format(answer=fact.answer)


def _chatter(texts: Texts, r: random.Random) -> Iterator[Turn]:
    """Turns that tell nothing, for ever."""
    while True:
        kind = r.random()
        if kind < 0.35:
            yield _filled(r, CHATTER)
        elif kind < 0.55:
            yield _filled(r, KNOWLEDGE)
        elif kind < 0.8:
            yield _filled(r, PASSAGES, text="".join(_some(texts, r, "prose", r.randint(2, 6))).strip())
        else:
            style = r.choice(("log", "json", "code"))
            text = "".join(_some(texts, r, style, r.randint(2, 8))).strip()
            if text:  # source code may have only blank lines there
                yield _filled(r, LINES[style], text=text)


def _some(texts: Texts, r: random.Random, style: str, count: int) -> list[str]:
    source = texts.pieces(style, r)  # type: ignore[arg-type]
    return [next(source) for _ in range(count)]


def _filled(r: random.Random, templates: list[tuple[str, str]], **slots: str) -> Turn:
    """Of one of the templates (text, reply), whose slots are filled alike."""
    slots |= {"first": r.choice(FIRST), "place": r.choice(PLACES), "object": r.choice(OBJECTS), "task": r.choice(TASKS)}
    for row in ROWS:
        names, _, fillings = row.partition(": ")
        slots |= dict(zip(names.split(), r.choice(fillings.split(", ")).split(), strict=True))
    text, reply = r.choice(templates)
    return Turn(text.format(**slots), reply.format(**slots))
