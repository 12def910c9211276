"""The parts of the recipe that makes the bundled model: what it trains is what the library runs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.bundled_model import chat, circuits, data, export, pretrain
from examples.bundled_model.model import SINKS, Kept, Recaller, Shape
from locret_stream.evaluation.facts import make_facts
from locret_stream.heads import RetainingHeads
from locret_stream.models import attach
from locret_stream.text import Segmenter

pytestmark = pytest.mark.thorough

TEXT = 'def f(x):\n    return x + 1\n\n\nprint("one, two")\nThe cat sat on the mat.\n' * 300
STAGE = pretrain.Stage(2, 2, 64, (2, 4), 2, 128, recent=(8, 16), kept=(60, 90), mined=2_000)


@pytest.fixture(scope="module")
def tokenizer():
    facts = make_facts(random.Random(0), 300, held_out=False)
    lines = [*chat.segments(TEXT), *(fact.sentence for fact in facts), *["user\n", "assistant\n", "system\n"] * 50]
    return chat.train_tokenizer(lines, 512)


@pytest.fixture(scope="module")
def model() -> Recaller:
    model = Recaller(Shape(vocab=512, width=64, ffn=96))
    circuits.initialise(model, 0)
    return model


@pytest.fixture
def writer(tokenizer) -> data.Writer:
    return data.Writer(tokenizer, [(TEXT, 1.0)])


def test_segments_are_those_of_the_library() -> None:
    text = TEXT[:2000] + "word " * 900 + "\n\n\nend" + "x" * 9000 + "\nlast"
    segmenter = Segmenter()
    assert chat.segments(text) == segmenter.push(text) + segmenter.flush()


def test_what_is_exported_is_the_model(model, tokenizer, tmp_path: Path) -> None:
    head = pretrain.RecallHead(model.head_features, 16, model.shape.kv_heads)
    export.export(model, head, tokenizer, tmp_path / "model", "a card\n")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    rounded = Recaller(model.shape)
    rounded.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
    ids = torch.randint(0, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = rounded.logits(rounded.tail_states(ids, None)[0])
        torch.testing.assert_close(loaded(ids).logits, ours, atol=1e-4, rtol=1e-4)
    read = RetainingHeads.load(tmp_path / "model")
    assert read.config.budget_shares == tuple(map(float, export.budgets(model)))
    features = torch.randn(1, 7, model.head_features)
    scores = read(model.shape.recall_layer, features)
    torch.testing.assert_close(scores, head(features).transpose(1, 2), atol=3e-2, rtol=3e-2)
    assert not read(0, features).any(), "equal scores: the newest units stay"
    assert read.config.fingerprint == attach(loaded).fingerprint
    for row in AutoTokenizer.from_pretrained(tmp_path / "model"), tokenizer:
        assert row.decode([tokenizer.token_to_id("<|im_end|>")], skip_special_tokens=False) == "<|im_end|>"


def test_the_template_writes_what_is_trained(model, tokenizer, writer, tmp_path: Path) -> None:
    chat.save_tokenizer(tokenizer, tmp_path, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    ids = loaded.apply_chat_template([*messages, messages[0]], add_generation_prompt=True, return_dict=False)
    one, two = writer.encode("one"), writer.encode("two")
    first = [*writer.start_user, *one, *writer.to_assistant, *two, writer.end]
    assert ids == [*first, *writer.next_user, *one, *writer.to_assistant]


def test_a_tool_call_is_rendered_as_it_is_trained(tokenizer, tmp_path: Path) -> None:
    chat.save_tokenizer(tokenizer, tmp_path, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "falcon"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = loaded.apply_chat_template([{"role": "user", "content": "q"}, turn], tokenize=False)
    assert '\n<tool_call>\n{"name": "lookup", "arguments": {"key": "falcon"}}\n</tool_call><|im_end|>\n' in text


def test_a_tail_sees_what_is_kept_at_its_rank() -> None:
    shape = Shape(vocab=64, width=32, layers=1, ffn=48, recall_layer=0)
    model = Recaller(shape)
    ids = torch.randint(0, 64, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, _ = model.tail_states(ids, None)
        block = model.layers[0]
        _, k, v = block.self_attn.qkv(block.input_layernorm(model.embed_tokens(ids)))
        kept = Kept(k[:, :, SINKS:30], v[:, :, SINKS:30])
        tail = torch.cat([ids[:, :SINKS], ids[:, 30:]], 1)
        rows = torch.tensor([[SINKS, SINKS + 3]] * 2)
        states, attention = model.tail_states(tail, kept, rows)
    torch.testing.assert_close(states[:, SINKS:], whole[:, 30:])
    assert attention.shape == (2, shape.kv_heads, 4, 26)
    assert 0 < attention.sum(-1).max() < 1


def test_a_batch_asks_for_what_it_planted(writer, tokenizer) -> None:
    batch = writer.batch(STAGE, np.random.default_rng(0))
    assert batch.snippets.shape == (2, 2, SINKS + 64)
    for tail, target, rows in zip(batch.tails, batch.targets, batch.answer_rows, strict=True):
        assert torch.equal(tail[1:], target[:-1])
        text = tokenizer.decode(target[rows[rows > 0]].tolist(), skip_special_tokens=False)
        whole = tokenizer.decode(tail.tolist(), skip_special_tokens=False)
        assert text.endswith("<|im_end|>") or "<tool_call>" in whole
        for answer in text.split("<|im_end|>")[:-1]:
            assert f"assistant\n{answer}" in whole
    assert batch.answers.any(1).sum() >= 3
    again = writer.batch(STAGE, np.random.default_rng(0))
    assert torch.equal(batch.tails, again.tails) and torch.equal(batch.snippets, again.snippets)


def test_a_step_trains_model_and_head(model, writer) -> None:
    head = pretrain.RecallHead(model.head_features, 16, model.shape.kv_heads)
    phase = pretrain.Phase([STAGE], 2, 1e-3, 0.5)
    before = head.fc1.weight.clone(), model.layers[0].mlp.up_proj.weight.clone()
    pretrain.train(model, head, writer, phase, seed=0)
    assert not torch.equal(before[0], head.fc1.weight)
    assert not torch.equal(before[1], model.layers[0].mlp.up_proj.weight)


ASSETS = Path(__file__).resolve().parents[1] / "locret_stream" / "assets" / "bundled"


def test_the_bundled_model_is_small_and_answers() -> None:
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) <= 8 * 2**20
    model = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    assert model.num_parameters() <= 2_500_000
    text = "The pass key of falcon is 48213.\nThe door code of heron is 7219.\n\nWhat is the pass key of falcon?"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    reply = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)[0, ids.shape[1] :]
    assert tokenizer.decode(reply, skip_special_tokens=False) == "48213<|im_end|>"
    RetainingHeads.load(ASSETS)
