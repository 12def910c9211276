"""Attach a causal LM: one attachment per model object, proved against the model's own logits before it is given out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_stream.errors import UnsupportedModel
from locret_stream.models.attachment import Attachment, Attended, LayerCall, shadow

_attached: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, int], Attachment]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def attach(model: PreTrainedModel, attn: str = "auto", number: int = 0) -> Attachment:
    """The attachment of this model object: made and self-tested once, then shared and counted.

    Args:
        model: a transformers causal LM; it is never changed. Move or cast it before attaching.
        attn: "auto" (what the model itself uses, sdpa or eager), "sdpa" or "eager".
        number: one attachment belongs to one thread; another number gives another one over the same weights.

    Raises:
        UnsupportedModel: not such a model, or the self-test found logits that differ from the stock model's.
    """
    with _lock:
        made = _attached.setdefault(model, {}) if isinstance(model, PreTrainedModel) else {}
        attachment = made.get((attn, number))
        if attachment is None:
            attachment = Attachment(model, attn)
            self_test(model, attachment)
            made[attn, number] = attachment
        attachment.users += 1
        return attachment


def detach(model: PreTrainedModel, attn: str = "auto", number: int = 0) -> int:
    """Give one use back; the last one forgets the shadow. Returns the uses that are left."""
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
    with _lock:
        number = min([0, *(number for _, number in _attached.get(model, {}))]) - 1 if isinstance(
            model, PreTrainedModel) else 0
        attachment = attach(model, number=number)
    try:
        yield attachment
    finally:
        detach(model, number=number)


_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Of root mean squares, which rounding moves far less than it moves the largest difference: that of the bundled model
is 0.34 in bf16, where the mean is 0.04; a norm after RoPE makes that 0.12."""


@torch.no_grad()
def self_test(model: PreTrainedModel, attachment: Attachment) -> float:
    """Compare logits with the stock model's at full budget: 24 tokens in pieces of 9, 1 and 14.

    Returns:
        The root mean square of the differences, in units of the stock logits' standard deviation.

    Raises:
        UnsupportedModel: it is above the dtype's tolerance (fp32 2e-5, fp16 2e-2, bf16 8e-2); says how much.
    """
    shape, device = attachment.shape, attachment.device
    total, pieces = 24, (9, 1, 14)
    ids = (torch.arange(total, device=device) * 7919 + 11) % min(shape.vocab, 50_000)
    tables = attachment.tables(total)
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def step(call: LayerCall) -> Attended:
        old_k, old_v = held.get(call.layer, (call.k[:, :, :0], call.v[:, :, :0]))
        k, v = torch.cat([old_k, call.k], 2), torch.cat([old_v, call.v], 2)
        held[call.layer] = (k, v)
        start, window = old_k.shape[2], shape.sliding[call.layer]
        ranks = torch.arange(k.shape[2], device=device)
        distance = ranks[start:, None] - ranks[None, :]
        mask = (distance >= 0) & (distance < (window or total + 1))
        return (tables.rotate(call.layer, call.q, start),
                tables.rotate(call.layer, k, 0), v, mask)

    try:
        expected = shadow(model)(ids[None], use_cache=False).logits.float()  # never the user's own: it may be in use
        found = torch.cat([attachment.logits(attachment.hidden(part[None], step))
                           for part in ids.split(pieces)], dim=1).float()
    except Exception as error:
        raise UnsupportedModel(f"{type(model).__name__}: the self-test failed with {type(error).__name__}: "
                               f"{error}") from error
    gap = ((found - expected).square().mean().sqrt() / expected.std().clamp(min=1e-6)).item()
    tolerance = _TOLERANCE.get(attachment.dtype, _TOLERANCE[torch.bfloat16])
    if not gap <= tolerance:
        raise UnsupportedModel(
            f"{type(model).__name__}: with a full budget its logits differ from the stock model's by {gap:.3g} "
            f"standard deviations (root mean square); expected at most {tolerance:g} in {attachment.dtype}. Its "
            "attention does something that this library does not reproduce (for example a norm after RoPE), so it is "
            "refused" + ("" if attachment.dtype.itemsize > 2 else "; in float32 rounding plays no part"))
    return gap
