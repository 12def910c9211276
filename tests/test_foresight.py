"""What is told of a model before its weights are read is what a loaded one holds, byte for byte, or its refusal."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from locret_stream import Runtime, UnsupportedModel
from locret_stream.models import attach, attached, foresee
from locret_stream.runtime.foresight import weights_bytes
from tests.architectures import BASE, CONFIGS, make, text_of
from tests.cli.command import invoke, mistake
from tests.context.support import tokenizer
from tests.test_without_heads import of_kind

KINDS = ["llama", "lfm2", "deepseek-v3", "gemma4-e2b"]
SLOW = "kimi-linear"  # whose layers without attention take transformers' slow way on CPUs
MEMORY = {"budget": 24, "chunk_size": 8, "sinks": 2, "stabilizers": 3, "max_live": 1}


def some(names: list[str], quick: list[str]) -> list[object]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.thorough]) for name in names]


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    model = of_kind(name).to(dtype)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def without_weights(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.mark.parametrize("name", some([name for name in CONFIGS if name != SLOW], KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
def test_shape_states_and_copies_are_those_of_the_attached_model(name: str, dtype: torch.dtype):
    found = foresee(lambda: text_of(config := CONFIGS[name]()).from_config(config, dtype=dtype), torch.device("cpu"))
    with attached(make(name, dtype=dtype)) as attachment:
        assert found.shape == attachment.shape and found.key_copies == attachment.key_copies
        assert [(state.name, state.shape, state.dtype) for state in found.states] == [
            (state.name, state.shape, state.dtype) for state in attachment.states]
        assert found.dtype == attachment.dtype and len(found.keeps) == len(attachment.layers)
        assert found.weights == sum(weight.numel() for weight in make(name).parameters())


@pytest.mark.parametrize("layers", [2, 9])
def test_layers_that_no_twin_has_are_of_forms_that_it_has(layers: int):
    """A model of a hundred layers is tried with one of each form."""
    types = ["linear_attention", "linear_attention", "full_attention"] * layers
    config = CONFIGS["qwen3.5"]()
    config.num_hidden_layers, config.layer_types = len(types), types
    found = foresee(lambda: AutoModelForCausalLM.from_config(config), torch.device("cpu"))
    assert found.keeps == ("a state", "a state", "units") * layers
    assert found.shape.layers == layers and [*dict.fromkeys(state.layer for state in found.states)] == [
        number for number, kind in enumerate(types) if kind == "linear_attention"]
    with attached(make("qwen3.5", config=config)) as attachment:
        assert found.shape == attachment.shape


def test_experts_in_a_stack_are_made_once():
    """Many of them take the room and the time of a few."""
    dtype = torch.bfloat16
    config = tf.Qwen3MoeConfig(**BASE, head_dim=16, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=128)
    made = AutoModelForCausalLM.from_config(config, dtype=dtype)
    found = foresee(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager"),
                    torch.device("cpu"))
    with attached(made) as attachment:
        assert (found.shape, found.dtype, found.key_copies) == (attachment.shape, dtype, attachment.key_copies)
    assert found.weights == made.num_parameters() and config.num_hidden_layers == BASE["num_hidden_layers"]


@pytest.mark.parametrize(("name", "options"), [
    *((name, {}) for name in KINDS), ("llama", {"policy": "h2o", "store_bits": 4}),
    *(pytest.param(name, options, marks=pytest.mark.thorough) for name, options in (
        ("mimo", {}), ("falcon-h1", {"policy": "h2o"}), ("gemma3", {"store_bits": (8, 4), "decode_copy": True}),
        ("llama", {"budget": "64KiB"}), ("qwen3.5", {"dtype": "bfloat16"}), ("gpt-oss", {"policy": "snapkv"})))])
async def test_the_bytes_are_those_of_a_runtime_that_holds_the_weights(name: str, options: dict, tmp_path: Path):
    folder = saved(name, tmp_path / "model")
    given = {**MEMORY, **options, "store": tmp_path / "store"}
    told = Runtime.from_pretrained(without_weights(folder, tmp_path / "config"), **given).foresee()
    assert told.weights_stored is None
    async with Runtime.from_pretrained(folder, **given) as runtime:
        pool, held = runtime.engine.pool, told.pool
        assert (held.bytes_resident, held.formula_bytes(), held.slot_bytes, held.layer_bytes, held.planes, held.rope,
                held.firsts) == (pool.bytes_resident, pool.formula_bytes(), pool.slot_bytes, pool.layer_bytes,
                                 pool.planes, pool.rope, pool.firsts)
        assert held.bytes_resident == held.formula_bytes() and told.layout.budgets == runtime.engine.budgets
        assert all(tensor.is_meta for tensor in held.tensors)
        assert told.layout.policy.name == runtime.engine.policy.name
        weights = {tensor.data_ptr(): tensor for tensor in runtime.model.parameters()}
        assert told.weights_held == sum(tensor.nbytes for tensor in weights.values())
        async with runtime.open("s", raw=True) as ctx:
            await ctx.feed("The pass key of falcon is 48213.\n" * 8)
            assert ctx.memory.tokens > 4 * max(told.layout.budgets)
            stored = (await ctx.snapshot()).bytes
        assert told.snapshot_bytes <= stored <= told.snapshot_bytes + 40_000, "headers, history, the log"
    assert weights_bytes(folder) == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


REFUSED = {
    "gpt2": lambda: tf.GPT2Config(vocab_size=401, n_embd=64, n_layer=2, n_head=4),
    "cpmant": lambda: tf.CpmAntConfig(vocab_size=401, hidden_size=64, num_attention_heads=4, dim_head=16,
                                      num_hidden_layers=2, dim_ff=96),
    "mamba": lambda: tf.MambaConfig(vocab_size=401, hidden_size=64, num_hidden_layers=2),
    "hunyuan": lambda: tf.HunYuanDenseV1Config(**BASE, head_dim=16, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)),
}


@pytest.mark.parametrize("name", some([*REFUSED], ["gpt2", "hunyuan"]))
def test_what_is_not_served_is_refused_in_the_words_of_attaching(name: str):
    with pytest.raises(UnsupportedModel) as attaching:
        attach(make(name, config=REFUSED[name]()))
    with pytest.raises(UnsupportedModel) as told:
        foresee(lambda: AutoModelForCausalLM.from_config(REFUSED[name]()), torch.device("cpu"))
    figures = re.compile(r"\d+\.\d+")
    assert figures.sub("N", str(told.value)) == figures.sub("N", str(attaching.value))


def test_inspect_tells_of_a_folder_without_weights(tmp_path: Path):
    folder = saved("lfm2", tmp_path / "model")
    options = ["--budget", 24, "--chunk-size", 8]
    code, out, err = invoke("inspect", "--json", "--model", without_weights(folder, tmp_path / "config"), *options)
    told = json.loads(out)
    assert code == 0 and told["fingerprint"] is None and told["weights_bytes"] is None, err
    assert told["kind"].startswith("hybrid") and told["keeps"] == ["a state", "units"] * 2
    code, out, err = invoke("inspect", "--json", "--load", "--model", folder, *options)
    loaded = json.loads(out)
    assert code == 0 and len(loaded["fingerprint"]) == 32 and loaded["weights_bytes"] > 1000, err
    assert {name: loaded[name] for name in told if told[name] != loaded[name]}.keys() == {
        "model", "fingerprint", "weights_bytes"}
    code, out, err = invoke("inspect", "--model", folder, *options)
    assert code == 0 and "of its layers 2 keep a state; 2 keep units" in out, err
    (tmp_path / "gpt").mkdir()
    REFUSED["gpt2"]().save_pretrained(tmp_path / "gpt")
    assert "its positions are learned embeddings" in mistake("inspect", "--model", tmp_path / "gpt")
    assert "expected one of them" in mistake("inspect", "--template", "--load", "--model", folder)


def test_sizes_of_checkpoints_are_read_off_their_files(tmp_path: Path):
    assert weights_bytes(tmp_path) is None
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(77))
    assert weights_bytes(tmp_path) == 77
    (tmp_path / "model.safetensors").write_bytes((10).to_bytes(8, "little") + bytes(10) + bytes(55))
    assert weights_bytes(tmp_path) == 55
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({
        "metadata": {"total_size": 99}, "weight_map": {"a": "model-1.safetensors"}}))
    assert weights_bytes(tmp_path) == 99, "its parts were not downloaded yet"
    (tmp_path / "model.gguf").write_bytes(bytes(33))
    assert weights_bytes(tmp_path / "model.gguf") == 33
