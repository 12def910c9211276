"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1.2) in its absorbed form.

Such a layer makes keys and values of all its heads from one *latent* of each token, beside a part of the key that RoPE
turns and all heads share. Absorbed into queries and outputs, the projection that would expand the latent is applied to
the new tokens alone: attention reads latents as they are, [latent; turned part], as K of one head and, in its first
numbers, as V. So a unit is one latent, and not a key and a value of every head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Latent:
    """The projection of one attention module whose latents are units.

    Attributes:
        width: numbers of a latent, without the part that RoPE turns.
    """

    def __init__(self, module: Any):
        self._of_keys, project = module.qk_nope_head_dim, module.kv_b_proj
        if type(project) is nn.Linear and project.bias is None:
            weight = project.weight
        else:  # packed, or with an adapter: what it makes of each number of a latent
            like = next(t for t in project.parameters() if t.is_floating_point())
            weight = project(torch.eye(module.kv_a_layernorm.weight.shape[0], dtype=like.dtype, device=like.device)).T
        # Detached, so that a graph of gradients never leads to the model's weights (`gradients.differentiable`);
        # [heads, key and value, latent].
        self._weight = weight.detach().unflatten(0, (-1, self._of_keys + module.v_head_dim))
        self.width = self._weight.shape[-1]

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [B, heads, T, key and turned part] -> those that attend to latents, [B, heads, T, latent and turned
        part]."""
        plain, turned = q[..., :self._of_keys], q[..., self._of_keys:]
        return torch.cat([torch.einsum("bhtk,hkl->bhtl", plain, self._weight[:, :self._of_keys]), turned], dim=-1)

    def expand(self, out: Tensor) -> Tensor:
        """Attended latents [B, heads, T, at least latent] -> values of the heads [B, T, heads, value]."""
        return torch.einsum("bhtl,hvl->bthv", out[..., :self.width], self._weight[:, self._of_keys:]).contiguous()


def latent_of(module: nn.Module) -> Latent | None:
    """The latents of an attention module, None if it has none."""
    found: Latent | None = vars(module).get("locret_latent")
    return found


def keep_latents(decoder: nn.Module) -> None:
    """Make every module of latent attention hand its latents to attention, in place of expanded keys and values."""
    for each in decoder.modules():
        module: Any = each
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            module.locret_latent = Latent(module)
            module.expand_kv = _as_they_are


def _as_they_are(latents: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [B, 1, T, latent] and turned parts [B, 1, T, ...] as K, and as V."""
    units = torch.cat([latents, turned], dim=-1)
    return units, units
