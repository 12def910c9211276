"""Random small models of every supported architecture, made from real configs."""

from __future__ import annotations

import torch
import transformers as tf
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

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


PLAIN = {
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
    "stablelm": lambda: tf.StableLmConfig(**BASE),  # divides for a partial rotation outside of its function
    "smollm3": lambda: tf.SmolLM3Config(**BASE, no_rope_layers=[1, 0, 1]),
    "gpt-oss": lambda: tf.GptOssConfig(**BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                       sliding_window=24, layer_types=ONE_SLIDING),
}


_LIKE_DEEPSEEK = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
                      n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
                      moe_intermediate_size=32)
_LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
               linear_conv_kernel_dim=4)
_MAMBA = dict(mamba_n_heads=8, mamba_d_state=8, mamba_d_head=16, mamba_expand=2, mamba_n_groups=1, mamba_d_conv=4,
              mamba_chunk_size=8)
STATEFUL = {
    "qwen3.5": lambda: tf.Qwen3_5TextConfig(**BASE | dict(num_hidden_layers=4), **_LINEAR, head_dim=16, layer_types=[
        "linear_attention", "full_attention", "linear_attention", "full_attention"]),
    "lfm2": lambda: tf.Lfm2Config(**BASE | dict(num_hidden_layers=4), layer_types=[
        "conv", "full_attention", "conv", "full_attention"]),
    "granite4-h": lambda: tf.GraniteMoeHybridConfig(
        **BASE | dict(num_hidden_layers=4), **_MAMBA, position_embedding_type="nope", num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=48, attention_multiplier=0.25,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"]),
    "falcon-h1": lambda: tf.FalconH1Config(**BASE, **_MAMBA, mamba_d_ssm=128, head_dim=16),
    "jamba": lambda: tf.JambaConfig(
        **BASE, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=8, attn_layer_period=2,
        attn_layer_offset=0, num_experts=4, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1),
    "zamba": lambda: tf.ZambaConfig(
        **BASE | dict(num_key_value_heads=4), attention_hidden_size=128, attention_head_dim=32, mamba_d_state=8,
        mamba_dt_rank=8, n_mamba_heads=2, layers_block_type=["linear_attention", "hybrid", "hybrid"]),
    "minimax": lambda: tf.MiniMaxConfig(
        **BASE | dict(num_hidden_layers=4), head_dim=16, block_size=8, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"] * 2),
    "recurrent-gemma": lambda: tf.RecurrentGemmaConfig(  # says nothing of positions, as all its layers have windows
        **{name: value for name, value in BASE.items() if name != "max_position_embeddings"}
        | dict(num_hidden_layers=6), attention_window_size=24),
}
"""Models with layers that carry a recurrent state, beside attention or in place of it."""

BY_LAYER = {
    "gemma4-e2b": lambda: tf.Gemma4TextConfig(
        **BASE | dict(num_hidden_layers=6), head_dim=16, global_head_dim=32, sliding_window=24, num_kv_shared_layers=2,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=401, attention_k_eq_v=False,
        layer_types=["sliding_attention", "full_attention"] * 3),
    "gemma4-moe": lambda: tf.Gemma4TextConfig(
        **BASE | dict(num_hidden_layers=4), head_dim=16, global_head_dim=32, sliding_window=24, attention_k_eq_v=True,
        num_global_key_value_heads=1, hidden_size_per_layer_input=0, num_kv_shared_layers=0, enable_moe_block=True,
        num_experts=4, top_k_experts=2, moe_intermediate_size=32,
        layer_types=["sliding_attention", "full_attention"] * 2),
    "mimo": lambda: tf.MiMoV2FlashConfig(
        **BASE | dict(num_hidden_layers=3), head_dim=16, v_head_dim=8, swa_num_attention_heads=4,
        swa_num_key_value_heads=4, swa_head_dim=16, swa_v_head_dim=8, sliding_window=24, layer_types=ONE_SLIDING,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1),
    "doge": lambda: tf.DogeConfig(**BASE, keep_window_size=128),
    "diffllama": lambda: tf.DiffLlamaConfig(**BASE),
}
"""Models whose layers differ in KV heads, share units, or have keys and values of other widths."""

LATENT = {
    "deepseek-v3": lambda: tf.DeepseekV3Config(**BASE | dict(num_key_value_heads=4), **_LIKE_DEEPSEEK),
    "kimi-linear": lambda: tf.KimiLinearConfig(
        **BASE | dict(num_hidden_layers=4, num_key_value_heads=4), kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=12, num_experts=4, num_experts_per_token=2, moe_intermediate_size=32,
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2),
}
"""Models whose units are latents."""

# Of few index heads none may score above 0, and between equal scores torch chooses by the length of the row.
_INDEX = dict(index_topk=12, index_n_heads=16, index_head_dim=16)
INDEXED = {
    "deepseek-v3.2": lambda: tf.DeepseekV32Config(**BASE | dict(num_key_value_heads=4), **_LIKE_DEEPSEEK, **_INDEX),
    "glm-5": lambda: tf.GlmMoeDsaConfig(
        **BASE | dict(num_key_value_heads=4), **_LIKE_DEEPSEEK, **_INDEX, indexer_types=["full", "shared", "full"],
        mlp_layer_types=["dense", "sparse", "sparse"]),
    "hy-v4": lambda: tf.HYV4Config(
        **BASE | dict(num_key_value_heads=4), **_LIKE_DEEPSEEK, **_INDEX, indexer_types=["full", "shared", "full"]),
    "mistral-large4": lambda: tf.MistralLarge4Config(
        vision_config=tf.PixtralVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                             num_attention_heads=2, image_size=32, patch_size=16),
        text_config=tf.MistralLarge4TextConfig(
            **BASE | dict(num_hidden_layers=6, num_key_value_heads=4), **_LIKE_DEEPSEEK, **_INDEX,
            no_rope_layers=[1, 1, 1, 0, 0, 1], kv_source_layers=[0, 1, 1, 3, 3, 1],
            indexer_types=["full", "shared", "full", "shared", "full", "shared"])),
    "glm-5.3": lambda: tf.Glm5NextConfig(
        vision_config=dict(hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=64),
        text_config=tf.Glm5NextTextConfig(
            **BASE | dict(num_key_value_heads=4), **_LIKE_DEEPSEEK | dict(qk_rope_head_dim=0), **_INDEX, index_kpool=4,
            layer_types=["full_attention"] * 3, indexer_types=["full", "shared", "full"])),
    "minimax-m3": lambda: tf.MiniMaxM3VLTextConfig(
        **BASE, head_dim=16, dense_intermediate_size=96, num_local_experts=4, num_experts_per_tok=2,
        index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=3,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]),
    "qwen4-exp": lambda: tf.Qwen4ExpTextConfig(
        **BASE | dict(num_hidden_layers=4), **_LINEAR, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, hc_lowrank=16, indexer_n_heads=4,
        indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=12, indexer_compress_ratio=4,
        layer_types=["linear_attention", "indexed_attention"] * 2),
}
"""Models whose layers choose what they attend to: 12 units of latents, by an index of their own or of an earlier layer,
which may have RoPE where they have none; or blocks of units, whose best index key, or whose mean one, scores best."""

_INKLING = dict(head_dim=16, swa_head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=4, d_rel=4,
                sliding_window_size=24, rel_extent=12, log_scaling_n_floor=16, n_routed_experts=4,
                num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
                layer_types=["hybrid_sliding", "hybrid", "hybrid"])
BIASED = {
    "inkling": lambda: tf.InklingTextConfig(**BASE, **_INKLING, mlp_layer_types=["dense", "sparse", "sparse"],
                                            logits_mup_width_multiplier=2.0),
    "inkling2": lambda: tf.Inkling2TextConfig(**BASE, **_INKLING),
}
"""Models that add to logits what depends on the token and on the distance, beside convolutions with a state."""

BEHIND_ROPE = {
    "ministral3": lambda: tf.Ministral3Config(**BASE, head_dim=16, sliding_window=None, rope_parameters=_rope(
        "yarn", factor=16.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
    "llama4": lambda: tf.Llama4TextConfig(
        **BASE | dict(num_hidden_layers=4), head_dim=16, intermediate_size_mlp=96, num_local_experts=4,
        num_experts_per_tok=1, attention_chunk_size=12, floor_scale=16, no_rope_layers=[1, 1, 1, 0],
        layer_types=["chunked_attention"] * 3 + ["full_attention"]),
    "hunyuan": lambda: tf.HunYuanDenseV1Config(**BASE, head_dim=16),  # norms with weights behind RoPE
}
"""Models that do something to queries behind RoPE, or whose layers see blocks of the stream."""
_OLD = dict(vocab_size=401, n_embd=64, n_layer=3, n_head=4, n_positions=4096, rotary_dim=8, bos_token_id=1,
            eos_token_id=2)
_FALCON = {**BASE, "num_key_value_heads": None}
OWN = {
    "gptj": lambda: tf.GPTJConfig(**_OLD),
    "codegen": lambda: tf.CodeGenConfig(**_OLD, n_ctx=4096),
    "gpt-neox-japanese": lambda: tf.GPTNeoXJapaneseConfig(**BASE, rope_parameters=_rope(
        "default", partial_rotary_factor=0.5)),
    "falcon": lambda: tf.FalconConfig(**_FALCON, multi_query=True),
    "falcon-new": lambda: tf.FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-alibi": lambda: tf.FalconConfig(  # its bias is in bf16, which tells 256 ranks apart
        **_FALCON | dict(max_position_embeddings=256), multi_query=True, alibi=True),
    "bloom": lambda: tf.BloomConfig(vocab_size=401, hidden_size=64, n_layer=3, n_head=4),
    "mpt": lambda: tf.MptConfig(vocab_size=401, d_model=64, n_layers=3, n_heads=4, max_seq_len=4096),
}
"""Models whose modules compute attention by themselves; the last three have ALiBi."""
ALIBI = ["falcon-alibi", "bloom", "mpt"]
OTHERWISE_BUILT = {
    "dbrx": lambda: tf.DbrxConfig(
        vocab_size=401, d_model=64, n_heads=4, n_layers=3, max_seq_len=4096,
        attn_config=dict(kv_n_heads=2, rope_theta=10_000.0, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2, hidden_size=64)),
    "modernbert-decoder": lambda: tf.ModernBertDecoderConfig(
        **BASE, cls_token_id=1, sep_token_id=2, local_attention=24, global_attn_every_n_layers=2),
    "hrm": lambda: tf.HrmTextConfig(**BASE | dict(num_hidden_layers=2), head_dim=16, H_cycles=2, L_cycles=1),
}
"""Models whose layers have other names, or whose modules are several layers each."""

CONFIGS = PLAIN | STATEFUL | BY_LAYER | LATENT | INDEXED | BIASED | BEHIND_ROPE | OWN | OTHERWISE_BUILT


def text_of(config: PreTrainedConfig) -> type:
    """The class of transformers that reads its text."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def make(name: str, *, attn: str | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
         config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """A random model whose weights are large enough that attention matters; `config` takes the place of the named."""
    config = config or CONFIGS[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # weights of one dimension keep what they are made with, some of which is random
        model = text_of(config).from_config(config, attn_implementation=attn, dtype=dtype)
    kept = model._get_dtype_plan(dtype)  # what `from_pretrained` would load in float32 (Inkling 2)
    noise = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        draw = torch.randn(parameter.shape, generator=noise).to(dtype)
        parameter.data = parameter.data + 0.1 * draw if parameter.dim() == 1 else draw * parameter.shape[-1] ** -0.5
    for name, parameter in model.named_parameters():
        if any(part in name for part in kept):
            parameter.data = parameter.data.float()
    return model.eval()
