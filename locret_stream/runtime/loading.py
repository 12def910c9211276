"""Loading a model and its tokenizer from a folder or the hub, and the folder of the bundled one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from locret_stream.errors import UnsupportedModel

BUNDLED = Path(__file__).parents[1] / "assets" / "bundled"


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
