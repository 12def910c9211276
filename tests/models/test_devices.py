"""A model over several devices: each layer's memory lies where the layer works, and all is as on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from locret_stream.engine import Engine
from locret_stream.errors import UnsupportedModel
from locret_stream.models import attach, detach
from locret_stream.snapshot.identity import digest_tensors
from locret_stream.training import Example, train_heads
from tests.kit import WITH_HEADS, build, feed, ids_of, logits_at_each, model, random_heads, stock_logits
from tests.packings import needs
from tests.pretend import CPU, ONE, TWO, There, put, spread


def test_pretended_devices_insist_on_themselves():
    """Otherwise the tests below could not fail."""
    one, two, cpu = put(torch.ones(3), ONE), put(torch.ones(3), TWO), torch.ones(3)
    for other in (two, cpu):
        with pytest.raises(RuntimeError, match="got tensors of"):
            one + other
        with pytest.raises(RuntimeError, match="got tensors of"):
            torch.cat([one, other])
    assert (one + 1).device == ONE and one[1:].device == ONE and one.cpu().device == CPU and one.to(TWO).device == TWO
    one[:2] = two[:2]
    one.add_(torch.tensor(1.0))
    assert isinstance(one, There) and one.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("name", "policy"), [
    ("llama", "locret"), ("gemma3", "sirllm"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("smollm3", "h2o"), ("llama", "nacl")))])
@pytest.mark.thorough(but=1)
def test_each_layer_keeps_its_memory_where_it_works(name: str, policy: str):
    ids = ids_of(37)
    heads = random_heads(attach(model(name)), policy=policy) if policy in WITH_HEADS else None

    def run(engine: Engine) -> tuple[torch.Tensor, list[list[int]], dict[str, torch.Tensor]]:
        state = engine.open(0)
        rows = logits_at_each(engine, state, ids[:10])
        feed(engine, state, ids[10:])
        feed(engine, engine.fork(state, 1), ids[:9])
        exported = engine.export(state)
        again = engine.load({name: t.cpu() for name, t in exported.items()}, 2)
        feed(engine, again, ids[:11])
        engine.focus(again, ids[:3])
        feed(engine, again, ids[:11])
        return (torch.cat([rows, engine.logits(again)[None]]).cpu(), [
            engine.decoder._step([state], [0]).argmax(-1).tolist() if state.pending else []],
            {name: t.cpu() for name, t in exported.items()})

    def made(on) -> Engine:
        own = copy.deepcopy(heads)
        return build(policy, on=on, heads=None if own is None else attach(on).put_beside(own))

    expected = run(made(copy.deepcopy(model(name))))
    with spread(copy.deepcopy(model(name)), 1) as stock:
        engine = made(stock)
        assert [place.device for place in engine.attachment.places] == [ONE, TWO, TWO]
        assert (engine.attachment.device, engine.attachment.last_device) == (ONE, TWO)
        for buffers, place in zip(engine.pool.layers, engine.attachment.places, strict=True):
            assert {t.device for t in (*buffers.tensors, buffers.scratch)} == {place.device}
        assert engine.pool.bytes_resident == engine.pool.formula_bytes()
        found = run(engine)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    assert found[2].keys() == expected[2].keys()
    assert all(torch.equal(found[2][key], expected[2][key]) for key in expected[2])


def test_several_contexts_take_a_step_together():
    with spread(copy.deepcopy(model()), 1) as stock:
        engine = build("keydiff", on=stock)
        states = [engine.open(slot) for slot in range(3)]
        for number, state in enumerate(states):
            engine.accept(state, ids_of(5 + number)[:5 + number])
            engine.logits(state)
            engine.accept(state, [7])
        together = engine.decoder
        together.run(states)
        assert all(state.tail_logits is not None and state.tail_logits.device == TWO for state in states)


def test_heads_are_not_trained_on_several_devices(tmp_path):
    with spread(copy.deepcopy(model()), 1) as stock, pytest.raises(
            UnsupportedModel, match=r"training needs a model on one device; found its layers on \['xpu:0', 'xpu:1'\]"):
        train_heads(stock, [Example(ids=torch.arange(1, 30), answer_spans=((20, 29),))] * 3, tmp_path)
    detach(stock)


def test_layers_that_wait_on_the_disk_are_the_same_model(tmp_path):
    """accelerate brings their weights in for a forward; between forwards they are on no device."""
    needs("accelerate")
    stock = model()
    stock.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
              "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    apart = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places, dtype=torch.float32,
                                                 offload_folder=tmp_path / "weights")
    assert apart.model.layers[1].self_attn.q_proj.weight.is_meta
    mine, theirs = attach(apart), attach(stock)
    assert mine.fingerprint == theirs.fingerprint and mine.sketch == theirs.sketch
    assert digest_tensors(mine.named_weights()) == digest_tensors(theirs.named_weights())
    engine, ids = build("streaming_llm", on=apart, units=48), ids_of(30)
    assert (logits_at_each(engine, engine.open(0), ids) - stock_logits(stock, ids)).abs().max() <= 1e-5
