"""Compares what an attachment computes with the stock model, before it is used. Knows no engine and no store."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_stream.config import UnitShape
from locret_stream.errors import UnsupportedModel
from locret_stream.models.attachment import Attachment, input_of
from locret_stream.models.calls import Attended, LayerCall, visible
from locret_stream.models.decoders import decoder_of
from locret_stream.models.indexed import choosing_few
from locret_stream.models.probing import windows_of
from locret_stream.models.weights import shadow

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Of root mean square differences, which rounding moves far less than the largest one: for the bundled model in bf16
these are 0.04 and 0.34."""

TOTAL = 24  # tokens of each text, or as many as fit the model's window
CHOSEN, SHORT = 12, 8  # of these, how many an index chooses, and how many a window or a block has
TEXTS = 3  # that are tried where an index chooses, and each layer agrees by itself: of equal scores rounding chooses
BY_LAYER = 8e-2  # tolerance of a quantised layer, as a share of the root mean square that the layer adds to its input
BY_ATTENTION = 5e-2  # of attention in fp16 and bf16, as a share of the root mean square of its output
OF_STATES = 5e-3  # most that the stock model may differ from itself when it reads in pieces
OF_ROUNDING = 0.5  # gap of logits in fp16 and bf16 up to which rounding may be the cause
SHAKEN = 3  # times that a model reads with its attention off by rounding, to see how far that moves its logits
COPIED, TRIED = 1 << 28, 8 << 30  # bytes up to which a copy in fp32 decides, and up to which it is the last resort
AMPLIFIED = 50  # how many tolerances the logits may differ by where every layer by itself is within one
_WINDOWS = ("sliding_window", "attention_chunk_size")
_THRESHOLDS = ("original_max_position_embeddings", "floor_scale", "log_scaling_n_floor")
"""Names in configs for lengths of windows, and for positions behind which a model does something else."""


@torch.no_grad()
def self_test(model: PreTrainedModel, attachment: Attachment) -> float:
    """Compare an attachment at full budget with the stock model: 24 tokens in pieces of 9, 1 and 14, at the beginning
    of a text, around the positions that the config names as thresholds, and at the last ones that the model has.

    So few tokens reach no window: here windows and blocks have 8 tokens in both models, and an index that would choose
    all chooses about 12. In fewer bits than 32, rounding alone makes an index choose others: there it chooses all.

    Layers amplify each other's rounding. Where the products of a shadow are summed in another order (`linears`),
    SmolLM2's logits differ by 2e-5 and its layers, each by itself, by 1e-6. A model that rounds activations inside its
    layers, as int8 kernels do, amplifies the last bit: its own logits differ by a tenth when it reads the same tokens
    in other pieces. So where a quantised model, or one in fp32 or fp64, differs by more than its dtype allows, every
    layer is compared by itself, with the input of the stock model's layer.

    In fp16 and bf16 a tolerance of logits tells little: a wrong rotation hides in it where weights are small. Up to
    256 MiB in fp32, a copy of the model in fp32 must pass. A larger model is compared by its attention modules, each by
    itself, as what a whole layer adds is often less than the rounding of what it adds it to; and its logits may differ
    by more than the tolerance only up to twice as much as the stock model's own do, where it reads the same pieces or
    where its attention is off by the rounding of its dtype. Should these differ, a copy decides up to 8 GiB.

    Returns:
        The root mean square of the differences of logits at the beginning, in units of the stock logits' standard
        deviation.

    Raises:
        UnsupportedModel: it is above the dtype's tolerance (fp32 2e-5, fp16 2e-2, bf16 8e-2), and so is a part by
            itself. The message says by how much, from which position on, and which layer is the first.
    """
    stock = shadow(model)  # the user's own object may be in use
    exact = attachment.dtype.itemsize >= 4 and not attachment.quantised
    with (choosing_few([stock, *attachment.layers] if exact else [], CHOSEN),
          _short_windows(stock, attachment) as units):
        comparison = _Comparison(model, stock, attachment, units)
        gap = comparison.at(0)
        for first in [] if comparison.copy else _far(stock, attachment):
            comparison.at(first)
    return gap


@dataclass(slots=True)
class _Run:
    """A run of a part of the stock model: the number of the layer, and its input and output, [1, T, hidden] each."""

    layer: int
    before: Tensor
    after: Tensor


class _Comparison:
    """Compares texts of `TOTAL` tokens, each without what comes before its first position.

    Attributes:
        units: by layer that keeps units, its shape, with the window that it has in these texts.
        half: whether it is in fp16 or bf16, and the rounding of weights is not that of a quantiser.
        copy: one in fp32, with its attachment, if it decides.
    """

    def __init__(self, model: PreTrainedModel, stock: PreTrainedModel, attachment: Attachment,
                 units: Sequence[UnitShape]):
        self.model, self.stock, self.attachment, self.units = model, stock, attachment, units
        self.half = attachment.dtype.itemsize < 4 and not attachment.quantised
        self.copy = self._copied(COPIED) if self.half else None
        self._tolerance = _TOLERANCE.get(attachment.dtype, _TOLERANCE[torch.bfloat16])
        self._total = min(TOTAL, max(3, attachment.shape.window))
        self._pieces = [before := self._total * 9 // TOTAL, 1, self._total - before - 1]
        self._ids = self._text(0)

    def at(self, first: int) -> float:
        """Compare from that position on: logits, or hidden states behind the beginning of a text. Returns and raises as
        `self_test`."""
        for number in range(TEXTS if self.attachment.shape.chooses else 1):
            self._ids = self._text(number)
            runs, last, expected = self._read_whole(first)
            hidden = self._read_in_pieces(first)
            found = hidden if first else [self.attachment.logits(each) for each in hidden]
            gap = _gap(torch.cat(found, 1), expected, expected.std())
            if self._agrees(gap, first, runs, last, expected):
                return gap
            if self._first_wrong(runs, first) is not None:
                break
        return self._refuse(gap, first, runs, expected)

    def _text(self, number: int) -> Tensor:
        """Ids [T], others for each number."""
        places = torch.arange(self._total, device=self.attachment.device) + number * self._total
        return (places * 7919 + 11) % min(self.attachment.shape.vocab, 50_000)

    def _agrees(self, gap: float, first: int, runs: list[_Run], last: Tensor, expected: Tensor) -> bool:
        attachment, tolerance = self.attachment, self._tolerance
        if self.half:
            if gap > OF_ROUNDING:
                return False
            if self.copy:
                return self._copy_passes()
            near = gap <= tolerance or gap <= 2 * self._own() or gap <= 2 * self._moved_by_rounding()
            return (near and self._first_wrong(runs, first) is None) or self._larger_copy_passes()
        if gap <= tolerance:
            return True
        if attachment.states:  # layers with a recurrent state sum in another order when they read in pieces
            own = self._own()
            if own > OF_STATES:
                raise UnsupportedModel(
                    f"{type(self.model).__name__}: its own forward forgets: read in pieces, with transformers' own "
                    f"cache, its logits differ from those of one forward by {own:.3g} standard deviations (root "
                    "mean square), as some of its layers begin anew with each piece; expected a model that goes on "
                    "from its recurrent state")
            if gap <= 2 * own:
                return True
        if not attachment.quantised and gap > AMPLIFIED * tolerance:
            return False
        head = 0.0 if first else _gap(attachment.logits(last), expected, expected.std())
        return head <= tolerance and self._first_wrong(runs, first) is None

    def _refuse(self, gap: float, first: int, runs: list[_Run], expected: Tensor) -> NoReturn:
        name, tolerance = type(self.model).__name__, self._tolerance
        if not first:
            some = self._pieces[0]
            alone = self.stock(self._ids[None, :some], use_cache=False).logits
            if (ahead := _gap(alone, expected[:, :some], expected.std())) > AMPLIFIED * tolerance:
                raise UnsupportedModel(
                    f"{name}: what it computes of a text depends on what comes after it: the logits of the first "
                    f"{some} tokens differ by {ahead:.3g} standard deviations (root mean square) from those of "
                    "these alone; expected a causal model")
        wrong = self._first_wrong(runs, first)
        raise UnsupportedModel(
            f"{name}: with a full budget its {'hidden states' if first else 'logits'} differ from the stock model's by "
            f"{gap:.3g} standard deviations (root mean square){f' from position {first:,} on' if first else ''}; "
            f"expected at most {tolerance:g} in {self.attachment.dtype}. "
            + ("Each of its layers agrees by itself" if wrong is None else
               f"Layer {wrong[0]} is the first that differs by itself, by {wrong[1]:.3g} of what it adds")
            + ". The model does something that this library does not reproduce (for example a norm behind RoPE that "
            "subtracts a mean), so it is refused" + ("; load it in float32 to rule rounding out" if self.half else ""))

    def _own(self) -> float:
        """How far the stock model's logits are from its own, where it reads the same pieces with the cache that it
        makes itself; one token at a time behind the first of them where it forgets otherwise."""
        cache, logits = None, []
        first, *others = self._pieces
        parts = [first, *[1] * sum(others)] if self.attachment.stepwise else self._pieces
        for part in self._ids.split(parts):
            out = self.stock(part[None], past_key_values=cache, use_cache=True)
            cache = getattr(out, "past_key_values", None)  # none where modules hold the state
            logits.append(out.logits)
        whole = self.stock(self._ids[None], use_cache=False).logits
        return _gap(torch.cat(logits, 1), whole, whole.float().std())

    def _moved_by_rounding(self) -> float:
        """How far the stock model's logits move, at most of a few times, where what each part puts out is off by the
        rounding of the dtype: far in a model that chooses experts or units, as rounding then chooses others."""
        eps, generator = torch.finfo(self.attachment.dtype).eps, torch.Generator().manual_seed(0)

        def shake(_module: torch.nn.Module, _args: Any, out: Any) -> Any:
            first = _first(out)
            noise = torch.randn(first.shape, generator=generator).to(first.device) * eps
            moved = (first.float() + noise * first.float().square().mean().sqrt()).to(first.dtype)
            return (moved, *out[1:]) if isinstance(out, tuple) else moved

        whole = self.stock(self._ids[None], use_cache=False).logits
        with ExitStack() as hooks:
            for name, _ in self._parts:
                hooks.enter_context(decoder_of(self.stock).get_submodule(name).register_forward_hook(shake))
            return max(_gap(self.stock(self._ids[None], use_cache=False).logits, whole, whole.float().std())
                       for _ in range(SHAKEN))

    @functools.cached_property
    def _parts(self) -> list[tuple[str, int]]:
        """What is compared by itself, by its name in the decoder and the number of its layer: attention modules in
        fewer bits than 32, else layers, whose outputs have their inputs in them."""
        decoder = self.attachment._decoder
        numbers = {id(module): number for number, layer in enumerate(self.attachment.layers)
                   for module in layer.modules()}
        layers = [id(layer) for layer in self.attachment.layers]
        return [(name, numbers[id(module)]) for name, module in decoder.named_modules()
                if (hasattr(module, "locret_layer") if self.half else id(module) in layers)]

    def _copied(self, most: int) -> tuple[PreTrainedModel, Attachment] | None:
        """A copy of the model in float32, if that takes at most so many bytes and says something: not where a model is
        attached in fewer bits alone (Falcon with ALiBi), nor of one with a recurrent state, as the decays that its
        layers have worked out beforehand would stay rounded."""
        if self.attachment.states or sum(parameter.numel() for parameter in self.model.parameters()) * 4 > most:
            return None
        exact = copy.deepcopy(self.model).float()
        try:
            return exact, Attachment(exact, self.attachment.attn)
        except UnsupportedModel:
            return None

    def _copy_passes(self) -> bool:
        assert self.copy is not None
        try:
            self_test(*self.copy)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{error}. This is of a copy in float32, without the rounding of "
                                   f"{self.attachment.dtype}") from error
        return True

    def _larger_copy_passes(self) -> bool:
        found = self._copied(TRIED)
        try:
            return found is not None and self_test(*found) >= 0
        except UnsupportedModel:
            return False

    # -- reading ----------------------------------------------------------------------------------------------

    def _read_whole(self, first: int) -> tuple[list[_Run], Tensor, Tensor]:
        """Of the stock model: the runs of its `_parts`, the output of its decoder [1, T, hidden], and the logits
        [1, T, vocab] at the beginning of a text, else that output again."""
        decoder, runs, last = decoder_of(self.stock), list[_Run](), list[Tensor]()
        with ExitStack() as hooks:
            for name, number in self._parts:
                hooks.enter_context(decoder.get_submodule(name).register_forward_hook(
                    lambda _, args, kwargs, out, number=number: runs.append(
                        _Run(number, input_of(args, kwargs), _first(out))), with_kwargs=True))
            hooks.enter_context(decoder.register_forward_hook(
                lambda _, args, out: last.append(out.last_hidden_state)))
            if first:
                positions = first + torch.arange(self._total, device=self._ids.device)[None]
                decoder(input_ids=self._ids[None], position_ids=positions, use_cache=False)
                return runs, last[0], last[0].float()
            logits = self.stock(self._ids[None], use_cache=False).logits.float()
        return runs, last[0], logits

    def _read_in_pieces(self, first: int) -> list[Tensor]:
        """Hidden states of the pieces, each of which sees all before it."""
        attachment, tables = self.attachment, self.attachment.tables(first + self._total, first)
        cache: dict[int, tuple[Tensor, Tensor]] = {}

        def step(call: LayerCall) -> Attended:
            if call.keeps:
                old_k, old_v = cache.get(call.layer, (call.own_k[:, :, :0], call.v[:, :, :0]))
                cache[call.layer] = torch.cat([old_k, call.own_k], 2), torch.cat([old_v, call.v], 2)
            k, v = cache[call.layer]
            start, ranks = k.shape[2] - call.q.shape[2], torch.arange(k.shape[2], device=k.device)
            mask, k = visible(self.units[call.layer], ranks[start:], ranks), tables.rotate(call.layer, k, 0)
            chosen = call.chosen(k, tables)
            mask = mask if chosen is None else chosen & mask
            return tables.rotate_queries(call.layer, call.q, start), k[..., :call.k.shape[-1]], v, mask

        carried, hidden, start = attachment.carry((), [0] * attachment.shape.layers), [], 0
        for part in self._ids.split(self._pieces):
            hidden.append(attachment.hidden(part[None], step, carried, first + start))
            start += len(part)
            carried = carried and attachment.carry(carried.tensors, [start] * attachment.shape.layers)
        return hidden

    def _first_wrong(self, runs: list[_Run], first: int) -> tuple[int, float] | None:
        """The first layer whose part differs by more than it may where it gets the input of the stock model's, and by
        how much of what that adds."""
        inputs, outputs = [run.before.split(self._pieces, 1) for run in runs], list[Tensor]()  # these by piece

        def replace(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
            piece, part = divmod(len(outputs), len(inputs))
            stock = inputs[part][piece]
            return ((stock, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stock})

        with ExitStack() as hooks:
            for name, _ in self._parts:
                module = self.attachment._decoder.get_submodule(name)
                hooks.enter_context(module.register_forward_pre_hook(
                    lambda _, args, kwargs: replace(args, kwargs), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(lambda _, args, out: outputs.append(_first(out))))
            self._read_in_pieces(first)
        most = BY_LAYER if self.attachment.quantised else BY_ATTENTION if self.half else self._tolerance
        for number, run in enumerate(runs):
            added = run.after.float() - (0 if self.half else run.before.float())
            gap = _gap(torch.cat(outputs[number::len(runs)], 1), run.after, added.square().mean().sqrt())
            if not gap <= most:
                return run.layer, gap
        return None


@contextmanager
def _short_windows(stock: PreTrainedModel, attachment: Attachment) -> Iterator[Sequence[UnitShape]]:
    """Inside, windows and blocks of the stock model have `SHORT` tokens, if what it computes follows its config. Gives
    the shapes of the layers that keep units."""
    config, units = decoder_of(stock).config, attachment.shape.units
    usual = {name: value for name in _WINDOWS if isinstance(value := getattr(config, name, None), int)
             and value > SHORT}
    ids = torch.arange(min(TOTAL, attachment.shape.window), device=attachment.device)[None]
    before = stock(ids, use_cache=False).logits if usual else ids
    try:
        for name in usual:
            setattr(config, name, SHORT)
        if usual and not torch.equal(stock(ids, use_cache=False).logits, before):
            units = tuple(msgspec.structs.replace(unit, sliding=sliding, blocks=blocks) for unit, (sliding, blocks)
                          in zip(units, windows_of(config, attachment._numbers), strict=True))
        else:
            vars(config).update(usual)
        yield units
    finally:
        for name, value in usual.items():
            setattr(config, name, value)


def _far(stock: PreTrainedModel, attachment: Attachment) -> list[int]:
    """First positions of texts around the thresholds of a config, and at the end of what the model was made for. None
    where attention does not see positions, asks transformers' cache for them (which `take_temperature` compares), or
    has an index that takes them for places among its keys."""
    decoder, shape = decoder_of(stock), attachment.shape
    if (shape.ranked or shape.biased or any(index.by_places for index in attachment._indexes)
            or any(getattr(module, "attn_temperature_tuning", None) for module in decoder.modules())):
        return []
    last = shape.window - TOTAL
    named = {value - TOTAL // 2 for value in _named(decoder.config.to_dict(), _THRESHOLDS)}
    return sorted(first for first in {*named, last} if 0 < first <= last)


def _named(config: object, names: Sequence[str]) -> Iterator[int]:
    """The whole numbers of these names in a config, at any depth."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name in names and isinstance(value, int):
                yield value
            yield from _named(value, names)


def _gap(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Root mean square of the differences, in units of `scale`."""
    gap = (found.float() - expected.to(found.device).float()).square().mean().sqrt()
    return gap.item() / max(scale.item(), 1e-6)


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out
