"""A causal LM that runs with this library's KV cache. Knows transformers' internals; knows no policy and no store.

An `Attachment` runs a *shadow* of the user's model: a second module tree that shares every weight tensor and has a
config of its own, so that the user's object never changes and stock `generate` on it works as before, on any thread.
In the shadow
- rotary embeddings are the identity, so that attention sees Q and K before RoPE;
- a function of this library takes the place of attention: it passes (q, k, v) to a `Step`, which stores them, applies
  RoPE at any ranks, and returns either the result or what to attend to, for the model's stock sdpa or eager kernel;
- no transformers cache and no transformers mask exist.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
from locret_stream.models.linears import pack, quicken
from locret_stream.models.norms import fuse
from locret_stream.models.rotary import Place, RopeTables, Rotary
from locret_stream.models.weights import adapters, fingerprint, form, named_weights, quantisation, shadow, sketch

NAME = "locret"  # of the attention function; no mask function has it, so that transformers builds no mask


@dataclass(slots=True)
class LayerCall:
    """One layer's attention, before RoPE: q [B, H*G, T, D], k and v [B, H, T, D].

    `hidden` [B, T, hidden] is the input of the attention module, after its norm. `softcap` bounds logits, in models
    that have one (Gemma2); `sink_logits` [H*G] are extra logits in the softmax's denominator (GPT-OSS).
    """

    layer: int
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None


Attended = Tensor | tuple[Tensor, Tensor, Tensor, Tensor | None]
"""The result of attention, [B, H*G, T, D]; or its operands: (q [B, H*G, T, D], k and v [B, H, S, D], mask [T, S]; None:
causal, where the last query sees all).

A mask is bool, True = visible, or the `additive_mask` of one, which callers can cache.
"""

Step = Callable[[LayerCall], Attended]


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, **kwargs: object) -> tuple[Tensor, None]:
    """transformers calls this in the shadow, with q, k, v before RoPE, of the new tokens only."""
    return module.locret_attachment()._attend(module, query, key, value, scaling, kwargs)


AttentionInterface.register(NAME, _attention)


class _DecoderStub(nn.Module):
    """Takes the place of the decoder while the causal LM computes logits from given hidden states."""

    hidden: Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class Attachment:
    """A model as the engine runs it. One thread at a time may call `hidden` and `logits`.

    Attributes:
        shape: sizes of the model.
        places: by layer, its device and dtypes. last_device: where hidden states come out.
        fingerprint: of the weights' content and the attention config, the same in float32 and bfloat16.
        form: quantisation and active adapters in words.
        adapters: names of the adapters that were active when the attachment was made, and stay so in it.
    """

    def __init__(self, model: PreTrainedModel, attn: str):
        self._check(model)
        self.adapters, self.form, self.quantised = adapters(model), form(model), quantisation(model) != ""
        self.attn = self._base_attention(model, attn)
        self._shadow = shadow(model)
        if self.quantised and self._shadow._forward_pre_hooks:  # the first forward of compressed-tensors unpacks
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
        self._graded = False  # whether forwards build an autograd graph
        self._input: Any = None  # the input of the attention module that is running: a tensor, or None in the probes
        self.places, self.last_device = self._probe_places(model)
        self.shape = self._read_shape(model)
        self._rotary.set_layers([self._probe_rope(module) for module in self._attentions], self.places,
                                self.shape.head_dim)
        for module in self._attentions:
            _note_inputs(module)
        for tree in (self._decoder, self._shadow):
            quicken(tree)
            fuse(tree)
        self._plain_head = self._probe_head()
        self.fingerprint, self.users = fingerprint(model), 0

    @functools.cached_property
    def sketch(self) -> str:
        """Of the base model, the same for every quantisation. It takes a moment, and seldom is it needed."""
        return sketch(self._decoder)

    @property
    def config(self) -> Any:
        """The config of the model as it runs; see `architecture` for what of it says what the model computes."""
        return self._config

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that the model computes with, by its name in the model; see `weights.named_weights`."""
        prefix = self._shadow.base_model_prefix
        yield from named_weights(self._shadow)
        for name, tensor in named_weights(self._decoder):
            yield f"{prefix}.{name}", tensor

    def put_beside(self, heads: RetainingHeads, dtype: torch.dtype | None = None) -> RetainingHeads:
        """The heads, each moved to the device of its layer, and cast to `dtype` if it is given."""
        for layer, place in enumerate(self.places):
            for net in (heads.fc1[layer], heads.fc2[layer]):
                net.to(place.device, dtype)
        return heads

    def expect_one_device(self, what: str) -> None:
        """Raises UnsupportedModel: the layers are on several devices, and `what` needs one."""
        devices = {str(place.device) for place in self.places} | {str(self.last_device)}
        if len(devices) > 1:
            raise UnsupportedModel(f"{what} needs a model on one device; found its layers on {sorted(devices)}")

    def pack_weights(self) -> int:
        """Read bf16 weights on a CPU from packed copies, as `linears.pack` says; returns the bytes that these take."""
        return pack((self._decoder, self._shadow))

    def check_heads(self, heads: RetainingHeads) -> None:
        """Raises HeadsMismatch: the heads are of another model."""
        same = heads.config.fingerprint == self.fingerprint
        heads.check_fits(self.shape, self.fingerprint, "" if same else self.sketch, self.packing)

    @property
    def packing(self) -> str:
        """`form`, or the name of a dtype that rounds a checkpoint in bfloat16; "" for a plain model."""
        return self.form or ("float16" if self.dtype == torch.float16 else "")

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
        # Some checkpoints (Phi-3-mini-128k) have a sliding window at least as long as all positions: it hides nothing.
        sliding = [extra.get("sliding_window") for extra in kwargs]
        return ModelShape(
            layers=len(kinds), kv_heads=kv_heads, groups=heads // kv_heads,
            head_dim=getattr(first, "head_dim", None) or config.hidden_size // heads, vocab=config.vocab_size,
            window=window, item_bytes=self.dtype.itemsize, hidden=config.hidden_size,
            sliding=tuple(None if not reach or reach >= window else reach for reach in sliding))

    @property
    def device(self) -> torch.device:
        """The device of the first layer, where ids go in."""
        return self.places[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of K and V, which is that of activations; packed weights have others."""
        return self.places[0].keys

    @property
    def key_copies(self) -> tuple[int, ...]:
        """How many copies of a key each layer stores, [L]: 2, before and after RoPE; 1 where the layer has no RoPE or
        kernels apply it on read."""
        return tuple(2 if uses and not self.rotates_on_load(layer) else 1
                     for layer, uses in enumerate(self._rotary.uses))

    def rotates_on_load(self, layer: int) -> bool:
        """Whether kernels apply RoPE as they read the layer's keys: in Triton, where RoPE is the rotation of halves."""
        return self._rotary.plain[layer] and uses_triton(torch.empty(0, device=self.places[layer].device))

    def tables(self, capacity: int) -> RopeTables:
        """RoPE tables for ranks 0..capacity-1; `capacity` fixes the scaling of dynamic and long RoPE for all ranks."""
        return self._rotary.tables(capacity)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers."""
        return list(self._decoder.layers)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers of the decoder, for profiles."""
        return [module for module in self._decoder.modules() if isinstance(module, nn.Linear)]

    @property
    def activation(self) -> str:
        """Name of the activation of the model's MLPs, which retaining heads use, too (Locret, section 3.2)."""
        return getattr(self._config, "hidden_act", "") or getattr(self._config, "hidden_activation", "silu")

    @torch.no_grad()
    def _probe_places(self, model: PreTrainedModel) -> tuple[list[Place], torch.device]:
        """The place of each layer, and the device where hidden states come out, as a forward shows them: the parameters
        of a quantised or offloaded model have other dtypes and devices."""
        inputs: dict[int, torch.dtype] = {}
        by_layer: dict[int, Place] = {}

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[module.layer_idx] = input_of(args, kwargs).dtype

        def step(call: LayerCall) -> Attended:
            by_layer[call.layer] = Place(call.k.device, inputs[call.layer], call.k.dtype)
            return call.q, call.k, call.v, None

        first = next((t.device for t in model.get_input_embeddings().parameters() if not t.is_meta), "cpu")
        with ExitStack() as hooks:
            for module in self._attentions:
                hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
            out = self.hidden(torch.arange(3, device=first)[None], step)
        places = [by_layer[layer] for layer in range(len(self._attentions))]
        dtypes = {place.keys for place in places}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise UnsupportedModel(f"{type(model).__name__}: its layers give keys of {sorted(map(str, dtypes))}; "
                                   "expected one floating-point dtype: load it with dtype=... for all of them")
        return places, out.device

    @torch.no_grad()
    def _probe_rope(self, module: Any) -> bool:
        """Whether a layer uses position embeddings (SmolLM3 has NoPE layers): runs it with real and identity ones."""
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
        """Whether logits are the result of the output embeddings alone, so that the rest of the causal LM's forward,
        which takes longer than a small head, can be skipped."""
        x = torch.linspace(-3, 3, 2 * self.shape.hidden, dtype=self.dtype, device=self.last_device)
        x = x.view(1, 2, self.shape.hidden)
        try:
            return torch.equal(self._whole_logits(x), self._head(x))
        except RuntimeError:  # the head has another dtype or device than hidden states
            return False

    # -- running ----------------------------------------------------------------------------------------------

    def hidden(self, ids: Tensor, step: Step) -> Tensor:
        """Run the decoder over ids [B, T]; `step` is called once per layer. Returns [B, T, hidden], with an autograd
        graph only inside `gradients.differentiable`."""
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
        assert self._step is not None, "only `hidden` and probes run the decoder"
        scale = scaling if scaling is not None else q.shape[-1] ** -0.5
        call = LayerCall(module.layer_idx, self._input, q, k, v, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
        attended = self._step(call)
        if isinstance(attended, Tensor):
            return attended.transpose(1, 2).contiguous(), None
        q, k, v, mask = attended
        new, total = q.shape[2], k.shape[2]
        causal = mask is None and new == total  # sdpa's own causal mask allows fast kernels
        if mask is None and new > 1 and not (causal and self.attn == "sdpa"):
            mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        if mask is not None and mask.dtype == torch.bool:
            mask = additive_mask(mask, q.dtype)
        if self.attn == "sdpa":
            return _sdpa(q, k, v, mask, scale, causal), None
        eager = sys.modules[type(module).__module__].eager_attention_forward
        kwargs.pop("dropout", None)
        return eager(module, q, k, v, mask, scaling=scale, dropout=0.0, **kwargs)[0], None


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer or an attention module of transformers."""
    return args[0] if args else kwargs["hidden_states"]


def _note_inputs(module: Any) -> None:
    """Make an attention module pass its input to its attachment, as transformers gives it to no attention function. The
    module's forward is wrapped, because hooks cost more time per step."""
    own, plain, this = vars(module).get("forward"), type(module).forward, weakref.ref(module)

    def noting(*args: Any, **kwargs: Any) -> Any:
        module: Any = this()  # this function would keep it alive, and its weights, until a search for garbage
        module.locret_attachment()._input = input_of(args, kwargs)
        return plain(module, *args, **kwargs) if own is None else own(*args, **kwargs)

    module.forward = noting


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """visible [T, S] bool -> [T, S] of `dtype` to add to logits: 0 where visible, else the lowest finite number."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Attention of q [B, H*G, T, D] over k, v [B, H, S, D] -> [B, T, H*G, D]; KV heads are never repeated."""
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal,
                                         enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()
