"""Attaches a causal LM: one attachment per model object, whose logits are compared with the model's own before use."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_stream.errors import LocretError, UnsupportedModel
from locret_stream.models.attachment import Attachment, input_of
from locret_stream.models.calls import Attended, LayerCall, visible
from locret_stream.models.decoders import decoder_of, layers_of
from locret_stream.models.indexed import choosing_few
from locret_stream.models.refusals import why_not
from locret_stream.models.weights import adapters, base_of, form, shadow

_attached: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, int], Attachment]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def attach(model: PreTrainedModel, attn: str = "auto", number: int = 0) -> Attachment:
    """The attachment of this model object: made and self-tested once, then shared, with its users counted.

    Args:
        model: a transformers causal LM, or a PEFT model around one; it is never changed. It must be moved, cast and
            given its adapters before.
        attn: "auto" (the model's own implementation, sdpa or eager), "sdpa" or "eager".
        number: one attachment belongs to one thread; another number makes another one over the same weights.

    Raises:
        UnsupportedModel: not such a model, or the self-test found logits that differ from the stock model's.
    """
    model = base_of(model)
    with _lock:
        made = _attached.setdefault(model, {}) if isinstance(model, PreTrainedModel) else {}
        attachment = made.get((attn, number))
        if attachment is None:
            try:
                attachment = Attachment(model, attn)
                self_test(model, attachment)
            except LocretError:
                raise
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise UnsupportedModel(f"{type(model).__name__}: {type(error).__name__}: {error}; expected a device "
                                       "with room for one more forward of a few tokens") from error
            except Exception as error:  # layers of a quantiser or an adapter may raise anything
                packing = f" ({words})" if (words := form(model)) else ""
                raise UnsupportedModel(
                    f"{type(model).__name__}{packing}: " + (f"its own forward does not work on this device ({broken})"
                    if (broken := _broken(model)) else why_not(model))) from error
            made[attn, number] = attachment
        elif attachment.adapters != (active := adapters(model)):
            raise UnsupportedModel(f"{type(model).__name__}: it is attached with the adapters "
                                   f"{list(attachment.adapters)}, and {list(active)} are active now; expected the "
                                   "same, or every runtime that uses it to be closed first")
        attachment.users += 1
        return attachment


def _broken(model: PreTrainedModel) -> str:
    """What the model's own forward fails with; "" if it works."""
    try:
        with torch.no_grad():
            shadow(model)(input_ids=torch.arange(3, device=model.device)[None], use_cache=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def detach(model: PreTrainedModel, attn: str = "auto", number: int = 0) -> int:
    """Count one user less; without users the attachment is dropped. Returns the users that are left."""
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
    """An attachment that no other thread runs, not even that of a runtime. An Attachment is used as it is, without
    counting. Raises as `attach`."""
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
"""Of root mean square differences, which rounding moves far less than the largest one: for the bundled model in bf16
these are 0.04 and 0.34. A norm behind RoPE that subtracts a mean, which must be refused, makes the root mean square
0.28."""

TOTAL, PIECES = 24, (9, 1, 14)  # tokens of the self-test, and of each piece that is read
CHOSEN = 12  # of these, where layers choose by an index what they attend to
BY_LAYER = 8e-2  # tolerance of a quantised layer, as a share of the root mean square that the layer adds to its input
OF_STATES = 5e-3  # most that the stock model may differ from itself when it reads in pieces
OF_ROUNDING, COPIED = 0.5, 8 << 30  # the gap in half precision, and bytes, up to which a copy in float32 is tried
AMPLIFIED = 50  # how many tolerances the logits may differ by where every layer by itself is within one


@torch.no_grad()
def self_test(model: PreTrainedModel, attachment: Attachment) -> float:
    """Compare logits with the stock model's at full budget: 24 tokens in pieces of 9, 1 and 14.

    Layers amplify each other's rounding. Where the products of a shadow are summed in another order (`linears`),
    SmolLM2's logits differ by 2e-5 and its layers, each by itself, by 1e-6. A model that rounds activations inside its
    layers, as int8 kernels do, amplifies the last bit: its own logits differ by a tenth when it reads the same tokens
    in other pieces. So where the logits of a quantised model, or of one in fp32 or fp64, differ by more than its dtype
    allows, every layer is compared by itself, with the input of the stock model's layer. In fp16 and bf16 that would
    say nothing: what a layer adds is often less than the rounding of what it adds it to. There a copy in fp32 is tried,
    where it takes at most 8 GiB.

    An index that would choose all of so few tokens chooses about 12 of them, in both models. In fewer bits than 32,
    rounding alone makes it choose others: there it chooses all.

    Returns:
        The root mean square of the differences, in units of the stock logits' standard deviation.

    Raises:
        UnsupportedModel: it is above the dtype's tolerance (fp32 2e-5, fp16 2e-2, bf16 8e-2), and so is, in fp32 or
            fp64, some layer's share of what the layer adds, or of a quantised model above 8e-2. The message says by
            how much.
    """
    stock = shadow(model)  # the user's own object may be in use
    exact = attachment.dtype.itemsize >= 4 and not attachment.quantised
    with choosing_few([stock, *attachment.layers] if exact else [], CHOSEN):
        return _compared(model, stock, attachment)


def _compared(model: PreTrainedModel, stock: PreTrainedModel, attachment: Attachment) -> float:
    device = attachment.device
    ids = (torch.arange(TOTAL, device=device) * 7919 + 11) % min(attachment.shape.vocab, 50_000)
    of_layers, last, expected = _read_whole(stock, ids)
    logits = torch.cat([attachment.logits(hidden) for hidden in _read_in_pieces(attachment, ids)], 1).float()
    gap = _gap(logits, expected, expected.std())
    tolerance = _TOLERANCE.get(attachment.dtype, _TOLERANCE[torch.bfloat16])
    if gap <= tolerance:
        return gap
    if attachment.states:  # layers with a recurrent state sum in another order when they read in pieces
        own = _gap(_stock_in_pieces(stock, ids, attachment.stepwise), expected, expected.std())
        if own > OF_STATES:
            raise UnsupportedModel(
                f"{type(model).__name__}: its own forward forgets: read in pieces, with transformers' own cache, its "
                f"logits differ from those of one forward by {own:.3g} standard deviations (root mean square), as some "
                "of its layers begin anew with each piece; expected a model that goes on from its recurrent state")
        if gap <= 2 * own:
            return gap
    exact = attachment.dtype.itemsize >= 4 and gap <= AMPLIFIED * tolerance
    if attachment.quantised or exact:
        head = _gap(attachment.logits(last), expected, expected.std())
        of_a_layer = BY_LAYER if attachment.quantised else tolerance
        if head <= tolerance and _gap_by_layer(attachment, ids, of_layers) <= of_a_layer:
            return gap
    if attachment.dtype.itemsize < 4 and not attachment.quantised and gap <= OF_ROUNDING and _right_in_float32(model):
        return gap
    alone = shadow(model)(ids[None, :PIECES[0]], use_cache=False).logits
    if (ahead := _gap(alone, expected[:, :PIECES[0]], expected.std())) > AMPLIFIED * tolerance:
        raise UnsupportedModel(
            f"{type(model).__name__}: what it computes of a text depends on what comes after it: the logits of the "
            f"first {PIECES[0]} tokens differ by {ahead:.3g} standard deviations (root mean square) from those of "
            "these alone; expected a causal model")
    raise UnsupportedModel(
        f"{type(model).__name__}: with a full budget its logits differ from the stock model's by {gap:.3g} "
        f"standard deviations (root mean square); expected at most {tolerance:g} in {attachment.dtype}. Its "
        "attention does something that this library does not reproduce (for example a norm behind RoPE that subtracts "
        "a mean), so it is refused" + ("" if attachment.dtype.itemsize > 2 else
                                    "; load it in float32 to rule rounding out"))


def _right_in_float32(model: PreTrainedModel) -> bool:
    """Whether a copy of the model in float32 passes, where that is small enough to be made: in fewer bits a router of
    experts may choose others for a rounding, and then the logits of a right attention differ by much."""
    if sum(parameter.numel() for parameter in model.parameters()) * 4 > COPIED:
        return False
    exact = copy.deepcopy(model).float()
    try:
        self_test(exact, Attachment(exact, "auto"))
    except UnsupportedModel:
        return False
    return True


def _stock_in_pieces(stock: PreTrainedModel, ids: Tensor, stepwise: bool) -> Tensor:
    """Logits [1, T, vocab] fp32 of the stock model that reads the same pieces with the cache that it makes itself; one
    token at a time behind the first of them where it forgets otherwise (`stepwise`)."""
    cache, logits = None, []
    for part in ids.split([PIECES[0], *[1] * sum(PIECES[1:])] if stepwise else PIECES):
        out = stock(part[None], past_key_values=cache, use_cache=True)
        cache = getattr(out, "past_key_values", None)  # none where modules hold the state
        logits.append(out.logits)
    return torch.cat(logits, 1).float()


def _gap(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Root mean square of the differences, in units of `scale`."""
    gap = (found.float() - expected.to(found.device)).square().mean().sqrt()
    return gap.item() / max(scale.item(), 1e-6)


def _read_whole(stock: PreTrainedModel, ids: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Input and output of every layer of the stock model, as often as it runs, the input of its head, [1, T, hidden]
    each, and its logits [1, T, vocab] fp32."""
    of_layers: list[tuple[Tensor, Tensor]] = []
    last: list[Tensor] = []
    with ExitStack() as hooks:
        decoder = decoder_of(stock)
        for layer in layers_of(decoder):
            hooks.enter_context(layer.register_forward_hook(
                lambda _, args, kwargs, out: of_layers.append((input_of(args, kwargs), _first(out))), with_kwargs=True))
        hooks.enter_context(decoder.register_forward_hook(
            lambda _, args, out: last.append(out.last_hidden_state)))
        logits = stock(ids[None], use_cache=False).logits.float()
    return of_layers, last[0], logits


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _read_in_pieces(attachment: Attachment, ids: Tensor) -> list[Tensor]:
    """Hidden states of the pieces, each of which sees all before it."""
    shape, tables = attachment.shape, attachment.tables(TOTAL)
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def step(call: LayerCall) -> Attended:
        if call.keeps:
            old_k, old_v = cache.get(call.layer, (call.own_k[:, :, :0], call.v[:, :, :0]))
            cache[call.layer] = torch.cat([old_k, call.own_k], 2), torch.cat([old_v, call.v], 2)
        k, v = cache[call.layer]
        start, ranks = k.shape[2] - call.q.shape[2], torch.arange(k.shape[2], device=k.device)
        mask, k = visible(shape.units[call.layer], ranks[start:], ranks), tables.rotate(call.layer, k, 0)
        chosen = call.chosen(k, tables)
        mask = mask if chosen is None else chosen & mask
        return tables.rotate_queries(call.layer, call.q, start), k[..., :call.k.shape[-1]], v, mask

    carried, hidden, start = attachment.carry((), [0] * shape.layers), [], 0
    for part in ids.split(PIECES):
        hidden.append(attachment.hidden(part[None], step, carried, start))
        start += len(part)
        carried = carried and attachment.carry(carried.tensors, [start] * shape.layers)
    return hidden


def _gap_by_layer(attachment: Attachment, ids: Tensor, of_layers: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of any layer's output, where each layer gets the input of the stock model's."""
    inputs = [before.split(PIECES, 1) for before, _ in of_layers]
    outputs: list[Tensor] = []  # of layer after layer, in piece after piece

    def replace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        piece, layer = divmod(len(outputs), len(inputs))
        stock = inputs[layer][piece]
        return ((stock, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": stock})

    with ExitStack() as hooks:
        for each in attachment.layers:
            hooks.enter_context(each.register_forward_pre_hook(
                lambda _, args, kwargs: replace(args, kwargs), with_kwargs=True))
            hooks.enter_context(each.register_forward_hook(lambda _, args, out: outputs.append(_first(out))))
        _read_in_pieces(attachment, ids)
    return max(_gap(torch.cat(outputs[layer::len(inputs)], 1), after.float(),
                    (after - before).float().square().mean().sqrt()) for layer, (before, after) in enumerate(of_layers))
