"""What a tiny model's sizes are, by the names that configs of transformers give them. Knows no model by its name.

Windows and the other thresholds of a config are 32 tokens: more than the 24 of the library's self-test, as every
published one is, and less than the 60 that a measurement reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCAB, WINDOW, LAYERS = 1536, 32, 4  # as many tokens as the bundled tokenizer has


@dataclass(frozen=True)
class IfSet:
    """A size of what a class has by default; where its default is None, it stays None."""

    value: Any


@dataclass(frozen=True)
class KVHeads:
    """Two KV heads for four heads; four where attention is latent, which knows no groups."""


def _all(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


OF_TEXT: dict[str, Any] = {
    # layers, widths, heads
    **_all(LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers layers"),
    **_all(64, "hidden_size n_embd d_model dim"),
    **_all(IfSet(64), "embedding_size"),
    **_all(4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
              "swa_num_attention_heads"),
    **_all(KVHeads(), "num_key_value_heads num_kv_heads"),
    **_all(2, "swa_num_key_value_heads"),
    **_all(16, "head_dim swa_head_dim kv_channels attention_head_dim swa_v_head_dim query_pre_attn_scalar"),
    **_all(96, "intermediate_size ffn_dim decoder_ffn_dim intermediate_size_mlp dense_intermediate_size "
               "shared_intermediate_size"),
    **_all(IfSet(96), "n_inner ffn_hidden_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    **_all(IfSet(8), "rotary_dim"),
    **_all(8, "laurel_rank"),
    # experts
    **_all(32, "moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size"),
    **_all(IfSet(4), "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_all(IfSet(2), "num_experts_per_tok top_k_experts moe_k moe_topk num_experts_per_token n_group"),
    **_all(IfSet(1), "topk_group num_expert_group n_shared_experts"),
    **_all(1, "first_k_dense_replace"),
    **_all(2, "zero_expert_num"),
    # latent attention, and an index
    **_all(IfSet(32), "q_lora_rank"),
    **_all(IfSet(16), "kv_lora_rank indexer_head_dim"),
    **_all(16, "qk_nope_head_dim v_head_dim index_head_dim"),
    **_all(8, "qk_rope_head_dim"),
    **_all(16, "index_n_heads"),  # of few none may score above 0: of equal scores torch chooses by the row's length
    **_all(IfSet(4), "indexer_n_heads"),
    # recurrent layers
    **_all(16, "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state mamba_d_head mamba_chunk_size "
               "mamba_head_dim ssm_state_size state_size mamba_headdim"),
    **_all(2, "linear_num_key_heads mamba_expand"),
    **_all(4, "linear_num_value_heads linear_num_heads linear_conv_kernel_dim"),
    **_all(8, "mamba_n_heads mamba_num_heads n_mamba_heads mamba_dt_rank"),
    **_all(1, "mamba_n_groups n_groups mamba_ngroups"),
    **_all(128, "mamba_d_ssm"),
    # tokens and positions
    **_all(VOCAB, "vocab_size vocab_size_per_layer_input"),
    **_all(IfSet(VOCAB), "unpadded_vocab_size"),
    **_all(16, "hidden_size_per_layer_input"),
    **_all(4096, "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length"),
    **_all(IfSet(WINDOW), "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size "
                          "index_topk log_scaling_n_floor"),
    **_all(WINDOW, "floor_scale"),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **_all(0.0, "attn_pdrop embd_pdrop resid_pdrop"),
}
"""Of a decoder, by the names of a config's fields."""

OF_OTHERS: dict[str, Any] = {
    **_all(2, "num_hidden_layers n_layer n_layers num_layers depth encoder_layers num_blocks"),
    **_all(2, "num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads "
              "conf_num_attention_heads num_key_value_heads"),
    **_all(1, "conf_num_hidden_layers num_global_layers"),
    **_all(32, "hidden_size d_model dim embed_dim n_embd"),
    **_all(48, "intermediate_size encoder_ffn_dim ffn_dim"),
    **_all(16, "head_dim global_head_dim num_position_embeddings"),
    **_all(64, "out_hidden_size output_dim position_embedding_size"),
    **_all(128, "vocab_size"),
    **_all(IfSet([0]), "deepstack_visual_indexes"),
    **_all([0], "fullatt_block_indexes"),
}
"""Of what reads images and sounds."""


def sized(fields: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a config with those fields, given as names with their defaults."""
    return {name: _value(sizes[name], default, fields) for name, default in fields.items() if name in sizes}


def _value(size: Any, default: Any, fields: dict[str, Any]) -> Any:
    if isinstance(size, IfSet):
        return size.value if default is not None else None
    if isinstance(size, KVHeads):
        return 4 if fields.get("kv_lora_rank") is not None else 2
    return size
