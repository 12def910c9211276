"""A causal LM that runs with a cache of ours. Knows transformers' internals; knows no policy and no store.

An `Attachment` runs a *shadow* of the user's model: a second module tree that shares every weight tensor but owns its
config, so nothing is ever changed on the user's object and stock `generate` on it stays what it was, on any thread.
In the shadow
- rotary embeddings are the identity, so attention sees Q and K before RoPE;
- the attention implementation is ours: it hands (q, k, v) to a `Step`, which stores them, rotates at the ranks it
  wants, and gives back either the attention's result or what to attend to, for the model's stock sdpa or eager kernel;
- no transformers cache and no transformers mask exist.
"""

from __future__ import annotations

import functools
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.modeling_outputs import MoeModelOutputWithPast

from locret_stream.config import ModelShape
from locret_stream.errors import UnsupportedModel
from locret_stream.heads import RetainingHeads
from locret_stream.kernels import uses_triton
from locret_stream.models.rotary import Place, RopeTables, Rotary
from locret_stream.models.weights import adapters, fingerprint, form, named_weights, quantisation, shadow, sketch

NAME = "locret"  # of our attention function; has no mask function, so transformers builds no mask for it


@dataclass(slots=True)
class LayerCall:
    """One layer's attention, before RoPE: q [B, H*G, T, D], k and v [B, H, T, D].

    `hidden` [B, T, hidden] is what the attention module was given, normed. `softcap` bounds logits where the model does
    that (Gemma2); `sinks` [H*G] are extra logits in the softmax's denominator (GPT-OSS).
    """

    layer: int
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


Attended = Tensor | tuple[Tensor, Tensor, Tensor, Tensor | None]
"""What attention gives, [B, H*G, T, D]; or what it is to run over: (q [B, H*G, T, D], k and v [B, H, S, D], mask
[T, S], or None: causal, ends aligned).

A mask is bool, True = visible, or what `additive_mask` makes of that (which is worth keeping, if it is used again).
"""

Step = Callable[[LayerCall], Attended]


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, **kwargs: object) -> tuple[Tensor, None]:
    """What transformers calls in the shadow; the arguments are q, k, v before RoPE, of the new tokens only."""
    return module.locret_attachment()._attend(module, query, key, value, scaling, kwargs)


AttentionInterface.register(NAME, _attention)


class _DecoderStub(nn.Module):
    """Stands in for the decoder while the causal LM turns given hidden states into logits, its own way."""

    hidden: Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class Attachment:
    """A model as the engine sees it. One thread at a time may call `hidden` and `logits`.

    Attributes:
        shape: sizes of the model.
        places: by layer, the device and dtypes that it works in. last_device: where hidden states come out.
        fingerprint: of the weights' content and the attention config, independent of the floating-point dtype.
        sketch: of the base model, whatever its quantisation. form: that and the active adapters in words, "" if plain.
        adapters: names of those that were active when it was made; it goes on with these.
    """

    def __init__(self, model: PreTrainedModel, attn: str):
        self._check(model)
        self.adapters, self.form, self.quantised = adapters(model), form(model), quantisation(model) != ""
        self.attn = self._base_attention(model, attn)
        self._shadow = shadow(model)
        if self.quantised and self._shadow._forward_pre_hooks:  # compressed-tensors unpacks in a model's first forward
            with torch.no_grad():
                self._shadow(torch.arange(3, device=model.device)[None], use_cache=False)
        self._shadow.set_attn_implementation(NAME)
        self._decoder = decoder = self._shadow.get_decoder()
        prefix = self._shadow.base_model_prefix
        if getattr(self._shadow, prefix, None) is not decoder:
            raise UnsupportedModel(f"{type(model).__name__}: found no decoder under {prefix!r}; expected a text-only "
                                   "causal LM (for multimodal models load the text part alone)")
        self._head = self._shadow.get_output_embeddings()
        self._stub = _DecoderStub()
        setattr(self._shadow, prefix, self._stub)
        self._rotary = Rotary(self._decoder, getattr(self._config, "layer_types", None))
        self._attentions = [layer.self_attn for layer in self._decoder.layers]
        this = weakref.ref(self)
        for module in self._attentions:
            module.locret_attachment = this
        self._step: Step | None = None
        self._graded = False  # whether what runs is to leave a graph
        self._input: Any = None  # of the attention module that is running: a tensor, None in the trials that come first
        self.places, self.last_device = self._probe_places(model)
        self.shape = self._read_shape(model)
        self._rotary.found([self._probe_rope(module) for module in self._attentions], self.places, self.shape.head_dim)
        for module in self._attentions:
            _note_inputs(module)
        self._plain_head = self._probe_head()
        self.fingerprint, self.sketch = fingerprint(model), sketch(self._decoder)
        self.users = 0

    @property
    def architecture(self) -> str:
        """The config as JSON, without what says nothing of what the model computes."""
        config = self._config.to_dict()
        for name in ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
                     "_attn_implementation", "attn_implementation"):
            config.pop(name, None)
        if isinstance(config.get("quantization_config"), dict):
            config["quantization_config"].pop("gguf_file", None)  # its name; what is in it are the weights
        return json.dumps(config, sort_keys=True, default=str)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that it computes with, by its name in the model; see `weights.named_weights`."""
        prefix = self._shadow.base_model_prefix
        yield from named_weights(self._shadow)
        for name, tensor in named_weights(self._decoder):
            yield f"{prefix}.{name}", tensor

    def put_beside(self, heads: RetainingHeads, dtype: torch.dtype | None = None) -> RetainingHeads:
        """The heads, each moved to where its layer works."""
        for layer, place in enumerate(self.places):
            for net in (heads.fc1[layer], heads.fc2[layer]):
                net.to(place.device, dtype)
        return heads

    def expect_one_device(self, what: str) -> None:
        """Raises UnsupportedModel: the layers are spread over several."""
        devices = {str(place.device) for place in self.places} | {str(self.last_device)}
        if len(devices) > 1:
            raise UnsupportedModel(f"{what} needs a model on one device; found its layers on {sorted(devices)}")

    def check_heads(self, heads: RetainingHeads) -> None:
        """Raises HeadsMismatch: they are of another model."""
        heads.check_fits(self.shape, self.fingerprint, self.sketch, self.form)

    # -- reading the model ------------------------------------------------------------------------------------

    @staticmethod
    def _check(model: object) -> None:
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModel(f"found {type(model).__name__}; expected a transformers causal LM, such as "
                                   "AutoModelForCausalLM.from_pretrained(...) gives")
        try:
            decoder = model.get_decoder()
            attentions = [layer.self_attn for layer in decoder.layers]
            ok = hasattr(decoder, "rotary_emb") and all(hasattr(a, "layer_idx") for a in attentions)
        except AttributeError:
            ok = False
        if not ok or not attentions or model.get_output_embeddings() is None:
            raise UnsupportedModel(f"{type(model).__name__}: expected a decoder-only model with rotary embeddings and "
                                   "a self_attn in every layer (as Llama, Qwen, Mistral, Phi3, Gemma, GPT-OSS have)")

    @staticmethod
    def _base_attention(model: PreTrainedModel, attn: str) -> str:
        if attn not in ("auto", "sdpa", "eager"):
            raise UnsupportedModel(f"attn is {attn!r}; expected 'auto', 'sdpa' or 'eager'")
        if attn == "auto":
            attn = model.config.get_text_config(decoder=True)._attn_implementation
            attn = attn if attn in ("sdpa", "eager") else "sdpa"
        return attn if model._supports_sdpa else "eager"

    @property
    def _config(self) -> Any:
        return self._shadow.config.get_text_config(decoder=True)

    def _read_shape(self, model: PreTrainedModel) -> ModelShape:
        config, first = self._config, self._attentions[0]
        kinds, kwargs = get_layer_types_and_kwargs(config)
        allowed = ("full_attention", "sliding_attention")
        if any(kind not in allowed for kind in kinds) or len(kinds) != len(self._attentions):
            raise UnsupportedModel(f"{type(model).__name__}: found layers of kind {sorted(set(kinds))}; expected only "
                                   f"{' and '.join(allowed)}")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        window = config.max_position_embeddings
        # Some checkpoints (Phi-3-mini-128k) name a sliding window that no position of theirs reaches: it hides nothing.
        sliding = [extra.get("sliding_window") for extra in kwargs]
        return ModelShape(
            layers=len(kinds), kv_heads=kv_heads, groups=heads // kv_heads,
            head_dim=getattr(first, "head_dim", None) or config.hidden_size // heads, vocab=config.vocab_size,
            window=window, item_bytes=self.dtype.itemsize, hidden=config.hidden_size,
            sliding=tuple(None if not reach or reach >= window else reach for reach in sliding))

    @property
    def device(self) -> torch.device:
        """That of the first layer, where ids go in."""
        return self.places[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V, which is that of activations: packed weights have others."""
        return self.places[0].keys

    @property
    def key_copies(self) -> tuple[int, ...]:
        """How often a key of each layer is held, [L]: 2, with a rotated one, or 1 where there is none or kernels rotate
        it on load."""
        return tuple(2 if uses and not self.rotates_on_load(layer) else 1
                     for layer, uses in enumerate(self._rotary.uses))

    def rotates_on_load(self, layer: int) -> bool:
        """Whether kernels rotate the layer's keys as they load them: Triton's, where RoPE is the rotation by halves."""
        return self._rotary.plain[layer] and uses_triton(torch.empty(0, device=self.places[layer].device))

    def tables(self, capacity: int) -> RopeTables:
        """For ranks 0..capacity-1; fixes the regime of dynamic and long RoPE for the session."""
        return self._rotary.tables(capacity)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers."""
        return list(self._decoder.layers)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers of the decoder, for a profile."""
        return [module for module in self._decoder.modules() if isinstance(module, nn.Linear)]

    @property
    def activation(self) -> str:
        """Name of the activation of the model's MLPs; retaining heads use the same (Locret, section 3.2)."""
        return getattr(self._config, "hidden_act", "") or getattr(self._config, "hidden_activation", "silu")

    @torch.no_grad()
    def _probe_places(self, model: PreTrainedModel) -> tuple[list[Place], torch.device]:
        """Where each layer works, and where the hidden states of the last come out. Asked of a forward: what lies in
        parameters is packed, or elsewhere, where the model is quantised or offloaded."""
        given: dict[int, torch.dtype] = {}
        found: dict[int, Place] = {}

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given[module.layer_idx] = (args[0] if args else kwargs["hidden_states"]).dtype

        def step(call: LayerCall) -> Attended:
            found[call.layer] = Place(call.k.device, given[call.layer], call.k.dtype)
            return call.q, call.k, call.v, None

        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in self._attentions]
        first = next((t.device for t in model.get_input_embeddings().parameters() if not t.is_meta), "cpu")
        try:
            out = self.hidden(torch.arange(3, device=first)[None], step)
        finally:
            for hook in hooks:
                hook.remove()
        places = [found[layer] for layer in range(len(self._attentions))]
        dtypes = {place.keys for place in places}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise UnsupportedModel(f"{type(model).__name__}: its layers give keys of {sorted(map(str, dtypes))}; "
                                   "expected one floating-point dtype: load it with dtype=... for all of them")
        return places, out.device

    @torch.no_grad()
    def _probe_rope(self, module: Any) -> bool:
        """Some layers ignore position embeddings (SmolLM3's NoPE): ask the module, with real and identity ones."""
        place = self.places[module.layer_idx]
        x = torch.linspace(-1, 1, 3 * self.shape.hidden, dtype=place.hidden, device=place.device)
        x = x.view(1, 3, self.shape.hidden)
        positions = torch.arange(3, device=place.device)[None]
        cos, sin = self._rotary.cos_sin(module.layer_idx, positions, place)
        seen: list[Tensor] = []

        def keep_query(call: LayerCall) -> Attended:
            seen.append(call.k)
            return call.q, call.k, call.v, None

        self._step = keep_query
        try:
            for pair in ((cos, sin), (torch.ones_like(cos), torch.zeros_like(sin))):
                module(hidden_states=x, position_embeddings=pair, attention_mask=None, past_key_values=None,
                       position_ids=positions)
        finally:
            self._step = self._input = None
        return not torch.equal(seen[0], seen[1])

    @torch.no_grad()
    def _probe_head(self) -> bool:
        """Whether logits are what the output embeddings give and nothing more: then the rest of the causal LM's
        forward, which takes longer than a small head, is spared."""
        x = torch.linspace(-3, 3, 2 * self.shape.hidden, dtype=self.dtype, device=self.last_device)
        x = x.view(1, 2, self.shape.hidden)
        try:
            return torch.equal(self._whole_logits(x), self._head(x))
        except RuntimeError:  # the head has a dtype or device of its own: its hidden states are not such
            return False

    # -- running ----------------------------------------------------------------------------------------------

    def hidden(self, ids: Tensor, step: Step) -> Tensor:
        """Run the decoder over ids [B, T]; `step` is called once per layer. Returns [B, T, hidden], without a graph
        unless it is called within `gradients.differentiable`."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        self._step = step
        try:
            with torch.set_grad_enabled(self._graded):
                return self._decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        finally:
            self._step = self._input = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, hidden] -> logits [B, T, vocab], through the model's own head, scaling and softcap."""
        with torch.set_grad_enabled(self._graded):
            return self._head(hidden) if self._plain_head else self._whole_logits(hidden)

    def _whole_logits(self, hidden: Tensor) -> Tensor:
        self._stub.hidden = hidden
        try:
            dummy = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            return self._shadow(input_ids=dummy, use_cache=False).logits
        finally:
            self._stub.hidden = None

    def _attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float | None,
                kwargs: dict) -> tuple[Tensor, None]:
        assert self._step is not None, "the decoder runs in `hidden` and in trials alone"
        scale = scaling if scaling is not None else q.shape[-1] ** -0.5
        call = LayerCall(module.layer_idx, self._input, q, k, v, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
        found = self._step(call)
        if isinstance(found, Tensor):
            return found.transpose(1, 2).contiguous(), None
        q, k, v, mask = found
        new, held = q.shape[2], k.shape[2]
        causal = mask is None and new == held  # the kernels' own causal mask, so that fast ones can be used
        if mask is None and new > 1 and not (causal and self.attn == "sdpa"):
            mask = torch.ones(new, held, dtype=torch.bool, device=q.device).tril(held - new)
        if mask is not None and mask.dtype == torch.bool:
            mask = additive_mask(mask, q.dtype)
        if self.attn == "sdpa":
            return _sdpa(q, k, v, mask, scale, causal), None
        eager = sys.modules[type(module).__module__].eager_attention_forward
        kwargs.pop("dropout", None)
        return eager(module, q, k, v, mask, scaling=scale, dropout=0.0, **kwargs)[0], None


def _note_inputs(module: Any) -> None:
    """Let an attention module tell its attachment what it is given: transformers' attention functions do not learn it.
    Its forward is wrapped, as hooks cost more per step."""
    forward = module.forward

    @functools.wraps(forward)
    def noting(*args: Any, **kwargs: Any) -> Any:
        module.locret_attachment()._input = args[0] if args else kwargs["hidden_states"]
        return forward(*args, **kwargs)

    module.forward = noting


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """visible [T, S] bool -> [T, S] of `dtype`: 0 where visible, else the lowest finite number; added to logits."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Attention of q [B, H*G, T, D] over k, v [B, H, S, D] -> [B, T, H*G, D]; KV heads are never repeated."""
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal,
                                         enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()
