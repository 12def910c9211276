"""Imports transformers in a process of this library's own, without what no verb needs: a third less time.

It changes things in torch and transformers for that, which a library may not do in the process of its user: only the
command line does it. Where one of them is another version, without what is changed here, its import is the usual one.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)
TRACING = "torch._dynamo._trace_wrapped_higher_order_op"


def import_quickly() -> None:
    """Import transformers, and of it what all decoders share; where it was imported before, do nothing."""
    if "transformers" in sys.modules:
        return
    try:
        with ExitStack() as changed:
            if not find_spec("torchao"):  # where it is installed, transformers imports it, and it all that is left out
                changed.enter_context(_without_compiler())
                _say_not_distributed()
            changed.enter_context(_models_listed_once())
            import_module("transformers.models.llama.modeling_llama")
    except Exception:  # a version that this does not suit: its own import says what is wrong, if anything is
        _log.debug("transformers is imported as it is", exc_info=True)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        import_module("transformers")


def _say_not_distributed() -> None:
    """Let transformers take torch, for as long as the process lives, for one that was built without torch.distributed,
    and import nothing of it; except where the process is one of several that were started for it."""
    from transformers import utils
    from transformers.utils import import_utils

    asked = "is_torch_distributed_available"
    if "WORLD_SIZE" not in os.environ and hasattr(utils, asked) and hasattr(import_utils, asked):
        for module in (utils, import_utils):
            setattr(module, asked, lambda: False)


def _unchanged(function: Any = None, *args: object, **options: object) -> Any:
    """A decorator that does nothing, bare and with arguments."""
    return function if function is not None else _unchanged


class _Deferred(ModuleType):
    """What is known of a module without it; whatever else is asked of it is asked of the module."""

    def __init__(self, name: str, **known: object) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which import asks of every module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Within it an import of transformers leaves torch's compiler, torch._dynamo, to those who compile.

    transformers needs of it marks on functions, which tell the compiler alone something, and one class, for masks that
    are made by vmap. The class is the real one as soon as it is used. What another thread marks meanwhile is not marked
    either, so the command line imports before it starts threads that could.
    """
    import torch
    from torch import compiler

    marks = dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _unchanged)
    tracing = _Deferred(TRACING, TransformGetItemToIndex=lambda: import_module(TRACING).TransformGetItemToIndex())
    dynamo = _Deferred("torch._dynamo", **marks)
    stock = {name: getattr(compiler, name) for name in marks}
    sys.modules.setdefault(TRACING, tracing)  # found there before its package is looked for
    vars(torch).setdefault("_dynamo", dynamo)  # torch would import it when it is asked for the attribute
    vars(compiler).update(marks)
    try:
        yield
    finally:
        vars(compiler).update(stock)
        if vars(torch).get("_dynamo") is dynamo:
            del vars(torch)["_dynamo"]
        if sys.modules.get(TRACING) is tracing:
            del sys.modules[TRACING]


@contextmanager
def _models_listed_once() -> Iterator[None]:
    """Within it transformers lists its models once.

    transformers 5 lists the 1,700 files of its models, which it reads for that, when it is imported, and once more with
    the first model, as what it remembers of the first time are 128 of their 550 folders. Here the second list is the
    first one.
    """
    import transformers
    from transformers.utils import import_utils

    utils: Any = import_utils
    models = Path(str(transformers.__file__)).parent / "models"
    stock = getattr(utils, "create_import_structure_from_path", None)
    if stock is None:
        yield
        return

    def listed(path: str | Path) -> Any:
        return stock(models if Path(path) == models / "__init__.py" else path)  # the whole is remembered by this path

    utils.create_import_structure_from_path = listed
    try:
        import transformers.models
        yield
    finally:
        utils.create_import_structure_from_path = stock
