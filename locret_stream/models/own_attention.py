"""Attention that a module computes by itself, by operations of torch, where transformers has no function to replace
(GPT-J, Falcon, BLOOM). Knows transformers' caches and torch's operations; knows no names of classes.

Such a module shows its keys and values to a cache before it attends. The cache that it gets here returns them as
`Shown`, which notices what is made of them: their product with queries is not computed, but noted as `Logits`, with all
that the module multiplies it by and adds to it; and where these would weigh the values, the attention of this library
answers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache

from locret_stream.errors import UnsupportedModel
from locret_stream.models.alibi import bias_of, is_alibi, numbers_of, slopes_in, widen

NAME = "locret-own"  # where a config names its attention function, of which such modules have none
Answer = Callable[..., tuple[Tensor, None]]
"""An attention function as transformers calls it: module, q, k, v, mask, scale -> [B, T, heads, D]."""
VIEWS = ("transpose", "permute", "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "to",
         "float", "type_as", "size", "dim", "shape", "dtype", "device", "ndim")
"""What changes no number of keys and values; in another dtype they are the same."""
KEPT = ("view", "reshape", "to", "float", "type_as", "contiguous", "masked_fill")
"""What changes no logit: all masks that a module gets hide nothing."""


def _hides_nothing(*args: object, dtype: torch.dtype, device: torch.device, **kwargs: object) -> Tensor:
    """A mask to add, as some decoders do not run without one. Who sees what is decided elsewhere."""
    return torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)


AttentionMaskInterface.register(NAME, _hides_nothing)


def take_over(decoder: PreTrainedModel, attn: str, answer: Answer) -> Showing | None:
    """What the decoder of a shadow must get as its cache, if its attention modules compute by themselves; else None.

    Args:
        attn: the implementation that was asked for; the modules go on with their own. answer: the attention function.

    Raises:
        UnsupportedModel: it is "eager": they have no function of their own that gets keys of earlier tokens.
    """
    if decoder._can_set_attn_implementation():
        return None
    if attn == "eager":
        raise UnsupportedModel(f"{type(decoder).__name__}: attn is 'eager', and its modules compute attention by "
                               "themselves; expected 'auto' or 'sdpa'")
    config: Any = decoder.config
    of_modules = copy.copy(config)
    config._attn_implementation_internal = NAME
    for module in decoder.modules():
        if not isinstance(module, PreTrainedModel) and getattr(module, "config", None) is config:
            module.config = of_modules
    return Showing(answer)


@dataclass(slots=True)
class _Attending:
    """A module that shows its keys, and what probes have found of it.

    Attributes:
        copies: how many heads in a row have the same keys and values. numbers: of its queries for ALiBi, [heads, 3];
            None: it has none.
    """

    module: Any
    copies: int
    numbers: Tensor | None = None
    asked: bool = False

    def learn(self, bias: Tensor, scale: float, like: Tensor) -> bool:
        """Take the slopes of a bias, the first time; whether it is ALiBi of these slopes, or none."""
        if not self.asked:
            slopes = self.module.locret_slopes = slopes_in(bias)
            self.numbers = None if slopes is None else numbers_of(slopes, scale, like)
            self.asked = True
        return is_alibi(bias, self.module.locret_slopes, like.dtype)


class _Enough(Exception):
    """Ends a forward of which the beginning is all that is asked."""


class Showing(DynamicCache):
    """Stands for transformers' cache in all forwards of a decoder, and keeps nothing."""

    def __init__(self, answer: Answer):
        super().__init__()
        self._answer = answer
        self._attending: dict[int, _Attending] = {}  # by the number of a layer in transformers' cache
        self._running: list[Any] = []  # the modules, outermost first, while a probe runs
        self._far = False  # whether that probe ends with the first that attends

    @contextmanager
    def watching(self, decoder: nn.Module) -> Iterator[None]:
        """Inside, for probes, it learns which modules show it their keys, and what they make of these."""
        def leave(*_: object) -> None:
            self._running.pop()

        with ExitStack() as hooks:
            for module in decoder.modules():
                hooks.enter_context(module.register_forward_pre_hook(lambda module, _: self._running.append(module)))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            yield

    def look_far(self, ask: Callable[[Tensor], object], ids: Tensor) -> None:
        """Ask for attention to so many keys that a bias shows whether it is ALiBi for all. Raises UnsupportedModel."""
        self._far = True
        try:
            ask(ids)
        except _Enough:
            pass
        finally:
            self._far = False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
               ) -> tuple[Any, Any]:
        """K and V of the new tokens, as they are, and noticed."""
        if layer_idx not in self._attending:
            self._attending[layer_idx] = _Attending(self._running[-1], _copies(key_states, value_states))
        by = self._attending[layer_idx]
        call = _Call(by, key_states[:, ::by.copies], value_states[:, ::by.copies], self)
        return Shown(key_states, call), Shown(value_states, call)

    def attend(self, by: _Attending, q: Tensor, k: Tensor, v: Tensor, scale: float,
               added: tuple[tuple[Tensor, float], ...]) -> Tensor | None:
        """What a module asks for: q [B, H*G, T, D], k and v [B, H, T, D] -> [B, T, H*G, D]. None: by a bias that is not
        served."""
        if self._running and not by.learn(bias_of(added, q.shape[1], k.shape[2]), scale, k):
            return None
        if self._far:
            raise _Enough
        if by.numbers is not None:
            q, k = widen(q, k, by.numbers)
        return self._answer(by.module, q, k, v, None, scale)[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: what came before is not here."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as above."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As many keys as queries, from the first on."""
        return query_length, 0


def _copies(k: Tensor, v: Tensor) -> int:
    """How many heads in a row have the same keys and values: some modules repeat these before they show them."""
    counts = [count for count in range(1, k.shape[1] + 1) if k.shape[1] % count == 0]
    return max(count for count in counts if all(
        torch.equal(x, x[:, ::count].repeat_interleave(count, dim=1)) for x in (k, v)))


@dataclass(slots=True, frozen=True)
class _Call:
    """What a module showed, and to whom: k and v [B, H, T, D], each head once."""

    by: _Attending
    k: Tensor
    v: Tensor
    showing: Showing

    def attend(self, q: Tensor, scale: float, added: tuple[tuple[Tensor, float], ...]) -> Tensor:
        """q [B, H*G, T, D], or with the first two as one, as baddbmm takes it -> [B, H*G, T, D]."""
        q = q.reshape(len(self.k), -1, *q.shape[-2:]).to(self.k.dtype)
        out = self.showing.attend(self.by, q, self.k, self.v, scale, added)
        if out is None:
            raise self.refuse(f"a bias that in {self.k.dtype} is not linear, as ALiBi is (in bfloat16 it may be, if "
                              "the model rounds it to that)")
        return out.transpose(1, 2)

    def refuse(self, what: str) -> UnsupportedModel:
        """The error to raise where a module does what is not known to be attention."""
        return UnsupportedModel(f"{type(self.by.module).__name__} computes its attention by itself, with {what}, which "
                                "is not served; expected products, scaling, ALiBi, a softmax, and what changes no "
                                "number")


class Shown:
    """Keys or values that a module showed, in any view that it takes of them."""

    def __init__(self, tensor: Tensor, call: _Call):
        self.tensor, self.call = tensor, call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in VIEWS:
            raise self.call.refuse(name)
        found = getattr(self.tensor, name)
        return self._viewed(found) if callable(found) else found

    def _viewed(self, view: Callable[..., Any]) -> Callable[..., Any]:
        def viewed(*args: Any, **kwargs: Any) -> Any:
            made = view(*args, **kwargs)
            return Shown(made, self.call) if isinstance(made, Tensor) else made

        return viewed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _answer(func.__name__, args, kwargs or {})


@dataclass(slots=True, frozen=True)
class Logits:
    """The products of queries and keys as a module goes on with them, of which none is computed.

    Attributes:
        added: tensors that it added, each with what it multiplied them by. normalised: whether they are weights by now.
    """

    call: _Call
    q: Tensor
    scale: float = 1.0
    added: tuple[tuple[Tensor, float], ...] = ()
    normalised: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """As if they were computed."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self.q.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in KEPT:
            raise self.call.refuse(name)
        return lambda *args, **kwargs: self

    def __add__(self, other: Tensor) -> Logits:
        if not isinstance(other, Tensor) or self.normalised:
            raise self.call.refuse("add")
        return replace(self, added=(*self.added, (other, 1.0)))

    __radd__ = __add__

    def __mul__(self, factor: float) -> Logits:
        if not isinstance(factor, int | float) or self.normalised:
            raise self.call.refuse("mul")
        return replace(self, scale=self.scale * factor, added=tuple((x, each * factor) for x, each in self.added))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Logits:
        return self * (1 / divisor)

    def __matmul__(self, values: Shown) -> Tensor:
        if not self.normalised or not isinstance(values, Shown):
            raise self.call.refuse("matmul")
        out = self.call.attend(self.q, self.scale, self.added)
        return out if values.tensor.dim() == 4 else out.flatten(0, 1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _answer(func.__name__, args, kwargs or {})


def _answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch that got keys, values or logits among its arguments."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](*args, **kwargs)
    raise _among(*args, *kwargs.values()).refuse(name)


def _among(*arguments: object) -> _Call:
    return next(each.call for each in arguments if isinstance(each, Shown | Logits))


def _product(left: Any, right: Any) -> Logits | Tensor:
    if isinstance(left, Tensor) and isinstance(right, Shown):
        return Logits(right.call, left)
    if not isinstance(left, Logits):
        raise _among(left, right).refuse("matmul")
    return left @ right


def _added_product(added: Tensor, batch1: Tensor, batch2: Shown, *, beta: float = 1, alpha: float = 1) -> Logits:
    return Logits(batch2.call, batch1, alpha, ((added, beta),))


def _whole(query: Tensor, key: Shown, value: Shown, attn_mask: Tensor | None = None, dropout_p: float = 0,
           is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    return key.call.attend(query, query.shape[-1] ** -0.5 if scale is None else scale,
                           () if attn_mask is None else ((attn_mask, 1.0),))


def _sum(one: Any, other: Any) -> Logits:
    """Of logits and a tensor, in any order."""
    logits, more = (one, other) if isinstance(one, Logits) else (other, one)
    if not isinstance(logits, Logits):
        raise _among(one, other).refuse("add")
    return logits + more


def _softmax(logits: Logits, *args: object, **kwargs: object) -> Logits:
    return replace(logits, normalised=True)


def _dropout(weights: Logits, p: float = 0.5, training: bool = True, inplace: bool = False) -> Logits:
    if training and p:
        raise weights.call.refuse("dropout")
    return weights


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": _product, "__matmul__": _product, "bmm": _product, "baddbmm": _added_product,
    "scaled_dot_product_attention": _whole, "softmax": _softmax, "dropout": _dropout,
    "add": _sum}
"""By name, what functions of torch do here."""
