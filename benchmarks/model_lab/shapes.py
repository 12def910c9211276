"""The specifics that published models have, which neither sizes nor the defaults of their config classes show.

Patterns of layers, positions that are scaled, layers without RoPE, shared units, and what must fit what in a config.
"""

from __future__ import annotations

from typing import Any

from model_lab.sizes import VOCAB, WINDOW

SLIDING, FULL, LINEAR, CONV = "sliding_attention", "full_attention", "linear_attention", "conv"
ALTERNATING, HYBRID = [SLIDING, FULL] * 2, [LINEAR] * 3 + [FULL]


def _rope(kind: str = "default", theta: float = 1e6, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_SCALED_FROM_32 = _rope("yarn", factor=16.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0,
                        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
_OF_IMAGES = {"rope_parameters": _rope(mrope_section=[2, 3, 3])}

TEXT: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None}, "mixtral": {"sliding_window": None},  # as since v0.2
    "phi3": {"sliding_window": None}, "phi4_multimodal": {"sliding_window": None},
    "ministral": {"layer_types": ALTERNATING},
    "ministral3": {"rope_parameters": _SCALED_FROM_32},
    "laguna": {"layer_types": ALTERNATING}, "mellum": {"layer_types": ALTERNATING},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "cohere_compass_text": {"layer_types": ALTERNATING, "rope_parameters": {SLIDING: _rope(theta=1e4), FULL: None}},
    "llama4_text": {"layer_types": ["chunked_attention"] * 3 + [FULL], "no_rope_layers": [1, 1, 1, 0],
                    "num_local_experts": 4, "num_experts_per_tok": 1, "attn_temperature_tuning": True},
    "gemma3n_text": {"num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2,
                     "activation_sparsity_pattern": [0.95] + [0.0] * 5, "intermediate_size": [96] * 6},
    "gemma4_text": {"layer_types": ALTERNATING, "global_head_dim": 32, "attention_k_eq_v": True,
                    "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "gemma4_unified_text": {"layer_types": ALTERNATING, "global_head_dim": 32, "num_global_key_value_heads": 1},
    # hybrids
    "lfm2": {"layer_types": [CONV, FULL] * 2}, "lfm2_moe": {"layer_types": [CONV, FULL] * 2, "num_dense_layers": 1},
    "lfm3": {"layer_types": [CONV, SLIDING, CONV, FULL]},
    "qwen3_next": {"layer_types": HYBRID}, "qwen3_5_text": {"layer_types": HYBRID},
    "qwen3_5_moe_text": {"layer_types": HYBRID}, "olmo_hybrid": {"layer_types": HYBRID},
    "qwen4_exp_text": {"layer_types": [LINEAR] * 3 + ["indexed_attention"], "indexer_n_heads": 4,
                       "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32,
                       "indexer_compress_ratio": 4, "hc_lowrank": 16},
    "granitemoehybrid": {"layer_types": HYBRID, "position_embedding_type": "nope"},  # as Granite 4 H
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"layers_block_type": [LINEAR, "mlp", FULL, "moe"], "num_hidden_layers": 4,
                   "moe_shared_expert_intermediate_size": 32, **_ONE_GROUP},
    "zamba": {"layers_block_type": [LINEAR, "hybrid"] * 2, "attention_hidden_size": 128, "attention_head_dim": 32,
              "mamba_dt_rank": 8, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": [LINEAR, "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "num_key_value_heads": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    # experts in groups, latents
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, **_ONE_GROUP},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, **_ONE_GROUP},
    "glm4_moe": _ONE_GROUP,
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "longcat_flash": {"head_dim": 8, "num_layers": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}},
    # models of before 2024
    "falcon": {"alibi": False, "multi_query": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    # texts of multimodal models
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_vl_text", "qwen3_vl_moe_text",
                     "qwen3_omni_moe_text", "glm4v_text", "glm46v_text"), _OF_IMAGES),
    "glm4v_moe_text": {"rope_parameters": _rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.5), **_ONE_GROUP},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 16], "rope_parameters": _rope(mrope_section=[3, 3, 2])},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32,
                        "swa_kv_lora_rank": 16, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16},
    "muse_spark_text": {"layer_types": [SLIDING] * 3 + [FULL], "moe_hidden_size": 32},
    "hunyuan_vl_text": {"rope_parameters": _rope("dynamic", 1e4, alpha=1000.0, factor=1.0, beta_fast=32.0,
                                                 beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                                                 mrope_section=[2, 2, 2, 2])},
    "step3p5": {"layer_types": ALTERNATING, "sliding_window": 32, "num_sliding_attention_heads": 8,
                "rope_theta": [1e4, 5e6] * 2, "partial_rotary_factors": [1.0, 0.5] * 2, "share_expert_dim": 32},
}
"""By model type, fields of the config of a text model."""

_BYTES = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 4}

AROUND: dict[str, dict[str, Any]] = {
    "blt": {"vocab_size": VOCAB, "max_position_embeddings": 4096, "local_attention_window_len": WINDOW,
            "encoder_hash_byte_group_vocab": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "patcher_config": {**_BYTES, "hidden_size": 32, "sliding_window": WINDOW},
            "encoder_config": {**_BYTES, "hidden_size": 32, "hidden_size_global": 64},
            "decoder_config": {**_BYTES, "hidden_size": 32, "hidden_size_global": 64, "sliding_window": None},
            "global_config": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
                              "num_key_value_heads": 4}},
    "dots3_note": {"vision_config": {"mlp_layer_types": ["dense"] * 2, "adapter_in_dim": 32, "adapter_out_dim": 64},
                   "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 64}},
    "fast_vlm": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4}},
    "granite4_vision": {"vision_config": {"hidden_size": 64, "image_size": 16, "patch_size": 4},
                        "downsample_rate": "1/2", "deepstack_layer_map": [[0, 1]],
                        "spatial_target_layers": [0, 1, 2, 3]},
    "inkling2": {"vision_config": {"text_hidden_size": 64, "projection_hidden_dim": 64}},
    "inkling_mm_model": {"vision_config": {"patch_size": 4, "num_hidden_layers": 4}},
    "molmo2": {"vision_config": {"image_size": [28, 28], "num_position_embeddings": 4},
               "adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64}},
    "muse_spark": {"audio_config": {"patch_sizes": [2, 2], "hidden_sizes": [16, 32], "depths": [1, 1]},
                   "out_hidden_size": 64, "projector_hidden_size": 64},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2, "image_size": 32}, "audio_config": None,
                        "vision_hidden_size": 32, "projector_hidden_size": 64},
}
"""By the type of a model with configs within its own, fields of it; those of a config within it as a dict, of which
`model_type` makes it one of another class. FastVLM's tower is timm's; text needs none, so that any will do."""

TOWERS_OF_TIMM = ("gemma3n_vision",)
"""Types of configs whose models are timm's, and of which no config allows another one."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 E2B (shared units, inputs per layer)": ("gemma4_text", {
        "num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16, "attention_k_eq_v": False, "num_global_key_value_heads": None}),
    "gemma4 26B-A4B (experts)": ("gemma4_text", {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}),
    "gemma4 with heads of one width": ("gemma4_text", {
        "global_head_dim": 16, "attention_k_eq_v": False, "num_global_key_value_heads": None}),
    "granite 4 micro (dense, RoPE, all attention)": ("granitemoehybrid", {
        "layer_types": [FULL] * 4, "position_embedding_type": "rope", "num_local_experts": 0}),
    "granite 4 H, all attention, no RoPE": ("granitemoehybrid", {"layer_types": [FULL] * 4}),
    "mistral v0.1 (sliding)": ("mistral", {"sliding_window": 32}),
    "ministral 8B, all sliding": ("ministral", {"layer_types": [SLIDING] * 4}),
    "ministral3 without scaling by position": ("ministral3", {"rope_parameters": _rope(
        original_max_position_embeddings=4096, llama_4_scaling_beta=0.0)}),
    "ministral3, scaled from 4,096 tokens on": ("ministral3", {"rope_parameters": {
        name: value for name, value in _SCALED_FROM_32.items() if not name.startswith("mscale")} | {
            "original_max_position_embeddings": 4096}}),
    "llama4 without temperature": ("llama4_text", {"attn_temperature_tuning": False}),
    "llama4 without chunks and temperature": ("llama4_text", {
        "attn_temperature_tuning": False, "layer_types": [FULL] * 4}),
    "deepseek_v3 with whole queries": ("deepseek_v3", {"q_lora_rank": None}),
    "qwen3_5, all full attention": ("qwen3_5_text", {"layer_types": [FULL] * 4}),
    "qwen3_next, all full attention": ("qwen3_next", {"layer_types": [FULL] * 4}),
    "lfm2, all attention": ("lfm2", {"layer_types": [FULL] * 4}),
    "falcon with ALiBi": ("falcon", {"alibi": True}),
    "falcon 40B (new decoder)": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi3 longrope": ("phi3", {"rope_parameters": _rope(
        "longrope", 1e4, short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=4096,
        factor=1.0)}),
    "qwen2 with sliding layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
    "minimax M3 with its sparse layers": ("minimax_m3_vl_text", {
        "layer_types": [FULL, "minimax_m3_sparse"] * 2, "index_block_size": 8, "index_topk_blocks": 2,
        "index_n_heads": 4}),
    "mimo with as many KV heads in all layers": ("mimo_v2_flash", {
        "swa_num_key_value_heads": 2, "num_key_value_heads": 2}),
    "mimo with V narrower than K": ("mimo_v2_flash", {"v_head_dim": 8, "head_dim": 16}),
    "glm_moe_dsa, an index of 2,048 tokens": ("glm_moe_dsa", {"index_topk": 2048}),
    "deepseek_v32, an index of 2,048 tokens": ("deepseek_v32", {"index_topk": 2048}),
}
"""Other published forms of a class, and what shows a cause: by name the model type, and fields of its config."""
