"""Answers of `locret-stream run`, printed as they come: what was thought ahead of one is told apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from locret_stream.cli.output import err, print_json
from locret_stream.cli.text_input import Reader, stdin_is_terminal

if TYPE_CHECKING:
    from locret_stream.cli.display import Row
    from locret_stream.config import Sampling
    from locret_stream.context import Memory, Recalled, StreamingContext, Token
    from locret_stream.conversation.parts import Part
    from locret_stream.conversation.replies import Reply

Apart = Callable[[], "tuple[Reply, list[int]]"]
"""Makes what takes a reply apart, and the special tokens that its text comes without."""


async def answer(questions: list[str], context: StreamingContext, sampling: Sampling, row: Row | None,
                 as_json: bool, *, recall: bool, evicts: bool, apart: Apart,
                 receipt: Mapping[str, Any] | None = None) -> None:
    """Answer every question from the same memory, and print the answers as they come; `recall`: as JSON with what was
    read again, which is nothing where the policy never evicts; `receipt`: of the texts, for JSON."""
    answers = []
    for question in questions:
        reply, skip_special = apart()
        spoken = Spoken(reply, indent="  " if len(questions) > 1 else "", silent=as_json)
        if not as_json and len(questions) > 1:
            print(question, flush=True)
        try:
            found = await context.ask(question, sampling=sampling, skip_special=skip_special, on_token=spoken.add)
        except BaseException:
            spoken.break_off()
            raise
        spoken.end(found.finish_reason, sampling)
        if recall and not as_json:
            err.print(_read_again(found.recalled, evicts, context.memory), soft_wrap=True)
        answers.append({"question": question, "answer": spoken.text.strip(), "finish_reason": found.finish_reason} | (
            {"reasoning": spoken.thought} if spoken.thought else {}) | (
            {"recalled": msgspec.to_builtins(found.recalled)} if recall else {}))
    memory = context.memory
    if as_json:
        print_json({
            "tokens_fed": row.tokens if row else 0,
            "units": fmean(memory.units),
            "bytes_resident": memory.bytes_resident,
            "bytes_full_cache": memory.bytes_full_cache,
            **({"bytes_recall": memory.bytes_recall} if recall else {}),
            "tok_per_s": round(row.tok_per_s, 1) if row else 0.0,
            "answers": answers,
            **(receipt or {}),
        })


async def chat(questions: Reader, context: StreamingContext, sampling: Sampling, apart: Apart) -> None:
    """Questions and answers in turn, all of which the memory keeps, until the input ends."""
    prompt = "> " if stdin_is_terminal() or questions.name != "stdin" else ""
    err.print("Ask away; Ctrl-D ends.")
    while True:
        print(prompt, end="", flush=True)
        question = await questions.line()
        if question is None:
            break
        if not question.strip():
            continue
        reply, skip_special = apart()
        spoken = Spoken(reply)
        generation = context.generate(question, sampling=sampling, skip_special=skip_special)
        async for token in generation:
            spoken.add(token)
        spoken.end(generation.finish_reason, sampling)
    if prompt:
        print(file=sys.stderr)


class Spoken:
    """An answer that is printed as it comes. What was thought ahead of it goes to stderr, dim: nobody who reads the
    answers takes it for one.

    Args:
        silent: nothing is printed.

    Attributes:
        text: the answer so far. thought: what was thought so far.
    """

    def __init__(self, reply: Reply, *, indent: str = "", silent: bool = False):
        self._reply, self._silent = reply, silent
        self._line, self._thinking = Stripped(indent), False
        self.text = self.thought = ""

    def add(self, token: Token) -> None:
        for part in self._reply.feed(token.text):
            self._take(part)

    def end(self, finish_reason: str | None, sampling: Sampling) -> None:
        """The reply ends here."""
        for part in self._reply.finish():
            self._take(part)
        if self._silent:
            return
        self._end_thought()
        print(flush=True)
        if finish_reason == "length":
            what = "thought" if self._reply.cut_thought and not self.text else "answer"
            err.print(f"The {what} was cut off at {sampling.max_new_tokens} tokens; --max-new-tokens allows more.",
                      soft_wrap=True)
        elif self._reply.cut_thought and not self.text:
            err.print("The model closed no thought, so that there is no answer.", soft_wrap=True)

    def break_off(self) -> None:
        """A part of an answer is not to look like a whole one."""
        self._end_thought()
        if self._line.begun:
            print(" …", flush=True)

    def _take(self, part: Part) -> None:
        from locret_stream.conversation.reading import with_calls
        self.thought += part.reasoning
        said = with_calls(part)
        self.text += said
        if self._silent:
            return
        if part.reasoning:
            err.print(part.reasoning, end="", style="dim", soft_wrap=True)
            self._thinking = True
        if said:
            self._end_thought()
            self._line.add(said)

    def _end_thought(self) -> None:
        if self._thinking:
            err.print()
        self._thinking = False


class Stripped:
    """Prints a reply as it comes, without the white space at its ends; `indent` stands before all its lines."""

    def __init__(self, indent: str = "") -> None:
        self._indent = indent
        self._space: str | None = None  # white space that may be the reply's end; None: at its beginning

    @property
    def begun(self) -> bool:
        """Whether anything was printed."""
        return self._space is not None

    def add(self, text: str) -> None:
        """Print what is certain by now."""
        text = text.lstrip() if self._space is None else self._space + text
        shown = text.rstrip()
        if shown:
            ahead = "" if self.begun else self._indent
            print(ahead + shown.replace("\n", f"\n{self._indent}"), end="", flush=True)
        if shown or self._space is not None:
            self._space = text[len(shown):]


def _read_again(passages: Sequence[Recalled], evicts: bool, memory: Memory) -> str:
    """What was read again for an answer, or why nothing was."""
    if passages:
        return (f"Read again for it: {len(passages)} passage{'s' * (len(passages) != 1)}, "
                f"{sum(passage.end - passage.start for passage in passages):,} tokens.")
    why = ("this policy evicts nothing" if not evicts else
           "all that was read stands before it, as less than a chunk was" if memory.tokens == memory.pending else
           "no passage of what is committed has telling words of the question")
    return f"Nothing was read again for it: {why}."
