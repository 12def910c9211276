"""Gradients through a frozen model: to what a `Step` brings in, never to the weights. Knows an attachment's shadow."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from locret_stream.errors import UnsupportedModel
from locret_stream.models.attachment import Attachment, Attended, LayerCall


@contextmanager
def differentiable(attachment: Attachment) -> Iterator[None]:
    """Within it `hidden` and `logits` of the attachment leave a graph: gradients pass through activations to whatever a
    `step` brings in, and never to the model's weights, whatever these require. The backward pass must run within, too.

    What is kept for it is one hidden state per layer: every layer, its `step` included, runs again in the backward pass
    (gradient checkpointing; Chen et al., arXiv:1604.06174), so that a `step` must depend on its call alone.
    """
    trees = attachment._decoder, attachment._shadow
    modules = {id(module): module for tree in trees for module in tree.modules()}.values()
    weights = [(module, dict(module._parameters)) for module in modules if module._parameters]
    graded, forwards = attachment._graded, [(layer, vars(layer).get("forward")) for layer in attachment._decoder.layers]
    try:
        for module, own in weights:  # the shadow's alone: the user's modules keep their parameters
            module._parameters.update({name: nn.Parameter(p.detach(), requires_grad=False)
                                       for name, p in own.items() if p is not None and p.requires_grad})
        for layer, _ in forwards:
            layer.forward = functools.partial(_checkpointed, attachment, layer.forward)
        attachment._graded = True
        yield
    finally:
        attachment._graded = graded
        for layer, forward in forwards:
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward
        for module, own in weights:
            module._parameters.update(own)


def expect_gradients(attachment: Attachment) -> None:
    """Try whether gradients arrive: some quantisers' layers let none through, and what is behind them would not learn.

    Raises:
        UnsupportedModel: they do not.
    """
    scales = [nn.Parameter(torch.ones((), device=place.device)) for place in attachment.places]
    tables = attachment.tables(3)

    def step(call: LayerCall) -> Attended:
        layer = call.layer
        v = call.v * scales[layer].to(call.v.dtype)
        return tables.rotate(layer, call.q, 0), tables.rotate(layer, call.k, 0), v, None

    reason = ""
    found: tuple[Tensor | None, ...]
    try:
        with differentiable(attachment), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*an autograd kernel was not registered", UserWarning)  # what is tried
            out = attachment.hidden(torch.arange(3, device=attachment.device)[None], step)
            found = torch.autograd.grad(out.float().square().mean(), scales, allow_unused=True)
    except RuntimeError as error:
        found, reason = (None,), f" ({error})"
    if any(gradient is None for gradient in found):
        raise UnsupportedModel(f"gradients do not pass through this model's layers, {attachment.form or 'as they are'}"
                               f"{reason}; expected the plain weights of the same base: heads tuned on them serve it, "
                               "too")


def _checkpointed(attachment: Attachment, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A layer's forward that is run again when its gradients are asked for, with the `step` it has now."""
    step = attachment._step

    def run(*args: Any, **kwargs: Any) -> Any:
        before, attachment._step = attachment._step, step
        try:
            return forward(*args, **kwargs)
        finally:
            attachment._step = before

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
