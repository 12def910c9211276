"""What a policy is: it declares its needs, scope and state, and turns tensors into scores. It never sees a store.

At every commit the engine asks for scores once per layer. A static policy scores the T new units; a stateful one
returns scores for all n + T units of the layer, the held ones first. Higher is kept longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from locret_stream.config import ModelShape


@dataclass(slots=True)
class Chunk:
    """One layer at one commit. H KV heads, T new tokens, n held units.

    q [H*G, T, D], k and v [H, T, D] before RoPE; `keys` [H, n+T, D] before RoPE, held ones first; `scores` [P, H, n]
    of the held units; `start` is the absolute position of the first new token. `column_sums` gives [H, n+T], and
    `logprobs` [T] is log p(token | everything before it), nan for the first token of a stream; each is there only if
    declared in `needs`. `state` holds the context's tensors that `begin` made, to be replaced, never written into.
    """

    layer: int
    start: int
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    scores: Tensor
    column_sums: Callable[[], Tensor] | None = None
    logprobs: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)


class Policy:
    """Base of all policies.

    Class attributes:
        name: in the registry and in snapshots.
        needs: of "qkv", "keys", "column_sums", "token_logprob".
        scope: "head" scores [H, ...], "layer" [1, ...] for all heads of a layer, "model" [1, ...] for all layers.
        stateful: returns scores of held units too.
        bounded: False never serves an endless stream.
        planes: fp32 numbers per unit, the score first; more than one returns [P, H, ...].
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[Literal["head", "layer", "model"]] = "head"
    stateful: ClassVar[bool] = False
    bounded: ClassVar[bool] = True
    planes: ClassVar[int] = 1

    knobs: Mapping[str, float | int | str | bool] = {}  # all of them, defaults included; `make_policy` sets it

    def begin(self, shape: ModelShape) -> dict[str, Tensor]:
        """Tensors of a new context; they fork and snapshot with it."""
        return {}

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        """Sinks and stabilizers of a layer of `budget` units; methods that always keep recent units raise them."""
        return sinks, stabilizers

    def score(self, chunk: Chunk) -> Tensor:
        """[H or 1, T] fp32 for a static policy, [H or 1, n + T] for a stateful one."""
        raise TypeError(f"{type(self).__name__} does not define score")
