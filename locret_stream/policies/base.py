"""The interface of policies: a policy declares its needs, scope and state, and turns tensors into scores.

At every commit the engine asks for scores once per layer. A static policy scores the T new units; a stateful one
scores all n + T units of the layer, the n kept ones first. Units with higher scores stay longer. A policy never sees a
store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from locret_stream.config import ModelShape
from locret_stream.errors import ConfigError

NEEDS = frozenset({"qkv", "hidden", "keys", "positions", "column_sums", "token_logprob"})


class ColumnSums(Protocol):
    """The type of `Chunk.column_sums`."""

    def __call__(self, rows: slice | Tensor | None = None, *, above_mean: bool = False) -> Tensor: ...


@dataclass(slots=True)
class Chunk:
    """One layer at one commit: H KV heads, T new tokens, n kept units.

    Always present: q [H*G, T, D], k and v [H, T, D] before RoPE; `keys` [H, n+T, D] before RoPE and `scores` [P, H, n],
    kept units first; `start`, the absolute position of the first new token; `budget`, how many of the n+T units stay,
    among them the first `sinks` and the last `stabilizers`; `state`, the tensors of the context that `begin` made: a
    policy replaces them and never writes into them. Where units are in few bits, a policy that declares `token_logprob`
    and not `keys` gets no keys. Present if declared in `needs`:

    hidden: [T, hidden], the input of the layer's attention module, after its norm.
    positions: [H, n+T] int64, absolute and ascending.
    column_sums: softmax attention that units receive, [H, n+T] fp32: from all T queries, or those of the chunk's
        `rows` (a slice, or indices [R]); `above_mean` counts queries in place of summing (see `reduced_attention`).
    logprobs: [T], log p(token | everything before it), nan for the first token of a stream.
    """

    layer: int
    start: int
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    scores: Tensor
    budget: int
    sinks: int
    stabilizers: int
    hidden: Tensor | None = None
    positions: Tensor | None = None
    column_sums: ColumnSums | None = None
    logprobs: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)


class Policy:
    """Base of all policies.

    Class attributes:
        name: its name in the registry and in snapshots.
        needs: a subset of `NEEDS`.
        scope: "head": scores [H, ...] (or [1, ...]); "layer": [1, ...] for all heads of a layer; "model": [1, ...], the
            same in every layer.
        stateful: whether it scores kept units, too. alone: whether such a policy scores each head by what that head
            has, so that heads with different numbers of units can be scored one at a time, each as a layer of one head.
        bounded: False for a policy that never evicts, so that its streams end.
        planes: how many score planes it has. A score plane is one fp32 number per unit, which is kept, moved and saved
            with the unit; the first is the score. With more than one, `score` returns [P, H, ...].
        features, output: of the retaining heads that it scores with, if any (see `HeadsConfig`); features None: any.
    """

    name: str
    needs: frozenset[str] = frozenset()
    scope: Literal["head", "layer", "model"] = "head"
    stateful: bool = False
    alone: ClassVar[bool] = False
    bounded: bool = True
    planes: int = 1
    features: ClassVar[str | None] = None
    output: ClassVar[str] = "score"

    knobs: Mapping[str, float | int | str] = {}  # all settings, defaults included; `make_policy` sets it

    def check_knob(self, ok: bool, knob: str, value: object, expected: str) -> None:
        """Raises ConfigError unless `ok`."""
        if not ok:
            raise ConfigError(f"policy {self.name!r}: {knob} is {value!r}; expected {expected}")

    def expect_declared(self) -> None:
        """Raises ConfigError: the policy declares a need or a scope that does not exist."""
        if unknown := self.needs - NEEDS:
            raise ConfigError(f"policy {self.name!r} needs {', '.join(map(repr, sorted(unknown)))}; expected of "
                              f"{', '.join(map(repr, sorted(NEEDS)))}")
        if self.scope not in ("head", "layer", "model"):
            raise ConfigError(f"policy {self.name!r} has scope {self.scope!r}; expected 'head', 'layer' or 'model'")

    def expect_scores(self, scores: Tensor, heads: int, units: int) -> Tensor:
        """Scores of `units` units as [planes, H or 1, units]. Raises ConfigError: their shape is not as declared."""
        full = scores[None] if scores.dim() == 2 and self.planes == 1 else scores
        rows = {heads, 1} if self.scope == "head" else {1}
        if full.dim() != 3 or full.shape[0] != self.planes or full.shape[1] not in rows or full.shape[2] != units:
            planes = f"{self.planes}, " if self.planes > 1 else ""
            raise ConfigError(f"policy {self.name!r} gave scores of shape {list(scores.shape)}; expected [{planes}"
                              f"{' or '.join(map(str, sorted(rows, reverse=True)))}, {units}], as it has scope "
                              f"{self.scope!r} and is {'stateful' if self.stateful else 'static'}")
        return full

    def begin(self, shape: ModelShape) -> dict[str, Tensor]:
        """Tensors of a new context, which are forked and saved with it."""
        return {}

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        """Sinks and stabilizers of a layer of `budget` units; a method that always keeps recent units returns more."""
        return sinks, stabilizers

    def score(self, chunk: Chunk) -> Tensor:
        """[H or 1, T] fp32 for a static policy, [H or 1, n + T] for a stateful one."""
        raise TypeError(f"{type(self).__name__} does not define score")


def can_share(policy: Policy | type[Policy]) -> bool:
    """Whether the KV heads of a layer can share its units with this policy: each head has scores of its own, given once
    or from what that head has."""
    return policy.bounded and policy.scope == "head" and (policy.alone or not policy.stateful)


class Listening(Policy):
    """For measurements, never registered: scores as `inner` does, and calls `heard(chunk, scores)` with its input and
    its scores, at every commit, for each layer with full attention in order. The chunk has what is in `needs`, too."""

    def __init__(self, inner: Policy, heard: Callable[[Chunk, Tensor], None],
                 needs: frozenset[str] = frozenset({"token_logprob"})):
        self.inner, self.heard = inner, heard
        self.name, self.scope, self.stateful, self.planes = inner.name, inner.scope, inner.stateful, inner.planes
        self.bounded, self.knobs, self.needs = inner.bounded, inner.knobs, inner.needs | needs

    def begin(self, shape: ModelShape) -> dict[str, Tensor]:
        return self.inner.begin(shape)

    def protection(self, budget: int, sinks: int, stabilizers: int) -> tuple[int, int]:
        return self.inner.protection(budget, sinks, stabilizers)

    def score(self, chunk: Chunk) -> Tensor:
        scores = self.inner.score(chunk)
        self.heard(chunk, scores)
        return scores
