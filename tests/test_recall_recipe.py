"""The recipe of the recall model at toy sizes: what it reads is right."""

from __future__ import annotations

import itertools
import random
import re
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from research import train_recall_model as recipe
from research.recall_model import data, lessons
from research.recall_model.circuits import initialise

pytestmark = pytest.mark.thorough

LENGTH = 256


@pytest.fixture(scope="module")
def text() -> str:
    rng = random.Random(0)
    vocabulary = ["".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randint(2, 8))) for _ in range(400)]
    return "\n".join(" ".join(rng.choices(vocabulary, k=rng.randint(3, 12))) for _ in range(1500))


@pytest.fixture(scope="module")
def writer(text):
    return data.Writer(data.train_tokenizer(text, 1200), text, "3")


@pytest.mark.thorough
def test_markers_are_tokens_of_their_own(writer):
    ids = writer.tokenizer.encode("?<QX:471\n<AB:067>\n").tokens
    assert ids == ["?", "<", "QX", ":", "4", "7", "1", "Ċ", "<", "AB", ":", "0", "6", "7", ">", "Ċ"]


def test_numbers_can_be_tokens_of_their_own(text):
    tokenizer = data.train_tokenizer(text, 2400, digits=3)
    assert tokenizer.encode("?<QX:471\n<AB:067").tokens == ["?", "<", "QX", ":", "471", "Ċ", "<", "AB", ":", "067"]
    assert tokenizer.encode("4711").tokens == ["471", "1"], "the same numbers everywhere, whatever is behind them"


@pytest.mark.thorough
def test_every_answer_of_a_sequence_is_right(writer):
    """Read back from the ids alone, by who kept every mark."""
    from tests.evaluation.test_markers import reader
    asked = 0
    for _ in range(40):
        ids, weights, answers = writer.sequence(LENGTH)
        assert len(ids) == len(weights) == len(answers) == LENGTH + 1
        assert (weights[answers] == 1).all()
        lines = writer.tokenizer.decode(ids.tolist(), skip_special_tokens=False).split("\n")
        for line in lines[1:-1]:  # the first may be cut
            if line.startswith("?"):
                size = 2 if line[1] == "@" else line.index(":") + 1
                question, answer = line[:size], line[size:]
                found = [mark for mark in lines if mark[:1] in ("<", "(", "{", "@")]
                if len(found) == len([mark for mark in lines[1:] if mark[:1] in ("<", "(", "{", "@")]):
                    assert reader(found, question) == answer
                    asked += 1
    assert asked > 100


def test_examples_for_heads_label_the_answers(writer):
    example = next(writer.examples(LENGTH))
    for start, end in example.answer_spans:
        said = writer.tokenizer.decode(example.ids[start:end].tolist())
        assert re.fullmatch(r"([0-9]{3}( [0-9]{3})*|[RPS]|(<[A-Z]{2}:[0-9]{3}>)+)\n", said)


def test_a_background_is_runs_of_its_text_and_holds_no_mark(writer, text):
    ids = writer.background(5000)
    assert ids.shape == (5000,) and ids.dtype == torch.int64
    lines = writer.tokenizer.decode(ids.tolist()).split("\n")[:-1]
    whole = text.split("\n")
    assert set(lines) <= set(whole) and len(set(lines)) > 40
    followed = sum(f"{one}\n{two}" in text for one, two in itertools.pairwise(lines))
    assert 0.9 < followed / (len(lines) - 1) < 1, "runs, not lines of their own, nor one run"


def test_figures_are_full_of_digits_and_hold_no_mark():
    lines = data.lines_of_figures("a seed", 4000)
    assert len(lines) == 4000 and lines == data.lines_of_figures("a seed", 4000) != data.lines_of_figures("b", 4000)
    whole = "\n".join(lines)
    assert sum(character in "0123456789abcdef" for character in whole) > 0.6 * len(whole.replace(" ", ""))
    assert not re.search(r"[<(\[{?][A-Z]{2}[:<]|@[RPS]\b", whole)
    kinds = re.findall(r"^    check|^\| |^'|INFO|<td>|assertEqual|sha256", whole, re.MULTILINE)
    assert min(map(kinds.count, set(kinds))) > 20 and len(set(kinds)) == 7


@pytest.mark.parametrize("seeded", [True, False])
def test_seeded_heads_of_the_first_layer_look_one_to_four_tokens_back(seeded: bool):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=300, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 5e5})).eval()
    initialise(model, seeded=seeded, seed=0)
    ids = torch.randint(0, 300, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = model.model(ids, output_attentions=True).attentions[0][0]
    back = torch.arange(20, 60) - first[:, 20:].argmax(-1)
    expected = torch.arange(1, 5)[:, None].expand(4, 40)
    assert ((back == expected).float().mean() > 0.95) == seeded


@pytest.fixture(scope="module")
def taught(text):
    """Lessons that are at a state, in a vocabulary with room for all keys and values."""
    words = ["abcdefgh"[i:j] * 2 for i in range(8) for j in range(i, 9)]
    more = "\n".join(" ".join(random.Random(n).choices(words, k=40)) for n in range(60))
    tokenizer = data.train_tokenizer(text + more, 2600, digits=3)
    return lambda *state: lessons.Lessons(tokenizer, "5", state)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_a_lesson_asks_its_own_marks_answer(taught, at: int):
    made = taught(at, 676, 900)
    ids, targets, weights, answers = made.batch(60 * made.now.length)
    assert ids.shape == (60, made.now.length) == targets.shape == weights.shape == answers.shape
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    asked = set()
    for row, right, sought in zip(torch.cat([ids[:, :1], targets], dim=1).tolist(), targets, answers, strict=True):
        if not sought.any():
            continue  # of copies
        asked.add(sum(sought.tolist()))
        found, values = "".join(f" {token}" for token in row) + " ", right[sought].tolist()
        for end, value in zip((sought.nonzero()[:, 0] + 1).tolist(), values, strict=True):
            opening = row[end - (2 if at == 0 else 3):end]  # < key and, but in pairs, a colon
            mark = "".join(f" {token}" for token in [*opening, value, made.form[">"]]) + " "
            assert mark in found, "every answer stands in a mark"
            assert found.count("".join(f" {token}" for token in [made.form["\n"], *opening]) + " ") <= 1
    assert asked == {{0: 4, 1: 5, 2: 8}[at]}


def test_repeated_segments_have_few_letters_from_the_second_lesson_on(taught):
    for at, least, most in (0, 0.0, 0.05), (1, 0.6, 0.95):
        made, doubtful, rows = taught(at, 676, 900), 0, 0
        _, targets, weights, answers = made.batch(200 * made.now.length)
        for row, weight, sought in zip(targets.tolist(), weights, answers, strict=True):
            if sought.any():
                continue
            rows += 1
            first = int((weight > 0).nonzero()[0])
            nexts = {}
            for one, two in itertools.pairwise(row):
                nexts.setdefault(one, set()).add(two)
            doubtful += max(map(len, nexts.values())) > 2
            assert weight[first:].eq(0.5).all() and not weight[:first].any()
        assert rows > 10 and least <= doubtful / rows <= most


def test_keys_double_when_answers_are_right_and_lessons_end_with_all_of_them(taught):
    made, yes, no = taught(*lessons.FIRST), torch.ones(50, dtype=torch.bool), torch.zeros(50, dtype=torch.bool)
    for _ in range(30):
        made.heed(no, yes)
    assert made.state == lessons.FIRST and made.answered < 0.1
    states = []
    while made.now and len(states) < 2000:
        made.heed(yes, no if len(states) < 100 else yes)
        states.append(made.state)
    assert made.state == lessons.DONE and made.now is None
    keys = [keys for _, keys, _ in states]
    assert list(dict.fromkeys(keys)) == [8, 16, 32, 64, 128, 256, 512, 676]
    assert states[99][0] == 0, "all keys, but repeated segments are not yet gone on with"


@pytest.mark.thorough
def test_a_stopped_training_goes_on_with_its_weights_optimisers_and_lessons(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", "--out", str(tmp_path), "--text", "-", "--minutes", "60"])
    tokenizer = data.train_tokenizer(text, 1664)
    run = recipe.Run(recipe.parse(), tokenizer, "text")
    assert run.lessons == lessons.FIRST and [type(each).__name__ for each in run.optimizers] == ["AdamW", "Muon"]
    made = lessons.Lessons(tokenizer, "6", (1, 676, 900))
    for _ in range(2):
        run.update(made.batch(128), 0.0)
    run.lessons = made.state
    run.save()
    again = recipe.Run(recipe.parse(), tokenizer, "text")
    assert (again.step, again.seen, again.lessons) == (2, 256, (1, 676, 900))
    batch = made.batch(128)
    for each in run, again:
        each.update(batch, 0.0)
    for one, two in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(SystemExit, match=r"run with text \w+; found \w+: expected the same, or another --out"):
        recipe.Run(recipe.parse(), tokenizer, "another text")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--seeded"])  # with circuits: AdamW alone, no lessons
    with pytest.raises(SystemExit, match="run with seeded False; found True"):
        recipe.Run(recipe.parse(), tokenizer, "text")
    (tmp_path / "checkpoint.pt").unlink()
    seeded = recipe.Run(recipe.parse(), tokenizer, "text")
    assert seeded.lessons == lessons.DONE and len(seeded.optimizers) == 1


@pytest.mark.thorough
def test_sequences_grow_by_accuracy_or_else_by_time(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", "--out", str(tmp_path), "--text", "-", "--tokens", "512"])
    run = recipe.Run(recipe.parse(), writer.tokenizer, "text")
    assert run.stage == 0 and run.accuracy is None
    run.learn(writer, 0.0)
    assert run.stage == 0
    run.accuracy = 1.0
    run.learn(writer, 0.0)
    assert run.stage == 1 and run.accuracy is None
    run.learn(writer, 0.25)
    assert run.stage == 1, "time was up for the first lengths alone"
    run.learn(writer, 0.31)
    assert run.stage == 2
    run.stage = len(recipe.STAGES) - 1
    run.learn(writer, 1.0)
    assert run.stage == len(recipe.STAGES) - 1


@pytest.mark.thorough
def test_only_a_training_without_circuits_needs_a_vocabulary_for_lessons(writer, tmp_path, monkeypatch):
    few = ["", "--out", str(tmp_path), "--text", "-", "--minutes", "0.001"]
    monkeypatch.setattr(sys, "argv", [*few, "--seeded"])
    run = recipe.Run(recipe.parse(), writer.tokenizer, "text")
    run.train(writer, writer)
    assert run.step == 1 and run.file.is_file() and run.lessons == lessons.DONE
    run.file.unlink()
    monkeypatch.setattr(sys, "argv", few)
    with pytest.raises(SystemExit, match="expected 1576, so a larger --vocab"):
        recipe.Run(recipe.parse(), writer.tokenizer, "text").train(writer, writer)
