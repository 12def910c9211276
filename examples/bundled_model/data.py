"""Batches for the recipe: contexts cut into snippets with facts in them, and tails that ask for the facts."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from locret_stream.evaluation.facts import HELD_OUT_QUESTION_FORMS, Fact, make_entity, make_facts
from locret_stream.evaluation.haystack import held_out_modules, read_module, training_modules
from locret_stream.evaluation.words import is_held_out

from .chat import segments
from .model import SINKS

SYSTEM_LINES = [
    "You watch the build logs.",
    "You read along and answer questions.",
    "You are a careful assistant.",
    "Answer with the value alone.",
    "You keep track of what you are told.",
    "You remember what matters in a long stream.",
]

# Most sentences and questions are composed of these, so that the model learns no wording by heart.
FACT_PARTS = (
    "||||Listen: |Also, |Again: |It is known that |I heard that |We decided that |FYI, |Attention: |He said that "
    "|One more thing: |Be aware that |Everyone knows that |> |* |TODO |ok, |After lunch ".split("|"),
    "the {A} of {E} is {V}|the {A} of the {E} is {V}|the {A} for {E} is {V}|{E}'s {A} is {V}|{E} has the {A} {V}"
    "|the {A} for the {E} was {V}|{E} got the {A} {V}|for {E} the {A} is {V}|the {A} of {E} remains {V}"
    "|{E}'s {A} becomes {V}|the {A} of {E} has been set to {V}|the {A} of {E} shall be {V}"
    "|the {E} carries the {A} {V}|{E} took {A} {V}|the {A} which belongs to {E} is {V}".split("|"),
    ".|.|.|.||!|, I think.|, for now.| (checked).|;|, as agreed.| today.".split("|"),
)
QUESTION_PARTS = (
    "||||Please |Now |So, |Quick question: |Hello, |One thing: |Question: |If you remember, |Before we go on, "
    "|I wonder, |Hey, |Then ".split("|"),
    "what is the {A} of {E}?|what is the {A} of the {E}?|what is {E}'s {A}?|what {A} does {E} have?"
    "|which {A} did {E} get?|what was the {A} for {E}?|tell me the {A} of {E}.|give the {A} for the {E}."
    "|name the {A} of {E}.|repeat the {A} of the {E}.|print the {A} for {E}.|show me {E}'s {A}."
    "|say what the {A} of {E} is.|tell us what {E}'s {A} is.|do you know the {A} of {E}?"
    "|do you know what the {A} of {E} is?|will you say what the {A} for {E} is?|would you repeat {E}'s {A}?"
    "|I want the {A} of {E}.|we need to know the {A} of the {E}.|find the {A} of {E}|check the {A} for {E}"
    "|read me the {A} of the {E}.|what did you note as {E}'s {A}?|what number is the {A} of {E}?".split("|"),
    "|||| Thanks.| Be quick.| Only the value.".split("|"),
)
RECORD_PARTS = (
    "||||# |// |set |let |config: |> |- |  ".split("|"),
    "{E}.{A} = {V}|{E} {A} = {V}|{A} {E} = {V}|{A}[{E}] = {V}|{E}: {A}={V}|{A} of {E} := {V}|{E} / {A} / {V}"
    "|{A} for {E} -> {V}|{E}, {A}, {V}|{E} | {A} | {V}".replace(" | ", " \0 ").split("|")
    + ["{{'{E}': {{'{A}': '{V}'}}}}", '{{"name": "{E}", "{A}": {V}}}', "<{E} {A}={V}>", "{E}({A}={V})"],
    "|||;|,|  # checked".split("|"),
)
REQUEST_PARTS = (
    "||||Please |Now |Then |So |Hi, |And |One more: ".split("|"),
    "||||can you |could you |would you |will you |I want you to |I would like you to |you should |try to "
    "|be so kind and |I must ask you to ".split("|"),
    "tell me |tell us |give me |give |show me |show |report |repeat |name |find |look up |write down |quote |send me "
    "|print |remind me of |answer with |work out ".split("|"),
    "the {A} of {E}|the {A} of the {E}|the {A} for {E}|the {A} for the {E}|{E}'s {A}|the {A} that {E} has"
    "|what the {A} of {E} was|what {E}'s {A} is|which {A} {E} has|the {A} belonging to {E}".split("|"),
    ".|.|?|?|, please.|, please?| now.| once more.|".split("|"),
)
FEW_DIGITS = 0.3  # share of the values in digits with only two or three different ones, so that pairs of digits repeat
TEXT_WEIGHT = 0.15  # of the loss of plain text, where an answer's tokens have 1
FIRST_TOKEN_WEIGHT = 5.0  # weight of an answer's first token: only the question points to it


def compose(rng: random.Random, parts: tuple[list[str], ...]) -> str:
    """A form composed of `parts`, mostly with a capital first letter."""
    form = "".join(rng.choice(part) for part in parts).replace("\0", "|")
    capital = form[0] != "{" and rng.random() < 0.7
    return form[0].upper() + form[1:] if capital else form


# ------------------------------------------------------------------ text


def synthetic_logs(rng: random.Random, lines: int) -> str:
    """Log lines full of numbers nobody asks for."""
    services = "worker scheduler cache router ingest billing auth search mailer proxy storage queue".split()
    events = "started stopped retry flushed connected timeout accepted rejected rotated synced".split()
    number = rng.randrange
    out = []
    for _ in range(lines):
        stamp = f"2024-{number(1, 13):02}-{number(1, 29):02} {number(24):02}:{number(60):02}:{number(60):02}"
        who, what = rng.choice(services), rng.choice(events)
        body = rng.choice(
            [
                f"INFO {who}-{number(1, 40)} {what} {number(1, 99999)} items in {number(1, 999)} ms",
                f"WARN {who}: {what} after {number(1, 60)} s (attempt {number(1, 6)})",
                f"DEBUG {who} {what} id={number(1 << 30):x} size={number(1 << 20)}",
                f"ERROR {who} {what}: code {number(100, 600)} from 10.{number(256)}.{number(256)}.{number(256)}",
                f"INFO GET /{who}/{what}/{number(9999)} {number(200, 505)} {number(50, 99999)}",
                f"INFO {who} {what} ok",
                f"DEBUG {who}.{what}: {number(10000)} of {number(10000)}, {number(1000)} left",
            ]
        )
        out.append(f"{stamp} {body}\n")
    return "".join(out)


def topics_text() -> str:
    """English text that comes with every Python: the topics of `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def read_texts(files: Iterable[Path], held_out: bool) -> list[str]:
    """The books: all but the last twentieth for training, the last twentieth held out."""
    out = []
    for file in files:
        text = re.sub(r"\n{3,}", "\n\n", Path(file).read_text(encoding="utf-8", errors="replace"))
        cut = int(len(text) * 0.95)
        out.append(text[cut:] if held_out else text[:cut])
    return out


def gather_sources(files: Sequence[Path], seed: int, held_out: bool = False) -> list[tuple[str, float]]:
    """(text, share of the mix) of each source."""
    rng = random.Random(f"sources {seed} {held_out}")
    names = held_out_modules(tests=False) if held_out else training_modules()
    rng.shuffle(names)
    code = "\n".join(read_module(name) for name in names)
    logs = synthetic_logs(rng, 4_000 if held_out else 20_000)
    books = read_texts(files, held_out)
    english = [(book, 0.3 / len(books)) for book in books] if books else [(topics_text(), 0.2)]
    return [(code, 0.55), (logs, 0.12), *english]


def common_words(sources: Sequence[tuple[str, float]], limit: int = 6000) -> list[str]:
    """Words that the recipe may use as entities; none of them is held out."""
    counts: Counter[str] = Counter()
    for text, _ in sources:
        counts.update(re.findall(r"\b[A-Z]?[a-z]{3,9}\b", text))
    frequent = [word for word, _ in counts.most_common(limit + 200)][200:]
    return [word for word in frequent if not is_held_out(word)]


class Corpus:
    """One tokenised source and where its segments start."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        pieces = tokenizer.encode_batch_fast(segments(text), add_special_tokens=False)
        lengths = np.array([len(piece.ids) for piece in pieces])
        self.ids = np.concatenate([np.array(piece.ids, np.int16) for piece in pieces])
        self.starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])

    def cut(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`length` tokens from the start of a segment on, and the indices in them at which segments start."""
        last = np.searchsorted(self.starts, len(self.ids) - length - 1)
        first = int(rng.integers(0, last))
        begin = self.starts[first]
        end = np.searchsorted(self.starts, begin + length)
        return self.ids[begin : begin + length].astype(np.int64), self.starts[first:end] - begin


# ------------------------------------------------------------------ batches


@dataclass(frozen=True)
class Stage:
    """The size of one batch: `contexts` contexts of `snippets` x `length` tokens, `tails` tails each."""

    contexts: int
    snippets: int
    length: int
    facts: tuple[int, int]
    tails: int
    tail_length: int
    recent: tuple[int, int] = (24, 64)
    kept: tuple[int, int] | None = None  # units the recall layer keeps; None: all
    copies: float = 0.0  # share of tails that repeat a random segment
    advance_at: float = 0.9  # running accuracy of answer tokens at which the next stage begins
    head: bool = True  # whether the retaining head is trained on it
    variety: float = 1.0  # share of the usual rewording, few-digit values and tool calls
    tools: float = 0.2  # share of the turns that are calls: a word without its leading space has to be spelled anew
    mined: int = 0  # tokens of plain text searched for units that the head would wrongly keep


@dataclass
class Batch:
    """C contexts, S snippets each, M tails each."""

    snippets: Tensor  # [C, S, SINKS + L] int64
    unit_fact: Tensor  # [C, S, L]: number of the fact a unit belongs to, -1 for text
    asked: Tensor  # [C, F] bool: facts some tail asks for
    tails: Tensor  # [C * M, T] int64
    targets: Tensor  # [C * M, T] int64, the next token
    weights: Tensor  # [C * M, T] float32 of each row's loss
    answers: Tensor  # [C * M, T] bool: rows that predict an answer's tokens or its end
    answer_rows: Tensor  # [C * M, R] int64: the same rows by number, padded with 0


class Writer:
    """Writes batches; all randomness comes from the generators passed to `batch`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sources: Sequence[tuple[str, float]],
        *,
        held_out: bool = False,
        words: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.corpora = [Corpus(tokenizer, text) for text, _ in sources]
        shares = np.array([share for _, share in sources])
        self.shares = shares / shares.sum()
        self.held_out, self.words = held_out, words
        self.start_user = self.encode("<|im_start|>user\n")
        self.start_system = self.encode("<|im_start|>system\n")
        self.next_user = self.encode("\n<|im_start|>user\n")
        self.to_assistant = self.encode("<|im_end|>\n<|im_start|>assistant\n")
        self.blank = self.encode("\n\n")
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.pad = tokenizer.token_to_id("<|endoftext|>")
        assert len(self.start_user) == 3, "sinks are the three template tokens and one of text"

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        return self.corpora[rng.choice(len(self.corpora), p=self.shares)].cut(rng, length)

    def render(self, rng: random.Random, sentence: str) -> str:
        """The sentence as it may stand in a stream: mostly alone on a line."""
        kind = rng.random()
        if kind < 0.68:
            return sentence + "\n"
        if kind < 0.76:
            return " " * rng.choice([0, 0, 4, 4, 8]) + "# " + sentence + "\n"
        if kind < 0.82:
            clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}"
            return f"2024-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02} {clock} INFO {sentence}\n"
        if kind < 0.90:
            return sentence + "\n\n"
        return " " + sentence

    def _reword(self, draw: random.Random, fact: Fact, values: set[str], variety: float) -> Fact:
        """The fact in other words, at times with a value of few different digits, which is not one of `values`."""
        if draw.random() >= variety:
            return fact
        sentence, question = draw.random(), draw.random()
        if sentence < 0.5:
            fact = replace(fact, form=compose(draw, FACT_PARTS if sentence < 0.32 else RECORD_PARTS))
        if question < 0.65:
            form = compose(draw, QUESTION_PARTS if question < 0.3 else REQUEST_PARTS)
            if form not in HELD_OUT_QUESTION_FORMS:
                fact = replace(fact, question_form=form)
        if fact.value.isdigit() and draw.random() < FEW_DIGITS:
            digits = draw.sample("0123456789", draw.randint(2, 3))
            value = "".join(draw.choice(digits) for _ in fact.value)
            if value not in values:
                values.add(value)
                fact = replace(fact, value=value)
        return fact

    def snippet(
        self, rng: np.random.Generator, length: int, planted: Sequence[tuple[int, list[int]]], first: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Text of `length` tokens with `planted` (number, ids) sentences, none before token `first`."""
        kept, used = [], 0
        for number, ids in planted:
            if used + len(ids) <= length - first:
                kept.append((number, ids))
                used += len(ids)
        text, starts = self.text(rng, length - used)
        allowed = starts[starts >= first]
        if len(allowed) < 2:
            allowed = np.arange(first, length - used + 1)
        places = np.sort(rng.choice(allowed, len(kept)))
        parts, owners, done = [], [], 0
        for place, (number, ids) in zip(places, kept, strict=True):
            parts += [text[done:place], np.array(ids, np.int64)]
            owners += [np.full(place - done, -1), np.full(len(ids), number)]
            done = place
        parts.append(text[done:])
        owners.append(np.full(len(text) - done, -1))
        return np.concatenate(parts), np.concatenate(owners)

    def batch(self, stage: Stage, rng: np.random.Generator) -> Batch:
        draw = random.Random(int(rng.integers(1 << 62)))
        snippets, owners, asked, tails = [], [], [], []
        most = stage.facts[1] + 2 * stage.tails
        for _ in range(stage.contexts):
            context = self._context(stage, rng, draw)
            snippets.append(context[0])
            owners.append(context[1])
            asked.append(np.zeros(most, bool))
            asked[-1][list(context[2])] = True
            tails += context[3]
        tokens, weights, answers = (np.stack(column) for column in zip(*tails, strict=True))
        answers = torch.from_numpy(answers[:, 1:])
        counts = answers.sum(1)
        rows = torch.zeros(len(tails), int(counts.max()), dtype=torch.int64)
        for i, row in enumerate(answers):
            rows[i, : counts[i]] = row.nonzero().flatten()
        return Batch(
            snippets=torch.from_numpy(np.stack(snippets)),
            unit_fact=torch.from_numpy(np.stack(owners)),
            asked=torch.from_numpy(np.stack(asked)),
            tails=torch.from_numpy(tokens[:, :-1]),
            targets=torch.from_numpy(tokens[:, 1:]),
            weights=torch.from_numpy(weights[:, 1:]),
            answers=answers,
            answer_rows=rows,
        )

    def _context(self, stage: Stage, rng: np.random.Generator, draw: random.Random):
        count = draw.randint(*stage.facts)
        local = sum(draw.random() < 0.35 for _ in range(stage.tails))
        facts = make_facts(
            draw,
            count + local,
            held_out=self.held_out,
            digits_only=draw.random() < 0.5,
            share=draw.choice([0.1, 0.3, 0.6]),
            extra_words=self.words,
        )
        if not self.held_out:
            values = {fact.value for fact in facts}
            facts = [self._reword(draw, fact, values, stage.variety) for fact in facts]
        rendered = [self.render(draw, fact.sentence) for fact in facts]
        encoded = self.tokenizer.encode_batch_fast(rendered, add_special_tokens=False)
        numbered = [(i, piece.ids) for i, piece in enumerate(encoded)]

        system = draw.random() < 0.25
        opening = self.start_system if system else self.start_user
        sinks = np.array([*opening, int(self.text(rng, 1)[0][0])])
        if system:
            sinks[3] = self.encode(draw.choice(SYSTEM_LINES))[0]

        places = [draw.randrange(stage.snippets) for _ in range(count)]
        rows, owners, planted = [], [], set()
        for s in range(stage.snippets):
            in_snippet = [numbered[i] for i in range(count) if places[i] == s]
            ids, owner = self.snippet(rng, stage.length, in_snippet, first=16 if stage.snippets > 1 else 0)
            rows.append(np.concatenate([sinks, ids]))
            owners.append(owner)
            planted.update(owner[owner >= 0].tolist())
        available = sorted(planted)
        if not available:  # every sentence was too long for its snippet
            return self._context(stage, rng, draw)

        asked: set[int] = set()
        queue = draw.sample(available, len(available))
        tails = []
        for t in range(stage.tails):
            in_tail = [numbered[count + t]] if t < local else []
            if draw.random() < stage.copies:
                tails.append(self._copy_tail(rng, sinks, stage.tail_length + 1))
                continue
            tail, used = self._tail(stage, rng, draw, sinks, facts, in_tail, queue, available)
            asked |= used
            tails.append(tail)
        return np.stack(rows), np.stack(owners), asked, tails

    def _copy_tail(self, rng: np.random.Generator, sinks: np.ndarray, length: int):
        segment = rng.integers(0, self.pad, int(rng.integers(8, length // 2)))
        tokens = np.concatenate([sinks, np.tile(segment, length // len(segment) + 1)])[:length]
        weights = np.zeros(length, np.float32)
        weights[SINKS + len(segment) + 2 :] = 0.3
        return tokens, weights, np.zeros(length, bool)

    def _tail(self, stage, rng, draw, sinks, facts, in_tail, queue, available):
        """Sinks, recent text, then questions and answers up to the tail's length."""
        limit = stage.tail_length + 1
        # In 15 % of the tails almost a whole chunk is pending.
        most = max(limit - 140, stage.recent[1]) if draw.random() < 0.15 else stage.recent[1]
        length = draw.randint(stage.recent[0], most)
        recent, owner = self.snippet(rng, length + sum(len(h[1]) for h in in_tail), in_tail)
        local = sorted({int(i) for i in owner if i >= 0})
        tokens = [*sinks.tolist(), *recent.tolist()]
        weights = [0.0] * SINKS + np.where(owner < 0, TEXT_WEIGHT, 0.0).tolist()
        answers = [False] * len(tokens)
        used: set[int] = set()
        first = True

        def add(ids: Sequence[int], weight: float = 0.0, answer: bool = False) -> None:
            tokens.extend(ids)
            weights.extend([weight] * len(ids))
            answers.extend([answer] * len(ids))

        while True:
            tool = draw.random() < stage.tools * stage.variety
            if local and draw.random() < 0.5:
                number = local.pop()
            else:
                if not queue:
                    queue.extend(draw.sample(available, len(available)))
                number = queue.pop()
            turn_start = len(tokens)
            add(self.blank if first else self.next_user)
            if not first and draw.random() < 0.1:
                add(self.text(rng, draw.randint(10, 60))[0].tolist(), TEXT_WEIGHT)
                add(self.blank)
            if tool:
                self._tool_turn(draw, facts[number], add)
            else:
                add(self.encode(facts[number].question))
                add(self.to_assistant)
                value = [*self.encode(facts[number].answer), self.end]
                add(value[:1], FIRST_TOKEN_WEIGHT, True)
                add(value[1:], 1.0, True)
            if len(tokens) > limit:
                del tokens[turn_start:], weights[turn_start:], answers[turn_start:]
                break
            if not tool:
                used.add(number)
            first = False
        if first:  # the recent text leaves no room for a turn
            return self._tail(stage, rng, draw, sinks, facts, in_tail, queue, available)
        missing = limit - len(tokens)
        add([self.pad] * missing)
        return (np.array(tokens), np.array(weights, np.float32), np.array(answers)), used

    def _tool_turn(self, draw: random.Random, fact: Fact, add) -> None:
        """A request, and the tool call that copies the entity from it; only the copy has a loss."""
        request = draw.choice(
            [
                "Look up the {A} of {E}.",
                "Look up the {A} of the {E}.",
                "Please look up {E}'s {A}.",
                "Find the {A} for {E}.",
                "Fetch the {A} of {E}, please.",
                "Use a tool to get the {A} of {E}.",
                "Get me the {A} of {E}.",
                "Which {A} has {E}? Use the tool.",
                "Check the {A} for the {E} with a tool.",
                "{A} of {E}, please look.",
            ]
        )
        entity = fact.entity if draw.random() < 0.3 else make_entity(draw, self.held_out, self.words)
        quoted = f'"{entity}"' if draw.random() < 0.25 else entity
        request = request.format(A=fact.attribute, E=quoted)
        name = draw.choice(["lookup", "search", "find", "get_record", "query", "fetch", "read_entry"])
        key = draw.choice(["key", "name", "query", "id", "subject", "entity", "item"])
        add(self.encode(request))
        add(self.to_assistant)
        add(self.encode('<tool_call>\n{"name": "' + name + '", "arguments": {"' + key + '": "'))
        copied = self.encode(entity + '"}}\n</tool_call>')
        add([*copied, self.end], 1.0)
        if draw.random() < 0.4:
            add(self.encode("\n<|im_start|>tool\n" + fact.value))
            add(self.to_assistant)
            add([*self.encode(fact.value), self.end], 0.5)
