"""Attach a causal LM: one attachment per model object, proved against the model's own logits before it is given out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_stream.errors import LocretError, UnsupportedModel
from locret_stream.models.attachment import Attachment, Attended, LayerCall
from locret_stream.models.weights import adapters, base_of, form, shadow

_attached: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, int], Attachment]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def attach(model: PreTrainedModel, attn: str = "auto", number: int = 0) -> Attachment:
    """The attachment of this model object: made and self-tested once, then shared and counted.

    Args:
        model: a transformers causal LM, or PEFT's around one; it is never changed. Move or cast it, and choose its
            adapters, before attaching.
        attn: "auto" (what the model itself uses, sdpa or eager), "sdpa" or "eager".
        number: one attachment belongs to one thread; another number gives another one over the same weights.

    Raises:
        UnsupportedModel: not such a model, or the self-test found logits that differ from the stock model's.
    """
    model = base_of(model)
    with _lock:
        made = _attached.setdefault(model, {}) if isinstance(model, PreTrainedModel) else {}
        attachment = made.get((attn, number))
        if attachment is None:
            attachment = _make(model, attn)
            self_test(model, attachment)
            made[attn, number] = attachment
        elif attachment.adapters != (active := adapters(model)):
            raise UnsupportedModel(f"{type(model).__name__}: it is attached with the adapters "
                                   f"{list(attachment.adapters)}, and {list(active)} are active now; expected the "
                                   "same, or every runtime that uses it to be closed first")
        attachment.users += 1
        return attachment


def _make(model: PreTrainedModel, attn: str) -> Attachment:
    try:
        return Attachment(model, attn)
    except LocretError:
        raise
    except Exception as error:  # whatever a quantiser's or an adapter's layers make of the trials
        raise UnsupportedModel(f"{type(model).__name__}{f' ({what})' if (what := form(model)) else ''}: the self-test "
                               f"failed with {type(error).__name__}: {error}; expected a model whose own "
                               "forward works on this device") from error


def detach(model: PreTrainedModel, attn: str = "auto", number: int = 0) -> int:
    """Give one use back; the last one forgets the shadow. Returns the uses that are left."""
    model = base_of(model)
    with _lock:
        made = _attached.get(model, {})
        if (attn, number) not in made:
            return 0
        made[attn, number].users -= 1
        left = made[attn, number].users
        if left <= 0:
            del made[attn, number]
        return max(left, 0)


@contextmanager
def attached(model: PreTrainedModel | Attachment) -> Iterator[Attachment]:
    """An attachment that nobody else runs meanwhile, such as a runtime's thread; an Attachment is used and left as it
    is. Raises as `attach`."""
    if isinstance(model, Attachment):
        yield model
        return
    base = base_of(model)
    with _lock:
        number = min([0, *(number for _, number in _attached.get(base, {}))]) - 1 if isinstance(
            base, PreTrainedModel) else 0
        attachment = attach(base, number=number)
    try:
        yield attachment
    finally:
        detach(base, number=number)


_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Of root mean squares, which rounding moves far less than it moves the largest difference: that of the bundled model
is 0.34 in bf16, where the mean is 0.04; a norm after RoPE makes that 0.12."""


TOTAL, PIECES = 24, (9, 1, 14)  # tokens of the self-test, and how it reads them
BY_LAYER = 8e-2  # of the root mean square that a layer adds to its input


@torch.no_grad()
def self_test(model: PreTrainedModel, attachment: Attachment) -> float:
    """Compare logits with the stock model's at full budget: 24 tokens in pieces of 9, 1 and 14.

    A model that rounds activations inside of its layers, as int8 kernels do, makes much of the last bit: its own logits
    differ by a tenth when it reads the same tokens in other pieces. Where a quantised model's differ by more than its
    dtype allows, every layer is compared by itself, given what the stock model's layer is given.

    Returns:
        The root mean square of the differences, in units of the stock logits' standard deviation.

    Raises:
        UnsupportedModel: it is above the dtype's tolerance (fp32 2e-5, fp16 2e-2, bf16 8e-2), and of a quantised model
            some layer's is above 8e-2 of what the layer adds; says how much.
    """
    device = attachment.device
    ids = (torch.arange(TOTAL, device=device) * 7919 + 11) % min(attachment.shape.vocab, 50_000)
    try:
        stock = shadow(model)  # never the user's own: it may be in use
        given, last, expected = _read_whole(stock, ids)
        found = torch.cat([attachment.logits(hidden) for hidden in _read_in_pieces(attachment, ids)], 1).float()
        gap = _gap(found, expected, expected.std())
        tolerance = _TOLERANCE.get(attachment.dtype, _TOLERANCE[torch.bfloat16])
        if gap <= tolerance:
            return gap
        if attachment.quantised:
            head = _gap(attachment.logits(last), expected, expected.std())
            if head <= tolerance and _gap_by_layer(attachment, ids, given) <= BY_LAYER:
                return gap
    except Exception as error:
        raise UnsupportedModel(f"{type(model).__name__}: the self-test failed with {type(error).__name__}: "
                               f"{error}") from error
    raise UnsupportedModel(
        f"{type(model).__name__}: with a full budget its logits differ from the stock model's by {gap:.3g} "
        f"standard deviations (root mean square); expected at most {tolerance:g} in {attachment.dtype}. Its "
        "attention does something that this library does not reproduce (for example a norm after RoPE), so it is "
        "refused" + ("" if attachment.dtype.itemsize > 2 else "; in float32 rounding plays no part"))


def _gap(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    off = (found.float() - expected.to(found.device)).square().mean().sqrt()
    return off.item() / max(scale.item(), 1e-6)


def _read_whole(stock: PreTrainedModel, ids: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """By layer of the stock model what goes in and what comes out, what its head is given, [1, T, hidden] each, and
    logits [1, T, vocab] fp32."""
    seen: list[tuple[Tensor, Tensor]] = []
    last: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, args, kwargs, out: seen.append((_hidden(args, kwargs), _first(out))),
                                         with_kwargs=True) for layer in stock.get_decoder().layers]
    hooks.append(stock.get_decoder().register_forward_hook(lambda _, args, out: last.append(out.last_hidden_state)))
    try:
        logits = stock(ids[None], use_cache=False).logits.float()
        return seen, last[0], logits
    finally:
        for hook in hooks:
            hook.remove()


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _read_in_pieces(attachment: Attachment, ids: Tensor) -> list[Tensor]:
    """Hidden states of the pieces, each behind all before it."""
    shape, tables = attachment.shape, attachment.tables(TOTAL)
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def step(call: LayerCall) -> Attended:
        old_k, old_v = held.get(call.layer, (call.k[:, :, :0], call.v[:, :, :0]))
        k, v = torch.cat([old_k, call.k], 2), torch.cat([old_v, call.v], 2)
        held[call.layer] = (k, v)
        start, window = old_k.shape[2], shape.sliding[call.layer]
        ranks = torch.arange(k.shape[2], device=k.device)
        distance = ranks[start:, None] - ranks[None, :]
        mask = (distance >= 0) & (distance < (window or TOTAL + 1))
        return (tables.rotate(call.layer, call.q, start),
                tables.rotate(call.layer, k, 0), v, mask)

    return [attachment.hidden(part[None], step) for part in ids.split(PIECES)]


def _gap_by_layer(attachment: Attachment, ids: Tensor, given: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of any layer's output, each being given what the stock model's layer was given."""
    inputs = [before.split(PIECES, 1) for before, _ in given]
    found: list[list[Tensor]] = [[] for _ in given]

    def replace(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = inputs[layer][len(found[layer])]
        return ((own, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": own})

    hooks = []
    for index, layer in enumerate(attachment.layers):
        hooks += [layer.register_forward_pre_hook(lambda _, args, kwargs, index=index: replace(index, args, kwargs),
                                                  with_kwargs=True),
                  layer.register_forward_hook(lambda _, args, out, index=index: found[index].append(_first(out)))]
    try:
        _read_in_pieces(attachment, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return max(_gap(torch.cat(ours, 1), after.float(), (after - before).float().square().mean().sqrt())
               for ours, (before, after) in zip(found, given, strict=True))
