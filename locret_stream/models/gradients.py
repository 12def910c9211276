"""Gradients through a frozen model, for what a `Step` adds, never for the weights. Knows an attachment's shadow."""

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
from locret_stream.models.attachment import Attachment
from locret_stream.models.calls import Attended, LayerCall
from locret_stream.models.linears import is_quicker


@contextmanager
def differentiable(attachment: Attachment) -> Iterator[None]:
    """Inside, `hidden` and `logits` of the attachment build an autograd graph: gradients pass through activations to
    all that a `step` adds, and never to the model's weights, even if these require gradients. The backward pass must
    run inside, too.

    Raises:
        UnsupportedModel: an attention module is several layers; which one depends on how often it ran in a forward.

    Only one hidden state per layer is kept for it: every layer, its `step` included, runs again in the backward pass
    (gradient checkpointing; Chen et al., arXiv:1604.06174), so that a `step` must depend on its call alone.
    """
    if attachment._in_turns:
        raise UnsupportedModel("gradients do not pass through a model in which one attention module is several layers")
    trees = attachment._decoder, attachment._shadow
    modules = {id(module): module for tree in trees for module in tree.modules()}.values()
    weights = [(module, dict(module._parameters)) for module in modules if module._parameters]
    quicker = [(module, vars(module)["forward"]) for module in modules if is_quicker(module)]
    graded, forwards = attachment._graded, [(layer, vars(layer).get("forward")) for layer in attachment.layers]
    try:
        for module, parameters in weights:  # modules of the shadow: the user's keep their parameters
            module._parameters.update({name: nn.Parameter(p.detach(), requires_grad=False)
                                       for name, p in parameters.items() if p is not None and p.requires_grad})
        for module, _ in quicker:  # their products are bound to the weights that may require gradients
            del module.forward
        for layer, _ in forwards:
            layer.forward = functools.partial(_checkpointed, attachment, layer.forward)
        attachment._graded = True
        yield
    finally:
        attachment._graded = graded
        attachment.forget_asked()
        for layer, forward in forwards:
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward
        for module, forward in quicker:
            module.forward = forward
        for module, parameters in weights:
            module._parameters.update(parameters)


def expect_gradients(attachment: Attachment) -> None:
    """Raises:
        UnsupportedModel: gradients do not pass through the model, as through layers of some quantisers.
    """
    scales = [nn.Parameter(torch.ones((), dtype=torch.float32, device=place.device)) for place in attachment.places]
    tables = attachment.tables(3)

    def step(call: LayerCall) -> Attended:
        layer = call.layer
        v = call.v * scales[layer].to(call.v.dtype)
        return tables.rotate_queries(layer, call.q, 0), tables.rotate(layer, call.k, 0), v, None

    reason = ""
    gradients: tuple[Tensor | None, ...]
    try:
        with differentiable(attachment), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*an autograd kernel was not registered", UserWarning)
            out = attachment.hidden(torch.arange(3, device=attachment.device)[None], step)
            gradients = torch.autograd.grad(out.float().square().mean(), scales, allow_unused=True)
    except RuntimeError as error:
        gradients, reason = (None,), f" ({error})"
    if any(gradient is None for gradient in gradients):
        raise UnsupportedModel(f"gradients do not pass through this model's layers, {attachment.form or 'as they are'}"
                               f"{reason}; expected the plain weights of the same base: heads tuned on them serve it, "
                               "too")


def _checkpointed(attachment: Attachment, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A layer's forward, which the backward pass runs again with the present `step`."""
    step = attachment._step

    def run(*args: Any, **kwargs: Any) -> Any:
        before, attachment._step = attachment._step, step
        try:
            return forward(*args, **kwargs)
        finally:
            attachment._step = before

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
