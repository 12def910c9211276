"""What the tests of the synchronous core share: small engines, streams of ids, and comparison bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_stream.config import Budget, StreamConfig, check_store_bits
from locret_stream.engine import Engine, EngineState
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.host_tier import HostTier
from locret_stream.models import Attachment, attach, attached
from locret_stream.policies import POLICIES as POLICY_CLASSES
from locret_stream.policies import make_policy
from tests.architectures import BASE, make

VOCAB = BASE["vocab_size"]
DEVICE = os.environ.get("LOCRET_TEST_DEVICE", "cpu")  # "cuda" holds the laws of the engine on a GPU
EVICTING = ("locret", "streaming_llm", "random", "keydiff", "h2o", "sirllm", "nacl", "snapkv", "tova", "scissorhands",
            "infllm", "kvzap", "trimkv")
POLICIES = (*EVICTING, "full")
WITH_HEADS = ("locret", "kvzap", "trimkv")


def examples(count: int) -> int:
    """Of a property; LOCRET_TEST_FEWER=10 tries a tenth, where every step is slow."""
    return max(2, count // int(os.environ.get("LOCRET_TEST_FEWER", "1")))


@cache
def model(name: str = "llama", attn: str | None = None) -> PreTrainedModel:
    """One random model per architecture and process; tests never change it."""
    return make(name, attn=attn).to(DEVICE)


def random_heads(attachment: Attachment, seed: int = 3, width: int = 24, policy: str = "locret") -> RetainingHeads:
    """Untrained retaining heads that fit this model and that policy."""
    shape, kind = attachment.shape, POLICY_CLASSES[policy]
    unit = shape.units[0]
    heads = RetainingHeads(HeadsConfig(layers=shape.layers, query_heads=unit.query_heads,
                                       kv_heads=unit.kv_heads, head_dim=unit.key_dim, width=width,
                                       features=kind.features or "hidden", hidden=shape.hidden, output=kind.output))
    noise = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=noise) * parameter.shape[-1] ** -0.5
    return heads.to(attachment.device).eval().requires_grad_(False)


def saved_heads(of: PreTrainedModel, folder: Path, policy: str = "locret", **more: object) -> Path:
    """Untrained heads for this model in that folder; `more` are fields of their config."""
    with attached(of) as attachment:
        heads = random_heads(attachment, policy=policy)
    heads.config = msgspec.structs.replace(heads.config, **more)
    heads.save(folder)
    return folder


def build(policy: str, *, on: PreTrainedModel | None = None, attn: str = "auto", units: int = 20, chunk_size: int = 8,
          sinks: int = 2, stabilizers: int = 3, slots: int = 4, allocation: str | tuple[float, ...] = "uniform",
          heads: RetainingHeads | None = None, store_bits: int | tuple[int, int] | None = None,
          decode_copy: bool = False, given_means: bool = False, exact: HostTier | None = None,
          by_head: bool = False, **knobs: float | str) -> Engine:
    """A small engine of that policy, with random heads if it takes any. LOCRET_TEST_STORE_BITS=4 is the default of
    `store_bits`, to hold all laws for codes; `given_means`: with means of keys as heads have them."""
    attachment = attach(on or model(), attn)
    heads = heads or (random_heads(attachment, policy=policy) if policy in WITH_HEADS else None)
    budget = Budget(units=units, sinks=sinks, stabilizers=stabilizers, allocation=allocation, by_head=by_head)
    bits = store_bits or int(os.environ.get("LOCRET_TEST_STORE_BITS", "16"))
    config = StreamConfig(budget=budget, chunk_size=chunk_size, policy=policy, knobs=knobs,
                          store_bits=check_store_bits(bits), exact=exact)
    return Engine(attachment, config, make_policy(policy, knobs, heads), slots, decode_copy=decode_copy,
                  key_means=random_means(attachment) if given_means else None)


def random_means(attachment: Attachment) -> Tensor:
    """Means of keys that no context would find by itself, [L, H, D]."""
    unit = attachment.shape.units[0]
    return torch.randn(attachment.shape.layers, unit.kv_heads, unit.key_dim,
                       generator=torch.Generator().manual_seed(11))


def ids_of(count: int, seed: int = 0, distinct: bool = False) -> list[int]:
    """Random token ids; `distinct` ones never repeat, so that no two units tie."""
    noise = torch.Generator().manual_seed(seed)
    if distinct:
        return torch.randperm(VOCAB, generator=noise)[:count].tolist()
    return torch.randint(0, VOCAB, (count,), generator=noise).tolist()


def feed(engine: Engine, state: EngineState, ids: Iterable[int]) -> None:
    """Accept ids and commit whatever is whole."""
    engine.accept(state, ids)
    while engine.ready(state):
        engine.commit(state)


def logits_at_each(engine: Engine, state: EngineState, ids: Iterable[int]) -> Tensor:
    """Feed one id at a time and ask after each; [len(ids), vocab]."""
    rows = []
    for token in ids:
        feed(engine, state, [token])
        rows.append(engine.logits(state))
    return torch.stack(rows)


@torch.no_grad()
def stock_logits(of: PreTrainedModel, ids: list[int]) -> Tensor:
    """What the user's own model computes in one forward, [len(ids), vocab]."""
    return of(torch.tensor([ids], device=of.device), use_cache=False).logits[0].float()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Two exports hold the same names and the same bits (NaN is itself, -0 is not +0), on whatever device."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype), name
        bits = [t.contiguous().view(-1).view(torch.uint8).cpu() for t in (other, tensor)]
        assert torch.equal(*bits), name


class Boom(RuntimeError):
    """What an injected fault raises."""


@contextmanager
def failing_in_layer(engine: Engine, layer: int) -> Iterator[None]:
    """Every forward fails in that layer, or the last one, after its units were written to the tail."""
    attachment, real = engine.attachment, engine.attachment._attend
    layer = min(layer, engine.shape.layers - 1)

    def attend(module, *args, **kwargs):
        out = real(module, *args, **kwargs)
        if module.locret_layer == layer:
            raise Boom(f"layer {layer}")
        return out

    attachment._attend = attend
    try:
        yield
    finally:
        del attachment._attend
