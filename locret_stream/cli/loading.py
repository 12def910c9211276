"""Runtimes and models for the verbs. torch is imported inside, once a verb needs it."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from locret_stream.cli.cores import usable_cores
from locret_stream.cli.options import RuntimeOptions, exact_of
from locret_stream.cli.output import err
from locret_stream.cli.quick_imports import import_quickly
from locret_stream.config import POLICY_NAMES
from locret_stream.errors import ConfigError, UnknownPolicy, UnsupportedModel
from locret_stream.named_models import named_model

if TYPE_CHECKING:
    from locret_stream.runtime import Runtime
    from locret_stream.runtime.foresight import Foresight

DIGITS = 1_000  # the most of a budget; Python converts no number of more than 4,300


def make_runtime(options: RuntimeOptions, **more: Any) -> Runtime:
    """A running runtime, for one context unless `max_live` says more, to be closed with `aclosing`. Where an option is
    None, the runtime's own default holds.

    Call it outside of an event loop: Ctrl-C then interrupts imports and loading at once.

    Args:
        more: further options of `Runtime.from_pretrained`.
    """
    with _no_garbage():
        _before_loading(options.model)
        from locret_stream.runtime import Runtime

        runtime = Runtime.from_pretrained(**runtime_options(options, **{"max_live": 1, **more}))
        runtime.start()
        return runtime


def foresee(options: RuntimeOptions) -> tuple[Runtime, Foresight]:
    """A runtime as `make_runtime` would start it, not started, and what it would hold; no weights are read."""
    with _no_garbage():
        _before_loading(options.model)
        from locret_stream.runtime import Runtime

        runtime = Runtime.from_pretrained(**runtime_options(options, max_live=1))
        return runtime, runtime.foresee()


def has_chat_template(options: RuntimeOptions, *, elsewhere: bool) -> bool:
    """Whether a model that other processes will load has a chat template. No weights are loaded, and torch only where
    the files of the model do not show it: this process stays beside the others, and torch would take 0.4 GiB of it.

    Args:
        elsewhere: they may run on other machines, and have a model that this one lacks: that is theirs to tell then.

    Raises:
        UnsupportedModel: the tokenizer cannot be loaded.
    """
    if named_model(options.model) is not None:  # all of them are chat models
        return True
    if _shows_template(Path(options.model)):
        return True
    with _no_garbage():
        _before_loading(options.model)
        from locret_stream.runtime.loading import load_tokenizer

        try:
            return bool(load_tokenizer(options.model).chat_template)
        except UnsupportedModel:
            if not elsewhere:
                raise
            return True


def _shows_template(folder: Path) -> bool:
    """Whether the tokenizer in that folder has a chat template in a file of its own, or among its settings."""
    if not any(folder.glob("tokenizer*")):  # such as an adapter, whose base model has it
        return False
    with contextlib.suppress(OSError, msgspec.DecodeError):
        settings = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
        if isinstance(settings, dict) and settings.get("chat_template"):
            return True
    file = folder / "chat_template.jinja"
    return file.is_file() and file.stat().st_size > 0


def runtime_options(options: RuntimeOptions, **more: Any) -> dict[str, Any]:
    """What the options are for `Runtime.from_pretrained`. Raises ConfigError."""
    given = {**msgspec.structs.asdict(options), **more}
    if given["policy"] not in (None, *POLICY_NAMES):  # before anything is loaded, and before a cluster starts
        raise UnknownPolicy(given["policy"], POLICY_NAMES)
    budget = options.budget
    if budget is not None and budget.strip().isdecimal():
        if len(budget) > DIGITS:
            raise ConfigError(f"budget is a number of {len(budget):,} digits; expected units per KV head, or a size "
                              "such as '512MiB'")
        given["budget"] = int(budget)
    if options.store_bits is not None:
        bits = [int(part) if part.strip().isdecimal() and len(part) < 9 else part[:9]
                for part in options.store_bits.split(",", 2)]
        given["store_bits"] = bits[0] if len(bits) == 1 else tuple(bits)
    tier = exact_of(options.exact, given.pop("exact_units"))
    given["exact"] = more.get("exact", tier)
    given = {name: value for name, value in given.items() if value is not None}
    if options.acknowledge == "":
        given["acknowledge"] = None
    if (named := given.pop("template_option", None)):
        given["template_options"] = dict(map(_template_option, named))
    return given


def _template_option(written: str) -> tuple[str, Any]:
    """NAME=VALUE: a value of JSON, or else a text. Raises ConfigError."""
    name, equals, value = written.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--template-option is {written!r}; expected NAME=VALUE, such as enable_thinking=false")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def beside(runtime: Runtime, policy: str) -> Runtime:
    """A second running runtime on a thread of its own (`Runtime.beside`, started). The two share the cores."""
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    second = runtime.beside(policy, own_thread=True)
    second.start()
    return second


def load(model: str, **options: Any) -> tuple[Any, Any]:
    """The model and its tokenizer alone; `options` are "device" and "dtype"."""
    with _no_garbage():
        _before_loading(model)
        from locret_stream.runtime import Runtime

        return Runtime.from_pretrained(model, **options).load()


def bound_threads() -> None:
    """Let torch compute with no more threads than there are cores for this process, unless OMP_NUM_THREADS is set."""
    import torch

    cores = usable_cores()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """A block that imports and loads without a search for garbage, which would take a seventh of the time for hardly
    any; and nothing that is there behind it is searched again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def _quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # it will be said when it is needed
        work()


def _before_loading(model: str) -> None:
    """Import torch and transformers without what they would print, bound the threads, and say where a hub is asked."""
    named = named_model(model)
    if named is not None and named.ahead is not None:
        threading.Thread(target=_quietly, args=(named.ahead,), name="locret-ahead", daemon=True).start()
    import_quickly()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    bound_threads()
    if named is None and not Path(model).exists() and model.count("/") < 2:
        err.print(f"{model} is no folder here: asking the Hugging Face hub.", soft_wrap=True)
