"""What a forward takes and leaves in layers of linear attention, Mamba layers and short convolutions: a recurrent
state, in tensors of a fixed size. Knows transformers' caches; knows no slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from locret_stream.cache import StateTensor

_KINDS = ("conv", "recurrent")


class Carried(DynamicCache):
    """Stands for transformers' cache during one forward: hands layers the state that they go on from, and takes what
    they leave. K and V pass through it, as attention keeps them elsewhere.

    Args:
        config: of the decoder.
        forms: of the state's tensors. tensors: their values, [B, ...] each, which the forward may overwrite; none for
            the beginning of a stream.
        ranks: by layer of the decoder, the rank of the first new token: for layers that read distances from the cache.

    Attributes:
        goes_on: whether there is a state to go on from.
    """

    def __init__(self, config: Any, forms: Sequence[StateTensor] = (), tensors: Sequence[Tensor] = (),
                 ranks: Mapping[int, int] | None = None):
        super().__init__(config=config)
        self._forms, self.goes_on, self._ranks = forms, bool(tensors), ranks or {}
        for form, tensor in zip(forms, tensors, strict=bool(tensors)):
            layer: Any = self.layers[form.layer]
            getattr(layer, f"{form.kind}_states")[form.index] = tensor
            getattr(layer, f"is_{form.kind}_states_initialized")[form.index] = True
            if form.kind == "conv":
                layer.conv_kernel_size[form.index] = tensor.shape[-1]
            layer.has_previous_state[form.index] = True
            layer.dtype, layer.device = tensor.dtype, tensor.device

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
               ) -> tuple[Tensor, Tensor]:
        """K and V of the new tokens, as they are."""
        return key_states, value_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The state of lightning attention (MiniMax), for which transformers has a cache of another interface."""
        layer: Any = self.layers[layer_idx]
        state: Tensor | None = layer.recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Take what lightning attention left."""
        layer: Any = self.layers[layer_idx]
        layer.recurrent_states[0] = linear_cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The units of the layer before the new ones, though they are not here; 0 where no layer asks for them."""
        return self._ranks.get(layer_idx, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many units the layer has with so many new ones, and the rank of the first."""
        return self.get_seq_length(layer_idx) + query_length, 0

    @property
    def tensors(self) -> list[Tensor]:
        """The state that the forward left, [B, ...] each, in the order of the forms."""
        return self.state_of(self._forms)

    def state_of(self, forms: Sequence[StateTensor]) -> list[Tensor]:
        """The tensors of these forms, [B, ...] each, as they are now."""
        return [getattr(self.layers[form.layer], f"{form.kind}_states")[form.index] for form in forms]

    def found(self) -> tuple[StateTensor, ...]:
        """The forms of whatever state the forward left."""
        forms = []
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                continue
            for kind in _KINDS:
                states: dict[int, Tensor | None] = getattr(layer, f"{kind}_states")
                forms += [StateTensor(number, kind, index, tuple(tensor.shape[1:]), tensor.dtype, tensor.device)
                          for index, tensor in states.items() if tensor is not None]
        return tuple(forms)
