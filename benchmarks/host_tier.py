"""What exact units in the host's memory buy (SpeCache): facts that are answered from the same device bytes.

SmolLM2 with its heads, or any model: `--facts` facts in sentences among the lines of a text of `--tokens` tokens, each
begun again in a copy of the memory, and its value told token by token: how likely is each. In the bytes that `--exact`
exact units per KV head take on a GPU in bf16 (without rotated keys beside them; it runs in `--dtype`): as many units in
8, 4 and 2 bits as fit, alone, and in 4, 2 and 1 bits with exact units in the host's memory, whose residual and fetched
units are counted. Scores and positions are counted for all, the room for a chunk for none. With `--hits`, of each
layer: how much of a token's attention falls on units that are exact for it, and how much of the best choice's part that
of the fetched ones is.
With `--steps N`: how long a decoded token takes, against units in 2 bits with `decode_copy`, in turn.
With `--flat N`: N tokens through a tiny Llama of random weights, whose units are in 2 bits with exact ones in the
host's memory: what is resident of the process on the way, and what is copied from the host for a token and for a chunk,
each beside its formula.

    python benchmarks/host_tier.py --streams 2 --keep host_tier
    python benchmarks/host_tier.py --steps 100 --exact 1024 --keep host_tier_steps
    python benchmarks/host_tier.py --flat 1000000 --exact 1024 --chunk 1024 --keep host_tier_flat
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from record import record
from timing import MIB, resident_bytes, tiny_llama

from locret_stream import HostTier, Runtime
from locret_stream.cache import TieredStore
from locret_stream.config import Budget, ModelShape, StreamConfig, check_store_bits, unit_bytes
from locret_stream.engine import Engine, EngineState, NextToken
from locret_stream.engine.fetching import _Layers
from locret_stream.evaluation import chat, metrics
from locret_stream.evaluation.haystack import stdlib_lines
from locret_stream.evaluation.words import COLOURS, NOUNS
from locret_stream.heads import RetainingHeads
from locret_stream.kernels import reduced_attention
from locret_stream.models import attach
from locret_stream.named_models import model_path, named_model
from locret_stream.policies import make_policy
from locret_stream.runtime.loading import load_model, load_tokenizer

SINKS, STABILIZERS, TOGETHER = 4, 32, 8
WAYS: dict[str, tuple[int | tuple[int, int], HostTier | None]] = {
    "exact": (16, None), "8 bits": (8, None), "4 bits": (4, None), "2 bits": (2, None),
    **{f"{bits} bit{'s' * (bits > 1)} + host": (bits, HostTier()) for bits in (4, 2, 1)},
    **{f"{bits} bit{'s' * (bits > 1)} + host, k = {units}": (bits, HostTier(units=units))
       for bits in (4, 2, 1) for units in (0, 16, 64, 128, 256)},
    **{f"{bits} bit{'s' * (bits > 1)} + host, by {by}": (bits, HostTier(units=64, chosen_by=by))
       for bits in (4, 2, 1) for by in ("guess", "last")},
    **{f"{bits} bit{'s' * (bits > 1)} + host, residual {units}": (bits, HostTier(residual=units))
       for bits in (2, 1) for units in (0, 16)},
    "K 4, V 2 bits": ((4, 2), None), "K 4, V 1 bits": ((4, 1), None),
    "K 2, V 1 bits + host": ((2, 1), HostTier()),
    **{f"{bits} bit{'s' * (bits > 1)} + host, codes read": (bits, HostTier(prefill="codes")) for bits in (4, 2, 1)},
}


def fitting(bits: int | tuple[int, int], tier: HostTier | None, exact: int, shape: ModelShape) -> int:
    """Units that take what `exact` exact ones do, in bf16."""
    unit = shape.one_unit("equal bytes")
    room = exact * unit_bytes(unit, 2, key_copies=1).kept
    of = unit_bytes(unit, 2, key_copies=1, store_bits=check_store_bits(bits), own_means=False, tier=tier)
    return bisect.bisect_right(range(shape.window), room, key=lambda units: of.of(units, 0, SINKS)) - 1


def facts(rng: random.Random, count: int) -> list[chat.Told]:
    """Numbers of things, five digits each."""
    made = []
    for thing in rng.sample([f"{colour} {noun}" for colour in COLOURS for noun in NOUNS], count):
        value = str(rng.randint(10_000, 99_999))
        made.append(chat.Told(f"The number of the {thing} is {value}.", f"What is the number of the {thing}?", value))
    return made


Asked = tuple[list[int], list[int]]
"""The ids of what is asked, and of the value that follows."""
Found = list[tuple[float, bool]]
"""Of each value the negative log-likelihood of a token, told those before it, and whether each is the likeliest."""


def stream(ids_of: Callable[[str], list[int]], seed: int, tokens: int, count: int) -> tuple[list[int], list[Asked]]:
    """The ids of a text of about so many tokens with so many facts among its lines, and what is asked about them."""
    rng = random.Random(f"host tier {seed}")
    lying = facts(rng, count)
    lines = chat.in_text([[one] for one in lying], rng, (line + "\n" for line in stdlib_lines(seed)), tokens,
                         lambda text: len(ids_of(text)))
    ids = [token for line, _ in lines for token in ids_of(line)]
    parts = [one.line.split(" is ") for one in lying]
    return ids, [(ids_of(f"\n{before} is"), ids_of(" " + value.rstrip("."))) for before, value in parts]


def read(engine: Engine, state: EngineState, ids: Sequence[int]) -> None:
    """Accept ids, and commit every whole chunk of them."""
    engine.accept(state, ids)
    while engine.ready(state):
        engine.commit(state)


def told(engine: Engine, contexts: Sequence[EngineState], asks: Sequence[Asked],
         watch: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext) -> Found:
    """Of each context one value, which it goes on to read; `watch` is entered at each step."""
    for context, (ask, _) in zip(contexts, asks, strict=True):
        read(engine, context, ask)
    seen: list[Found] = [[] for _ in asks]

    def force(kept: Found, ids: list[int]) -> Callable[[torch.Tensor], int]:
        def choose(logits: torch.Tensor) -> int:
            token = ids[len(kept)]
            kept.append((-float(logits.log_softmax(-1)[token]), int(logits.argmax()) == token))
            return token
        return choose

    for step in range(max(len(value) for _, value in asks)):
        going = [at for at, (_, value) in enumerate(asks) if step < len(value)]
        with watch():
            answers = engine.decode([NextToken(contexts[at], force(seen[at], asks[at][1])) for at in going])
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        for at in going:
            while engine.ready(contexts[at]):
                engine.commit(contexts[at])
    return [(statistics.mean(loss for loss, _ in kept), all(right for _, right in kept)) for kept in seen]


def asked(engine: Engine, state: EngineState, asks: Sequence[Asked],
          watch: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext, first_slot: int = 1) -> Found:
    """`told`, each of a copy of the context, in slots from `first_slot` on."""
    found: Found = []
    for first in range(0, len(asks), TOGETHER):
        part = asks[first:first + TOGETHER]
        found += told(engine, [engine.fork(state, first_slot + at) for at in range(len(part))], part, watch)
    return found


def summary(found: Found) -> dict[str, Any]:
    """Means and their intervals, as of questions that are independent of each other."""
    losses, right = [loss for loss, _ in found], [float(whole) for _, whole in found]
    return {"nll": round(statistics.mean(losses), 4),
            "nll_interval": list(metrics.interval([[loss] for loss in losses])),
            "right": round(statistics.mean(right), 4), "right_interval": list(metrics.interval([[x] for x in right])),
            "questions": len(right)}


@contextlib.contextmanager
def watched(engine: Engine, kept: list[list[tuple[float, float]]],
            chosen: dict[tuple[TieredStore, int], torch.Tensor]) -> Iterator[None]:
    """Meanwhile collect, by layer, of the newest token of each step the share of its attention that falls on exact
    units, the newest ones included, and that part of what the k best units would add to the others."""
    attend, fetch = _Layers._attend, TieredStore.fetch
    assert engine.config.exact is not None
    by_query = not engine.config.exact.hot

    def fetched(store: TieredStore, layer: int, *arguments: Any) -> Any:
        found = fetch(store, layer, *arguments)
        if found is not None:
            chosen[store, layer] = found[0]
        return found

    def attended(layers: _Layers, call: Any, q: Any, found: Any, store: TieredStore, context: int, rank: int) -> Any:
        layer, count = call.layer, store.counts[call.layer]
        before = chosen.pop((store, layer), None)  # by a guess, or the last token: chosen one step before
        out = attend(layers, call, q, found, store, context, rank)
        ranks = chosen.get((store, layer)) if by_query else before
        if ranks is not None:
            heads = found[0].shape[1]
            at = torch.arange(count).expand(1, heads, -1)
            keys = found[0][0, :, :rank + 1].clone()
            keys[:, :count] = engine.layout.tables.rotate_at(layer, store.rows(layer, count)[0][None], at)[0]
            weights = reduced_attention(q[0, :, :1], keys, call.scale, torch.tensor([rank])) / (q.shape[1] // heads)
            coded = torch.ones(rank + 1, dtype=torch.bool)
            coded[:SINKS], coded[count - engine.pool.residuals[layer]:] = False, False
            always = weights[:, ~coded].sum(1)
            hot = weights.gather(1, ranks).sum(1)
            best = weights[:, coded].topk(ranks.shape[1]).values.sum(1)
            kept[layer].append((float((always + hot).mean()), float((hot / best).mean())))
        return out

    _Layers._attend, TieredStore.fetch = attended, fetched  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Layers._attend, TieredStore.fetch = attend, fetch  # type: ignore[method-assign]


@contextlib.contextmanager
def unwatched(*_: Any) -> Iterator[None]:
    yield


@torch.no_grad()
def measured(options: argparse.Namespace, way: str, model: Any, tokenizer: Any, heads: RetainingHeads | None
             ) -> dict[str, Any]:
    """Of each fact the negative log-likelihood of a token of its value, told the tokens before it, and whether every
    one of them is the likeliest."""
    bits, tier = WAYS[way]
    attachment = attach(model)
    own = None if heads is None else attachment.put_beside(heads, attachment.dtype)
    policy, means = ("locret", heads.key_means) if heads is not None else ("keydiff", None)
    units = options.exact if options.same_units else fitting(bits, tier, options.exact, attachment.shape)
    budget = Budget(units=units, sinks=SINKS, stabilizers=STABILIZERS, by_head=options.by_head)
    config = StreamConfig(budget=budget, chunk_size=options.chunk, policy=policy, store_bits=check_store_bits(bits),
                          exact=tier)
    engine = Engine(attachment, config, make_policy(policy, {}, own), slots=1 + TOGETHER, key_means=means,
                    shares=heads.config.budget_shares if heads is not None else None)
    rows: list[Found] = []
    began = time.perf_counter()
    watch = watched if options.hits and tier is not None else unwatched
    of_layers: list[list[tuple[float, float]]] = [[] for _ in engine.budgets]
    chosen: dict[tuple[TieredStore, int], torch.Tensor] = {}

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    for seed in range(options.first_seed, options.first_seed + options.streams):
        ids, asks = stream(ids_of, seed, options.tokens, options.facts)
        state = engine.open(0)
        read(engine, state, ids)
        found = asked(engine, state, asks[:options.asked], lambda: watch(engine, of_layers, chosen))
        rows.append(found)
        print(f"{way}: {units} units, stream {seed}: {statistics.mean(loss for loss, _ in found):.3f}, "
              f"{statistics.mean(right for _, right in found):.3f} right, {time.perf_counter() - began:.0f} s",
              file=sys.stderr, flush=True)
    return {"units": units, **summary([found for row in rows for found in row]), "fetched": engine.pool.fetched,
            **({"hits": [[round(statistics.mean(part), 3) for part in zip(*layer, strict=True)] for layer in of_layers]}
               if of_layers[0] else {})}


@torch.no_grad()
def timed(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Of `--exact` units in 2 bits, with a scratch for each layer: medians of `--steps` tokens, and of their ratios to
    those without exact units in the host's memory."""
    attachment = attach(model)
    tiers = {"none": None, **{f"by the query, k = {units}": HostTier(units=units) for units in (0, 64, 256)},
             **{f"by {by}, k = 64": HostTier(units=64, chosen_by=by) for by in ("guess", "last")}}
    running: dict[str, tuple[Engine, Any]] = {}
    ids = torch.randint(3, attachment.shape.vocab, (options.exact + options.chunk + 4,),
                        generator=torch.Generator().manual_seed(1)).tolist()
    for name, tier in tiers.items():
        config = StreamConfig(budget=Budget(units=options.exact, sinks=SINKS, stabilizers=STABILIZERS),
                              chunk_size=options.chunk, policy="keydiff", store_bits=(2, 2), exact=tier)
        engine = Engine(attachment, config, make_policy("keydiff", {}, None), slots=1, decode_copy=True)
        state = engine.open(0)
        read(engine, state, ids)
        running[name] = engine, state

    def step(engine: Engine, state: Any) -> float:
        while engine.ready(state):
            engine.commit(state)
        began = time.perf_counter()
        [answer] = engine.decode([NextToken(state, lambda logits: int(logits.argmax()))])
        assert isinstance(answer, int), answer
        return time.perf_counter() - began

    spent: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(options.steps + 3):
        for name, (engine, state) in running.items():
            seconds = step(engine, state)
            if turn >= 3:  # the first ones fill what later ones find
                spent[name].append(seconds)
    return {name: {"ms": round(1000 * statistics.median(times), 2), "ratio": round(statistics.median(
        one / base for one, base in zip(times, spent["none"], strict=True)), 3)} for name, times in spent.items()}


async def streamed(options: argparse.Namespace) -> dict[str, Any]:
    """`--flat` tokens, after every sixteen chunks a reply; what is resident is that of the process."""
    budget = Budget(units=options.exact, sinks=SINKS, stabilizers=STABILIZERS)
    marks: list[tuple[int, float]] = []
    moved: dict[str, set[float]] = {"fetched_for_a_token": set(), "read_for_a_chunk": set()}
    with tiny_llama(16 * options.chunk, num_hidden_layers=2, hidden_size=64, intermediate_size=128,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=32) as folder:
        ids = np.load(f"{folder}/ids.npy").tolist()
        async with (Runtime.from_pretrained(folder, dtype="float32", device="cpu", policy="keydiff", budget=budget,
                                            chunk_size=options.chunk, store_bits=2, exact=HostTier(),
                                            max_live=1) as runtime, runtime.open(raw=True) as ctx):
            pool, fetched, steps, began = runtime.engine.pool, 0, list[int](), time.perf_counter()
            step = runtime.engine.decoder._step

            def counted(states: Any, counts: Any) -> torch.Tensor:
                steps.append(len(states))
                return step(states, counts)

            runtime.engine.decoder._step = counted  # type: ignore[method-assign]
            while ctx.memory.tokens < options.flat:
                tokens, read = ctx.memory.tokens, pool.read
                await ctx.feed(ids)
                if tokens > options.exact:
                    chunks = ctx.memory.tokens // options.chunk - tokens // options.chunk
                    moved["read_for_a_chunk"].add((pool.read - read) / chunks)
                    moved["fetched_for_a_token"].add((pool.fetched - fetched) / sum(steps))
                fetched = pool.fetched
                steps.clear()  # that of a reply's last token may still run when it has ended, but not behind a feed
                async for _ in ctx.generate(max_new_tokens=9, ignore_eos=True):
                    pass
                marks.append((ctx.memory.tokens, resident_bytes() / MIB))
                if len(marks) % 8 == 0:
                    print(f"{marks[-1][0]:,} tokens, {marks[-1][1]:.1f} MiB resident", file=sys.stderr, flush=True)
            seconds = time.perf_counter() - began
            token, chunk = pool.formula_moved()
            early, late = (next(resident for seen, resident in marks if seen >= share * options.flat)
                           for share in (0.1, 1))
            unit = pool.shape.units[0]
            return {"tokens": ctx.memory.tokens, "tok_per_s": round(ctx.memory.tokens / seconds),
                    "resident_mib_at_a_tenth": round(early, 2), "resident_mib_at_the_end": round(late, 2),
                    "most_growth_mib": round(max(resident for seen, resident in marks if seen >= 0.1 * options.flat)
                                             - early, 2),
                    "host_bytes": pool.host_bytes, "formula_host_bytes": pool.formula_host_bytes(),
                    "pool_bytes": pool.bytes_resident, "formula_bytes": pool.formula_bytes(),
                    "bytes_full_cache": ctx.memory.bytes_full_cache,
                    **{name: sorted(found) for name, found in moved.items()},
                    "formula_for_a_token": token, "formula_for_a_chunk": chunk,
                    "bytes_of_a_unit": sum(unit.dims) * pool.shape.item_bytes}


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.flat:
        return asyncio.run(streamed(options))
    named = named_model(options.model)
    path = model_path(options.model)
    folder = options.heads or (named.heads if named is not None else None)
    heads = None if folder is None else RetainingHeads.load(folder)
    model, tokenizer = load_model(path, options.dtype, "cpu"), load_tokenizer(path)
    if options.steps:
        return {"model": options.model, "units": options.exact, "steps": timed(options, model)}
    return {name: getattr(options, name) for name in ("model", "tokens", "facts", "asked", "streams", "exact")} | {
        way: measured(options, way, model, tokenizer, heads) for way in options.ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--heads")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--facts", type=int, default=128, help="told in each stream")
    parser.add_argument("--asked", type=int, default=128, help="of these")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--exact", type=int, default=512, help="exact units per KV head whose bytes are filled")
    parser.add_argument("--same-units", action="store_true", help="as many units in every way, whatever they take")
    parser.add_argument("--by-head", action="store_true", help="the KV heads of a layer share its units")
    parser.add_argument("--hits", action="store_true")
    parser.add_argument("--steps", type=int, default=0, metavar="N")
    parser.add_argument("--flat", type=int, default=0, metavar="N")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:7])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    options = parser.parse_args()
    if options.hits and options.by_head:
        parser.error("--hits counts ranks that are the same in every head; expected it without --by-head")
    torch.set_num_threads(options.threads)
    record(options.keep or "host_tier", run(options), keep=options.keep is not None)


if __name__ == "__main__":
    main()
