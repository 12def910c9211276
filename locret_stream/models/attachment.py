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

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from locret_stream.errors import UnsupportedModel
from locret_stream.heads import RetainingHeads
from locret_stream.kernels import uses_triton
from locret_stream.models.alibi import FAR, is_ranked
from locret_stream.models.asked import keep_biases
from locret_stream.models.calls import LayerCall, Step, additive_mask, masked_attention
from locret_stream.models.decoders import decoder_of, head_of, layers_of, path_to_replace, probe_ids
from locret_stream.models.indexed import asked_of, note_indexes
from locret_stream.models.latent import keep_latents, latent_of
from locret_stream.models.linears import pack, quicken
from locret_stream.models.mixers import go_on_from_states
from locret_stream.models.module_states import carry_module_states
from locret_stream.models.norms import fuse
from locret_stream.models.own_attention import take_over
from locret_stream.models.probing import Probed, most_positions, probe, shape_of
from locret_stream.models.queries import At, NormsBehind, QueryFactors, take_temperature
from locret_stream.models.recurrent import Carried
from locret_stream.models.refusals import learned_positions, why_not
from locret_stream.models.rotary import Place, RopeTables, Rotary
from locret_stream.models.weights import adapters, fingerprint, form, named_weights, quantisation, shadow, sketch

NAME = "locret"  # of the attention function; no mask function has it, so that transformers builds no mask


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, **kwargs: object) -> tuple[Tensor, None]:
    """transformers calls this in the shadow, with q, k, v before RoPE, of the new tokens only."""
    return module.locret_attachment()._attend(module, query, key, value, scaling, kwargs)


AttentionInterface.register(NAME, _attention)


class _Output(MoeModelOutputWithPast):
    """What a base model returns: wrappers read more from it than its hidden states, such as features of images."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _BaseStub(nn.Module):
    """Takes the place of the base model while the causal LM computes logits from given hidden states."""

    hidden: Tensor | None = None

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = [base]  # a list makes it no submodule

    def __getattr__(self, name: str) -> Any:
        """Some causal LMs read a multiplier of their base model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["base"][0], name)
            if isinstance(found, nn.Module):
                raise
            return found

    def forward(self, *args: object, **kwargs: object) -> MoeModelOutputWithPast:
        return _Output(last_hidden_state=self.hidden)


class Attachment:
    """A model as the engine runs it. One thread at a time may call `hidden` and `logits`.

    Attributes:
        shape: sizes of the model.
        places: by layer, its device and dtype. shares: whether layers read the units of others. states: the tensors of
            its recurrent state, in layers that have one. stepwise: whether some of these, in the stock model, go on
            from it one token at a time only.
        last_device: where hidden states come out.
        fingerprint: of the weights' content and the attention config, the same in float32 and bfloat16.
        form: quantisation and active adapters in words.
        adapters: names of the adapters that were active when the attachment was made, and stay so in it.
        packed_bytes: of copies of weights, see `pack_weights`.
        tried: whether an engine's own path was tried with it (`engine.try_out`).
    """

    def __init__(self, model: PreTrainedModel, attn: str):
        self._check(model)
        self.adapters, self.form, self.quantised = adapters(model), form(model), quantisation(model) != ""
        self.attn = self._base_attention(model, attn)
        self._shadow = shadow(model)
        if self.quantised and self._shadow._forward_pre_hooks:  # the first forward of compressed-tensors unpacks
            with torch.no_grad():
                self._shadow(torch.arange(3, device=model.device)[None], use_cache=False)
        self._decoder = decoder = decoder_of(self._shadow)
        self._showing = take_over(decoder, attn, _attention)
        if self._showing is None:
            self._shadow.set_attn_implementation(NAME)
        else:
            self.attn = "sdpa"
        self._head: Any = head_of(self._shadow)
        self._path = self._take_base_out(model)
        self._rotary = Rotary(decoder)
        keep_latents(decoder)
        carry_module_states(decoder)
        self._indexes = note_indexes(decoder)
        most = keep_biases(decoder)
        self._ids = probe_ids(model)
        self._step: Step | None = None
        self._asked: list[tuple[Any, LayerCall]] | None = None  # what is noted, while a probe runs
        self._graded = False  # whether forwards build an autograd graph
        self._in_turns: list[Any] = []  # attention modules that are several layers, one after another
        self._input: Any = None  # the input of the attention module that is running: a tensor, or None in the probes
        this = weakref.ref(self)
        for module in decoder.modules():  # a probe shows which of them attend
            module.locret_attachment = this
        with contextlib.nullcontext() if self._showing is None else self._showing.watching(decoder):
            layers, self.states, stepwise, self.last_device = probe(model, decoder, self._config, self._rotary,
                                                                    self._ask)
            if self._showing is not None and any(is_ranked(layer.module) for layer in layers):
                far = min(most_positions(self._config), FAR)
                self._showing.look_far(self._ask, torch.zeros(1, far, dtype=torch.long, device=model.device))
        for module in stepwise:
            go_on_from_states(module)
        self.stepwise = bool(stepwise)
        self.shares = any(layer.reads is not None for layer in layers)
        keeping = [layer for layer in layers if layer.reads is None]
        turns: dict[Any, list[tuple[int, bool]]] = {}
        for layer in layers:
            kept = layer if layer.reads is None else layers[layer.reads]
            turns.setdefault(layer.module, []).append((keeping.index(kept), kept is layer))
        layers = keeping
        self._attentions = [layer.module for layer in layers]
        self._numbers = [layer.number for layer in layers]
        self.places = [Place(layer.call.k.device, layer.call.k.dtype) for layer in layers]
        self.shape = shape_of(model, self._config, layers, most, sum(each.bytes for each in self.states))
        if all(unit.sliding for unit in self.shape.units) and self._scales_by_position():
            raise UnsupportedModel(
                f"{type(model).__name__}: it scales its queries by position, and each of its layers forgets what is "
                "behind its window, so that no layer's ranks tell a position; expected a layer without a window")
        self._rotary.set_layers(self._attentions, [layer.source for layer in layers], self.places,
                                [unit.key_dim for unit in self.shape.units],
                                [layer.lead for layer in layers],
                                [None if (asked := layer.call.asked) is None else asked.index for layer in layers],
                                self._query_factors(layers))
        for number, layer in enumerate(layers):
            if layer.normed and not self._rotary.keeps_lengths(number):
                raise UnsupportedModel(f"{type(model).__name__}: its RoPE makes keys longer, and a norm behind RoPE "
                                       "takes that back, which is not served")
        for module, each in turns.items():
            module.locret_layer, module.locret_keeps = each[0]
            _note_inputs(module, each)
        self._in_turns = [module for module, each in turns.items() if len(each) > 1]
        for tree in (self._decoder, self._shadow):
            quicken(tree)
            fuse(tree)
        self._plain_head = self._probe_head()
        self.fingerprint, self.users, self.packed_bytes, self.tried = fingerprint(model), 0, 0, False

    @functools.cached_property
    def sketch(self) -> str:
        """Of the base model, the same for every quantisation. It takes a moment, and seldom is it needed."""
        return sketch(self._decoder)

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return type(self._shadow).__name__

    @property
    def config(self) -> Any:
        """The config of the model as it runs; see `architecture` for what of it says what the model computes."""
        return self._config

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that the model computes with, by its name in the model; see `weights.named_weights`."""
        yield from named_weights(self._shadow)
        for name, tensor in named_weights(self._decoder):
            yield f"{self._path}.{name}", tensor

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

    def pack_weights(self) -> None:
        """Read bf16 weights on a CPU from packed copies, as `linears.pack` says."""
        self.packed_bytes = pack((self._decoder, self._shadow))

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
        decoder = decoder_of(model)
        if not layers_of(decoder) or head_of(model) is None or learned_positions(decoder):
            raise UnsupportedModel(f"{type(model).__name__}: {why_not(model)}")

    def _take_base_out(self, model: PreTrainedModel) -> str:
        """Put a stub in the place of the base model, which is the decoder or, in a multimodal wrapper, has it; returns
        the decoder's name in the whole model. Raises UnsupportedModel."""
        path = path_to_replace(self._shadow, self._decoder)
        if path is None:
            raise UnsupportedModel(f"{type(model).__name__}: found no decoder in it; expected a causal LM, or a "
                                   "multimodal model around one")
        decoder = next(name for name, module in self._shadow.named_modules() if module is self._decoder)
        parent, _, name = path.rpartition(".")
        self._stub = _BaseStub(self._shadow.get_submodule(path))
        setattr(self._shadow.get_submodule(parent), name, self._stub)
        self._embeds = bool(parent)  # a wrapper embeds ids before it runs what the stub is in
        return decoder

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

    def tables(self, capacity: int, first: int = 0) -> RopeTables:
        """RoPE tables for ranks first..capacity-1, whose rank 0 is `first`; `capacity` fixes the scaling of dynamic and
        long RoPE for all ranks."""
        return self._rotary.tables(capacity, first)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers."""
        return layers_of(self._decoder)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers of the decoder, for profiles."""
        return [module for module in self._decoder.modules() if isinstance(module, nn.Linear)]

    @property
    def activation(self) -> str:
        """Name of the activation of the model's MLPs, which retaining heads use, too (Locret, section 3.2)."""
        return getattr(self._config, "hidden_act", "") or getattr(self._config, "hidden_activation", "silu")

    def _ask(self, ids: Tensor, carried: Carried | None = None, start: int = 0
             ) -> tuple[Tensor, list[tuple[Any, LayerCall]]]:
        """Hidden states of a forward in which attention gives zeros, and who asked it for what."""
        asked = self._asked = []
        try:
            return self.hidden(ids, None, carried, start), asked
        finally:
            self._asked = None

    @torch.no_grad()
    def _query_factors(self, layers: list[Probed]) -> dict[int, QueryFactors]:
        """By layer, what its queries are multiplied by behind RoPE."""
        made = {number: take_temperature(layer.module, layer.call.q.shape[1],
                                         functools.partial(self._queries_at, number))
                for number, layer in enumerate(layers)}
        if any(layer.normed for layer in layers):
            norms = NormsBehind([layer.module for layer in layers if layer.normed])
            with norms.seen():
                _, asked = self._ask(self._ids)
            calls = {id(module): (call.q, call.k) for module, call in asked}
            made |= {number: norms.take(layer.module, *calls[id(layer.module)])
                     for number, layer in enumerate(layers) if layer.normed}
        return {layer: factors for layer, factors in made.items() if factors is not None}

    @torch.no_grad()
    def _queries_at(self, layer: int, position: int) -> Tensor:
        """The queries [1, H*G, 1, D] that a layer without RoPE gives to attention for one token at that position."""
        place, asked = self.places[layer], list[tuple[Any, LayerCall]]()
        x = torch.linspace(-1, 1, self.shape.hidden, dtype=place.keys, device=place.device).view(1, 1, -1)
        self._asked = asked
        try:
            self._attentions[layer](hidden_states=x, position_embeddings=None, attention_mask=None,
                                    past_key_values=At(position))
        finally:
            self._asked = None
        return asked[0][1].q

    @torch.no_grad()
    def _scales_by_position(self) -> bool:
        """Whether queries before RoPE depend on the position: those at the model's last ones, and at its first, but for
        the very first, where recurrent layers may begin anew (RecurrentGemma)."""
        ids = self._ids
        at_each = [self._ask(ids, self.carry(), start)[1] for start in (1, self.shape.window - ids.shape[1])]
        return any(not torch.equal(early.q, late.q) for (_, early), (_, late) in zip(*at_each, strict=True))

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

    def hidden(self, ids: Tensor, step: Step | None, carried: Carried | None = None, start: int | Tensor = 0) -> Tensor:
        """Run the decoder over ids [B, T]; `step` is called once per layer that attends (None: in a probe). Returns
        [B, T, hidden], with an autograd graph only inside `gradients.differentiable`.

        Args:
            carried: where a recurrent state comes from and goes to, see `carry`; None: it begins here, and is dropped.
            start: the position of the first id, one for all rows or [B, 1]. RoPE is applied elsewhere, at each layer's
                own ranks; but some models scale queries by position, too (Ministral 3, Llama 4).
        """
        positions = torch.arange(ids.shape[1], device=ids.device)[None] + start
        self._step = step
        for module in self._in_turns:
            module.locret_turn = 0
        try:
            with torch.set_grad_enabled(self._graded):
                cache = self._showing if carried is None else carried
                more = {} if cache is None else {"past_key_values": cache}
                return self._decoder(input_ids=ids, position_ids=positions, use_cache=False, **more).last_hidden_state
        finally:
            self._step = self._input = None
            if not self._graded:  # the backward pass runs layers again, with what their indexes were asked
                self.forget_asked()

    def forget_asked(self) -> None:
        """Hold nothing of a forward that is over."""
        for index in self._indexes:
            index.asked = None

    def carry(self, tensors: Sequence[Tensor] = (), ranks: Sequence[int] = ()) -> Carried | None:
        """What `hidden` takes to go on from a recurrent state: its tensors, [B, ...] each, in the order of `states`,
        which the forward may overwrite; none at the beginning of a stream. None for a model that needs none of this.

        Args:
            ranks: of the first new token in each layer, [L]; read by a model that is `biased` alone.
        """
        if not self.states and not self.shape.biased:
            return None
        return Carried(self._config, self.states, tensors, dict(zip(self._numbers, ranks, strict=bool(ranks)))
                       if self.shape.biased else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, hidden] -> logits [B, T, vocab], through the model's own head, scaling and softcap."""
        with torch.set_grad_enabled(self._graded):
            return self._head(hidden) if self._plain_head else self._whole_logits(hidden)

    def _whole_logits(self, hidden: Tensor) -> Tensor:
        self._stub.hidden = hidden
        try:
            dummy = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            given = {"inputs_embeds": hidden} if self._embeds else {"input_ids": dummy}
            return self._shadow(**given, use_cache=False).logits
        finally:
            self._stub.hidden = None

    def _attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float | None,
                kwargs: dict) -> tuple[Tensor, None]:
        scale = scaling if scaling is not None else q.shape[-1] ** -0.5
        if (latent := latent_of(module)) is not None:
            q = latent.absorb(q)
        asked = asked_of(module) if self._indexes else None
        if self._asked is not None:
            self._asked.append((module, LayerCall(len(self._asked), self._input, q, k, v, scale, asked=asked,
                                                  bias=kwargs.get("position_bias"))))
            out = q.new_zeros(len(q), q.shape[2], q.shape[1], v.shape[-1])
            return out if latent is None else latent.expand(out.transpose(1, 2)), None
        assert self._step is not None, "only `hidden` and probes run the decoder"
        call = LayerCall(module.locret_layer, self._input, q, k, v, scale, kwargs.get("softcap"), kwargs.get("s_aux"),
                         module.locret_keeps, asked)
        if self.shape.biased:
            call.bias = kwargs.pop("position_bias")
            call.sink_logits = kwargs["sinks"][..., 0] if "sinks" in kwargs else call.sink_logits
        attended = self._step(call)
        if isinstance(attended, Tensor):
            return attended.transpose(1, 2).contiguous() if latent is None else latent.expand(attended), None
        q, k, v, mask = attended
        new, total = q.shape[2], k.shape[2]
        causal = mask is None and new == total and call.bias is None  # sdpa's own causal mask allows fast kernels
        if mask is None and new > 1 and not (causal and (self.attn == "sdpa" or latent is not None)):
            mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        if mask is not None and mask.dtype == torch.bool:
            mask = additive_mask(mask, q.dtype)
        if call.bias is not None:
            bias = call.bias[..., call.bias.shape[-1] - total:]
            mask = bias if mask is None else bias + mask
        if latent is not None:
            out = masked_attention(q, k, v, mask, scale, causal=causal, sink_logits=call.sink_logits)
            return latent.expand(out), None
        if self.attn == "sdpa":
            return masked_attention(q, k, v, mask, scale, causal=causal).transpose(1, 2).contiguous(), None
        eager = sys.modules[type(module).__module__].eager_attention_forward
        kwargs.pop("dropout", None)
        return eager(module, q, k, v, mask, scaling=scale, dropout=0.0, **kwargs)[0], None


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer or an attention module of transformers."""
    return args[0] if args else kwargs["hidden_states"]


def _note_inputs(module: Any, turns: Sequence[tuple[int, bool]]) -> None:
    """Make an attention module pass its input to its attachment, as transformers gives it to no attention function; and
    where it runs several times in a forward, know which layer it is now, and whether that keeps units, of its `turns`.
    The module's forward is wrapped, because hooks cost more time per step."""
    own, plain, this = vars(module).get("forward"), type(module).forward, weakref.ref(module)

    def noting(*args: Any, **kwargs: Any) -> Any:
        module: Any = this()  # this function would keep it alive, and its weights, until a search for garbage
        module.locret_attachment()._input = input_of(args, kwargs)
        return plain(module, *args, **kwargs) if own is None else own(*args, **kwargs)

    def turning(*args: Any, **kwargs: Any) -> Any:
        module: Any = this()
        module.locret_layer, module.locret_keeps = turns[module.locret_turn]
        module.locret_turn += 1
        return noting(*args, **kwargs)

    module.forward = noting if len(turns) == 1 else turning
