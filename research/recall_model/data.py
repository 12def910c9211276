"""The tokenizer of the recall model, and the sequences it is trained on: the tasks of `evaluation.markers` in text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from locret_stream.evaluation import markers
from locret_stream.training import Example

END = "<|end|>"
TEXT_WEIGHT, COPY_WEIGHT = 0.3, 0.5
RUN = 40  # lines of a background that follow each other
TEXT_SHARES = (0.0, 0.3, 0.6, 0.85)  # how much of a sequence is text
LONG_TEXT_SHARES = (0.3, 0.6, 0.85, 0.95)  # the same for what learns what to forget
PLAIN = 0.3  # the share of plain recall
HARDER = ((0.45, markers.last_write), (0.52, markers.several_values), (0.62, markers.several_keys),
          (0.7, markers.decoys), (0.95, markers.variables))
"""Tasks of about three lines a question, and the draw below which each is taken: most for what is learnt last."""


def train_tokenizer(text: str, vocab: int, digits: int = 1) -> Tokenizer:
    """A byte-level BPE in which keys are one token and the brackets of markers stand alone; so do digits, or, with
    `digits` 3, runs of up to three of them, which are one token (as Llama 3's tokenizer has it)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(rf"[A-Z]{{2}}|[0-9]{{1,{digits}}}|[<>\[\](){{}}:?@\n]"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=[END], show_progress=False)
    whole = [*markers.KEYS, *(f"{n:03d}" for n in range(1000) if digits == 3)]
    often = [" ".join(whole)] * (len(text) // (50 if digits == 1 else 500))  # so that all of them are merged
    tokenizer.train_from_iterator([text, *often], trainer)
    missing = [word for word in whole if tokenizer.token_to_id(word) is None]
    assert not missing, f"{len(missing)} keys or numbers are no tokens of their own; expected a larger vocabulary"
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, window: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "model_max_length": window,
        "clean_up_tokenization_spaces": False, "add_bos_token": False}, indent=2) + "\n")


def lines_of_figures(seed: str, count: int) -> list[str]:
    """Lines full of digits and brackets that are no marks: logs, dumps, tables, long numbers. A few in a row are of one
    kind, as in files. Heads that saw too few of them keep every zero of a table."""
    rng, lines = random.Random(f"figures {seed}"), []

    def figures(least: int, most: int) -> str:
        size = rng.randint(least, most)
        return rng.choice((str(rng.randrange(10)) * size, ("1234567890" * size)[:size],
                           "".join(rng.choice("0123456789") for _ in range(size))))

    def several(make: Callable[[], str], between: str) -> str:
        return between.join(make() for _ in range(rng.randint(2, 12)))

    kinds = (
        lambda: f"20{figures(2, 2)}-0{rng.randint(1, 9)}-1{rng.randrange(10)} {rng.randint(10, 23)}:{figures(2, 2)}:"
                f"{figures(2, 2)},{figures(3, 3)} INFO worker-{rng.randint(1, 99)}: request {figures(4, 7)} took "
                f"0.{figures(3, 3)} s",
        lambda: "    " + several(lambda: f"0x{rng.getrandbits(32):08x}", ", ") + ",",
        lambda: several(lambda: f"{rng.getrandbits(8):02x}", " "),
        lambda: "| " + several(lambda: f"{rng.randint(0, 999)}.{figures(1, 2)}", " | ") + " |",
        lambda: f'    check("%.{rng.randint(1, 30)}d", {figures(1, 12)}, "{figures(5, 40)}")',
        lambda: f"'{figures(10, 60)}'",
        lambda: f"    ({several(lambda: figures(1, 4), ', ')}): [{several(lambda: figures(1, 3), ', ')}],",
        lambda: several(lambda: figures(1, 6), ","),
        lambda: f"  <td>{figures(1, 5)}</td><td>{figures(1, 3)}:{figures(2, 2)}</td>",
        lambda: f"self.assertEqual(f({figures(1, 5)}, {figures(1, 5)}), {figures(1, 9)})",
        lambda: f"package-{figures(1, 2)}=={rng.randint(0, 9)}.{rng.randint(0, 30)}.{rng.randint(0, 9)}  "
                f"# sha256:{rng.getrandbits(128):032x}",
    )
    while len(lines) < count:
        kind = rng.choice(kinds)
        lines += [kind() for _ in range(rng.randint(2, 15))]
    return lines[:count]


class Writer:
    """Training sequences: text with marks in it, then questions and answers, of any mixture of the tasks."""

    def __init__(self, tokenizer: Tokenizer, text: str, seed: str):
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        lines = [line + "\n" for line in text.split("\n") if line.strip()]
        self.lines = [np.array(line.ids, np.int64) for line in tokenizer.encode_batch(lines, add_special_tokens=False)]
        self.vocab = tokenizer.get_vocab_size()

    def _ids(self, lines: Sequence[str]) -> list[np.ndarray]:
        return [np.array(line.ids, np.int64)
                for line in self.tokenizer.encode_batch(list(lines), add_special_tokens=False)]

    def case(self, room: int) -> markers.Case:
        """A mixture of tasks of about `room` marks and questions."""
        rng, keys, cases = self.rng, markers.Keys(self.rng), []
        left = max(3, min(room, 300))
        while left >= 3:
            kind, size = rng.random(), rng.randint(1, max(1, left // 2))
            if kind < PLAIN:
                cases.append(markers.recall(rng, size, asked=max(1, size // 2), keys=keys))
                left -= size + size // 2
            elif kind < HARDER[-1][0]:
                make = next(make for edge, make in HARDER if kind < edge)
                cases.append(make(rng, max(2, size // 3), keys=keys))
                left -= 3 * max(2, size // 3)
            elif not any(question.ask == "?@" for case in cases for question in case.questions):
                size = max(5, min(25, left))
                cases.append(markers.preference(rng, size))
                left -= size
        return markers.merged(rng, cases)

    def sequence(self, length: int, shares: Sequence[float] = TEXT_SHARES
                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids [length + 1], loss weights and answers (bool) of the same shape, aligned with ids as targets."""
        rng = self.rng
        fill = rng.choice(shares)
        case = self.case(int(length * (1 - fill) / 9))
        places, marks = [place for place, _ in case.marks], self._ids([line + "\n" for _, line in case.marks])
        asked = self._ids([part for question in case.questions for part in (question.ask, question.answer + "\n")])
        questions = list(zip(asked[::2], asked[1::2], strict=True))
        while sum(map(len, marks)) + sum(map(len, asked)) > length - 8 and len(questions) > 1:
            asked = asked[:-2]
            questions.pop()
        room = length + 1 - sum(map(len, marks)) - sum(len(q) + len(a) for q, a in questions)
        parts = self._with_text(places, marks, room)
        parts += [part for q, a in questions for part in ((q, 0.0, False), (a, 1.0, True))]
        ids = np.concatenate([part for part, _, _ in parts])
        weights = np.concatenate([np.full(len(part), weight, np.float32) for part, weight, _ in parts])
        answers = np.concatenate([np.full(len(part), answer) for part, _, answer in parts])
        cut = max(0, len(ids) - length - 1)
        return ids[cut:], weights[cut:], answers[cut:]

    def _with_text(self, places: list[float], marks: list[np.ndarray], room: int) -> list:
        """Marks among lines of text that fill `room`; the first line is cut to fit."""
        lines, at, size = [], self.rng.randrange(len(self.lines)), 0
        while size < room:
            lines.append(self.lines[at % len(self.lines)])
            size += len(lines[-1])
            at += 1
        if lines and size > room:
            lines[0] = lines[0][size - room:]
        parts, read, due = [], 0, 0
        for line in lines:
            while due < len(marks) and places[due] * room <= read:
                parts.append((marks[due], 0.0, False))
                due += 1
            parts.append((line, TEXT_WEIGHT, False))
            read += len(line)
        return parts + [(mark, 0.0, False) for mark in marks[due:]]

    def examples(self, length: int) -> Iterator[Example]:
        """Sequences without end as examples for retaining heads: every answer is a reply."""
        while True:
            ids, _, answers = self.sequence(length, LONG_TEXT_SHARES)
            edges = np.flatnonzero(np.diff(np.concatenate([[False], answers, [False]]).astype(np.int8)))
            yield Example(torch.from_numpy(ids), tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)))

    def background(self, count: int) -> Tensor:
        """Ids [count] of text alone, in runs of lines from all over it."""
        parts, size = [], 0
        while size < count:
            at = self.rng.randrange(len(self.lines))
            parts += self.lines[at:at + RUN]
            size += sum(map(len, self.lines[at:at + RUN]))
        return torch.from_numpy(np.concatenate(parts)[:count])

    def copies(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A random segment, repeated: the plainest reason to look back."""
        size = self.rng.randint(8, max(9, length // 2))
        segment = np.array([self.rng.randrange(1, self.vocab) for _ in range(size)], np.int64)
        ids = np.tile(segment, length // size + 2)[:length + 1]
        weights = np.zeros(length + 1, np.float32)
        weights[size + 3:] = COPY_WEIGHT
        return ids, weights, np.zeros(length + 1, bool)

    def batch(self, length: int, count: int, copies: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """inputs, targets, weights, answers, each [count, length]."""
        rows = [self.copies(length) if self.rng.random() < copies else self.sequence(length) for _ in range(count)]
        ids, weights, answers = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
        return ids[:, :-1], ids[:, 1:], weights[:, 1:], answers[:, 1:]
