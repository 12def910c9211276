"""One small model as people load it: plain, quantised by several libraries, with adapters. What is not installed is
skipped, by name."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.architectures import make

BASE = dict(vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONFIGS = {"llama": lambda: tf.LlamaConfig(**BASE), "qwen2": lambda: tf.Qwen2Config(**BASE),
           "qwen3": lambda: tf.Qwen3Config(**BASE, head_dim=64)}
EXTRAS = {"torchao": "quantised", "bitsandbytes": "quantised", "accelerate": "gguf", "gguf": "gguf", "peft": "peft"}


def needs(package: str) -> None:
    """Skip where it is not installed."""
    if importlib.util.find_spec(package) is None:
        wanted = f"'locret-stream[{EXTRAS[package]}]'" if package in EXTRAS else package
        pytest.skip(f"needs {package}, which is not installed here: pip install {wanted}")


def _torchao(config: Callable[[Any], Any]) -> Callable[[Path, torch.dtype], PreTrainedModel]:
    def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        needs("torchao")
        import torchao.quantization as ao

        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=tf.TorchAoConfig(
            config(ao)))

    return load


def _bitsandbytes(**options: Any) -> Callable[[Path, torch.dtype], PreTrainedModel]:
    def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        needs("bitsandbytes")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=tf.BitsAndBytesConfig(
            **options))

    return load


def _plain(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


GROUP = 32
NIBBLES_OF_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def _nibbles(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight values below 16 in each int32, along a dimension."""
    whole = (values.movedim(dim, -1).unflatten(-1, (-1, 8)).long() << 4 * torch.arange(8)).sum(-1)
    return whole.sub((whole >= 2 ** 31) * 2 ** 32).int().movedim(-1, dim).contiguous()


def in_nibbles(method: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in 4 bit as GPTQ ("gptq") or AWQ ("awq") lays them out, rounded to the nearest."""
    out: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        path, is_packed, _ = name.partition("_proj.weight")
        if not is_packed:
            out[name] = weight.half().contiguous()
            continue
        groups = weight.float().unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-6).half()
        zeros = (-low / scales.float()).round().clamp(1, 15)  # GPTQ keeps one less
        levels = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
        path, levels, zeros = f"{path}_proj.", levels.T, zeros.T
        out[path + "scales"] = scales.T.contiguous()
        if method == "gptq":
            out |= {path + "qweight": _nibbles(levels, 0), path + "qzeros": _nibbles(zeros - 1, 1),
                    path + "g_idx": torch.arange(len(levels)).int() // GROUP}
        else:
            levels, zeros = (t.unflatten(1, (-1, 8))[..., NIBBLES_OF_AWQ].flatten(1) for t in (levels, zeros))
            out |= {path + "qweight": _nibbles(levels, 1), path + "qzeros": _nibbles(zeros, 1)}
    return out


HOW = {"gptq": dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=False),
       "awq": dict(quant_method="awq", bits=4, group_size=GROUP, version="gemm", zero_point=True)}


def save_in_nibbles(method: str, model: PreTrainedModel, folder: Path) -> Path:
    """A folder as GPTQ's and AWQ's tools write them, without their tools."""
    from safetensors.torch import save_file

    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16", "quantization_config": HOW[method]}))
    save_file(in_nibbles(method, model), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class InNibbles(torch.nn.Module):
    """What gptqmodel puts in a linear's place, without gptqmodel: int32 buffers and no weight. As its kernels for CPUs
    do, the first forward in half precision repacks them, and one with gradients has them stay for good."""

    def __init__(self, method: str, tensors: dict[str, torch.Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.method, self.linear_mode, self._cpu_transformed = method, None, False
        self.out_features = self.scales.shape[1]
        self.in_features = self.qweight.shape[0] * (8 if method == "gptq" else 1)

    def unpack(self) -> None:
        levels, zeros = ((t.unsqueeze(-1) >> 4 * torch.arange(8)) & 15 for t in (self.qweight, self.qzeros))
        if self.method == "gptq":
            levels, zeros = levels.movedim(-1, 1).flatten(0, 1), zeros.flatten(1) + 1
        else:
            back = torch.tensor(NIBBLES_OF_AWQ).argsort()
            levels, zeros = levels[..., back].flatten(1), zeros[..., back].flatten(1)
        self.levels, self.zeros = levels.float(), zeros.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.linear_mode is None:
            half = x.dtype != torch.float32 and not x.requires_grad
            self.linear_mode = "inference" if half else "train"
            if half:
                self.unpack()
                self.scales = self.scales.to(x.dtype)
                self.qweight = self.levels.T.to(torch.uint8).contiguous()
                self.qzeros = (8 - self.zeros).to(x.dtype) * self.scales
                self._cpu_transformed = True
        if self.linear_mode == "train":
            self.unpack()
        elif x.dtype != self.scales.dtype:
            raise RuntimeError("repacked for another dtype")
        weight = (self.levels.unflatten(0, (-1, GROUP)) - self.zeros[:, None]) * self.scales.float()[:, None]
        return x @ weight.flatten(0, 1).to(x.dtype)


InNibbles.__module__ = "gptqmodel.stand_in"


def _stand_in(method: str) -> Callable[[Path, torch.dtype], PreTrainedModel]:
    def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(folder)
        tensors, model = in_nibbles(method, model), model.half().to(dtype)
        for path in [path for path, _ in model.named_modules()]:
            if path.endswith("_proj"):
                own = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{path}.")}
                model.set_submodule(path, InNibbles(method, own))
        model.config.quantization_config = HOW[method]
        return model

    return load


def _gptqmodel(method: str) -> Callable[[Path, torch.dtype], PreTrainedModel]:
    def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        for package in ("gptqmodel", "optimum", "accelerate"):
            needs(package)
        target = folder.with_name(f"{folder.name}-{method}")
        if not target.exists():
            save_in_nibbles(method, AutoModelForCausalLM.from_pretrained(folder), target)
        return AutoModelForCausalLM.from_pretrained(target, dtype=dtype, device_map={"": "cpu"})

    return load


PACKINGS: dict[str, Callable[[Path, torch.dtype], PreTrainedModel]] = {
    "plain": _plain,
    "torchao-int8": _torchao(lambda ao: ao.Int8WeightOnlyConfig()),
    "torchao-int8-dynamic": _torchao(lambda ao: ao.Int8DynamicActivationInt8WeightConfig()),
    "torchao-int4": _torchao(lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32))),
    "bitsandbytes-8": _bitsandbytes(load_in_8bit=True),
    "bitsandbytes-4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes-4-nested": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                           bnb_4bit_use_double_quant=True),
}
IN_NIBBLES: dict[str, Callable[[Path, torch.dtype], PreTrainedModel]] = {
    "gptq-stand-in": _stand_in("gptq"), "awq-stand-in": _stand_in("awq"),
    "gptq": _gptqmodel("gptq"), "awq": _gptqmodel("awq")}
"""Apart, as what loads the last two is installed in few places."""
EXACT = ("plain", "torchao-int8", "torchao-int4", *IN_NIBBLES)
"""Those that compute in the dtype of activations; the others round these inside of a layer."""


@cache
def base(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A random model in bf16, never changed."""
    return make(name, dtype=torch.bfloat16, seed=seed, config=CONFIGS[name]())


@cache
def _saved(name: str, seed: int, root: Path) -> Path:
    base(name, seed).save_pretrained(folder := root / f"{name}-{seed}")
    return folder


def packed(packing: str, root: Path, *, name: str = "llama", seed: int = 0,
           dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The base as that packing loads it; `root` is a folder for all tests of a process."""
    return (PACKINGS | IN_NIBBLES)[packing](_saved(name, seed, root), dtype).eval()


def with_adapter(model: PreTrainedModel, *names: str, rank: int = 4, seed: int = 1) -> Any:
    """A PEFT model around a copy, with LoRA adapters that change much; the last one is active."""
    needs("peft")
    import peft

    wrapped = None
    for number, name in enumerate(names or ("default",)):
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj", "down_proj"])
        if wrapped is None:
            wrapped = peft.get_peft_model(copy.deepcopy(model), config, adapter_name=name)
        else:
            wrapped.add_adapter(name, config)
        noise = torch.Generator().manual_seed(seed + number)
        for path, parameter in wrapped.named_parameters():
            if f".lora_A.{name}." in path or f".lora_B.{name}." in path:
                parameter.data = torch.randn(parameter.shape, generator=noise).to(parameter) * 0.1
        wrapped.set_adapter(name)
    return wrapped.eval()


def as_gguf(model: PreTrainedModel, tokenizer: tf.PreTrainedTokenizerFast, path: Path, kind: str = "Q8_0") -> Path:
    """A Llama and its byte-level tokenizer as llama.cpp's converter would write them, in one quantisation."""
    needs("gguf")
    needs("accelerate")
    import gguf

    config, definition = model.config, json.loads(tokenizer.backend_tokenizer.to_str())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {each["id"]: each["special"] for each in definition["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens.get(index, f"<unused{index}>") for index in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.CONTROL if added.get(index) else gguf.TokenType.USER_DEFINED
                            if index in added else gguf.TokenType.NORMAL if index in tokens else gguf.TokenType.UNUSED
                            for index in range(config.vocab_size)])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair
                             for pair in definition["model"]["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:  # llama.cpp rotates neighbours where transformers rotates halves
                data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        how = gguf.GGMLQuantizationType.F32 if data.ndim == 1 else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(names.get_name(name, (".weight",)) + ".weight" if not (
            found := names.get_name(name, (".weight",))).endswith(".weight") else found,
            gguf.quants.quantize(data, how), raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
