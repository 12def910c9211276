"""L-Eval (arXiv:2307.11088): its records and its metrics. Knows no model.

A record is {"instructions", "input", "outputs", "source", "evaluation"}: one text, and for each instruction the output
that is expected. The text is read once for all of its questions. Only the name of the file says which task a record is
of; "evaluation" is "exam", "f1", "rouge", or "human" or "LLM" for what has no metric here (`Question.metric` is "").

The wording around a text is this project's own, to the same effect as L-Eval's. As there, an open question says how
many words the reference has, where it is scored by what it has in common with that reference.

Metrics are those of its `Evaluation` folder, by formula. Where they differ:

- An empty answer to a question with options is worth 0 (there 0.25).
- `rouge_l` is the F of ROUGE-L alone; L-Eval shows it beside ROUGE-1 and ROUGE-2.
- sci_fi has two questions in one there, by the story and by the world. Only the first has to do with what was read.
"""

from __future__ import annotations

import re

import msgspec

from locret_stream.errors import ConfigError
from locret_stream.evaluation.published import overlap
from locret_stream.evaluation.published.records import Benchmark, Document, Question, best

NAME = "leval"
MAX_NEW_TOKENS = 512
LETTERS = "ABCD"
OPEN = {"f1": "f1", "rouge": "rouge_l"}
JUDGED = ("human", "llm")

# part of a task's name: (what is said before its text, metric)
EXAMS = {
    "gsm": ("Here are worked problems. Solve the last one like them, and end with: The answer is, and the number.\n\n",
            "number"),
    "topic": ("This is the record of a conversation that you had with a user. A topic begins where the user says what "
              "to talk about. Remember the topics in their order; you will be asked for one of them.\n\n", "exact"),
    "coursera": ("Read this document. Each question on it has one right option or several; answer with their letters "
                 "only, such as B or BD.\n\n", "letters"),
    "codeU": ("Read this code and its comments. You will be asked what calls of its functions give.\n\n", "code"),
    "sci_fi": ("Read this story. Answer with True or False, by what the story says and not by what you know.\n\n",
               "true_false"),
    "quality": ("Read this document. Each question on it has one right option; answer with its letter only.\n\n",
                "letter"),
    "tpo": ("Read this document. Each question on it has one right option; answer with its letter only.\n\n", "letter"),
}
OTHER_EXAM = ("Read this document, and answer questions on it in as few words as you can.\n\n", "exact")
OTHER = "Read this document, and then do what is asked about it.\n\n"


class Record(msgspec.Struct, frozen=True):
    """One record of a file, its fields by their names there."""

    instructions: list[str]
    input: str
    outputs: list[str]
    evaluation: str


def document(record: Record, task: str) -> Document:
    """One record, as many questions as it has instructions."""
    if not record.instructions or len(record.instructions) != len(record.outputs):
        raise ConfigError(f"found {len(record.instructions)} `instructions` and {len(record.outputs)} `outputs`, "
                          "expected as many of the one as of the other")
    kind = record.evaluation.lower()
    if kind == "exam":
        before, metric = next((EXAMS[part] for part in EXAMS if part in task), OTHER_EXAM)
    elif kind in OPEN or kind in JUDGED:
        before, metric = OTHER, OPEN.get(kind, "")
    else:
        raise ConfigError(f"found the evaluation {record.evaluation!r}, expected exam, f1, rouge, human or LLM")
    questions = tuple(
        Question(_asked(instruction, output, metric), (output,), metric and f"{NAME}/{metric}", MAX_NEW_TOKENS)
        for instruction, output in zip(record.instructions, record.outputs, strict=True))
    return Document(NAME, task, before + record.input, questions)


def _asked(instruction: str, output: str, metric: str) -> str:
    if metric in ("number", "code"):  # these texts go on with their own instructions
        return f"\n\n{instruction}"
    length = f"\nAnswer in {len(output.split())} words." if metric in OPEN.values() else ""
    return f"\n\n{instruction}{length}\nAnswer:"


def exact(found: str, expected: str) -> float:
    """1 for the expected answer, a quarter for some of several expected letters and no other letter.

    Letters are compared with letters and numbers with numbers. Any other answer is right if the expected one occurs in
    the first line that has more than one character, case and spaces aside.
    """
    ours = " ".join(overlap.answer_words(expected, lower=False))
    if set(ours) <= set(LETTERS):
        theirs = " ".join(overlap.answer_words(found, lower=False))
        if theirs == ours:
            return 1.0
        return 0.25 if theirs and set(theirs) <= set(ours) else 0.0
    try:
        return float(float(found) == float(expected))
    except ValueError:
        line = next((line for line in found.split("\n") if len(line) > 1), found)
        return float(expected.lower().replace(" ", "") in line.lower().replace(" ", ""))


def letter(found: str, expected: str) -> float:
    """`exact`, of the first of the letters A to D in the answer; an answer without any counts as A, as in L-Eval."""
    return _of_letters(next((c for c in found if c in LETTERS), _letters(found)), found, expected)


def letters(found: str, expected: str) -> float:
    """`exact`, of the letters of the answer: those it begins with if there are several, else those that stand before a
    space, a full stop or a bracket, up to a next "Question"; an answer without any counts as A, as in L-Eval."""
    return _of_letters(_letters(found), found, expected)


def _of_letters(chosen: str, found: str, expected: str) -> float:
    right = "".join(c for c in (expected.split() or [""])[0] if c in LETTERS) or "A"
    return exact(found if found and found in LETTERS else chosen, right) if found else 0.0


def _letters(found: str) -> str:
    rest = found.lstrip(LETTERS)
    lead = found[:len(found) - len(rest)]
    if len(lead) < 2:
        lead += "".join(re.findall(r"[A-Z](?=[\s.)])", rest.split("Question")[0]))
    return "".join(c for c in LETTERS if c in lead) or "A"


def number(found: str, expected: str) -> float:
    """`exact`, of the digits, up to a full stop, of the number after "The answer is", or else of the last number of the
    first paragraph."""
    return exact(_number(found), _number(expected))


def _number(text: str) -> str:
    said = re.search(r"The answer is (\S+)", text)
    words = [said[1]] if said else text.split("\n\n")[0].split(" ")
    last = next((word for word in reversed(words) if any(map(str.isdigit, word))), "")
    return "".join(c for c in last.split(".")[0] if c.isdigit())


def code(found: str, expected: str) -> float:
    """`exact`, of the last words of the answer, or its first words after "the final output": as many as are expected
    and three more. Commas, quotes, ".0" and the words around a result are left out of both."""
    text, take = _bare_code(found), len(expected.split()) + 3
    for phrase in ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed"):
        text = text.replace(phrase, "")
    _, final, rest = text.rpartition("the final output")
    words = re.split(r"\s+", rest)
    return exact(" ".join(words[:take] if final else words[-take:]), _bare_code(expected))


def _bare_code(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    for part in (",", "'", "\\", ".0"):
        text = text.replace(part, "")
    return text.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")


def true_false(found: str, expected: str) -> float:
    """1 if the first word with "true" or "false" in it is of the expected kind, by the story (before "[fact:")."""
    found, expected = (text.lower().split("[fact:")[0] for text in (found, expected))
    said = re.search("true|false", found)
    return exact(said[0] if said else "", expected.strip())


BENCHMARK = Benchmark(
    NAME, "L-Eval", Record, document, tasks="the name of an L-Eval file, such as coursera", knows=bool,
    metrics={"exact": best(exact), "letter": best(letter), "letters": best(letters), "number": best(number),
             "code": best(code), "true_false": best(true_false), "f1": best(overlap.qa_f1),
             "rouge_l": best(overlap.rouge_l)})
