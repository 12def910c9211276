"""What some models multiply their queries by behind RoPE. It is taken from the modules of a shadow, and `RopeTables`
does it, at the rank that a query has. Knows modules of transformers; knows no store.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locret_stream.errors import UnsupportedModel
from locret_stream.models.norms import fuse


@dataclass(slots=True, frozen=True)
class QueryFactors:
    """Of one layer.

    Attributes:
        heads: query heads of all KV heads. of_ranks: from a capacity to the factors of ranks 0..capacity-1,
            [capacity, D or 1] fp32.
    """

    heads: int
    of_ranks: Callable[[int], Tensor]


class At:
    """Stands for transformers' cache in a probe, where it says how many tokens came before. K and V pass through it."""

    def __init__(self, position: int):
        self.position = position

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens came before."""
        return self.position

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """K and V of the new tokens, as they are."""
        return key, value


def take_temperature(module: Any, heads: int, queries_at: Callable[[int], Tensor]) -> QueryFactors | None:
    """Take from an attention module the temperature by position of layers without RoPE (Llama 4, after
    arXiv:2501.19399), as it asks a cache for the position; None where it has none.

    Args:
        queries_at: the module's own queries [1, heads, 1, D] of one token that stands at that position.

    Raises:
        UnsupportedModel: its queries do not grow so.
    """
    if not getattr(module, "attn_temperature_tuning", None) or getattr(module, "use_rope", True):
        return None
    floor, scale = float(module.floor_scale), float(module.attn_scale)

    def of_ranks(capacity: int) -> Tensor:
        steps = torch.floor((torch.arange(capacity, dtype=torch.float32) + 1) / floor)
        return (torch.log1p(steps) * scale + 1)[:, None]

    last = int(3 * floor)
    table, first = of_ranks(last + 1), queries_at(0)
    for position in (int(floor) - 1, last):
        expected = first.float() * table[position].item() / table[0].item()
        if not torch.allclose(queries_at(position).float(), expected, rtol=2e-2 if first.dtype.itemsize < 4 else 1e-4):
            raise UnsupportedModel(f"{type(module).__name__}: its queries at position {position} are not those at 0, "
                                   "times a temperature as Llama 4 has it")
    module.attn_temperature_tuning = False
    return QueryFactors(heads, of_ranks)


class NormsBehind:
    """The norms of queries and of keys behind the rotation, where they have weights (Hunyuan v1).

    Without weights a norm does the same before the rotation, which changes no length; and of the weights of both, w and
    w', logits have the product: they are the sum over d of w_d w'_d R(q)_d R(k)_d. So the norms go without weights, and
    queries are multiplied by that product behind their rotation.

    Args:
        modules: those that attend, and normalise keys behind the rotation.
    """

    def __init__(self, modules: list[Any]):
        self._modules = modules
        self._outputs: dict[int, list[tuple[nn.Module, Tensor]]] = {id(module): [] for module in modules}

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Inside, for a probe, what their norms give is noted."""
        with ExitStack() as hooks:
            for module in self._modules:
                outputs = self._outputs[id(module)]
                for norm in module.modules():
                    weight = norm._parameters.get("weight")
                    if weight is not None and weight.dim() == 1 and len(norm._parameters) == 1:
                        hooks.enter_context(norm.register_forward_hook(
                            lambda norm, _, out, outputs=outputs: outputs.append((norm, out))))
            yield

    def take(self, module: Any, q: Tensor, k: Tensor) -> QueryFactors | None:
        """Let the norms of a module, which gave that to attention, go without weights; None where they have none.

        Raises:
            UnsupportedModel: a norm does something else with its weights.
        """
        outputs = self._outputs[id(module)]
        found = [norm for x in (q, k) for norm, out in outputs if _same(out, x)]
        if not found:
            return None
        product = torch.stack([_without_weights(norm) for norm in found]).prod(0)
        return QueryFactors(q.shape[1], lambda capacity: product.expand(capacity, -1))


def _same(out: Tensor, x: Tensor) -> bool:
    """Whether x [B, heads, T, D] is that, or has its heads behind tokens there."""
    return any(each.shape == x.shape and torch.equal(each, x) for each in (out, out.transpose(1, -2)))


def _without_weights(norm: Any) -> Tensor:
    """Let a norm go without its weights, which stay in its place; returns these, [D] fp32."""
    weight = norm._parameters["weight"]
    plain = copy.copy(norm)
    plain._parameters = {"weight": torch.ones_like(weight)}
    x = torch.linspace(-3, 3, 2 * len(weight), dtype=weight.dtype, device=weight.device).view(2, -1)
    close = 1e-5 if weight.dtype.itemsize >= 4 else 2e-2
    if not torch.allclose(norm(x), weight * plain(x), rtol=close, atol=close):
        raise UnsupportedModel(f"{type(norm).__name__}: a norm behind RoPE does not multiply by its weights")
    fuse(plain)
    norm.forward = plain.forward
    return weight.detach().float()
