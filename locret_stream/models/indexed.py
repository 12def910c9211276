"""Layers that choose by an index what they attend to (DeepSeek Sparse Attention, DeepSeek-V3.2). Knows modules of
transformers; knows no store.

Such a layer has an *index key* of each token beside its K and V. The index scores all index keys for a new token, and
the token attends to those units alone that score best: single ones, or whole blocks of neighbours. An index key is part
of a unit: it is stored behind the numbers of K, before RoPE, and so it stays, moves and leaves with its unit. Of up to
`Index.most` units an index chooses all, so that nothing is computed.

What an index computes is the model's own code, run twice in each forward: as far as the new tokens' index keys, before
these are stored; and, once the keys of all units are known, to the choice. Where a layer uses the choice of an earlier
one, its units have copies of that layer's index keys, so that it may keep other units than that layer.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locret_stream.kernels import reference

Embeddings = tuple[Tensor, Tensor]
"""cos and sin of some ranks, [1, ranks, width] each."""


class Index:
    """The index of one attention module, whose forward notes what it is asked from now on.

    Attributes:
        turned_at: how many numbers of a key stand before those that RoPE turns; None: it turns none before they are
            kept.
        asked: what the forward that runs asks it.
    """

    def __init__(self, module: Any):
        self._module, self._plain, self._own = weakref.ref(module), type(module).forward, vars(module).get("forward")
        self._signature = inspect.signature(self._plain)
        self._by_head = False  # whether its cache has a dimension for heads
        self._gives_mask: bool | None = None  # None: it did not run yet
        self.turned_at: int | None = None
        self.asked: Asked | None = None
        module.forward = self._note

    @property
    def most(self) -> int:
        """Units of which all are chosen."""
        most = _most(self._module())
        assert most is not None, "`note_indexes` makes none of others"
        return most

    @property
    def by_places(self) -> bool:
        """Whether positions are, to it, places among its keys (MiniMax M3), and so ranks. Others multiply queries by
        what depends on a token's position in the stream (Mistral Large 4), as attention beside them does."""
        return hasattr(self._module(), "topk_blocks")

    def _note(self, *args: Any, **kwargs: Any) -> Tensor:
        """Takes the place of the module's forward; returns a choice that nobody reads."""
        arguments = self._signature.bind(None, *args, **kwargs).arguments
        del arguments["self"]
        hidden, cache = arguments["hidden_states"], _Cache()
        try:
            self._run(arguments, cache)
        except _Noted:
            pass
        keys = cache.keys
        assert keys is not None, "an index keeps the keys of new tokens"
        self._by_head = keys.dim() == 4
        self.asked = Asked(self, arguments, keys if self._by_head else keys[:, None])
        if self._gives_mask is None:
            first = self.asked.of(0)
            self._gives_mask = first.choice(first.keys[0], arguments.get("position_embeddings")).dtype == torch.bool
        if self._gives_mask:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden.device)
        return torch.zeros(*hidden.shape[:2], 1, dtype=torch.int32, device=hidden.device)

    def choice(self, arguments: dict[str, Any], keys: Tensor) -> Tensor:
        """What the module's forward gives where its cache holds the keys [H, S, I]."""
        return self._run(arguments, _Cache(keys[:, None] if self._by_head else keys))

    def _run(self, arguments: dict[str, Any], cache: _Cache) -> Tensor:
        arguments = arguments | {"past_key_values": cache}
        found: Tensor = self._plain(self._module(), **arguments) if self._own is None else self._own(**arguments)
        return found

    def by_unit(self, choice: Tensor, total: int) -> Tensor:
        """Its choice among `total` units, which is a mask [H, 1, T, S], or numbers of units [H, T, k] or of blocks
        [H, index heads, T, k], negative for none -> bool [H, 1 or index heads, T, S]."""
        if choice.dtype == torch.bool:
            return choice
        size = getattr(self._module(), "block_size", 1) if choice.dim() == 4 else 1
        choice = choice if choice.dim() == 4 else choice[:, None]
        blocks = -(-total // size)
        chosen = torch.zeros(*choice.shape[:-1], blocks + 1, dtype=torch.bool, device=choice.device)
        chosen.scatter_(-1, choice.long().masked_fill(choice < 0, blocks), True)
        return chosen[..., :blocks].repeat_interleave(size, -1)[..., :total]

    def see_turned(self, plain: Tensor, turned: Tensor, embeddings: Embeddings | None) -> bool:
        """Learn by keys [1, 1, T, I] before and after RoPE where it turns them; returns whether that is a rotation of
        halves of the first or the last numbers, or none."""
        self.turned_at = None
        if torch.equal(plain, turned):
            return True
        if embeddings is None:
            return False
        close = 1e-5 if plain.dtype in (torch.float32, torch.float64) else 1e-2
        for at in (0, plain.shape[-1] - embeddings[0].shape[-1]):
            if at >= 0 and torch.allclose(turn(at, plain, *embeddings), turned.to(plain.dtype), rtol=close, atol=close):
                self.turned_at = at
                return True
        return False


def turn(at: int, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Index keys [B, H, T, I] after RoPE of as many of their numbers as cos and sin [B, T, width] have, from the number
    `at` on."""
    stop = at + cos.shape[-1]
    turned = reference.rotate_halves(keys[..., at:stop], cos[:, None], sin[:, None])
    return torch.cat([keys[..., :at], turned.to(keys.dtype), keys[..., stop:]], -1)


@dataclass(slots=True, frozen=True, eq=False)
class Asked:
    """What a forward asks an index: its arguments, among which `keys` [B, 1, T, I] of the new tokens, before RoPE."""

    index: Index
    arguments: dict[str, Any]
    keys: Tensor

    def of(self, row: int) -> Asked:
        """What it asks for one row of the batch."""
        arguments = {name: value[row:row + 1] if isinstance(value, Tensor) and value.shape[:1] == self.keys.shape[:1]
                     else value for name, value in self.arguments.items()}
        return Asked(self.index, arguments, self.keys[row:row + 1])

    def choice(self, keys: Tensor, embeddings: Embeddings | None) -> Tensor:
        """What the index gives for new tokens in one row, which are the last of units with index keys [H, S, I]: each
        head's choice among its own. `embeddings`: of all ranks; None: the layer has no RoPE."""
        (heads, total, _), new = keys.shape, self.keys.shape[2]
        ranks = torch.arange(total, device=keys.device)
        arguments = {name: value.expand(heads, *value.shape[1:]) if isinstance(value, Tensor) and value.dim() else value
                     for name, value in self.arguments.items()}
        mask = arguments.get("attention_mask")
        if mask is not None and mask.dim() > 2:  # else it says which of the new tokens are padding: none
            visible = (ranks <= ranks[total - new:, None]).expand(heads, new, total)
            arguments["attention_mask"] = visible if mask.dim() == 3 else visible[:, None]
        if self.index.by_places and arguments.get("position_ids") is not None:
            arguments["position_ids"] = ranks[total - new:].expand(heads, new)
        if embeddings is not None and "position_embeddings" in arguments:
            # Where keys are kept as they are, the index turns them, if at all, as it reads them.
            first = 0 if self.index.turned_at is None else total - new
            arguments["position_embeddings"] = tuple(each[:, first:total].expand(heads, -1, -1) for each in embeddings)
        return self.index.choice(arguments, keys)

    def visible(self, keys: Tensor, embeddings: Embeddings | None, query_heads: int) -> Tensor:
        """Which units each new token of one row attends to, bool [1, 1 or query heads, T, S]; arguments as for
        `choice`."""
        total, new = keys.shape[1], self.keys.shape[2]
        ranks = torch.arange(total, device=keys.device)
        chosen = self.index.by_unit(self.choice(keys, embeddings), total) & (ranks <= ranks[total - new:, None])
        if chosen.shape[:2] == (1, 1):
            return chosen
        queries = torch.arange(query_heads, device=keys.device)
        heads, of_index = chosen.shape[:2]
        return chosen[queries * heads // query_heads, queries * of_index // query_heads][None]


class _Noted(Exception):
    """An index has given the keys of the new tokens."""


class _Cache:
    """Stands for transformers' cache while an index runs: hands it the keys of all units, those of the new tokens
    included; without these it takes the new ones, and ends the run."""

    def __init__(self, keys: Tensor | None = None):
        self.keys, self._holds = keys, keys is not None

    def update_indexer(self, keys: Tensor, *args: object) -> Tensor:
        """The keys of all units, in place of the new ones alone."""
        if not self._holds:
            self.keys = keys
            raise _Noted
        assert self.keys is not None
        return self.keys

    update_index = update_indexer

    def __getitem__(self, layer: int) -> _Cache:
        return self

    @property
    def layers(self) -> _Cache:
        """A cache of one layer for each number."""
        return self

    def get_seq_length(self, *args: object) -> int:
        """Units that it holds."""
        assert self.keys is not None
        return self.keys.shape[-2]


def note_indexes(decoder: nn.Module) -> list[Index]:
    """Find the indexes of a decoder, in order, and make each note what it is asked. A module without one whose forward
    takes the choice of an earlier layer uses the last one before it."""
    found: list[Index] = []
    for each in list(decoder.modules()):
        module: Any = each
        if isinstance(indexer := getattr(module, "indexer", None), nn.Module) and _most(indexer) is not None:
            found.append(Index(indexer))
            module.locret_index = found[-1]
            module.forward = functools.partial(_with_a_mask, weakref.ref(module), type(module).forward)
        elif found and getattr(module, "indexer", module) is None and (
                "prev_topk_indices" in inspect.signature(type(module).forward).parameters):
            module.locret_index = found[-1]
    return found


def asked_of(module: nn.Module) -> Asked | None:
    """What the forward that runs asks the index of an attention module; None if it has none."""
    index: Index | None = vars(module).get("locret_index")
    return None if index is None else index.asked


def _with_a_mask(this: weakref.ref[nn.Module], forward: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of such a module, which reads a mask for its index, though no mask is made here."""
    if kwargs.get("attention_mask") is None:
        hidden = args[0] if args else kwargs["hidden_states"]
        kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1, device=hidden.device)
    return forward(this(), *args, **kwargs)


def _most(indexer: Any) -> int | None:
    """Units of which an index chooses all; None for what is no index of a known form."""
    if hasattr(indexer, "topk_blocks"):  # of neighbours (MiniMax M3)
        return int(indexer.topk_blocks * indexer.block_size)
    if not getattr(indexer, "index_kpool_always_select_tail", True):  # units behind the last whole block are not seen
        return 0
    most: int | None = getattr(indexer, "token_budget", getattr(indexer, "index_topk", None))
    return most


def _fewer(indexer: Any, units: int) -> dict[str, int]:
    """Attributes with which an index chooses so many units, or as few as it can."""
    if hasattr(indexer, "topk_blocks"):
        return {"topk_blocks": 2, "block_size": units // 2}
    if hasattr(indexer, "token_budget"):
        return {"token_budget": units, "block_topk": 2, "compress_ratio": units // 2}
    return {"index_topk": max(units, getattr(indexer, "index_kpool", 1))}


@contextmanager
def choosing_few(trees: Iterable[nn.Module], units: int) -> Iterator[None]:
    """Inside, the indexes of module trees choose about so many units, so that a few tokens show what they do."""
    usual: list[tuple[Any, dict[str, int]]] = []
    for module in (module for tree in trees for module in tree.modules()):
        indexer: Any = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module) and _most(indexer) is not None:
            fewer = _fewer(indexer, units)
            usual.append((indexer, {name: getattr(indexer, name) for name in fewer}))
            vars(indexer).update(fewer)
    try:
        yield
    finally:
        for indexer, before in usual:
            vars(indexer).update(before)
