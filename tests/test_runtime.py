"""Runtime, open_context and SyncContext: what they refuse, what they hold, and that they leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from locret_stream import (
    Budget,
    ConfigError,
    ContextClosed,
    HeadsMismatch,
    Runtime,
    SyncContext,
    UnknownPolicy,
    UnsupportedModel,
    WindowExceeded,
    open_context,
)
from locret_stream.heads import HeadsConfig, RetainingHeads
from locret_stream.models import attach, detach
from locret_stream.runtime import core as runtime_core
from locret_stream.snapshot import Store
from tests.architectures import CONFIGS, make
from tests.context.support import (
    CHUNK,
    TEXT,
    UNITS,
    cut_at_every_await,
    data,
    expect_free,
    expect_pure,
    ids_in,
    literals,
    model,
    snap,
    tiny,
    tokenizer,
    unstarted,
)
from tests.kit import assert_same, random_heads
from tests.processes import run_python

BEFORE: set[threading.Thread] = set()
"""Threads that a test run earlier in this process still has: none of this module's."""


@pytest.fixture(autouse=True)
def threads_before() -> None:
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()
            if thread.name.startswith("locret") and thread not in BEFORE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """The tiny model and tokenizer as a folder of transformers."""
    path = tmp_path_factory.mktemp("tiny")
    model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


# -- what cannot work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"policy": "streaming_lm"}, UnknownPolicy, "Did you mean 'streaming_llm'"),
    ({"policy": "nothing like it"}, UnknownPolicy, "expected one of: full, h2o"),
    ({"budget": Budget(units=20, sinks=1, stabilizers=1), "sinks": 2}, ConfigError, "beside a Budget"),
    ({"chunk_size": 0}, ConfigError, "chunk_size is 0; expected a whole number of tokens, at least 1"),
    ({"chunk_size": -8}, ConfigError, "chunk_size is -8"),
    ({"chunk_size": 8.0}, ConfigError, "chunk_size is 8.0"),
    ({"chunk_size": "8"}, ConfigError, "chunk_size is '8'"),
    ({"chunk_size": True}, ConfigError, "chunk_size is True"),
    *[({name: value}, ConfigError, f"{name} is {value!r}") for name, value in (
        ("ingest_rate", 0), ("ingest_rate", -1), ("ingest_rate", float("nan")), ("ingest_rate", float("inf")),
        ("ingest_rate", "fast"), ("ingest_rate", True), ("slot_timeout_s", 0), ("slot_timeout_s", "1"),
        ("max_live", 0), ("max_live", 1.5), ("max_live", True), ("scratch", 0))],
    *[({"knobs": value}, ConfigError, f"knobs are {value!r}; expected a dict") for value in ([1], "x", 5)],
    *[({"store": value}, ConfigError, f"store is {value!r}; expected a folder or a URL") for value in (5, "", b"x")],
])
def test_values_that_cannot_work_are_refused_before_anything_is_loaded(options: dict, error: type, says: str):
    def loads() -> None:
        raise AssertionError("nothing may be loaded")

    with pytest.raises(error) as caught:
        Runtime(loads, loads, **{"policy": "h2o", "budget": 20, **options})
    assert says in str(caught.value)


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"budget": 20, "sinks": 10, "stabilizers": 10}, ConfigError, "10 sinks + 10 stabilizers always stay; expected "
                                                               "at least 21 units"),
    ({"budget": Budget(units=10, sinks=0, stabilizers=10)}, ConfigError, "of 10 units the smallest layer gets 10"),
    ({"budget": Budget(units=2, sinks=0, stabilizers=0, allocation=(1.0, 9.0))}, ConfigError, "at least 5 units"),
    ({"budget": 20, "sinks": -1}, ConfigError, "sinks is -1"),
    ({"budget": 0}, ConfigError, "units is 0"),
    ({"budget": "lots"}, ConfigError, "budget is 'lots'"),
    ({"budget": "1B"}, ConfigError, "expected a larger size"),
    ({"budget": 2.5}, ConfigError, "budget is 2.5"),
    ({"budget": 2048, "sinks": 1, "stabilizers": 1}, WindowExceeded, "2048 + 8 = 2056 units, the model knows 2048"),
    ({"budget": Budget(units=20, allocation=(1.0, 1.0, 1.0), stabilizers=2)}, ConfigError, "3 layer shares"),
    ({"policy": "locret"}, ConfigError, "needs retaining heads"),
    ({"policy": "random", "knobs": {"sed": 1}}, ConfigError, "no knob 'sed'"),
    ({"template": "no template at all"}, ConfigError, "template is"),
    ({"attn": "flash"}, UnsupportedModel, "attn is 'flash'"),
    ({"reads": object()}, ConfigError, "expected a fast tokenizer"),
    ({"on": torch.nn.Linear(2, 2)}, UnsupportedModel, "found Linear"),
])
@pytest.mark.thorough(but=3)
async def test_what_is_found_out_on_entering_leaves_nothing(options: dict, error: type, says: str):
    runtime = unstarted(**options)
    with pytest.raises(error) as caught:
        async with runtime:
            pass
    assert says in str(caught.value)
    assert not our_threads() and detach(model()) == 0, "no thread, no use of the model"
    with pytest.raises(ContextClosed):
        runtime.open()


async def test_slots_that_no_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch):
    zeros = torch.zeros

    def full(*shape: int, **more: object) -> torch.Tensor:
        if len(shape) == 4 and shape[0] > 1000:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return zeros(*shape, **more)

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ConfigError, match=r"no room for 2001 slots \(max_live 2000 \+ scratch 1\) of about \d+ MiB"):
        await unstarted(max_live=2000).__aenter__()
    assert not our_threads() and detach(model()) == 0


def random_model(name: str) -> PreTrainedModel:
    """Of that architecture, with a row for every id of the tokenizer."""
    config = CONFIGS[name]()
    config.vocab_size = len(tokenizer())
    return make(name, config=config)


@pytest.mark.parametrize(("name", "policy"), [("llama", "streaming_llm"), ("llama", "infllm"), ("gemma2", "random"),
                                               ("gemma3", "random"), ("smollm3", "keydiff"), ("gpt-oss", "full")])
async def test_a_size_is_that_of_one_context(name: str, policy: str):
    """Score planes, layers without rotation and layers that hold their window alone are counted as they are."""
    async with tiny(on=random_model(name), policy=policy, budget="512KiB") as runtime:
        assert 0.98 * 2**19 < runtime.engine.pool.slot_bytes <= 2**19


async def test_a_model_that_sees_only_what_is_near_is_told(caplog: pytest.LogCaptureFixture):
    async with tiny(on=random_model("mistral-sliding"), policy="random", units=40):
        assert "every layer of this model attends to its last 24 tokens alone" in caplog.text
    caplog.clear()
    async with tiny(on=random_model("gemma3"), policy="random", units=40):
        assert not caplog.text


@pytest.mark.parametrize(("options", "says"), [
    ({"device": "tpu"}, "device is 'tpu'"), ({"device": "meta:x"}, "device is 'meta:x'"),
    ({"device": "meta"}, "no kernels for; expected cpu or cuda"),
    ({"dtype": "int8"}, "dtype is 'int8'"),
    ({"dtype": "float"}, "dtype is 'float'"), ({"dtype": torch.int64}, "dtype is torch.int64"),
    *([] if torch.cuda.is_available() else [({"device": "cuda"}, "torch finds no CUDA")]),
])
def test_devices_and_dtypes_that_cannot_be_used_are_refused_at_once(options: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        Runtime.from_pretrained("bundled", **options)


async def test_defaults_of_the_bundled_model_also_stand_for_none():
    async with Runtime.from_pretrained("bundled", budget=None, chunk_size=None, heads=None, max_live=1) as runtime:
        assert runtime.engine.chunk_size == 256 and sum(runtime.engine.budgets) == 4 * 768
        assert set(runtime.engine.layout.protection) == {(4, 32)}


async def test_what_never_evicts_holds_the_same_in_every_layer():
    async with Runtime.from_pretrained("bundled", policy="full", max_live=1) as runtime:
        assert set(runtime.engine.budgets) == {768}
    async with Runtime.from_pretrained("bundled", budget=40, max_live=1) as runtime:  # small layers: little protected
        assert min(runtime.engine.budgets) == 5 and set(runtime.engine.layout.protection) == {(1, 1)}


def test_the_largest_window_fits_exactly():
    runtime = unstarted(budget=Budget(units=2040, sinks=1, stabilizers=1), max_live=1)
    runtime.start()
    assert runtime.engine.layout.tables.capacity == 2048
    asyncio.run(runtime.aclose())


async def test_heads_of_another_model_are_refused(tmp_path):
    attachment = attach(model())
    fits = random_heads(attachment)
    sizes = dict(layers=2, query_heads=4, kv_heads=2, head_dim=8, width=4)
    marked = {"same": attachment.fingerprint, "another": "0" * 32}
    detach(model())
    for name in ("layers", "kv_heads", "head_dim", "query_heads"):
        with pytest.raises(HeadsMismatch, match=r"heads of another model: 'fc1.* is .* this model needs"):
            async with unstarted(policy="locret", heads=RetainingHeads(HeadsConfig(**{**sizes, name: 3}))):
                pass
    RetainingHeads(HeadsConfig(**sizes, fingerprint=marked["another"])).save(tmp_path)
    with pytest.raises(HeadsMismatch, match=f"{'0' * 32}, this model is {marked['same']}"):
        async with unstarted(policy="locret", heads=tmp_path):
            pass
    assert not our_threads()
    for heads in (fits, RetainingHeads(HeadsConfig(**sizes, fingerprint=marked["same"]))):
        async with tiny(policy="locret", heads=heads) as runtime, runtime.open() as ctx:
            used = runtime.engine.policy.heads
            assert used is not heads, "another runtime may move the caller's to its own device"
            await ctx.feed(TEXT)
            await expect_pure(ctx)


async def test_a_model_that_cannot_be_loaded(tmp_path):
    for path in (tmp_path, "/no/such/folder"):
        with pytest.raises(UnsupportedModel, match="cannot be loaded"):
            async with Runtime.from_pretrained(path, budget=UNITS):
                pass
    with pytest.raises(ConfigError, match="dtype is 'floaty'"):
        Runtime.from_pretrained(tmp_path, dtype="floaty")
    assert not our_threads()


# -- opening and closing --------------------------------------------------------------------------------------------


async def test_a_runtime_can_be_started_again_but_not_twice():
    runtime = unstarted()
    states = []
    for _ in range(2):
        async with runtime:
            with pytest.raises(ConfigError, match="running already"):
                await runtime.__aenter__()
            async with runtime.open() as ctx:
                await ctx.feed(TEXT)
                states.append((await snap(ctx)).tensors)
        await runtime.aclose()
        assert not our_threads()
    assert_same(*states)


@pytest.mark.parametrize("twice", [False, True])
async def test_entering_and_leaving_cancelled_anywhere_leaves_nothing(twice: bool):
    async def visit() -> None:
        async with unstarted(max_live=1) as runtime:
            async with runtime.open() as ctx:
                await ctx.feed([7] * CHUNK)

    async def run(guard) -> None:
        await guard(visit())
        assert not our_threads() and detach(model()) == 0

    assert await cut_at_every_await(run, twice=twice) >= 3


async def test_contexts_left_open_are_closed_with_the_runtime():
    async with unstarted() as runtime:
        contexts = [await runtime.open().__aenter__() for _ in range(3)]
        await asyncio.gather(*(ctx.feed(TEXT) for ctx in contexts))
    for ctx in contexts:
        with pytest.raises(ContextClosed):
            await ctx.feed("x")
        await ctx.aclose()
    assert not our_threads()


async def test_the_memory_is_given_back():
    runtime = unstarted()
    async with runtime:
        kept = [layer.keys for layer in runtime.engine.pool.layers]
        assert kept
        async with runtime.open() as ctx:
            await ctx.feed("one")
    refs = [weakref.ref(tensor) for tensor in kept]
    del kept
    assert ctx.closed and not [ref for ref in refs if ref() is not None], "though the context is still held"
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o).__name__ == "Pool" and o.slots == 5 and o.chunk_size == CHUNK
                and o.layers and o.layers[0].keys.shape[-2] == UNITS + CHUNK]


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["h2o", "random", "full"])
async def test_bytes_resident_are_what_the_tensors_hold_from_start_to_end(policy: str):
    async with tiny(policy=policy, max_live=2, scratch=2, units=200 if policy == "full" else UNITS) as runtime:
        engine = runtime.engine

        def pool_bytes() -> int:
            tensors = [t for layer in engine.pool.layers for t in layer.tensors] + [engine.pool.scratch]
            return sum(t.numel() * t.element_size() for t in tensors)

        before, slot = runtime.memory, None
        assert before.bytes_pool == pool_bytes() == engine.pool.formula_bytes()
        assert before.bytes_resident == pool_bytes() + engine.layout.tables.bytes_resident  # no mask yet
        assert before.slots == 4
        async with runtime.open() as ctx, runtime.open() as other:
            for n in range(3):
                await ctx.feed([n + 5] * 40)
                await ctx.ask("q", max_new_tokens=3)
                slot = slot or ctx.memory.bytes_resident
                assert ctx.memory.bytes_resident == other.memory.bytes_resident == slot == before.slot_bytes
                assert ctx.memory.bytes_full_cache == ctx.memory.tokens * 2 * 2 * 2 * 8 * 4
            assert 4 * slot + engine.pool.scratch.nbytes == before.bytes_pool
        masks = sum(mask.nbytes for mask in engine.attention._masks.values())
        assert runtime.memory.bytes_resident == before.bytes_resident + masks and masks < slot / 2
        assert runtime.memory.bytes_pool == pool_bytes() == before.bytes_pool
        assert not [t for layer in engine.pool.layers for t in layer.tensors if t.requires_grad]


async def test_nothing_grows_with_the_stream():
    """All that a context keeps in Python is bounded: ids in memory, buffered text, masks, queues."""
    async with tiny() as runtime, runtime.open() as ctx:
        noise, state = random.Random(0), ctx._session.state
        await ctx.feed(iter([[noise.randrange(400)] * 30 for _ in range(40)]))
        sizes = []
        for _ in range(3):
            await ctx.feed(iter([[noise.randrange(400)] * 30 for _ in range(20)]))
            gc.collect()
            tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
            sizes.append((len(state.committed_ids), len(runtime.worker._queues), ctx._session.buffered.size, tensors))
            assert len(runtime.engine.attention._masks) <= 4
        assert len(set(sizes)) == 1 and sizes[0][:3] == (1024, 0, 0), sizes
        assert ctx.memory.tokens > 3000 and sum(ctx.memory.units) == 2 * UNITS


async def test_memory_and_receipts_while_a_feed_runs():
    """They may be read at any time; what they say belongs together."""
    async with tiny() as runtime, runtime.open() as ctx:
        feeding = asyncio.ensure_future(ctx.feed([[7] * 5] * 80)._drain())
        seen = []
        while not feeding.done():
            await asyncio.sleep(0)
            memory = ctx.memory
            assert memory.tokens >= (seen[-1] if seen else 0)
            assert memory.pending <= CHUNK
            assert all(units <= UNITS for units in memory.units) and memory.capacity == (UNITS + CHUNK,) * 2
            seen.append(memory.tokens)
            if len(seen) % 5 == 0:
                receipts = await ctx.receipts()
                assert receipts.kept.shape[-1] == receipts.end >= memory.tokens
        await feeding
        receipts = await ctx.receipts()
        kept = receipts.kept.sum(-1)
        assert (kept == UNITS + ctx.memory.pending).all()
        with pytest.raises(ConfigError, match="receipts of tokens 5 to 3"):
            await ctx.receipts(5, 3)


def test_count_tokens_is_what_feeding_adds():
    async def main() -> None:
        async with tiny() as runtime, runtime.open() as ctx:
            assert runtime.count_tokens(TEXT) == (await ctx.feed(TEXT)).tokens

    asyncio.run(main())


# -- the shorthands -------------------------------------------------------------------------------------------------


async def test_open_context_is_one_context_in_a_private_runtime(folder: str):
    async with open_context(folder, system="You watch.", policy="keydiff", budget=UNITS, chunk_size=CHUNK,
                            name="logs") as ctx:
        assert ctx.name == "logs" and ctx._services.slots.live.size == 1
        await ctx.feed(TEXT)
        assert await ctx.ask("q", max_new_tokens=3) is not None
        await expect_free_later(ctx)
    with pytest.raises(ContextClosed):
        await ctx.feed("x")
    assert not our_threads()
    with pytest.raises(ConfigError, match="needs retaining heads"):
        async with open_context(folder, policy="locret", budget=UNITS):
            pass
    assert not our_threads()


async def expect_free_later(ctx) -> None:
    expect_free(ctx._services, taken=1)


def sync(folder: str, **options) -> SyncContext:
    return SyncContext(folder, policy="keydiff", budget=UNITS, chunk_size=CHUNK, acknowledge=None, **options)


async def test_sync_context_does_the_same(folder: str):
    def script() -> tuple:
        with sync(folder) as ctx:
            report = ctx.feed(iter(TEXT.splitlines(keepends=True)))
            answer = ctx.ask("q?", max_new_tokens=4)
            reply = [token.id for token in ctx.generate("q?", max_new_tokens=6, ignore_eos=True)]
            for _ in ctx.generate("again", max_new_tokens=6, ignore_eos=True):
                break
            left = ctx.generate("once more", max_new_tokens=6, ignore_eos=True)
            assert left.finish_reason is None and next(left).text == left.text and not left.recalled
            left.close()
            assert left.finish_reason == "closed" and not list(left)
            unbegun = ctx.generate("never", max_new_tokens=6)
            unbegun.close()
            assert unbegun.finish_reason == "closed" and not list(unbegun)
            ctx.feed([5, 6, 7])
            ids = ids_in(ctx._ctx)
            return report.tokens, answer, reply, ids, ctx.memory

    tokens, answer, reply, ids, memory = await asyncio.to_thread(script)
    assert not our_threads()
    async with unstarted(policy="keydiff", budget=UNITS, on=model()) as runtime, runtime.open() as ctx:
        assert tokens == len(data(runtime, TEXT)) == (await ctx.feed(TEXT)).tokens
        assert answer == await ctx.ask("q?", max_new_tokens=4)
        assert reply == [t.id async for t in ctx.generate("q?", max_new_tokens=6, ignore_eos=True)]
        assert ids[-3:] == [5, 6, 7] and ids[:ctx.memory.tokens] == ids_in(ctx)
        assert ids[-3 - len(literals(runtime, "<|im_start|>user\n")):-3] == literals(runtime, "<|im_start|>user\n")
    assert memory.tokens == len(ids)


def test_sync_context_pushes_and_saves(folder: str, tmp_path: Path):
    with sync(folder, name="a", store=str(tmp_path)) as ctx:
        assert ctx.push("half a line") == 0 and ctx.discard() == len("half a line")
        count = ctx.push("half a line") + ctx.flush()
        assert count > 0
        first, tokens = ctx.snapshot(), ctx.memory.tokens
        ctx.feed(TEXT)
        assert ctx.snapshot().tokens > first.tokens
        ctx.rewind(first)
        assert ctx.memory.tokens == tokens
        assert ctx.save_as("b").name == "b"
    assert [one.name for one in Store(tmp_path).list()] == ["a", "b"]
    assert not our_threads()


def test_sync_context_says_what_a_reply_recalled(folder: str):
    with sync(folder, recall=True) as ctx:
        ctx.feed("The badge of the ferry is blue.\n" + "The rain went on, and nobody came to see us there.\n" * 40)
        dropped = ctx.generate("Which badge has the ferry?", max_new_tokens=6, ignore_eos=True)
        next(dropped)
        assert any("badge of the ferry" in passage.text for passage in dropped.recalled)
        del dropped
        assert ctx.feed([9]).tokens == 1, "a reply that is dropped has ended"
    assert not our_threads()


def test_sync_context_is_entered_once(folder: str):
    with sync(folder) as ctx:
        with pytest.raises(ContextClosed, match="was entered before, and can be entered once; expected a new one"), ctx:
            pass
        ctx.feed("still open\n")
    with pytest.raises(ContextClosed, match="expected a new one"), ctx:
        pass
    assert not our_threads()


def test_sync_context_has_a_focus(folder: str):
    with sync(folder, focus="which?") as ctx:
        before = ctx.memory.focus
        ctx.feed(TEXT)
        ctx.focus(None)
        ctx.feed(TEXT)
        assert before > 0 == ctx.memory.focus


def test_sync_context_before_and_after_its_block(folder: str):
    ctx = sync(folder)
    for _ in range(2):
        for use in (lambda: ctx.feed("x"), lambda: ctx.ask("x"), lambda: list(ctx.generate("x")), lambda: ctx.memory):
            with pytest.raises(ContextClosed, match="with SyncContext"):
                use()
        if ctx._thread.ident is None:
            with ctx:
                left = ctx.generate("q", ignore_eos=True)
                next(left)
    left.close()  # a generator that outlives the block
    assert not our_threads()
    with pytest.raises(UnsupportedModel):
        with SyncContext("/no/such/folder", budget=UNITS):
            pass
    assert not our_threads()
    with pytest.raises(ValueError, match="surrogate"):
        with sync(folder) as ctx:
            ctx.feed("\ud800")
    assert not our_threads()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_sync_context_stops_the_work_and_waits_for_it(folder: str):
    with sync(folder) as ctx:
        ctx.feed("before")
        engine, commit = ctx._ctx._services.engine, ctx._ctx._services.engine.commit
        engine.commit = lambda state: (time.sleep(0.05), commit(state))  # so that Ctrl-C hits a step
        for endless in (lambda: ctx.feed(iter(lambda: [7] * 3, None)),
                        lambda: ctx.ask("q", max_new_tokens=10**6, ignore_eos=True),
                        lambda: list(ctx.generate("q", max_new_tokens=10**6, ignore_eos=True))):
            timer = threading.Timer(0.15, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
            timer.start()
            started = time.perf_counter()
            with pytest.raises(KeyboardInterrupt):
                endless()
            timer.join()
            assert time.perf_counter() - started < 20
            ctx.feed([9])  # free at once
            assert ctx.ask("q", max_new_tokens=1) is not None
    assert not our_threads()


def test_a_start_that_ctrl_c_ends_opens_nothing_and_can_be_made_again(monkeypatch):
    """Also when the thread that loads is done only afterwards."""
    runtime, built = unstarted(), []

    def interrupted(work):
        built.append(work())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runtime_core, "in_passing", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.start()
    assert built and not runtime.running
    with pytest.raises(ContextClosed):
        runtime.open()
    runtime.start()
    assert runtime.running
    asyncio.run(runtime.aclose())


NESTED = """
import gc, sys
from locret_stream import ContextBusy, SyncContext

def tried(call):
    try:
        return call()
    except ContextBusy as error:
        return type(error).__name__

with SyncContext(sys.argv[1], policy="keydiff", budget=20, chunk_size=8, acknowledge=None) as ctx:
    print(tried(lambda: ctx.feed(line for line in ["a"] if ctx.ask("q", max_new_tokens=1))))
    print(tried(lambda: ctx.ask("q", max_new_tokens=1, on_token=lambda token: ctx.push("x"))))
    print(ctx.ask("q", max_new_tokens=1, on_token=lambda token: ctx.memory) is not None)
    gc.disable()
    circle = [ctx.generate("q", max_new_tokens=50, ignore_eos=True)]
    next(circle[0])
    circle.append(circle)
    del circle
    ctx.ask("q", max_new_tokens=1, on_token=lambda token: print(gc.collect() > 0))
    print(ctx.feed([5, 6]).tokens)
"""


@pytest.mark.thorough
def test_sync_context_never_waits_for_itself(folder: str):
    """A call from inside another one is refused; a reply that is collected on the loop's own thread has ended then."""
    done = run_python("-c", NESTED, folder, timeout_s=120)
    assert done.stdout.split() == ["ContextBusy", "ContextBusy", "True", "True", "2"], done.stderr
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr
