"""Loading a model and its tokenizer from a folder or the hub, on a device, in a data type."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from locret_stream.errors import ConfigError, UnsupportedModel
from locret_stream.named_models.one_at_a_time import one_at_a_time
from locret_stream.runtime.valueless import quick_arithmetic

T = TypeVar("T")
LOADERS = {"gptq": ("gptqmodel", "optimum", "accelerate"), "awq": ("gptqmodel", "accelerate")}
"""By quantisation the packages that transformers needs, where it does not name all of them."""
_OBJECTS = ("config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
KINDS = ("cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_device(device: str | Mapping[str, Any] | None) -> str | Mapping[str, Any]:
    """A device that can be used here. None: CUDA where there is one, else the CPU. "auto" and devices by module are
    left to transformers, which needs accelerate for them.

    Raises:
        ConfigError: it cannot be used.
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
        kind = torch.empty(0, device=device).device.type
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ConfigError(f"device is {device!r}, which cannot be used here; expected {best!r}"
                          f"{' or cpu' if best != 'cpu' else ' (torch finds no CUDA)'}") from error
    if kind not in KINDS:
        raise ConfigError(f"device is {device!r}, which this library has no kernels for; expected {' or '.join(KINDS)}")
    return device


def check_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype of weights by its name, or "auto".

    Raises:
        ConfigError: no such dtype.
    """
    chosen = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if chosen != "auto" and chosen not in DTYPES.values():
        raise ConfigError(f"dtype is {dtype!r}; expected 'auto', 'float32', 'bfloat16' or 'float16'")
    return chosen


def load_model(path: str | Path, dtype: str | torch.dtype, device: str | Mapping[str, Any],
               quantization: Any = None) -> Any:
    """The language model in a folder or a GGUF file, ready to answer; of a multimodal model what text needs, as images
    are not read.

    Args:
        dtype: "auto" is the checkpoint's own; on a CPU see `cpu_dtype`, unless it is quantised.
        device: one device, or a `device_map` of transformers: "auto", or devices by module.
        quantization: a quantiser's config of transformers, applied while loading.

    Raises:
        UnsupportedModel: it cannot be loaded.
    """
    with (one_at_a_time(), readable(path, "configuration and weights"),
          _no_bar() if _loads_at_once(path) else contextlib.nullcontext()):
        source, options = source_of(path)
        spread = device == "auto" or isinstance(device, Mapping)
        declared = {} if options else _declared(base_of(path))
        packing = quantization if quantization is not None else declared.get("quantization_config")
        packed = packing is not None
        _expect_loader(packing)
        if quantization is not None:
            options["quantization_config"] = quantization
        if dtype == "auto" and device == "cpu" and not packed:
            dtype = cpu_dtype(dtype_of(declared))
        if spread or (packed and importlib.util.find_spec("accelerate")):  # packed weights cannot always be moved
            options["device_map"] = device if spread else {"": device}
        with quick_arithmetic():
            kind = class_of(None if options else config_of(path, options), options)
            loaded: Any = kind.from_pretrained(source, dtype=dtype, output_loading_info=True,
                                                                   **options)
        model, info = loaded  # a pair, because of output_loading_info; its annotation says a model
        missing = sorted(info["missing_keys"])
        if missing and not packed and "gguf_file" not in options:  # transformers draws them at random, and goes on
            raise ValueError(f"its weights lack {len(missing)} tensors, the first {missing[0]!r}; expected a whole "
                             "checkpoint: download or copy the folder again")
        if "device_map" not in options:
            drop_towers(model)
        return (model if "device_map" in options else model.to(device)).eval()


def config_of(path: str | Path, options: Mapping[str, Any]) -> Any:
    """The config of a checkpoint, of an adapter that of its base; `options` as `source_of` has them."""
    from transformers import AutoConfig
    return AutoConfig.from_pretrained(Path(path).parent if options else base_of(path), **options)


def class_of(config: Any, options: Mapping[str, Any]) -> Any:
    """The class of transformers that loads the model of a checkpoint with that config: of a multimodal one its text
    alone, where there is such a class; of a text config that no such class is listed for, the class that the checkpoint
    names."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    if "gguf_file" in options:
        return AutoModelForCausalLM
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:  # `.keys()` would import the config of every model
            return auto
    named = (getattr(config, "architectures", None) or [""])[0]
    known = getattr(transformers, named, None) if named.endswith(("ForCausalLM", "ForConditionalGeneration")) else None
    return AutoModelForCausalLM if known is None else known


def drop_towers(model: Any) -> None:
    """Take out of a multimodal model what reads images and sounds: it takes memory, and text does not need it. Its
    weights lie in mapped files, so that they were not read yet. What embeds ids from an offset in the vocabulary on is
    small, and stays: the model asks it which of a text's ids are its own (Gemma 3n)."""
    from torch import nn

    from locret_stream.models.decoders import decoder_of, head_of
    base = getattr(model, model.base_model_prefix, model)
    decoder = decoder_of(model) if hasattr(model, "get_decoder") else None
    if not isinstance(base, nn.Module) or not isinstance(decoder, nn.Module) or base is decoder:
        return
    needed = decoder, head_of(model)
    for name, child in list(base.named_children()):
        if any(True for _ in child.parameters()) and not hasattr(child, "vocab_offset") and not any(
                each is module for module in child.modules() for each in needed):
            setattr(base, name, None)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model; for the folder of an adapter that has none, the tokenizer of its base model.

    Raises:
        UnsupportedModel: it cannot be loaded.
    """
    from transformers import AutoTokenizer
    with readable(path, "tokenizer files"):
        source, options = source_of(path)
        if not list(Path(path).glob("tokenizer*")):
            source = base_of(source)
        return AutoTokenizer.from_pretrained(source, **options)


def source_of(path: str | Path) -> tuple[str | Path, dict[str, Any]]:
    """What transformers is to load from, and its options for that."""
    if str(path).endswith(".gguf") and Path(path).is_file():
        missing = [name for name in ("gguf", "accelerate") if not importlib.util.find_spec(name)]
        if missing:
            raise ImportError(f"GGUF files need {' and '.join(missing)}, which are not installed here: pip install "
                              "'locret-stream[gguf]'")
        return Path(path).parent, {"gguf_file": Path(path).name}
    return path, {}


def base_of(path: str | Path) -> str | Path:
    """The base model of the adapter in a folder that PEFT wrote; for any other path, the path itself."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return path
    if not importlib.util.find_spec("peft"):
        raise ImportError("the folder of an adapter needs peft, which is not installed here: pip install "
                          "'locret-stream[peft]'")
    config = json.loads(file.read_bytes())
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str):
        raise ValueError(f"{file} names no base model; expected base_model_name_or_path in it, as PEFT writes it")
    return base


def _declared(path: str | Path) -> dict[str, Any]:
    """The config of the checkpoint, as it is stored; empty where it cannot be read and loading will fail."""
    from transformers import PreTrainedConfig
    with contextlib.suppress(OSError, ValueError):
        return dict(PreTrainedConfig.get_config_dict(path)[0])
    return {}


def dtype_of(declared: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of the weights of a config's language model; None where it names none that we know."""
    text = declared.get("text_config")
    configs = [*([text] if isinstance(text, Mapping) else []), declared]
    name = next((config[key] for config in configs for key in ("dtype", "torch_dtype") if config.get(key)), None)
    return DTYPES.get(str(name).removeprefix("torch."))


def cpu_dtype(own: torch.dtype | None) -> torch.dtype:
    """The dtype that "auto" means on a CPU for a checkpoint of the dtype `own` (None: a GGUF file, or unknown).

    It is bfloat16 for one in half precision where the CPU has instructions for it, which is then twice as fast, else
    float32."""
    return torch.bfloat16 if own in (torch.bfloat16, torch.float16) and cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies matrices of bfloat16 by instructions of its own (AVX512-BF16, AMX, Arm BF16). torch
    computes with bfloat16 on others, too, but no faster than with float32."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) if torch.backends.mkldnn.is_available() else False
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def _expect_loader(packing: Any) -> None:
    method = packing.get("quant_method") if isinstance(packing, Mapping) else getattr(packing, "quant_method", None)
    method = str(getattr(method, "value", method))
    missing = [name for name in LOADERS.get(method, ()) if not importlib.util.find_spec(name)]
    if missing:
        raise ImportError(f"{method.upper()} checkpoints need {' and '.join(missing)}, not installed here: "
                          f"pip install {' '.join(missing)}, or take the plain checkpoint of the same base")


def _loads_at_once(path: str | Path) -> bool:
    """Whether this is the folder of a model so small that a progress bar would only flicker."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) < 2**29


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """Without transformers' progress bar."""
    from transformers.utils import logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def readable(path: str | Path, files: str) -> Iterator[None]:
    """Loading errors as UnsupportedModel, with what to do. Where files were not downloaded whole, transformers,
    tokenizers and PEFT raise errors of any kind."""
    try:
        yield
    except Exception as error:
        hub = "" if Path(path).expanduser().exists() else " (no such folder is here: taken for a hub id)"
        clear = isinstance(error, (OSError, ValueError, ImportError, RuntimeError))
        why = str(error) if clear else f"{type(error).__name__} in its {files}: {error}"
        damaged = _damaged(Path(path).expanduser())
        if damaged:
            why += f"; damaged: {'; '.join(damaged)}: download or copy the folder again"
        raise UnsupportedModel(f"{path} cannot be loaded as a causal language model with its tokenizer{hub}: {why}; "
                               'expected a folder with config.json, weights and tokenizer files, that of an adapter, a '
                               'GGUF file, a hub id, "smollm2" or "bundled"') from error


def _damaged(folder: Path) -> list[str]:
    """The files of a folder that are not what their names say, each with the reason."""
    damaged = []
    for path in sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            elif not isinstance(json.loads(path.read_bytes()), dict) and path.name in _OBJECTS:
                raise ValueError("it holds no JSON object")
        except (OSError, ValueError, SafetensorError) as error:
            damaged.append(f"{path.name} ({error})")
    return damaged


def in_passing(work: Callable[[], T]) -> T:
    """The result of `work`, run in another thread. Ctrl-C does not wait for it: the thread ends with the process."""
    done: Future[T] = Future()
    threading.Thread(target=_settle, args=(done, work), name="locret-start", daemon=True).start()
    try:
        return done.result()
    finally:
        del done  # an error refers to the frames that it passed: through this one to itself, and to the model


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    finally:
        del done
