"""RetainingHeads: one two-layer network per model layer; files are safetensors + JSON. Knows no model code.

    score = fc2(act(fc1([q; k; v])))        (Locret, arXiv:2410.01805, section 3.2)

q, k, v are taken before RoPE, and after q/k-norm on models that have it. With `features="hidden"` heads read the input
of the layer's attention module instead (KVzap, arXiv:2601.07891). With `output="retention"` their output is the log
odds of beta, the factor on a unit's score at every token (TRIM-KV, arXiv:2512.03324).
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.activations import ACT2FN

from locret_stream.config import MOST_SHARES, ModelShape
from locret_stream.errors import ConfigError, HeadsMismatch
from locret_stream.files import replace
from locret_stream.heads.published import infer_sizes, read_published
from locret_stream.kernels import score_units
from locret_stream.kernels.reference import project

_log = logging.getLogger(__name__)
WEIGHTS, CONFIG, MEANS = "heads.safetensors", "heads.json", "key_means.safetensors"
VERSION = 1
MOST = 1 << 18  # of any count in a config: far above any model, and a damaged file must not allocate all memory
KIN_BITS = 32  # of 128: sketches of unrelated models differ in half, and in so few by chance once in 10^8 times


class HeadsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How heads were made and for which model. New fields always have a default.

    features: "qkv", or "hidden" of the size `hidden`. output: "score" or "retention". See the module for both.
    query_tokens: length of the focus in front of every training example, 0 for none (the query of Locret-Q).
    budget_shares: how a budget is divided over layers, in relative shares [L]; None: equally.
    trained_layers: layers that have a head, None for all; in the others every unit scores 0, so that the newest stay.
    fingerprint: of the model as it was, its packed weights and active adapters included.
    sketch: of the model's base, the same for every packing (`models.weights.sketch`). Older files have none.
    form: the model's quantisation and active adapters in words, "" for a plain one. Older files have none.
    kernel: odd width in tokens of the average that policy `locret` takes of the scores of neighbours in a chunk, so
        that words of one fact stay together. Unset, as in older files: none.
    value_dim: numbers of a value. Unset, as in older files: as many as of a key, `head_dim`.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    width: int = 1024
    act: str = "silu"
    input_norm: bool = False
    bias: bool = False
    label: str = "logprob"
    pooling: str = "max"
    alpha: float = 2.5e-3
    fingerprint: str = ""
    head_input: str = "pre-rope, post-norm"
    budget_shares: tuple[float, ...] | None = None
    trained_layers: tuple[int, ...] | None = None
    features: Literal["qkv", "hidden"] = "qkv"
    hidden: int = 0
    output: Literal["score", "retention"] = "score"
    query_tokens: int = 0
    version: int = VERSION
    sketch: str | msgspec.UnsetType = msgspec.UNSET
    form: str | msgspec.UnsetType = msgspec.UNSET
    kernel: int | msgspec.UnsetType = msgspec.UNSET
    value_dim: int | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(f"heads: found version {self.version}; expected {VERSION}: a later version needs a newer "
                              "locret-stream")
        for name in ("layers", "query_heads", "kv_heads", "head_dim", "width"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ConfigError(f"heads: {name} is {getattr(self, name)}; expected 1 to {MOST}")
        if self.kernel is not msgspec.UNSET and not (1 <= self.kernel <= MOST and self.kernel % 2 == 1):
            raise ConfigError(f"heads: kernel is {self.kernel}; expected an odd number of tokens from 1, or none")
        if self.value_dim is not msgspec.UNSET and not 0 <= self.value_dim <= MOST:
            raise ConfigError(f"heads: value_dim is {self.value_dim}; expected 0 to {MOST}, or none")
        if self.features == "hidden" and not 1 <= self.hidden <= MOST:
            raise ConfigError(f"heads: hidden is {self.hidden}; expected the size of the hidden states that they read")
        if self.sketch and not re.fullmatch("[0-9a-f]{32}", self.sketch):
            raise ConfigError(f"heads: sketch is {self.sketch[:40]!r}; expected 32 hexadecimal digits")
        shares = self.budget_shares
        if shares is not None and not (len(shares) == self.layers and all(s > 0 for s in shares)
                                       and sum(shares) < MOST_SHARES):
            raise ConfigError(f"heads: found budget_shares {list(shares)}; expected {self.layers} numbers above 0, one "
                              f"per layer, together below {MOST_SHARES:g}: leave them out for the same units in each")

    @property
    def in_features(self) -> int:
        if self.features == "hidden":
            return self.hidden
        value_dim = self.head_dim if self.value_dim is msgspec.UNSET else self.value_dim
        return (self.query_heads + self.kv_heads) * self.head_dim + self.kv_heads * value_dim

    @property
    def layers_with_head(self) -> tuple[int, ...]:
        return tuple(range(self.layers)) if self.trained_layers is None else self.trained_layers

    def has_head(self, layer: int) -> bool:
        return self.trained_layers is None or layer in self.trained_layers


def kin(one: str, other: str) -> bool:
    """Whether two sketches are of one base model, which may be quantised or fine-tuned in either."""
    return (int(one, 16) ^ int(other, 16)).bit_count() <= KIN_BITS


def write_key_means(folder: str | os.PathLike[str], means: Tensor) -> None:
    """Write means [L, H, D] beside heads, by an atomic replacement. Raises OSError."""
    stored = means.detach().float().cpu().contiguous()
    replace(Path(folder) / MEANS, lambda path: save_file({"key_means": stored}, path, metadata={"format": "pt"}))


def _read_means(path: Path, config: HeadsConfig) -> Tensor:
    """The means of a file. Raises HeadsMismatch: it holds anything else. SafetensorError, OSError: it is none."""
    tensors = load_file(path)
    if tensors.keys() != {"key_means"}:
        raise HeadsMismatch(f"{path} holds {sorted(tensors)}; expected key_means alone: remove that file, and each "
                            "context takes means of its own")
    _expect_means(tensors["key_means"], config, str(path))
    return tensors["key_means"]


def _expect_means(means: object, config: HeadsConfig, where: str) -> None:
    """Raises HeadsMismatch: anything but finite numbers of the shape that these heads have."""
    expected = (config.layers, config.kv_heads, config.head_dim)
    found = (tuple(means.shape), means.dtype) if isinstance(means, Tensor) else type(means).__name__
    if not isinstance(means, Tensor) or found != (expected, torch.float32) or not torch.isfinite(means).all():
        raise HeadsMismatch(f"key_means of {where}: found {found}; expected {expected} of finite float32 numbers, "
                            "or none, and each context takes means of its own")


class RetainingHeads(nn.Module):
    """Scores units of every layer that has a head. `fc1[l]`: in_features -> width, `fc2[l]`: width -> H.

    Attributes:
        key_means: of the model's keys before RoPE, [L, H, D] fp32, which units in few bits are coded without
            (`training.store_key_means`); None: not measured. They are no part of what scores, nor of its digest.
    """

    def __init__(self, config: HeadsConfig):
        super().__init__()
        self.config = config
        self.key_means: Tensor | None = None
        if config.act not in ACT2FN:
            raise ConfigError(f"heads: activation {config.act!r}; expected one that transformers knows")
        self.act = ACT2FN[config.act]
        if config.trained_layers == ():
            raise ConfigError("heads: trained_layers is empty; expected a layer at least, or None for all")
        unknown = sorted(set(config.trained_layers or ()) - set(range(config.layers)))
        if unknown:
            raise ConfigError(f"heads: trained_layers names layer {unknown[0]}; expected 0 to {config.layers - 1}")
        # Layers without a head have an Identity, which has no parameters, so that the file has nothing of them.
        self.fc1 = nn.ModuleList(nn.Linear(config.in_features, config.width, bias=config.bias, dtype=torch.float32)
                                 if config.has_head(layer) else nn.Identity() for layer in range(config.layers))
        self.fc2 = nn.ModuleList(nn.Linear(config.width, config.kv_heads, bias=config.bias, dtype=torch.float32)
                                 if config.has_head(layer) else nn.Identity() for layer in range(config.layers))

    def score(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        """q [B, H*G, T, D], k and v [B, H, T, D], all before RoPE -> [B, H, T] fp32; higher scores stay longer.

        Heads of `features="hidden"` read `hidden` [B, T, hidden] instead.
        """
        if not self.config.has_head(layer):
            return k.new_zeros(k.shape[:3], dtype=torch.float32)
        if self.config.features == "hidden":
            assert hidden is not None, "heads of features='hidden' read hidden states"
            return self.forward(layer, hidden)
        if len(q) == 1 and v.shape == k.shape and not self.config.input_norm and not torch.is_grad_enabled():
            fc1, fc2 = self.fc1[layer], self.fc2[layer]
            return score_units(q[0], k[0], v[0], fc1.weight, fc2.weight, self.act, fc1.bias, fc2.bias)[None]
        x = torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], dim=-1)
        return self.forward(layer, x)

    def forward(self, layer: int, x: Tensor) -> Tensor:
        """x [B, T, in_features], which is [q; k; v] or hidden -> [B, H, T] fp32; 0 in a layer without a head."""
        fc1, fc2 = self.fc1[layer], self.fc2[layer]
        if not (isinstance(fc1, nn.Linear) and isinstance(fc2, nn.Linear)):
            return x.new_zeros(x.shape[0], self.config.kv_heads, x.shape[1], dtype=torch.float32)
        x = x.to(fc1.weight.dtype)
        if self.config.input_norm:
            x = nn.functional.layer_norm(x, x.shape[-1:])
        return project(self.act(fc1(x)), fc2.weight, fc2.bias)

    def averaged(self, scores: Tensor) -> Tensor:
        """Scores [B, H, T] of tokens side by side, at inference those of a chunk -> each the mean of its neighbours
        among them, see `HeadsConfig.kernel`."""
        kernel = self.config.kernel
        if kernel is msgspec.UNSET or kernel == 1:
            return scores
        return nn.functional.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2, count_include_pad=False)

    def save(self, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Write heads.safetensors, heads.json and, where there are means, key_means.safetensors, each by an atomic
        replacement. Raises OSError."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: (t.to(dtype) if dtype else t).detach().cpu().contiguous()
                   for name, t in self.state_dict().items()}
        config = msgspec.json.format(msgspec.json.encode(self.config), indent=2)
        replace(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        replace(folder / CONFIG, lambda path: path.write_bytes(config))
        if self.key_means is not None:
            write_key_means(folder, self.key_means)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], weights: str = WEIGHTS) -> RetainingHeads:
        """Read a folder written by `save`; fp32, eval mode. `weights`: the name of another file of such tensors in it.

        Raises:
            HeadsMismatch: files are missing, unreadable, or have other tensors than the config says.
        """
        folder = Path(folder)
        if not (folder / weights).is_file():
            raise HeadsMismatch(f"no {weights} in {folder}; expected a folder written by `train-heads`")
        config = cls.read_config(folder)
        try:
            tensors = load_file(folder / weights)
            with torch.device("meta"):  # sizes are compared before memory is allocated
                cls(config).expect_tensors(tensors)
            heads = cls(config)
            heads.load_strictly(tensors)
            if os.path.lexists(folder / MEANS):
                heads.key_means = _read_means(folder / MEANS, config)
        except (SafetensorError, OSError) as error:
            raise HeadsMismatch(f"{folder} cannot be read as retaining heads: {error}") from error
        return heads.float().eval()

    @staticmethod
    def read_config(folder: str | os.PathLike[str]) -> HeadsConfig:
        """The config of the heads in a folder, without their weights. Raises HeadsMismatch."""
        path = Path(folder) / CONFIG
        if not path.is_file():
            raise HeadsMismatch(f"no {CONFIG} in {path.parent}; expected a folder written by `train-heads`")
        try:
            return msgspec.json.decode(path.read_bytes(), type=HeadsConfig)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HeadsMismatch(f"{path.parent} cannot be read as retaining heads: {error}") from error

    def load_strictly(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors of exactly the expected names and shapes, or raise HeadsMismatch and change nothing."""
        self.expect_tensors(tensors)
        self.load_state_dict({name: t.float() for name, t in tensors.items()})

    def expect_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Raises HeadsMismatch unless names, shapes and dtypes are those of these heads, and all numbers are finite."""
        expected = {name: tuple(t.shape) for name, t in self.state_dict().items()}
        found = {name: tuple(t.shape) for name, t in tensors.items()}
        if expected != found:
            wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            name = wrong[0]
            raise HeadsMismatch(f"{len(wrong)} tensors do not fit, first {name!r}: found {found.get(name, 'none')}, "
                                f"expected {expected.get(name, 'none')}")
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise HeadsMismatch(f"{name!r} is of {tensor.dtype}; expected floating point numbers")
            if not torch.isfinite(tensor.float()).all():
                raise HeadsMismatch(f"{name!r} holds values that are not finite; expected the file as it was written")

    def check_fits(self, shape: ModelShape, fingerprint: str = "", sketch: str = "", form: str = "") -> None:
        """Refuse a model for which these heads were not made; the fingerprint "" is not checked.

        Another packing of the same base, or the base with an adapter, is accepted with a warning: its K and V are close
        to those that the heads were trained on.

        Args:
            sketch: of the model's base. form: its quantisation and adapters in words; "" for a plain model.

        Raises:
            HeadsMismatch: names the first tensor with both shapes, or both fingerprints.
        """
        width, unit = self.config.width, shape.one_unit("retaining heads")
        features = (shape.hidden if self.config.features == "hidden" else
                    unit.kv_heads * ((unit.groups + 1) * unit.key_dim + unit.value_dim))
        layers = [n for n in range(shape.layers) if n >= self.config.layers or self.config.has_head(n)]
        expected = {f"fc1.{n}.weight": (width, features) for n in layers}
        expected |= {f"fc2.{n}.weight": (unit.kv_heads, width) for n in layers}
        found = {name: tuple(t.shape) for name, t in self.state_dict().items() if name.endswith(".weight")}
        for name in sorted(expected.keys() | found.keys(), key=lambda n: (int(n.split(".")[1]), n)):
            if expected.get(name) != found.get(name):
                raise HeadsMismatch(f"retaining heads of another model: {name!r} is {found.get(name, 'missing')}, this "
                                    f"model needs {expected.get(name, 'none')}; train heads for it with "
                                    "`locret-stream train-heads`")
        if self.config.layers > shape.layers:
            raise HeadsMismatch(f"retaining heads of another model: they are for {self.config.layers} layers, this "
                                f"model has {shape.layers}; train heads for it with `locret-stream train-heads`")
        if self.key_means is not None:
            _expect_means(self.key_means, self.config, "these heads")
        trained_on = self.config.fingerprint
        if not trained_on or not fingerprint or trained_on == fingerprint:
            return
        trained_form, trained_sketch = self.config.form or "", self.config.sketch or ""
        if (form or trained_form) and (not sketch or not trained_sketch):
            _log.warning("retaining heads that were trained for %s serve a model in another form (%s): whether it "
                         "is of the same base cannot be checked, as these heads have no sketch", trained_on, form)
        elif (form or trained_form) and kin(sketch, trained_sketch):
            _log.warning("retaining heads that were trained on their model as %s serve the same base as %s: what they "
                         "keep may be a little worse", trained_form or "plain weights", form or "plain weights")
        else:
            raise HeadsMismatch("retaining heads of another model of the same shape: they were trained for "
                                f"{trained_on}, this model is {fingerprint}; train heads for it with `locret-stream "
                                "train-heads`")

    @classmethod
    def from_published(cls, path: str | os.PathLike[str], *, query_heads: int | None = None,
                       kv_heads: int | None = None, head_dim: int | None = None, shape: ModelShape | None = None,
                       act: str = "silu", fingerprint: str = "") -> RetainingHeads:
        """Heads in the layout their authors publish (`model.layers.N.self_attn.fc1.weight`); fp32, eval mode.

        Args:
            path: a .bin (read with `weights_only=True`) or .safetensors, or a folder that holds just one.
            query_heads, kv_heads, head_dim: of the model; query_heads or head_dim is needed, the others follow from
                the shapes. All that are given must agree with these.
            shape: of the attached model, in place of the three.
            act: the model's `hidden_act`. fingerprint: of the model, which is stored with the heads; "": unknown.

        Raises:
            HeadsMismatch: anything else than exactly that layout, by name and shape.
            ConfigError: sizes that do not follow from the shapes, or an unknown activation.
        """
        tensors = read_published(path)
        if shape is not None:
            unit = shape.one_unit("retaining heads")
            kv_heads, head_dim, query_heads = unit.kv_heads, unit.key_dim, unit.query_heads
        sizes = infer_sizes(tensors, layers=None if shape is None else shape.layers, query_heads=query_heads,
                            kv_heads=kv_heads, head_dim=head_dim)
        heads = cls(HeadsConfig(layers=sizes["layers"], query_heads=sizes["query_heads"], kv_heads=sizes["kv_heads"],
                                head_dim=sizes["head_dim"], width=sizes["width"], act=act, label="logit",
                                fingerprint=fingerprint))
        heads.load_strictly(tensors)
        return heads.float().eval()
