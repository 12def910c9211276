"""The laws on models whose layers keep other things than keys and values of equal shape: a recurrent state, latents,
units of other layers, units of another width, index keys; on those that do something to queries behind RoPE, or see
blocks; and on models whose modules compute attention by themselves, or are several layers each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from locret_stream.engine import Engine
from locret_stream.errors import ConfigError, SnapshotCorrupt, UnsupportedModel, WindowExceeded
from locret_stream.models import Attachment, Attended, LayerCall, attached, differentiable, visible
from locret_stream.training.student import Student
from tests.architectures import ALIBI, BEHIND_ROPE, BIASED, BY_LAYER, INDEXED, LATENT, OWN, STATEFUL, make
from tests.engine.test_decoding import alone, together
from tests.engine.test_laws import operation, play
from tests.kit import assert_same, build, examples, feed, ids_of, logits_at_each, model, random_heads, stock_logits

POLICIES = {"qwen3.5": "h2o", "lfm2": "tova", "granite4-h": "keydiff", "falcon-h1": "snapkv", "gemma4-e2b": "keydiff",
            "jamba": "h2o", "zamba": "tova", "gemma4-moe": "h2o", "mimo": "h2o", "deepseek-v3": "keydiff",
            "deepseek-v3.2": "tova", "kimi-linear": "h2o", "ministral3": "tova", "llama4": "h2o", "hrm": "h2o",
            "glm-5": "h2o", "hy-v4": "keydiff", "minimax-m3": "h2o", "qwen4-exp": "keydiff", "inkling": "h2o",
            "inkling2": "snapkv", "hunyuan": "snapkv", "minimax": "keydiff", "recurrent-gemma": "keydiff",
            "doge": "h2o", "diffllama": "tova", "gptj": "h2o", "codegen": "snapkv", "gpt-neox-japanese": "tova",
            "falcon": "h2o", "falcon-new": "keydiff", "falcon-alibi": "h2o", "bloom": "keydiff", "mpt": "tova",
            "mistral-large4": "snapkv", "glm-5.3": "keydiff"}
KINDS = ["lfm2", "gemma4-e2b", "deepseek-v3.2", "llama4", "bloom", "hunyuan", "minimax", "recurrent-gemma", "doge",
         "diffllama", "gptj", "qwen3.5", "deepseek-v3", "mimo", "ministral3", "minimax-m3", "falcon-h1", "hrm",
         "gemma4-moe", "granite4-h", "glm-5", "hy-v4", "qwen4-exp", "mistral-large4", "glm-5.3", "inkling", "inkling2",
         "jamba", "zamba", "falcon-alibi", "falcon-new", "codegen", "mpt", "falcon", "gpt-neox-japanese",
         "kimi-linear"]
WITH_STATE = ["lfm2", "qwen3.5", "minimax", "recurrent-gemma", "jamba", "falcon-h1", "granite4-h", "qwen4-exp",
              "inkling", "zamba", "inkling2", "kimi-linear"]
UNITS, CHUNK = 20, 8
SLOW = "kimi-linear"  # whose layers without attention take transformers' slow way on CPUs
CLOSE = 2e-5, 1e-3
"""Most that provisional logits may differ by, computed in one way or another: of models without a recurrent state, and
with one. Gated delta rules amplify rounding: stock Qwen3.5 of these weights differs from itself by 8e-5 when it reads
token by token. Committed states are bit-equal in all."""


def test_every_kind_is_tried():
    assert {*KINDS} == {*STATEFUL, *BY_LAYER, *LATENT, *INDEXED, *BIASED, *BEHIND_ROPE, *OWN, "hrm"} == {*POLICIES}


@pytest.mark.thorough
def test_every_kind_with_a_state_is_tried_as_one():
    assert {*WITH_STATE} == {SLOW} | {name for name in KINDS if name != SLOW and engine_of(name).attachment.states}


def close(on: str) -> float:
    return CLOSE[on in WITH_STATE]


def some(names: list[str], but: int) -> list[object]:
    """The first `but` of them by default, and never the slow one."""
    return [pytest.param(name, marks=[pytest.mark.thorough] if name == SLOW or number >= but else [])
            for number, name in enumerate(names)]


def engine_of(on: str, policy: str = "", units: int = UNITS, **options: int) -> Engine:
    return build(policy or POLICIES[on], on=model(on), units=units, chunk_size=CHUNK, slots=6, **options)


@pytest.mark.parametrize("on", some(KINDS, 8))
def test_it_is_exact_while_it_fits(on: str):
    """Fed one by one and asked after each, which runs every way of computing a provisional unit."""
    ids = ids_of(60, seed=4)
    engine = engine_of(on, "streaming_llm", units=64)
    found, expected = logits_at_each(engine, engine.open(0), ids), stock_logits(model(on), ids)
    assert (found - expected).square().mean().sqrt() <= 1e-5 * expected.std()
    small = engine_of(on, "streaming_llm")
    assert (logits_at_each(small, small.open(0), ids) - expected).abs().max() > 1e-3, "it evicts, and that shows"


@pytest.mark.parametrize("on", some(KINDS, 3))
def test_committed_state_is_a_function_of_the_tokens(on: str):
    """Whatever was asked, forked, undone, reloaded, or failed: equal tokens give bit-equal exports."""
    engine = engine_of(on)

    @settings(max_examples=examples(12))
    @given(st.lists(operation, min_size=6, max_size=12))
    def law(operations):
        play(engine, operations, close(on))

    law()


@pytest.mark.parametrize("on", some(KINDS, 3))
def test_contexts_decode_together_as_alone(on: str):
    engine, lengths = engine_of(on), (1, 8, 29)
    prompts, reply = [ids_of(length, seed=length) for length in lengths], ids_of(12, seed=1)
    expected, states = [], []
    for prompt in prompts:
        state = engine.open(5)
        feed(engine, state, prompt)
        expected.append(alone(engine, state, reply))
    for slot, prompt in enumerate(prompts):
        states.append(engine.open(slot))
        feed(engine, states[-1], prompt)
    for step, token in enumerate(reply):
        for found, right in zip(together(engine, states, [token] * 3), (each[step] for each in expected), strict=True):
            assert (found - right).abs().max() <= close(on)
    for state, prompt in zip(states, prompts, strict=True):
        again = engine.open(5)
        feed(engine, again, prompt + reply)
        assert_same(engine.export(state), engine.export(again))


@pytest.mark.parametrize("on", some(KINDS, 4))
@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
def test_the_formula_is_what_the_tensors_take(on: str, policy: str):
    engine = engine_of(on, policy)
    assert engine.pool.bytes_resident == engine.pool.formula_bytes()
    assert engine.pool.slot_bytes == sum(engine.pool.layer_bytes) + 2 * engine.shape.state_bytes


@pytest.mark.parametrize("on", some(["lfm2", "deepseek-v3", "gemma4-moe", "llama4", "hunyuan", "mimo", "qwen3.5",
                                     "falcon-h1", "granite4-h", "gemma4-e2b", "kimi-linear", "ministral3"], 4))
def test_units_in_few_bits_follow_the_same_laws(on: str):
    engine = build("keydiff", on=model(on), units=UNITS, chunk_size=CHUNK, slots=4, store_bits=8)
    assert engine.pool.bytes_resident == engine.pool.formula_bytes()

    @settings(max_examples=examples(6))
    @given(st.lists(operation, min_size=4, max_size=10))
    def law(operations):
        play(engine, operations, close(on))

    law()


@pytest.mark.parametrize("bits", [8, 4])
def test_latents_in_few_bits_round_little_and_take_less(bits: int):
    """K and V at once: each is rounded once, where expanded units would be rounded apart."""
    ids, stock = ids_of(60, seed=4), model("deepseek-v3")
    exact, coded = (build("streaming_llm", on=stock, units=64, chunk_size=CHUNK, slots=1, store_bits=each)
                    for each in (16, bits))
    expected = stock_logits(stock, ids)
    found = logits_at_each(coded, coded.open(0), ids)
    gap = ((found - expected).square().mean().sqrt() / expected.std()).item()
    assert 1e-4 < gap < (0.02 if bits == 8 else 0.3)
    unit = [engine.layout.stored_rows[0][0] * item for engine, item in ((exact, 4), (coded, 1))]
    assert unit[1] < unit[0] / 2 and coded.layout.stored_rows[0][1] == 0


def test_index_keys_are_kept_as_they_are():
    with pytest.raises(ConfigError, match="index keys"):
        build("keydiff", on=model("minimax-m3"), store_bits=8)


@pytest.mark.parametrize("on", some(ALIBI, 1))
def test_keys_with_a_place_for_their_rank_are_kept_as_they_are(on: str):
    with pytest.raises(ConfigError, match=r"store_bits is \[8, 8\]: with ALiBi .* expected 16 for K"):
        build("keydiff", on=model(on), store_bits=8)
    engine = build("keydiff", on=model(on), units=UNITS, chunk_size=CHUNK, store_bits=(16, 8))
    feed(engine, state := engine.open(0), ids_of(3 * CHUNK))
    assert torch.isfinite(engine.logits(state)).all()


def test_no_gradient_reaches_the_weights_of_latents():
    """Heads are tuned through them, and the model's weights stay as they are, though they require gradients."""
    stock = make("deepseek-v3")
    with attached(stock) as attachment, differentiable(attachment):
        gain = torch.ones((), requires_grad=True)
        attachment.hidden(torch.arange(5)[None], lambda call: (call.q, call.k, call.v * gain, None)).square().sum(
            ).backward()
    assert gain.grad and all(parameter.requires_grad and parameter.grad is None for parameter in stock.parameters())


def test_a_latent_unit_is_one_row_for_all_heads():
    """576 numbers in DeepSeek-V3, and as many after RoPE; expanded, 128 heads of 192 and 128, and the keys again."""
    engine = engine_of("deepseek-v3", "streaming_llm")
    [unit] = set(engine.shape.units)
    config = model("deepseek-v3").config
    assert (unit.kv_heads, unit.dims) == (1, (config.kv_lora_rank + config.qk_rope_head_dim, 0))
    assert unit.groups == config.num_attention_heads
    rows = {name: tensor for name, tensor in engine.export(engine.open(0)).items() if name.endswith("values")}
    assert all(tensor.shape[-1] == 0 for tensor in rows.values()), "K is V, so that nothing is stored twice"


@pytest.mark.parametrize("on", some(WITH_STATE, 2))
def test_a_snapshot_without_its_state_is_none(on: str):
    engine = engine_of(on)
    state = engine.open(0)
    feed(engine, state, ids_of(2 * CHUNK + 3))
    tensors = engine.export(state)
    names = [name for name in tensors if name.startswith("state.")]
    assert names and len(names) == len(engine.attachment.states)
    for change in (lambda t: t[..., :-1], lambda t: t.double()):
        with pytest.raises(SnapshotCorrupt, match=names[-1]):
            engine.load(tensors | {names[-1]: change(tensors[names[-1]])}, 1)
    with pytest.raises(SnapshotCorrupt, match=names[0]):
        engine.load({name: tensor for name, tensor in tensors.items() if name != names[0]}, 1)
    assert not [name for name in engine.export(engine.open(2)) if name.startswith("state.")], "nothing was read yet"


@pytest.mark.parametrize("on", some(WITH_STATE, 2))
def test_the_state_of_one_context_is_not_that_of_another(on: str):
    """A slot that is used again begins anew, and a neighbour's tokens change nothing."""
    engine = engine_of(on)
    ids = ids_of(2 * CHUNK + 5, seed=1)
    first = engine.open(0)
    feed(engine, first, ids)
    expected, logits = engine.export(first), engine.logits(first)
    other = engine.open(1)
    logits_at_each(engine, other, ids_of(3 * CHUNK + 2, seed=2))
    assert_same(engine.export(first), expected)
    again = engine.open(1)
    feed(engine, again, ids)
    assert_same(engine.export(again), expected)
    assert torch.equal(engine.logits(again), logits)


@pytest.mark.parametrize("on", some(WITH_STATE, 2))
def test_what_is_taken_back_leaves_nothing_in_the_state(on: str):
    """A state cannot be rewound: the provisional one begins again from the committed one."""
    engine = engine_of(on)
    state, plain = engine.open(0), engine.open(1)
    ids = ids_of(CHUNK + 2, seed=3)
    feed(engine, state, ids)
    feed(engine, plain, ids)
    before = engine.logits(state)
    logits_at_each(engine, state, ids_of(4, seed=5))
    engine.truncate(state, 2)
    assert (engine.logits(state) - before).abs().max() <= close(on)
    assert torch.equal(engine.logits(state), engine.logits(plain))


@pytest.mark.parametrize("on", some([*INDEXED], 2))
def test_an_index_chooses_among_what_is_kept(on: str):
    """Of up to 12 units an index chooses all. Of more it leaves some out, and that shows."""
    engine, ids = engine_of(on, "streaming_llm", units=64), ids_of(20, seed=4)
    indexes = engine.attachment._indexes
    assert [index.most for index in indexes] == [12] * len(indexes)
    state = engine.open(0)
    feed(engine, state, ids)
    chosen, heads = engine.logits(state), [index.asked for index in indexes]
    assert heads == [None] * len(indexes), "nothing of a forward is held when it is over"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCall, "chosen", lambda *_: None)
        other = engine.open(1)
        feed(engine, other, ids)
        assert (engine.logits(other) - chosen).abs().max() > 1e-3


@pytest.mark.parametrize("on", some(["deepseek-v3.2", "minimax-m3"], 1))
def test_an_index_key_is_part_of_its_unit(on: str):
    """It is stored once for each KV head, and a snapshot without it is none."""
    engine = engine_of(on, "streaming_llm")
    unit = engine.shape.units[-1]
    state = engine.open(0)
    feed(engine, state, ids_of(2 * CHUNK))
    tensors, name = engine.export(state), f"{engine.shape.layers - 1}.keys"
    assert tensors[name].shape == (unit.kv_heads, 2 * CHUNK, unit.key_dim + 16)
    with pytest.raises(SnapshotCorrupt, match=name):
        engine.load(tensors | {name: tensors[name][..., :unit.key_dim]}, 1)


def test_units_of_a_layer_that_shares_an_index_have_keys_of_it():
    """GLM-5: so the layer may keep other units than the one whose index it is."""
    engine = engine_of("glm-5", "streaming_llm", units=24)
    state = engine.open(0)
    feed(engine, state, ids_of(2 * CHUNK))
    keys = [tensor[..., engine.shape.units[0].key_dim:] for name, tensor in engine.export(state).items()
            if name.endswith("keys")]
    assert torch.equal(keys[1], keys[0]) and not torch.equal(keys[2], keys[0])


def test_gradients_pass_through_what_an_index_chose():
    """A layer runs again in the backward pass, one that shares an index before the layer whose index it is."""
    with attached(make("glm-5")) as attachment:
        tables, gain = attachment.tables(20), torch.ones((), requires_grad=True)

        def step(call: LayerCall) -> Attended:
            q, k, v, mask = call.to_itself(tables, None)
            return q, k, v * gain, mask

        with differentiable(attachment):
            attachment.hidden(torch.arange(20)[None], step).square().sum().backward()
        assert [index.asked for index in attachment._indexes] == [None, None]
    assert gain.grad


def test_heads_are_not_tuned_where_an_index_chooses():
    with attached(model("deepseek-v3.2")) as attachment, pytest.raises(UnsupportedModel, match="without --tune"):
        Student(attachment, random_heads(attachment), [20] * 3, CHUNK, 2, 2, 64)


def test_a_model_that_chooses_by_a_bias_has_a_memory_of_no_more_than_it_attends_to():
    """Doge: above so many units nothing is promised."""
    most = model("doge").config.keep_window_size
    engine = engine_of("doge", "streaming_llm", units=most - CHUNK)
    assert engine.shape.window == most
    with pytest.raises(WindowExceeded, match=f"attends to all of at most {most}, and of more"):
        engine_of("doge", "streaming_llm", units=most)


def test_a_failure_between_two_halves_of_one_attention_leaves_no_trace(monkeypatch):
    """DiffLlama asks for one half of the values after the other."""
    engine, ids = engine_of("diffllama", "streaming_llm", units=64), ids_of(20)
    state, expected = engine.open(0), stock_logits(model("diffllama"), ids)
    feed(engine, state, ids[:19])
    second, name = engine.attachment._attentions[1], "locret-twice"
    whole = ALL_ATTENTION_FUNCTIONS[name]

    def fails(module, *args, **kwargs):
        if module is second and module.locret_first is not None:
            raise torch.OutOfMemoryError("no memory is left")
        return whole(module, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, fails)
        with pytest.raises(torch.OutOfMemoryError):
            feed(engine, state, ids[19:])
            engine.logits(state)
    assert (engine.logits(state) - expected[-1]).abs().max() <= 1e-4


@pytest.mark.parametrize("on", some(["lfm2", "deepseek-v3.2", "gemma4-e2b", "qwen3.5", "minimax-m3"], 3))
def test_a_focus_in_front_is_a_function_of_its_ids(on: str):
    """A state does not know of it; whatever the split, replaced at the same place, and when it is loaded."""
    engine, ids, states = engine_of(on), ids_of(3 * CHUNK + 3, seed=6), []
    for slot, size in enumerate((5, 3)):
        states.append(engine.open(slot))
        engine.focus(states[-1], ids_of(3, seed=7))
        for start in range(0, len(ids), size):
            feed(engine, states[-1], ids[start:start + size])
            engine.logits(states[-1])
        engine.focus(states[-1], ids_of(2, seed=8))
        feed(engine, states[-1], ids[:CHUNK])
    assert_same(engine.export(states[1]), engine.export(states[0]))
    assert_same(engine.export(engine.load(engine.export(states[0]), 2)), engine.export(states[0]))


@pytest.mark.parametrize("on", BIASED)
def test_a_bias_by_distance_is_of_the_ranks_of_the_layer(on: str, monkeypatch):
    """Without them each piece would begin at rank 0, and such a model is refused."""
    stock = make(on)
    real = Attachment.carry
    with monkeypatch.context() as patch, pytest.raises(UnsupportedModel):
        patch.setattr(Attachment, "carry", lambda self, tensors=(), ranks=(): real(self, tensors, [0] * len(ranks)))
        with attached(stock):
            pass
    engine = engine_of(on)
    assert engine.shape.biased and not engine.decoder.can_run(engine.open(0))
    with pytest.raises(ConfigError, match="adds a bias by distance"):
        engine.shape.one_unit("retaining heads")


def test_scores_by_attention_know_the_bias_and_the_sinks():
    """What h2o sums is the attention of the stock model."""
    stock = make("inkling2", attn="eager")
    engine = build("h2o", on=stock, units=UNITS, chunk_size=CHUNK)
    state, ids = engine.open(0), ids_of(CHUNK)
    feed(engine, state, ids)
    weights = stock(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    unit = engine.shape.units[1]
    expected = weights[1][0].unflatten(0, (unit.kv_heads, unit.groups)).sum((1, 2))
    torch.testing.assert_close(state.store.scores(1)[0], expected, rtol=1e-4, atol=1e-5)


def test_layers_that_share_units_keep_one_copy():
    engine = engine_of("gemma4-e2b", "streaming_llm")
    config = model("gemma4-e2b").config
    assert engine.shape.layers == config.num_hidden_layers - config.num_kv_shared_layers
    assert engine.attachment.shares


def test_receipts_of_layers_with_other_numbers_of_heads():
    engine = engine_of("gemma4-moe", "streaming_llm")
    state = engine.open(0)
    feed(engine, state, ids_of(6 * CHUNK + 3))
    receipts = engine.receipts(state, 0, None)
    assert receipts.kept.shape == (engine.shape.layers, 2, 6 * CHUNK + 3)
    for layer, (unit, count) in enumerate(zip(engine.shape.units, state.store.counts, strict=True)):
        assert receipts.kept[layer].sum(-1).tolist() == [count + 3] * unit.kv_heads + [0] * (2 - unit.kv_heads)


@pytest.mark.parametrize(("units", "chunk_size"), [(40, 5), (40, 17), (7, 8)])
def test_a_block_is_seen_from_its_start_and_never_beyond(units: int, chunk_size: int):
    """Llama 4's layers of 12: whatever part of a block is committed with the next one, or alone, and where a budget is
    less than a block, of the last of its tokens."""
    stock, ids = model("llama4"), ids_of(60, seed=2)
    engine = build("streaming_llm", on=stock, units=units, chunk_size=chunk_size, sinks=1, stabilizers=1)
    unit = engine.shape.units[0]
    assert (unit.sliding, unit.blocks, engine.shape.units[3].sliding) == (12, True, None)
    assert engine.budgets == (min(12, units),) * 3 + (units,)
    found = logits_at_each(engine, engine.open(0), ids[:units])
    assert (found - stock_logits(stock, ids[:units])).abs().max() <= 1e-4
    for position in (0, 11, 12, 35):
        assert unit.reach(position) == position % 12 + 1 == visible(
            unit, torch.tensor([position]), torch.arange(60)).sum()


def test_contexts_in_other_places_of_their_blocks_decode_together():
    """One step of them: a window for each."""
    engine = engine_of("llama4", "streaming_llm", units=64)
    stock, places = model("llama4"), (10, 11, 12, 25)
    states = [engine.open(slot) for slot in range(4)]
    for state, place in zip(states, places, strict=True):
        feed(engine, state, ids_of(place, seed=place))
    together(engine, states, [5] * 4)
    for found, place in zip(together(engine, states, [6] * 4), places, strict=True):
        assert (found - stock_logits(stock, [*ids_of(place, seed=place), 5])[-1]).abs().max() <= 1e-4
