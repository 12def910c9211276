"""Random small models of every supported architecture, made from real configs."""

from __future__ import annotations

import torch
import transformers as tf
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

BASE = dict(vocab_size=401, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ONE_SLIDING = ["sliding_attention", "full_attention", "full_attention"]


def _rope(kind: str, **more: object) -> dict:
    return dict(rope_type=kind, rope_theta=10_000.0, **more)


def _longrope() -> PreTrainedConfig:
    rope = _rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64,
                 partial_rotary_factor=0.5, factor=64.0)
    return tf.Phi3Config(**BASE, original_max_position_embeddings=64, rope_parameters=rope)


def _granite() -> PreTrainedConfig:
    """With multipliers as in the published models: the class's own default is an attention scale of 1."""
    return tf.GraniteConfig(**BASE, embedding_multiplier=12.0, attention_multiplier=1 / 16, residual_multiplier=0.22,
                            logits_scaling=8.0)


CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**BASE),
    "llama-llama3": lambda: tf.LlamaConfig(**BASE, rope_parameters=_rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
    "llama-yarn": lambda: tf.LlamaConfig(**BASE, rope_parameters=_rope(
        "yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen2": lambda: tf.Qwen2Config(**BASE),
    "qwen3": lambda: tf.Qwen3Config(**BASE, head_dim=32),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**BASE, head_dim=16, num_experts=4, num_experts_per_tok=2,
                                           moe_intermediate_size=32),
    "mistral": lambda: tf.MistralConfig(**BASE, sliding_window=None),
    "mistral-sliding": lambda: tf.MistralConfig(**BASE, sliding_window=24),
    "phi3-partial": lambda: tf.Phi3Config(**BASE, rope_parameters=_rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": _longrope,
    "gemma2": lambda: tf.Gemma2Config(**BASE, head_dim=16, query_pre_attn_scalar=16, sliding_window=24),
    "gemma3": lambda: tf.Gemma3TextConfig(**BASE, head_dim=16, query_pre_attn_scalar=16, sliding_window=24,
                                          layer_types=ONE_SLIDING),
    "olmo2": lambda: tf.Olmo2Config(**BASE),
    "granite": _granite,
    "smollm3": lambda: tf.SmolLM3Config(**BASE, no_rope_layers=[1, 0, 1]),
    "gpt-oss": lambda: tf.GptOssConfig(**BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                       sliding_window=24, layer_types=ONE_SLIDING),
}


def make(name: str, *, attn: str | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
         config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """A random model whose weights are large enough that attention matters; `config` takes the place of the named."""
    model = AutoModelForCausalLM.from_config(config or CONFIGS[name](), attn_implementation=attn, dtype=dtype)
    noise = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        draw = torch.randn(parameter.shape, generator=noise).to(dtype)
        parameter.data = parameter.data + 0.1 * draw if parameter.dim() == 1 else draw * parameter.shape[-1] ** -0.5
    return model.eval()
