"""Attaches a causal LM: one attachment per model object, whose logits are compared with the model's own before use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from locret_stream.errors import LocretError, UnsupportedModel
from locret_stream.models.attachment import Attachment
from locret_stream.models.comparison import self_test
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
