"""Recurrent mixers whose forward goes on from a state one token at a time only: found by running them, and run so.

The Mamba mixers of Jamba and Zamba use the state that the cache hands them where they read one token; where they read
several, they begin anew. Knows transformers' modules by what they do with the state; knows no slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locret_stream.models.recurrent import Carried


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


def read_one_by_one(module: nn.Module) -> None:
    """Make a module that goes on from a state read one token after another; from the beginning of a stream it reads all
    at once, as it is exact there."""
    own, plain, this = vars(module).get("forward"), type(module).forward, weakref.ref(module)

    def stepping(*args: Any, **kwargs: Any) -> Any:
        module = this()  # this function would keep it alive, and its weights, until a search for garbage
        carried, tokens = handed(args, kwargs), (args[0] if args else kwargs["hidden_states"]).shape[1]
        pieces = [slice(None)] if carried is None or not carried.goes_on else [
            slice(token, token + 1) for token in range(tokens)]
        out = []
        for piece in pieces:
            some, named = of_tokens(piece, args, kwargs)
            out.append(plain(module, *some, **named) if own is None else own(*some, **named))
        return torch.cat(out, 1) if len(out) > 1 else out[0]

    module.forward = stepping


def handed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried | None:
    """The recurrent state among the arguments of a module."""
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, Carried)), None)


def of_tokens(piece: slice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a module with a piece of its hidden states [B, T, hidden], and of all that it has by token."""
    each = (args[0] if args else kwargs["hidden_states"]).shape[:2]

    def some(value: Any) -> Any:
        return value[:, piece] if isinstance(value, Tensor) and value.shape[:2] == each else value

    return tuple(map(some, args)), {name: some(value) for name, value in kwargs.items()}
