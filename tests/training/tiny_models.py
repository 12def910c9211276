"""Random models of three layers whose attention is sharp enough to matter, and examples for them."""

from __future__ import annotations

import torch
import transformers as tf
from transformers import AutoModelForCausalLM, PreTrainedModel

from locret_stream.training import Example

BASE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ONE_SLIDING = ["sliding_attention", "full_attention", "full_attention"]
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**BASE),
    "qwen3": lambda: tf.Qwen3Config(**BASE, head_dim=16),
    "mistral-sliding": lambda: tf.MistralConfig(**BASE, sliding_window=9),
    "gemma2": lambda: tf.Gemma2Config(**BASE, head_dim=16, query_pre_attn_scalar=16, sliding_window=9,
                                      attn_logit_softcapping=2.0),
    "gpt-oss": lambda: tf.GptOssConfig(**BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                       sliding_window=9, layer_types=ONE_SLIDING),
}


def make_model(name: str = "llama", attn: str = "sdpa", seed: int = 0, **changes: object) -> PreTrainedModel:
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32)
    noise = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        draw = torch.randn(parameter.shape, generator=noise)
        parameter.data = parameter.data + 0.3 * draw if parameter.dim() == 1 else draw * 1.5 * parameter.shape[-1] ** -0.5
    return model.eval()


def make_examples(count: int, length: int = 48, seed: int = 0) -> list[Example]:
    noise = torch.Generator().manual_seed(seed)
    spans = ((length // 2, length // 2 + 3), (length - 5, length))
    return [Example(torch.randint(3, 97, (length,), generator=noise), spans) for _ in range(count)]
