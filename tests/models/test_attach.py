"""Attaching: shared and counted, refused where it would change the model, and invisible to the user's own object."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from locret_stream.errors import HeadsMismatch, UnsupportedModel
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.models import Attachment, attach, attached, attaching, detach, self_test, weights
from tests.architectures import BASE, CONFIGS, make
from tests.kit import build, feed, ids_of, logits_at_each, stock_logits


@pytest.fixture
def stock() -> tf.PreTrainedModel:
    """A model that no other test uses."""
    return make("llama", seed=5)


# -- counted ------------------------------------------------------------------------------------------------------


def test_attach_is_idempotent_and_counted(stock):
    first = attach(stock)
    assert attach(stock) is first and first.users == 2
    assert detach(stock) == 1
    assert attach(stock) is first
    assert (detach(stock), detach(stock), detach(stock)) == (1, 0, 0)
    again = attach(stock)
    assert again is not first and again.users == 1
    assert again.fingerprint == first.fingerprint


def test_each_attention_implementation_is_attached_by_itself(stock):
    sdpa, eager = attach(stock, "sdpa"), attach(stock, "eager")
    assert sdpa is not eager and (sdpa.attn, eager.attn) == ("sdpa", "eager")
    assert detach(stock, "eager") == 0 and attach(stock, "sdpa") is sdpa
    with pytest.raises(UnsupportedModel, match=r"'flash_attention_2'.*'sdpa'"):
        attach(stock, "flash_attention_2")


def test_auto_takes_what_the_model_uses():
    assert attach(make("llama", attn="eager")).attn == "eager"
    assert attach(make("llama")).attn == "sdpa"
    assert attach(make("gemma2"), "sdpa").attn == "eager"  # has no sdpa


def test_attach_is_locked_per_model(stock, monkeypatch):
    """Eight threads at once: one self-test, one attachment, eight uses."""
    tested, barrier, real = [], threading.Barrier(8), attaching.self_test
    monkeypatch.setattr(attaching, "self_test", lambda *args: (tested.append(1), real(*args)))

    def attach_together(_: int) -> Attachment:
        barrier.wait(60)
        return attach(stock)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(attach_together, range(8)))
    assert len(tested) == 1 and len({id(a) for a in made}) == 1 and made[0].users == 8


def test_the_model_is_not_kept_alive():
    stock = make("llama", seed=5)
    ref = weakref.ref(stock)
    attachment = attach(stock)
    shadow = weakref.ref(attachment._shadow)
    del stock, attachment
    gc.collect()
    assert ref() is None and shadow() is None


def test_attention_modules_go_with_the_attachment():
    """Their weights would stay until a search for garbage, which no allocator of a GPU calls."""
    attachment = attach(stock := make("llama", seed=5))
    gc.collect()
    gc.disable()
    try:
        modules = [weakref.ref(module) for module in attachment._attentions]
        del attachment, stock
        assert not [ref for ref in modules if ref() is not None]
    finally:
        gc.enable()


def test_an_out_of_memory_error_in_rope_leaves_it_as_it_was(monkeypatch):
    attachment = attach(make("gpt-oss"))  # whose tables are half as wide as its keys
    tables, shape = attachment.tables(16), attachment.shape
    x = torch.randn(1, shape.units[0].kv_heads, 4, shape.units[0].key_dim)
    expected = tables.rotate(0, x, 2)

    def full(*_):
        raise torch.OutOfMemoryError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[type(attachment._attentions[0]).__module__], "apply_rotary_pos_emb", full)
        with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
            tables.rotate(0, x, 2)
    assert torch.equal(tables.rotate(0, x, 2), expected)


def test_an_out_of_memory_error_while_rope_is_probed_says_so(monkeypatch):
    stock, raised = make("gpt-oss"), []

    def full_once(rotate):
        def once(*given):
            if not raised and given[1].shape[1] == 0:  # no heads of keys: none of the model's own calls
                raised.append(True)
                raise torch.OutOfMemoryError("no memory is left")
            return rotate(*given)
        return once

    module = sys.modules[type(stock.model.layers[0].self_attn).__module__]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", full_once(module.apply_rotary_pos_emb))
    with pytest.raises(UnsupportedModel, match="OutOfMemoryError: no memory is left"):
        attach(stock)


# -- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_refuses_a_norm_after_rope_that_changes_with_a_rotation(dtype):
    """One that subtracts the mean: Hunyuan's, which takes squares alone, is served."""
    hunyuan = make("hunyuan")
    assert attach(hunyuan)._rotary.factors.keys() == {0, 1, 2}
    for layer in hunyuan.model.layers:
        layer.self_attn.query_layernorm, layer.self_attn.key_layernorm = (nn.LayerNorm(16, bias=False) for _ in "qk")
    detach(hunyuan)
    of_a_copy = "" if dtype == torch.float32 else f"This is of a copy in float32, without the rounding of {dtype}"
    with pytest.raises(UnsupportedModel, match=r"HunYuanDenseV1ForCausalLM: .*differ from the stock model's by .*"
                                               "standard deviations .*; expected at most 2e-05 in torch.float32.*"
                                               f"{of_a_copy}$"):
        attach(hunyuan.to(dtype))


def test_a_norm_after_rope_that_makes_keys_longer_is_refused():
    """Yarn lengthens what it turns, and the norm takes that back: without it before, and not behind, it would stay."""
    config = CONFIGS["hunyuan"]()
    config.rope_parameters = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
    with pytest.raises(UnsupportedModel, match="its RoPE makes keys longer, and a norm behind RoPE takes that back"):
        attach(make("hunyuan", config=config))


def test_a_norm_behind_rope_that_reads_its_weights_otherwise_is_refused(monkeypatch):
    """As Gemma's, which multiplies by 1 + weight."""
    monkeypatch.setattr(HunYuanDenseV1RMSNorm, "forward", lambda norm, x: (1 + norm.weight) * F.rms_norm(
        x, norm.weight.shape, eps=norm.variance_epsilon))
    with pytest.raises(UnsupportedModel, match="HunYuanDenseV1RMSNorm: a norm behind RoPE does not multiply by its"):
        attach(make("hunyuan"))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_refuses_scaling_by_position_where_no_layer_tells_a_position(beta):
    """With a window in every layer, ranks stop growing, and the scale would."""
    config = CONFIGS["ministral3"]()
    config.sliding_window = 30
    config.rope_parameters["llama_4_scaling_beta"] = beta
    stock = make("", config=config)
    if beta:
        with pytest.raises(UnsupportedModel, match="scales its queries by position, and each of its layers forgets"):
            attach(stock)
    else:
        assert attach(stock).shape.sliding == (30, 30, 30)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("folder", ["locret_stream/assets/bundled", "research/models/recall"])
@pytest.mark.thorough(but=2)
def test_rounding_is_no_reason_to_refuse_what_is_shipped(folder, dtype):
    """In bf16 a few logits of the bundled model differ by a third of a standard deviation."""
    model = tf.AutoModelForCausalLM.from_pretrained(Path(__file__).parents[2] / folder, dtype=dtype)
    assert 0 < self_test(model, Attachment(model, "auto")) < 0.05


@pytest.fixture
def amplifying() -> tf.PreTrainedModel:
    """Deep, with sharp attention: its layers amplify each other's rounding, as SmolLM2's do."""
    model = make("llama", seed=5, config=tf.LlamaConfig(**BASE | {"num_hidden_layers": 24}))
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 15
    return model


class _LastInputFirst(nn.Linear):
    """The same product, summed in another order."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.flip(-1), self.weight.flip(-1), self.bias)


def _in_another_order(model: tf.PreTrainedModel) -> Attachment:
    attachment = Attachment(model, "auto")
    for layer in attachment.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                vars(module).pop("forward", None)
                module.__class__ = _LastInputFirst
    return attachment


def test_rounding_that_layers_amplify_is_no_reason_to_refuse(amplifying):
    """SmolLM2 was refused on a processor on which oneDNN sums in another order: 2.02e-5."""
    assert 2e-5 < self_test(amplifying, _in_another_order(amplifying)) < 1e-3


@pytest.mark.parametrize("layer", [0, 23])
def test_a_small_mistake_in_a_model_that_amplifies_is_refused(amplifying, layer):
    attachment = _in_another_order(amplifying)
    attachment.layers[layer].self_attn.scaling *= 1.0003
    with pytest.raises(UnsupportedModel, match=r"differ from the stock model's by .*; expected at most 2e-05"):
        self_test(amplifying, attachment)


def test_a_difference_between_the_layers_is_refused_though_each_layer_is_right(amplifying):
    attachment = Attachment(amplifying, "auto")
    attachment._decoder.embed_tokens = nn.Embedding.from_pretrained(amplifying.model.embed_tokens.weight.data.flip(-1))
    with pytest.raises(UnsupportedModel, match="differ from the stock model's by"):
        self_test(amplifying, attachment)


def test_a_mistake_in_the_head_of_a_model_that_amplifies_is_refused(amplifying):
    attachment = _in_another_order(amplifying)
    attachment._head = nn.Linear(64, 401, bias=False)
    attachment._head.weight.data = amplifying.lm_head.weight.data * 1.0003
    with pytest.raises(UnsupportedModel, match="differ from the stock model's by"):
        self_test(amplifying, attachment)


def test_in_bf16_rounding_that_layers_amplify_cannot_be_told_from_a_mistake(amplifying):
    with pytest.raises(UnsupportedModel, match="load it in float32 to rule rounding out"):
        attach(amplifying.to(torch.bfloat16))


@pytest.mark.parametrize("what", [nn.Linear(2, 2), "meta-llama/Llama-3.1-8B-Instruct", None, 5])
def test_refuses_what_is_no_model(what):
    with pytest.raises(UnsupportedModel, match=rf"found {type(what).__name__}; expected a transformers causal LM"):
        attach(what)


OLD = dict(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64)
MAMBA = dict(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)


@pytest.mark.parametrize(("config", "why"), [
    (tf.GPT2Config(**OLD), "positions are learned embeddings"),
    (tf.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64,
                   is_decoder=True), "positions are learned embeddings"),
    (tf.BioGptConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64),
     "positions are learned embeddings"),
    (tf.MambaConfig(**MAMBA), "recurrent, without attention"),
], ids=["gpt2", "bert", "biogpt", "mamba"])
def test_what_is_not_served_is_refused_by_its_reason(config, why: str):
    """In the words of who runs it, without the error that its forward would raise here."""
    with pytest.raises(UnsupportedModel, match=why) as caught:
        attach(tf.AutoModelForCausalLM.from_config(config))
    assert not any(word in str(caught.value) for word in ("TypeError", "AttributeError", "KeyError", "NoneType"))


def test_a_tower_in_the_decoder_may_have_learned_positions():
    """As that of Phi-4-multimodal, which reads images inside of the decoder's embeddings."""
    stock = make("llama")
    stock.model.reads_images = nn.Module()
    stock.model.reads_images.position_embedding = nn.Embedding(4, 8)
    assert attach(stock).shape.layers == 3
    stock = make("llama")
    stock.model.embed_positions = nn.Embedding(4, 8)
    with pytest.raises(UnsupportedModel, match="positions are learned embeddings"):
        attach(stock)


def test_a_temperature_by_position_of_another_form_is_refused(monkeypatch):
    """The self-test has too few tokens to see it: so the module's own queries are asked for at positions far on."""
    forward = Llama4TextAttention.forward

    def steeper(module, hidden_states, past_key_values=None, **kwargs):
        if past_key_values is not None:
            past_key_values.position *= 2
        return forward(module, hidden_states=hidden_states, past_key_values=past_key_values, **kwargs)

    assert attach(make("llama4")).shape.units[0].blocks
    monkeypatch.setattr(Llama4TextAttention, "forward", steeper)
    with pytest.raises(UnsupportedModel, match="its queries at position 48 are not those at 0, times a temperature"):
        attach(make("llama4"))


def test_the_text_of_mllama_is_served_without_its_cross_attention():
    """Without an image transformers skips those layers, so that they keep nothing."""
    config = tf.MllamaTextConfig(**BASE | dict(num_hidden_layers=4), cross_attention_layers=[1, 3])
    stock = tf.MllamaForCausalLM(config).eval()
    engine, ids = build("streaming_llm", on=stock, units=64), ids_of(30)
    assert engine.shape.layers == 2
    assert (logits_at_each(engine, engine.open(0), ids) - stock_logits(stock, ids)).abs().max() <= 1e-5
    assert engine.attachment._path == "model"


def test_refuses_a_decoder_without_a_head():
    with pytest.raises(UnsupportedModel, match="LlamaModel"):
        attach(tf.LlamaModel(tf.LlamaConfig(**BASE)))


class ByPosition(tf.LlamaForCausalLM):
    """Tampered: logits depend on how many tokens the call has."""

    def forward(self, input_ids=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits * (1 + 1e-3 * input_ids.shape[1])
        return out


class Tagged(tf.LlamaForCausalLM):
    """Tampered: logits depend on the ids, not on the hidden states alone."""

    def forward(self, input_ids=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits + (input_ids % 2)[..., None]
        return out


@pytest.mark.parametrize("kind", [ByPosition, Tagged])
def test_refuses_tampered_logits_and_says_by_how_much(kind):
    tampered = kind(tf.LlamaConfig(**BASE)).eval()
    with pytest.raises(UnsupportedModel, match=rf"{kind.__name__}: .*(its logits|first 9 tokens) differ .*by \d"):
        attach(tampered)
    assert tampered not in attaching._attached or not attaching._attached[tampered]


def test_a_model_that_looks_ahead_is_refused_by_that():
    """Doge's experts are chosen by sums over several tokens, in transformers."""
    config = tf.DogeConfig(**BASE, is_moe=True, num_experts=16, num_experts_per_tok=2)
    with pytest.raises(UnsupportedModel, match="depends on what comes after it: the logits of the first 9 tokens"):
        attach(make("doge", config=config))


def test_refuses_attention_that_looks_at_absolute_positions(stock):
    """A hook adds a sum over the whole sequence, which a call with a piece of it cannot know."""
    attention = stock.model.layers[1].self_attn
    attention.register_forward_hook(lambda module, args, out: (out[0] + out[0].cumsum(1) * 0.01, *out[1:]))
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        attach(stock)


def test_refuses_a_model_whose_forward_fails(stock):
    stock.model.layers[1].mlp.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(UnsupportedModel, match=r"its own forward does not work on this device \(ZeroDivisionError"):
        attach(stock)


def test_refuses_nan(stock):
    stock.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(UnsupportedModel):
        attach(stock)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.thorough(but=6)
def test_half_precision_models_pass(name: str, dtype: torch.dtype):
    attachment = attach(make(name, dtype=dtype))
    assert attachment.dtype == dtype and attachment.shape.item_bytes == 2


# -- invisible ----------------------------------------------------------------------------------------------------


def portrait(model: tf.PreTrainedModel) -> dict:
    """Everything that a user could see change: config, identity of every attribute of every module, tensors."""
    seen: dict = {"config": copy.deepcopy(model.config.to_dict()), "attn": model.config._attn_implementation}
    for path, module in model.named_modules():
        seen[path, "type"] = type(module)
        for name, value in vars(module).items():
            if isinstance(value, dict):
                seen[path, name] = (id(value), [(key, id(item)) for key, item in value.items()])
            else:
                seen[path, name] = value if isinstance(value, (int, float, str, bool, type(None))) else id(value)
    for name, tensor in model.state_dict(keep_vars=True).items():
        seen["tensor", name] = (id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad)
    return seen


def test_the_users_object_is_never_changed(stock):
    stock.train()
    stock.config._attn_implementation = "eager"
    before = portrait(stock)
    engine = build("locret", on=stock, attn="sdpa")
    assert portrait(stock) == before
    logits_at_each(engine, engine.open(0), ids_of(60))
    assert portrait(stock) == before
    detach(stock, "sdpa")
    assert portrait(stock) == before and stock.training


def test_weights_are_shared_not_copied(stock):
    attachment = attach(stock)
    mine = {t.data_ptr() for t in stock.parameters()}
    assert {t.data_ptr() for t in attachment._shadow.parameters()} <= mine


def test_a_model_in_training_mode_is_run_in_eval_mode():
    config = tf.LlamaConfig(**BASE, attention_dropout=0.5)
    torch.manual_seed(0)
    stock = tf.LlamaForCausalLM(config).train()
    engine = build("streaming_llm", on=stock)
    ids = ids_of(30)
    one, two = (logits_at_each(engine, engine.open(slot), ids) for slot in (0, 1))
    assert torch.equal(one, two) and stock.training


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_stock_generate_is_bit_equal_before_during_and_after(name: str):
    """On the same object, on another thread, while engines attach, step and detach on this one."""
    stock = make(name, seed=5)
    prompt = torch.tensor([ids_of(20)])

    def generate() -> tuple[torch.Tensor, ...]:
        out = stock.generate(prompt, max_new_tokens=12, do_sample=False, return_dict_in_generate=True,
                             output_logits=True)
        return out.sequences, *out.logits

    def same(found: tuple[torch.Tensor, ...]) -> bool:
        return len(found) == len(before) and all(map(torch.equal, found, before))

    before = generate()
    stop, verdicts, errors = threading.Event(), [], []

    def keep_generating() -> None:
        try:
            while not stop.is_set() or len(verdicts) < 3:
                verdicts.append(same(generate()))
        except Exception as error:  # shown below, on the test's own thread
            errors.append(error)

    thread = threading.Thread(target=keep_generating)
    thread.start()
    try:
        rows = []
        for _ in range(3):
            engine = build("h2o", on=stock)
            rows.append(logits_at_each(engine, engine.open(0), ids_of(40)))
            detach(stock)
    finally:
        stop.set()
        thread.join(120)
    assert not thread.is_alive() and not errors and len(verdicts) >= 3 and all(verdicts)
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
    assert same(generate())


def test_a_failed_forward_leaves_the_attachment_usable(stock):
    engine = build("locret", on=stock)
    state = engine.open(0)
    feed(engine, state, ids_of(20))
    expected = engine.logits(engine.fork(state, 1))
    with pytest.raises(RuntimeError):
        engine.attachment.hidden(torch.tensor([[1, 2]]), lambda call: (_ for _ in ()).throw(RuntimeError("step")))
    assert engine.attachment._step is None
    assert torch.equal(engine.logits(state), expected)


# -- fingerprint --------------------------------------------------------------------------------------------------


def test_fingerprint_is_that_of_the_checkpoint_whatever_the_dtype(tmp_path):
    make("qwen3", dtype=torch.bfloat16).save_pretrained(tmp_path)
    load = tf.AutoModelForCausalLM.from_pretrained
    prints = {attach(load(tmp_path, dtype=dtype)).fingerprint for dtype in (torch.bfloat16, torch.float32)}
    assert len(prints) == 1


@pytest.mark.parametrize("trained, used", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)], ids=str)
def test_heads_serve_their_model_in_float16_though_it_rounds_small_weights(tmp_path, caplog, trained, used):
    tiny = make("qwen3", dtype=torch.bfloat16)
    with torch.no_grad():
        tiny.model.layers[0].mlp.up_proj.weight[0, :64] = 1.1e-6  # below the steps of float16 there
    tiny.save_pretrained(tmp_path)
    load = tf.AutoModelForCausalLM.from_pretrained
    of_heads, attachment = (attach(load(tmp_path, dtype=dtype)) for dtype in (trained, used))
    assert of_heads.fingerprint != attachment.fingerprint
    unit = attachment.shape.units[0]
    heads = RetainingHeads(HeadsConfig(
        layers=attachment.shape.layers, query_heads=unit.query_heads, kv_heads=unit.kv_heads,
        head_dim=unit.key_dim, width=8, fingerprint=of_heads.fingerprint, sketch=of_heads.sketch,
        form=of_heads.packing))
    attachment.check_heads(heads)
    assert "the same base as " in caplog.text
    other = attach(make("qwen3", seed=9).to(used))
    with pytest.raises(HeadsMismatch, match="another model"):
        other.check_heads(heads)


def test_the_fingerprint_keeps_no_tensor_that_is_made_for_it(stock, monkeypatch):
    named, made = weights.named_weights, list[weakref.ref]()

    def copies(model):
        for name, tensor in named(model):
            copied = tensor.detach().clone()
            made.append(weakref.ref(copied))
            assert sum(ref() is not None for ref in made) < 3
            yield name, copied
            del copied

    expected = weights.fingerprint(stock)
    monkeypatch.setattr(weights, "named_weights", copies)
    assert weights.fingerprint(stock) == expected and len(made) > 10


def test_fingerprint_tells_models_apart(stock):
    other_weights = make("llama", seed=6)
    other_rope = make("llama-llama3", seed=5)
    tuned = copy.deepcopy(stock)
    tuned.model.layers[2].mlp.up_proj.weight.data *= 1.01
    assert len({attach(m).fingerprint for m in (stock, other_weights, other_rope, tuned)}) == 4
    assert attach(copy.deepcopy(stock)).fingerprint == attach(stock).fingerprint


def test_a_head_of_another_dtype_is_attached():
    """The norm and the head in fp32 behind a bf16 model: logits by the model's own way."""
    mixed = make("llama").to(torch.bfloat16)
    mixed.model.norm.float()
    mixed.lm_head.float()
    attachment = attach(mixed)
    try:
        assert not attachment._plain_head
    finally:
        detach(mixed)


def test_an_attachment_for_a_block_is_nobody_else_s():
    """A runtime's thread may run the shared one meanwhile."""
    stock = make("llama")
    shared = attach(stock)
    with attached(stock) as one, attached(stock) as two:
        assert len({id(shared), id(one), id(two)}) == 3
    with pytest.raises(KeyError), attached(stock) as again:
        raise KeyError
    assert again is not one and attach(stock) is shared
    with attached(shared) as same:
        assert same is shared
    assert shared.users == 2
    detach(stock)
    detach(stock)


def test_a_sliding_window_that_no_position_reaches_is_none():
    """As Phi-3-mini-128k names one: twice its positions."""
    most = BASE["max_position_embeddings"]
    for window, slides in ((2 * most, False), (most, False), (most - 1, True), (None, False)):
        found = make("llama", config=tf.Phi3Config(**BASE, sliding_window=window))
        with attached(found) as attachment:
            assert attachment.shape.sliding == (window if slides else None,) * attachment.shape.layers, window


def test_frequencies_that_a_model_writes_anew_stay_its_own():
    """longrope writes them at every call; the shadow has a copy, as another thread may run the model."""
    stock = make("phi3-longrope")
    own = stock.model.rotary_emb.inv_freq
    before, version = own.clone(), own._version
    engine = build("streaming_llm", on=stock, units=49, chunk_size=16)  # beyond the switch to the long factors
    logits_at_each(engine, engine.open(0), ids_of(60))
    assert stock.model.rotary_emb.inv_freq is own and own._version == version and torch.equal(own, before)
    detach(stock)
