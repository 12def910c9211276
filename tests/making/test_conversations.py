"""Made conversations: where facts lie, what is asked, and that only what a model answers right is kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from locret_stream import InputError
from locret_stream.making import Conversation, Making, Texts, answered, conversation
from locret_stream.training import load_examples, render
from tests.cli.command import invoke, mistake
from tests.training.tiny import make_tokenizer

SENTENCES = [f"Sentence number {n} of the book is not a long one." for n in range(150)]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("\n".join(SENTENCES))
    return path


@pytest.fixture(scope="module")
def texts(book: Path) -> Texts:
    return Texts([book])


def made(texts: Texts, seed: int, **more) -> Conversation:
    return conversation(texts, random.Random(seed), lambda text: len(text.split()), Making(tokens=(100, 300), **more))


@pytest.mark.parametrize("seed", range(40))
def test_every_question_is_about_what_was_told_before_it(texts: Texts, seed: int):
    talk = made(texts, seed)
    assert talk.messages == made(texts, seed).messages
    assert talk.questions and talk.messages[-1]["role"] == "assistant"
    said = [message["content"] for message in talk.messages]
    for question in talk.questions:
        assert said[question.message - 1] == question.fact.question and said[question.message] == question.fact.answer
        read = "\n".join(said[:question.message - 1])
        assert all(sentence in read for sentence in question.fact.told)
        if len(question.fact.told) == 2:
            assert read.index(question.fact.told[0]) < read.index(question.fact.told[1])
    weights = [message.get("weight", 1) for message in talk.messages if message["role"] == "assistant"]
    assert weights.count(1) == len(talk.questions)


def test_texts_are_as_long_as_asked(texts: Texts):
    for seed in range(20):
        talk = made(texts, seed, system=0.0, asked_early=0.0)
        asked = {question.message - back for question in talk.questions for back in (0, 1)}
        read = sum(len(message["content"].split()) for number, message in enumerate(talk.messages)
                   if number not in asked)  # replies in talk are a part of its length
        assert 95 <= read <= 420, "up to one long line more"


def test_a_book_needs_sentences(tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("Too short. Really.")
    with pytest.raises(InputError, match="found 0 sentences of 20 to 400 characters; expected at least 100"):
        Texts([path])
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"is UTF-16 .* expected UTF-8 text$"):
        Texts([path])


class Knowing:
    """A model that predicts every token of what it reads, but those at some places."""

    device = torch.device("cpu")

    def __init__(self, blind: set[int]):
        self.blind = blind

    def __call__(self, ids, logits_to_keep, use_cache):
        logits = torch.zeros(1, len(logits_to_keep), int(ids.max()) + 2)
        for at, row in enumerate(logits_to_keep.tolist()):
            logits[0, at, -1 if row in self.blind else ids[0, row + 1]] = 1
        return SimpleNamespace(logits=logits)


def test_only_what_is_answered_right_is_kept(texts: Texts):
    tokenizer = make_tokenizer()
    talk = next(talk for talk in (made(texts, seed) for seed in range(99)) if len(talk.questions) > 3
                and talk.questions[1].fact.answer.startswith("The "))
    whole = answered(Knowing(set()), tokenizer, talk)
    assert whole.conversation == talk and whole.right == len(talk.questions) and whole.wrong == 0
    spans = render(tokenizer, talk.messages).answer_spans
    lost = talk.questions[1]
    value = lost.fact.answer.rindex(lost.fact.value)
    last = spans[1][0] + len(lost.fact.answer[:value]) - 1  # bytes, but for merges: somewhere in the answer
    part = answered(Knowing(set(range(last - 3, spans[1][1]))), tokenizer, talk)
    assert part.wrong == 1 and part.right == len(talk.questions) - 1
    kept = part.conversation
    assert kept is not None and lost.fact.question not in [message["content"] for message in kept.messages]
    assert [question.fact for question in kept.questions] == [one.fact for one in talk.questions if one is not lost]
    for question in kept.questions:
        assert kept.messages[question.message]["content"] == question.fact.answer
    elsewhere = answered(Knowing({spans[1][0] - 1}), tokenizer, talk)
    assert elsewhere.wrong == 0, "only the value has to be right, not the first word"
    nothing = answered(Knowing(set(range(10**5))), tokenizer, talk)
    assert nothing.conversation is None and nothing.right == 0 and nothing.wrong == len(talk.questions)


def test_a_file_of_conversations_is_training_data(book: Path, tiny: Path, tmp_path: Path, monkeypatch):
    from locret_stream import making

    monkeypatch.setattr(making, "answered", lambda model, tokenizer, talk: answered(Knowing(set()), tokenizer, talk))
    to = tmp_path / "pairs.jsonl"
    options = ["make-data", "--model", tiny, "--text", book, "--out", to, "--conversations", 4, "--tokens", 300,
               "--tokens", 600]
    code, out, err = invoke(*options, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["conversations"] == found["tried"] == 4 and found["answered"] == found["questions"] > 4
    examples = load_examples(to, make_tokenizer())
    assert len(examples) == 4 and sum(len(one.answer_spans) for one in examples) == found["questions"]
    assert f"{to} exists" in mistake(*options)
    options[options.index(to)] = tmp_path / "more.jsonl"
    code, out, err = invoke(*options)
    assert code == 0 and (tmp_path / "more.jsonl").read_text() == to.read_text(), "a function of the seed"
    assert f"train-heads --model {tiny} --data" in out


def test_a_background_tells_nothing(book: Path, tiny: Path, tmp_path: Path, monkeypatch):
    from locret_stream import making

    monkeypatch.setattr(making, "answered", lambda model, tokenizer, talk: answered(Knowing(set()), tokenizer, talk))
    monkeypatch.setattr("locret_stream.cli.make_data.BACKGROUND_TOKENS", 6_000)
    plain = tmp_path / "plain.jsonl"
    options = ["make-data", "--model", tiny, "--text", book, "--out", tmp_path / "pairs.jsonl", "--conversations", 1,
               "--tokens", 300, "--tokens", 600, "--background"]
    code, _, err = invoke(*options, plain)
    assert code == 0, err
    lines = [json.loads(line)["messages"] for line in plain.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokens = [len(tokenizer(message["content"], add_special_tokens=False)["input_ids"])
              for talk in lines for message in talk]
    assert 6_000 <= sum(tokens) < 9_000 and len({json.dumps(talk) for talk in lines}) == len(lines) > 5
    assert any(len(talk) > 6 for talk in lines), "talk"
    assert all(message.get("weight", 1) == 0 for talk in lines for message in talk if message["role"] == "assistant")
    assert f"{plain} exists" in mistake(*options[:-1], "--background", plain, "--out", tmp_path / "more.jsonl")
    both = tmp_path / "both.jsonl"
    assert "expected two files" in mistake(*options, both, "--out", both)


def test_mistakes_in_make_data_are_one_line(book: Path, tiny: Path, tmp_path: Path, monkeypatch):
    options = ["make-data", "--model", tiny, "--text", book, "--out", tmp_path / "pairs.jsonl"]
    assert "expected it twice" in mistake(*options, "--tokens", 300)
    assert "expected it twice" in mistake(*options, "--tokens", 300, "--tokens", 200)
    monkeypatch.setattr("locret_stream.cli.make_data.PATIENCE", 2)
    assert "answered none of the questions of 2 conversations" in mistake(*options, "--tokens", 100, "--tokens", 120)
