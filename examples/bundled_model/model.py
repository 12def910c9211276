"""The bundled model as it is trained: Llama blocks under Hugging Face names, shaped for a small memory.

One layer, `recall_layer`, has a large budget at inference and so looks far back; every other layer
sees sinks and recent units only. Training says so directly. The context is cut into snippets that
pass through the layers below the recall layer alone (`snippet_features`); some of their units are
kept; the tail (a few context tokens, questions, answers) passes through all layers and sees the kept
units in the recall layer, at the positions they would have: their ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SINKS = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; `window` is the largest position it is trained at."""

    vocab: int = 1536
    width: int = 192
    layers: int = 4
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 512
    theta: float = 1e7
    recall_layer: int = 2
    window: int = 4096

    def llama_config(self, eos: int, pad: int) -> dict:
        """The same, as `config.json` of a LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.window,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout of Llama: x [..., T, D], cos and sin [T, D]."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, query, bias=False)
        self.k_proj = nn.Linear(shape.width, kv, bias=False)
        self.v_proj = nn.Linear(shape.width, kv, bias=False)
        self.o_proj = nn.Linear(query, shape.width, bias=False)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pre-RoPE q [B, Hq, T, D], k and v [B, H, T, D]."""
        split = (*x.shape[:-1], -1, self.shape.head_dim)
        q, k, v = (proj(x).view(split).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def merge(self, out: Tensor) -> Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.width)
        self.post_attention_layernorm = RMSNorm(shape.width)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.merge(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class Kept:
    """Units of the recall layer that tails see beside their own: k and v [C, H, N, D] before RoPE."""

    k: Tensor
    v: Tensor


class Recaller(nn.Module):
    """The whole model. Its `state_dict()` has the names of LlamaForCausalLM's without the prefix `model.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.inverse_frequencies = shape.theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)

    @property
    def head_features(self) -> int:
        """Features of a unit as its retaining head sees it: q, k and v."""
        return (self.shape.query_heads + 2 * self.shape.kv_heads) * self.shape.head_dim

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions.float()[:, None] * self.inverse_frequencies).repeat(1, 2)
        return angle.cos(), angle.sin()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """q [B, Hq, T, D], k and v [B, H, S, D], visible [T, S] -> [B, Hq, T, D].

        The heads of a group become further rows, so that no K is copied.
        """
        batch, heads, length, dim = q.shape
        groups = heads // k.shape[1]
        bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf")).repeat(groups, 1)
        out = F.scaled_dot_product_attention(q.reshape(batch, -1, groups * length, dim), k, v, attn_mask=bias)
        return out.view(batch, heads, length, dim)

    def _attend_own(self, block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = block.self_attn.qkv(block.input_layernorm(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.shape.query_heads // self.shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return block.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def snippet_features(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pre-RoPE q, k, v of the recall layer for independent snippets: ids [B, T]."""
        cos, sin = self.angles(torch.arange(ids.shape[1]))
        x = self.embed_tokens(ids)
        for block in self.layers[: self.shape.recall_layer]:
            x = self._attend_own(block, x, cos, sin)
        block = self.layers[self.shape.recall_layer]
        return block.self_attn.qkv(block.input_layernorm(x))

    def tail_states(
        self, ids: Tensor, kept: Kept | None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Final normed states [B, T, width] of tails that see `kept` behind their sinks in the recall layer.

        Tails are grouped by context: B / C of them share each of the C contexts of `kept`. With `rows` [B, R]
        (row numbers), also the attention [B, H, G * R, N] of these rows onto `kept`.
        """
        length = ids.shape[1]
        cos, sin = self.angles(torch.arange(length))
        x = self.embed_tokens(ids)
        weights = None
        for number, block in enumerate(self.layers):
            if number == self.shape.recall_layer and kept is not None:
                x, weights = self._attend_kept(block, x, kept, rows)
            else:
                x = self._attend_own(block, x, cos, sin)
        return self.norm(x), weights

    def _attend_kept(
        self, block: Block, x: Tensor, kept: Kept, rows: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Ranks: the sinks, the kept units, then the tail's other units. A context's tails share the kept units."""
        shape, length, count = self.shape, x.shape[1], kept.k.shape[2]
        tails = x.shape[0] // kept.k.shape[0]
        q, k, v = block.self_attn.qkv(block.input_layernorm(x))
        cos, sin = self.angles(torch.arange(length + count))
        ranks = torch.cat([torch.arange(SINKS), torch.arange(SINKS, length) + count])
        middle = slice(SINKS, SINKS + count)
        kept_k = rotate(kept.k.to(k.dtype), cos[middle], sin[middle]).repeat_interleave(tails, 0)
        kept_v = kept.v.to(v.dtype).repeat_interleave(tails, 0)
        q, k = rotate(q, cos[ranks], sin[ranks]), rotate(k, cos[ranks], sin[ranks])
        k = torch.cat([k, kept_k], 2)
        v = torch.cat([v, kept_v], 2)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        visible = torch.cat([causal, (torch.arange(length) >= SINKS)[:, None].expand(-1, count)], 1)
        attended = self._attend(q, k, v, visible)
        weights = None
        if rows is not None:
            with torch.no_grad():
                batch, picked = rows.shape
                groups = shape.query_heads // shape.kv_heads
                index = rows[:, None, :, None].expand(-1, shape.query_heads, -1, shape.head_dim)
                picked_q = q.gather(2, index).float().view(batch, shape.kv_heads, groups * picked, shape.head_dim)
                logits = picked_q @ k.float().transpose(2, 3) / math.sqrt(shape.head_dim)
                seen = visible[rows].repeat(1, groups, 1)[:, None]
                weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)[..., length:]
        return block.finish(x, attended), weights

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.embed_tokens.weight)


def answer_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy over rows [N], weighted."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()
