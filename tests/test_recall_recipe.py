"""The recipe of the recall model at toy sizes: what it reads is right."""

from __future__ import annotations

import itertools
import random
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = str(ROOT / "examples")
LENGTH = 256


@pytest.fixture(scope="module")
def text() -> str:
    rng = random.Random(0)
    vocabulary = ["".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randint(2, 8))) for _ in range(400)]
    return "\n".join(" ".join(rng.choices(vocabulary, k=rng.randint(3, 12))) for _ in range(1500))


@pytest.fixture(scope="module")
def data():
    sys.path.insert(0, EXAMPLES)
    try:
        from recall_model import data
        yield data
    finally:
        sys.path.remove(EXAMPLES)


@pytest.fixture(scope="module")
def writer(data, text):
    return data.Writer(data.train_tokenizer(text, 1200), text, "3")


def test_markers_are_tokens_of_their_own(data, writer):
    ids = writer.tokenizer.encode("?<QX:471\n<AB:067>\n").tokens
    assert ids == ["?", "<", "QX", ":", "4", "7", "1", "Ċ", "<", "AB", ":", "0", "6", "7", ">", "Ċ"]


def test_numbers_of_three_digits_can_be_tokens_of_their_own(data, text):
    tokenizer = data.train_tokenizer(text, 2400, digits=3)
    assert tokenizer.encode("?<QX:471\n<AB:067>\n").tokens == ["?", "<", "QX", ":", "471", "Ċ", "<", "AB", ":", "067",
                                                               ">", "Ċ"]
    assert tokenizer.decode(tokenizer.encode("12345 0x7").ids) == "12345 0x7"


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


def test_figures_are_full_of_digits_and_hold_no_mark(data):
    lines = data.lines_of_figures("a seed", 4000)
    assert len(lines) == 4000 and lines == data.lines_of_figures("a seed", 4000) != data.lines_of_figures("b", 4000)
    whole = "\n".join(lines)
    assert sum(character in "0123456789abcdef" for character in whole) > 0.6 * len(whole.replace(" ", ""))
    assert not re.search(r"[<(\[{?][A-Z]{2}[:<]|@[RPS]\b", whole)
    kinds = re.findall(r"^    check|^\| |^'|INFO|<td>|assertEqual|sha256", whole, re.MULTILINE)
    assert min(map(kinds.count, set(kinds))) > 20 and len(set(kinds)) == 7


@pytest.mark.parametrize("seeded", [True, False])
def test_seeded_heads_of_the_first_layer_look_one_to_four_tokens_back(data, seeded: bool):
    from recall_model.circuits import initialise
    from transformers import LlamaConfig, LlamaForCausalLM
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
