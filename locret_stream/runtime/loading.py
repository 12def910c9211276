"""Loading a model and its tokenizer from a folder or the hub, and the folder of the bundled one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from locret_stream.errors import ConfigError, UnsupportedModel

T = TypeVar("T")
BUNDLED = Path(__file__).parents[1] / "assets" / "bundled"


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_device(device: str | None) -> str:
    """A device that can be used here; None: CUDA where there is one, else the CPU.

    Raises:
        ConfigError: it cannot.
    """
    best = "cuda" if torch.cuda.is_available() else "cpu"
    if device is None:
        return best
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ConfigError(f"device is {device!r}, which cannot be used here; expected {best!r}"
                          f"{' or cpu' if best != 'cpu' else ' (torch finds no CUDA)'}") from error
    return device


def check_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype of weights by its name, or "auto".

    Raises:
        ConfigError: no such dtype.
    """
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found != "auto" and found not in DTYPES.values():
        raise ConfigError(f"dtype is {dtype!r}; expected 'auto', 'float32', 'bfloat16' or 'float16'")
    return found


def load_model(path: str | Path, dtype: str | torch.dtype, device: str) -> Any:
    """The causal language model in a folder, ready to answer.

    Raises:
        UnsupportedModel: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM
    with _readable(path), _no_bar() if path == BUNDLED else contextlib.nullcontext():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def load_tokenizer(path: str | Path) -> Any:
    """Its tokenizer.

    Raises:
        UnsupportedModel: it cannot be loaded.
    """
    from transformers import AutoTokenizer
    with _readable(path):
        return AutoTokenizer.from_pretrained(path)


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """Without transformers' progress bar: for a model that loads in a blink."""
    from transformers.utils import logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """Loading errors as UnsupportedModel, with what to do."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise UnsupportedModel(f"{path} cannot be loaded as a causal language model with its tokenizer: {error}; "
                               'expected a folder with config.json, weights and tokenizer files, a hub id, or "bundled"'
                               ) from error


def in_passing(work: Callable[[], T]) -> T:
    """The result of `work` in a thread of its own. Ctrl-C does not wait for it: the thread ends with the process."""
    done: Future[T] = Future()
    threading.Thread(target=_settle, args=(done, work), name="locret-start", daemon=True).start()
    try:
        return done.result()
    finally:
        del done  # an error holds the frames it went through: with this it would hold itself, and the model


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    finally:
        del done
