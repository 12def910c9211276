"""Loading a model and its tokenizer from a folder or the hub, and the folder of the bundled one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from locret_stream.errors import ConfigError, UnsupportedModel

T = TypeVar("T")
BUNDLED = Path(__file__).parents[1] / "assets" / "bundled"

LOADERS = {"gptq": ("gptqmodel", "optimum", "accelerate"), "awq": ("gptqmodel", "accelerate")}
"""By quantisation what transformers needs, where it does not name all of it."""
OBJECTS = ("config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_device(device: str | Mapping[str, Any] | None) -> str | Mapping[str, Any]:
    """A device that can be used here; None: CUDA where there is one, else the CPU. "auto" and devices by module are
    left to transformers, which needs accelerate for them.

    Raises:
        ConfigError: it cannot.
    """
    best = "cuda" if torch.cuda.is_available() else "cpu"
    if device is None:
        return best
    if device == "auto" or isinstance(device, Mapping):
        if not importlib.util.find_spec("accelerate"):
            raise ConfigError(f"device is {device!r}: a model over several devices needs accelerate, which is not "
                              "installed here; expected `pip install accelerate`, or one device")
        return device
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


def load_model(path: str | Path, dtype: str | torch.dtype, device: str | Mapping[str, Any],
               quantization: Any = None) -> Any:
    """The causal language model in a folder or a GGUF file, ready to answer.

    Args:
        dtype: "auto" is the checkpoint's own; on a CPU float32, unless it is quantised.
        device: one, or what transformers takes for `device_map`: "auto", or devices by module.
        quantization: transformers' config of a quantiser, to be applied while loading.

    Raises:
        UnsupportedModel: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM
    with _readable(path, "configuration and weights"), _no_bar() if path == BUNDLED else contextlib.nullcontext():
        source, options = _source(path)
        spread = device == "auto" or isinstance(device, Mapping)
        packing = quantization if quantization is not None else None if options else _packing(_base(path))
        packed = packing is not None
        _expect_loader(packing)
        if quantization is not None:
            options["quantization_config"] = quantization
        if dtype == "auto" and device == "cpu" and not packed:
            dtype = torch.float32
        if spread or (packed and importlib.util.find_spec("accelerate")):  # what is packed cannot always be moved
            options["device_map"] = device if spread else {"": device}
        model, told = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
        missing = sorted(told["missing_keys"])
        if missing and not packed and "gguf_file" not in options:  # transformers makes them up at random, and goes on
            raise ValueError(f"its weights lack {len(missing)} tensors, the first {missing[0]!r}; expected a whole "
                             "checkpoint: download or copy the folder again")
        return (model if "device_map" in options else model.to(device)).eval()


def load_tokenizer(path: str | Path) -> Any:
    """Its tokenizer; of an adapter's folder without one that of its base.

    Raises:
        UnsupportedModel: it cannot be loaded.
    """
    from transformers import AutoTokenizer
    with _readable(path, "tokenizer files"):
        source, options = _source(path)
        if not list(Path(path).glob("tokenizer*")):
            source = _base(source)
        return AutoTokenizer.from_pretrained(source, **options)


def _source(path: str | Path) -> tuple[str | Path, dict[str, Any]]:
    """What transformers is to load from, and with which options."""
    if str(path).endswith(".gguf") and Path(path).is_file():
        missing = [name for name in ("gguf", "accelerate") if not importlib.util.find_spec(name)]
        if missing:
            raise ImportError(f"GGUF files need {' and '.join(missing)}, which are not installed here: pip install "
                              "'locret-stream[gguf]'")
        return Path(path).parent, {"gguf_file": Path(path).name}
    return path, {}


def _base(path: str | Path) -> str | Path:
    """What the adapter in a folder that PEFT wrote is for, which is loaded with it; of others the path itself."""
    told = Path(path) / "adapter_config.json"
    if not told.is_file():
        return path
    if not importlib.util.find_spec("peft"):
        raise ImportError("the folder of an adapter needs peft, which is not installed here: pip install "
                          "'locret-stream[peft]'")
    config = json.loads(told.read_bytes())
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str):
        raise ValueError(f"{told} names no base model; expected base_model_name_or_path in it, as PEFT writes it")
    return base


def _packing(path: str | Path) -> Any:
    """How the checkpoint says that it is quantised, None if not; what cannot be read fails when it is loaded."""
    from transformers import PreTrainedConfig
    with contextlib.suppress(OSError, ValueError):
        return PreTrainedConfig.get_config_dict(path)[0].get("quantization_config")
    return None


def _expect_loader(packing: Any) -> None:
    method = packing.get("quant_method") if isinstance(packing, Mapping) else getattr(packing, "quant_method", None)
    method = str(getattr(method, "value", method))
    missing = [name for name in LOADERS.get(method, ()) if not importlib.util.find_spec(name)]
    if missing:
        raise ImportError(f"{method.upper()} checkpoints need {' and '.join(missing)}, not installed here: "
                          f"pip install {' '.join(missing)}, or take the plain checkpoint of the same base")


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
def _readable(path: str | Path, files: str) -> Iterator[None]:
    """Loading errors as UnsupportedModel, with what to do: transformers, tokenizers and PEFT raise anything at all of
    files that were not downloaded whole."""
    try:
        yield
    except Exception as error:
        why = "" if Path(path).expanduser().exists() else " (no such folder is here: taken for a hub id)"
        told = isinstance(error, (OSError, ValueError, ImportError, RuntimeError))
        found = str(error) if told else f"{type(error).__name__} in its {files}: {error}"
        damaged = _damaged(Path(path).expanduser())
        if damaged:
            found += f"; damaged: {'; '.join(damaged)}: download or copy the folder again"
        raise UnsupportedModel(f"{path} cannot be loaded as a causal language model with its tokenizer{why}: {found}; "
                               'expected a folder with config.json, weights and tokenizer files, that of an adapter, a '
                               'GGUF file, a hub id, or "bundled"') from error


def _damaged(folder: Path) -> list[str]:
    """The files of a folder that are not what their names say, each with why."""
    found = []
    for path in sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            elif not isinstance(json.loads(path.read_bytes()), dict) and path.name in OBJECTS:
                raise ValueError("it holds no JSON object")
        except (OSError, ValueError, SafetensorError) as error:
            found.append(f"{path.name} ({error})")
    return found


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
