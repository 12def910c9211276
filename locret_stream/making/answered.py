"""Which of the questions a model answers right with its full cache: only those can teach what to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from locret_stream.making.conversations import Conversation
from locret_stream.training import Example, render


@dataclass(frozen=True, slots=True)
class Answered:
    """A conversation with the questions that the model answers right.

    Args:
        conversation: None if it answers none. tokens: of the whole conversation.
        right, wrong: the kinds of what was asked, by whether it was answered right.
    """

    conversation: Conversation | None
    tokens: int
    right: int
    wrong: int


@torch.no_grad()
def answered(model: Any, tokenizer: Any, made: Conversation) -> Answered:
    """Read the whole conversation once with the full cache; a question is answered right if every token of the value
    that its answer needs is the most probable one where it stands."""
    example = render(tokenizer, made.messages)
    replies = [number for number, message in enumerate(made.messages)
               if message["role"] == "assistant" and message.get("weight") != 0]
    spans = dict(zip(replies, example.answer_spans, strict=True))
    rows = {question.message: _rows(tokenizer, example, spans[question.message], question.fact.answer,
                                    question.fact.value) for question in made.questions}
    wanted = torch.tensor(sorted({row for some in rows.values() for row in some}))
    ids = example.ids.to(model.device)
    logits = model(ids[None], logits_to_keep=wanted.to(model.device), use_cache=False).logits[0]
    hit = dict(zip(wanted.tolist(), (logits.argmax(-1) == ids[wanted.to(model.device) + 1]).tolist(), strict=True))
    wrong = {message for message, some in rows.items() if not all(hit[row] for row in some)}
    kept = made.without(wrong)
    return Answered(kept if kept.questions else None, len(ids), len(rows) - len(wrong), len(wrong))


def _rows(tokenizer: Any, example: Example, span: tuple[int, int], answer: str, value: str) -> list[int]:
    """The rows that predict the tokens of `value`, its last occurrence in the answer."""
    begin = answer.rindex(value)
    ends = [len(tokenizer.decode(example.ids[span[0]:at + 1])) for at in range(*span)]
    starts = [0, *ends[:-1]]
    return [at - 1 for at, start, end in zip(range(*span), starts, ends, strict=True)
            if end > begin and start < begin + len(value)]
