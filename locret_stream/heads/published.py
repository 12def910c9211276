"""Retaining heads in the layout that the paper's authors publish. Knows names and shapes.

The published layout is a flat dict in a torch pickle, which is read with `weights_only=True`, or in safetensors:

    model.layers.N.self_attn.fc1.weight   [width, (n_q + 2 * n_kv) * head_dim]
    model.layers.N.self_attn.fc2.weight   [n_kv, width]

for every layer N. There are no biases; labels are raw pre-softmax logits, max-pooled (arXiv:2410.01805).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from locret_stream.errors import ConfigError, HeadsMismatch

_NAME = re.compile(r"model\.layers\.(0|[1-9]\d{0,4})\.self_attn\.(fc[12])\.weight")


def read_published(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a published file, or of the only one in a folder, under the names of RetainingHeads.

    Raises:
        HeadsMismatch: no such file, it is unreadable, or has anything but finite tensors of that layout.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        if len(files) != 1:
            raise HeadsMismatch(f"{path}: found {len(files)} weight files; expected one, or the path of one")
        path = files[0]
    if not path.is_file():
        raise HeadsMismatch(f"no such file: {path}; expected published heads (.bin or .safetensors)")
    try:
        if path.suffix == ".safetensors":
            published = load_file(path)
        else:
            published = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises nearly anything on damaged bytes
        raise HeadsMismatch(f"{path} cannot be read as plain tensors, and code in a pickle is never run: "
                            f"{error}") from error
    if not isinstance(published, dict) or not published:
        raise HeadsMismatch(f"{path}: found {type(published).__name__}; expected a dict of tensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in published.items():
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if not match:
            raise HeadsMismatch(f"{path}: found {name!r}; expected only model.layers.N.self_attn.fc1.weight and fc2")
        if not isinstance(tensor, Tensor) or tensor.dim() != 2 or not tensor.is_floating_point():
            kind = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise HeadsMismatch(f"{path}: {name!r} is {kind}; expected a matrix of floats")
        if not tensor.isfinite().all():
            raise HeadsMismatch(f"{path}: {name!r} holds values that are not finite")
        tensors[f"{match[2]}.{match[1]}.weight"] = tensor
    layers = 1 + max(int(name.split(".")[1]) for name in tensors)
    missing = [f"model.layers.{n}.self_attn.{fc}.weight" for n in range(layers) for fc in ("fc1", "fc2")
               if f"{fc}.{n}.weight" not in tensors]
    if missing:
        raise HeadsMismatch(f"{path}: {len(missing)} tensors are missing, first {missing[0]!r}; expected both of all "
                            f"{layers} layers")
    return tensors


def infer_sizes(tensors: dict[str, Tensor], *, layers: int | None = None, query_heads: int | None = None,
                kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, int]:
    """Sizes as HeadsConfig names them, from the tensors of layer 0 and those that are given, which must agree.

    Raises:
        HeadsMismatch: they do not. ConfigError: neither query_heads nor head_dim was given; shapes give no more than
            their product.
    """
    width, features = tensors["fc1.0.weight"].shape
    outputs = tensors["fc2.0.weight"].shape[0]
    if kv_heads is not None and kv_heads != outputs:
        raise HeadsMismatch(f"'model.layers.0.self_attn.fc2.weight': found {tuple(tensors['fc2.0.weight'].shape)}, "
                            f"expected ({kv_heads}, {width}) for {kv_heads} KV heads")
    found = len(tensors) // 2
    if layers is not None and layers != found:
        name = f"model.layers.{min(layers, found)}.self_attn.fc1.weight"
        raise HeadsMismatch(f"found {found} layers, expected {layers}: {name!r} is "
                            f"{'too many' if found > layers else 'missing'}")
    if head_dim is None:
        if query_heads is None:
            raise ConfigError(f"fc1 reads {features} values and fc2 writes {outputs}; expected query_heads or head_dim "
                              "(or the model's shape), which say how they divide")
        head_dim = features // (query_heads + 2 * outputs)
    if query_heads is None:
        query_heads = features // head_dim - 2 * outputs
    expected = (query_heads + 2 * outputs) * head_dim
    if query_heads < outputs or expected != features:
        raise HeadsMismatch(f"'model.layers.0.self_attn.fc1.weight': found {(width, features)}, expected ({width}, "
                            f"{expected}) for {query_heads} query and {outputs} KV heads of {head_dim} dimensions")
    return {"layers": found, "query_heads": query_heads, "kv_heads": outputs, "head_dim": head_dim, "width": width}
