"""Recurrent mixers whose forward goes on from a state one token at a time only: found by running them, and mended.

The Mamba mixers of Jamba and Zamba use the state that the cache hands them where they read one token; where they read
several, their scan begins anew. Knows transformers' modules by what they do with the state; knows no slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locret_stream.models.functions import calls, globals_of, with_globals
from locret_stream.models.recurrent import Carried

_SCAN = "mamba_selective_scan"


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """A forward of a module that was handed the recurrent state: its arguments, hidden states [B, T, hidden] first."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @torch.no_grad()
    def again(self, carried: Carried, tokens: slice) -> Any:
        """What the module gives for these of the tokens, where it goes on from that state."""
        args, kwargs = of_tokens(tokens, self.args, self.kwargs)
        args = tuple(carried if isinstance(each, Carried) else each for each in args)
        return self.module(*args, **{name: carried if isinstance(each, Carried) else each
                                     for name, each in kwargs.items()})


@contextmanager
def mixing(decoder: nn.Module) -> Iterator[list[Mixed]]:
    """Inside, the forwards of modules that are handed a state are noted; of modules within each other the innermost."""
    given: dict[nn.Module, Mixed] = {}
    noted: list[Mixed] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if handed(args, kwargs) is not None:
            given[module] = Mixed(module, args, kwargs)

    with ExitStack() as hooks:
        for module in decoder.modules():
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield noted
    noted += [mixed for module, mixed in given.items()
              if not any(inner in given for inner in module.modules() if inner is not module)]


def forgetful(mixers: Sequence[Mixed], config: Any, carried: Carried) -> list[nn.Module]:
    """The modules that give the same from any state of some kind where they read several tokens, and not where they
    read one.

    Args:
        mixers: forwards of at least two tokens, which left the state `carried`. config: of the decoder.
    """
    forms = carried.found()
    tensors = carried.state_of(forms)

    def forgets(mixed: Mixed) -> bool:
        def given(tokens: slice, changed: str = "") -> Any:
            state = [tensor + (form.kind == changed) for form, tensor in zip(forms, tensors, strict=True)]
            return mixed.again(Carried(config, forms, state), tokens)

        one, several = slice(1), slice(None)
        expected = given(several)
        return isinstance(expected, Tensor) and any(
            torch.equal(given(several, kind), expected) and not torch.equal(given(one, kind), given(one))
            for kind in {form.kind for form in forms})

    return [mixed.module for mixed in mixers if forgets(mixed)]


def go_on_from_states(module: Any) -> None:
    """Make a forgetful module go on from the state that it is handed, however many tokens it reads: in its scan, where
    it has transformers' selective one, else token after token. From the beginning of a stream it reads as before."""
    own, plain, this = vars(module).get("forward"), type(module).forward, weakref.ref(module)
    if own is not None or not calls(plain, _SCAN):
        module.forward = _one_by_one(this, own or plain, bound=own is not None)
        return
    states: list[Tensor] = []  # of each of the scans that are to come
    scanning = with_globals(plain, **{_SCAN: _scan_from(states, globals_of(plain)[_SCAN])})

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        module: Any = this()  # this function would keep it alive, and its weights, until a search for garbage
        carried = handed(args, kwargs)
        if carried is not None and carried.goes_on and hidden_states.shape[1] > 1:
            layer: Any = carried.layers[module.layer_idx]
            state: Tensor = layer.recurrent_states[0]
            states[:] = [state] if state.dim() == 3 else state.unbind(1)
        try:
            return scanning(module, hidden_states, *args, **kwargs)
        finally:
            states.clear()

    module.forward = forward


def _scan_from(states: list[Tensor], scan: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' `mamba_selective_scan`, which begins with the next of the states [B, D, N], if there are any.

    The scan is linear in its state: of the first one h, the output at token t has C_t exp(A (dt_1 + ... + dt_t)) h more
    (arXiv:2312.00752, equation 2 with its discretisation), before the gate.
    """
    def scanning(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, z: Tensor, delta_bias: Tensor | None,
                 return_last_state: bool, **options: Any) -> Any:
        found = scan(u, dt, A, B, C, z=z, delta_bias=delta_bias, return_last_state=return_last_state, **options)
        if not states:
            return found
        (out, last), state = found, states.pop(0).float()
        steps = F.softplus((dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]).float()).cumsum(-1)
        more, kept = torch.zeros_like(steps), []
        for number in range(state.shape[-1]):  # one after another, as a processor's cache holds [B, D, T]
            # What has decayed to e^-40 counts no more, and with numbers below e^-87 CPUs take tenfold the time.
            left = (A.float()[:, number, None] * steps).clamp_(min=-40).exp_().mul_(state[..., number, None])
            kept.append(left[..., -1])
            more.addcmul_(left, C[:, number, None].float())
        return out + (more * F.silu(z.float())).to(out.dtype), last + torch.stack(kept, -1).to(last.dtype)

    return scanning


def _one_by_one(this: Callable[[], Any], forward: Callable[..., Any], *, bound: bool) -> Callable[..., Any]:
    """A forward that reads one token after another where it goes on from a state."""
    def stepping(*args: Any, **kwargs: Any) -> Any:
        carried, tokens = handed(args, kwargs), (args[0] if args else kwargs["hidden_states"]).shape[1]
        pieces = [slice(None)] if carried is None or not carried.goes_on else [
            slice(token, token + 1) for token in range(tokens)]
        out = []
        for piece in pieces:
            some, named = of_tokens(piece, args, kwargs)
            out.append(forward(*some, **named) if bound else forward(this(), *some, **named))
        return torch.cat(out, 1) if len(out) > 1 else out[0]

    return stepping


def handed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried | None:
    """The recurrent state among the arguments of a module."""
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, Carried)), None)


def of_tokens(piece: slice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a module with a piece of its hidden states [B, T, hidden], and of all that it has by token."""
    each = (args[0] if args else kwargs["hidden_states"]).shape[:2]

    def some(value: Any) -> Any:
        return value[:, piece] if isinstance(value, Tensor) and value.shape[:2] == each else value

    return tuple(map(some, args)), {name: some(value) for name, value in kwargs.items()}
