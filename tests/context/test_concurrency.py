"""Several contexts, several event loops, several runtimes: fair, alone, and cleanly closed."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import AsyncExitStack

import pytest

from locret_stream import ContextClosed, NoSlot, worker
from locret_stream.context.session import Session
from tests.context.support import (
    CHUNK,
    TEXT,
    CountedAsync,
    data,
    expect_free,
    expect_pure,
    expect_same,
    ids_in,
    model,
    snap,
    tiny,
    unstarted,
)
from tests.kit import assert_same


async def quiet(work) -> BaseException | object:
    """The result, or the error as a value."""
    try:
        return await work
    except Exception as error:
        return error


# -- fairness -------------------------------------------------------------------------------------------------------


async def test_a_long_feed_never_delays_a_question_by_more_than_a_step():
    """Counted in the worker: between a question's step being queued and being run, at most the feed's current and
    next step are run."""
    async with tiny() as runtime, runtime.open() as long, runtime.open() as short:
        ran, delays, worker = [], [], runtime.worker
        submit, submit_joint = worker.submit, worker.submit_joint
        feeder = id(long._session.state)

        def counting(key, step):
            queued = len(ran)

            def run(*items):
                if key != feeder:
                    delays.append(sum(1 for other in ran[queued:] if other == feeder))
                ran.append(key)
                return step(*items)

            return run

        worker.submit = lambda key, step: submit(key, counting(key, step))
        worker.submit_joint = lambda key, group, item, step, ahead: submit_joint(key, group, item, counting(key, step),
                                                                                 ahead)
        await short.feed("hello")
        feeding = asyncio.ensure_future(long.feed([7] * (60 * CHUNK))._drain())
        while len(ran) < 3:  # noqa: ASYNC110 - an event would need a thread's help
            await asyncio.sleep(0)
        await short.ask("quick?", max_new_tokens=10, ignore_eos=True)
        assert not feeding.done(), "the answer came first"
        assert len(delays) > 10 and max(delays) <= 2, delays
        await feeding
        worker.submit, worker.submit_joint = submit, submit_joint
        assert long.memory.tokens > 60 * CHUNK


async def test_replies_at_once_share_their_steps_and_are_each_what_they_are_alone(monkeypatch):
    """Of different lengths, one of them left in the middle. Tokens and memory are those of a context that is alone."""
    monkeypatch.setattr(worker, "_PATIENCE_S", (0.1, 0.0, 0.1))  # on a busy machine too
    prompts = ["one", "a second question", TEXT[:60], "x" * 90]

    async def reply(ctx, n: int) -> list[int]:
        said = []
        async for token in ctx.generate(prompts[n], max_new_tokens=20 + 5 * n, ignore_eos=True):
            said.append(token.id)
            if n == 1 and len(said) == 9:
                break
        return said

    async with tiny(max_live=4, chunk_size=32) as runtime:  # so that commits do not come at every other step
        alone, widths = [], []
        for n in range(4):
            async with runtime.open() as ctx:
                alone.append((await reply(ctx, n), await snap(ctx)))
        hidden = runtime.attachment.hidden
        runtime.attachment.hidden = lambda ids, *more: widths.append(tuple(ids.shape)) or hidden(ids, *more)
        async with AsyncExitStack() as stack:
            contexts = [await stack.enter_async_context(runtime.open()) for _ in prompts]
            said = await asyncio.gather(*(reply(ctx, n) for n, ctx in enumerate(contexts)))
            assert said == [ids for ids, _ in alone]
            for ctx, (_, expected) in zip(contexts, alone, strict=True):
                expect_same(await snap(ctx), expected)
        del runtime.attachment.hidden
        decoded = [width for width, new in widths if new == 1]
        assert max(decoded) == 4 and sum(decoded) >= 2 * len(decoded), widths


async def test_a_reply_does_not_wait_for_one_that_has_ended(monkeypatch):
    """Ended by itself, or left: neither takes another step."""
    monkeypatch.setattr(worker, "_PATIENCE_S", (60.0, 0.0, 60.0))
    async with tiny(max_live=2) as runtime, asyncio.timeout(30):
        for left in (False, True):
            async with runtime.open() as ctx:
                async for _ in ctx.generate("one", max_new_tokens=4, ignore_eos=True):
                    if left:
                        break
        async with runtime.open() as ctx:
            assert len([token async for token in ctx.generate("two", max_new_tokens=4, ignore_eos=True)]) == 4


async def test_long_feeds_take_turns():
    async with tiny() as runtime:
        order: list[int] = []

        async def feed(n: int) -> None:
            async with runtime.open(raw=True) as ctx:
                real = runtime.engine.commit
                async for _ in ctx.feed([n + 5] * (12 * CHUNK)):
                    if ctx.memory.pending == 0:
                        order.append(n)
                assert runtime.engine.commit == real

        await asyncio.gather(*map(feed, range(3)))
        for n in range(3):
            gaps = [b - a for a, b in zip(*(lambda at: (at, at[1:]))([i for i, m in enumerate(order) if m == n]),
                                          strict=False)]
            assert len(gaps) == 11 and max(gaps) <= 5, order


async def test_scratch_slots_are_given_out_in_order():
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("text")
        done: list[int] = []

        async def ask(n: int) -> None:
            await ctx.ask(f"{n}?", max_new_tokens=3)
            done.append(n)

        async with asyncio.TaskGroup() as group:
            for n in range(8):
                group.create_task(ask(n))
        assert done == list(range(8))
        assert runtime.slots.scratch.free == 1


async def test_no_slot_after_the_deadline_and_not_before():
    async with tiny(slot_timeout_s=0.3, max_live=2) as runtime, runtime.open() as ctx, runtime.open() as other:
        await ctx.feed("text")
        before, started = await snap(ctx), time.perf_counter()
        with pytest.raises(NoSlot, match=r"no live slot of 2 came free within 0\.3 s; expected a context to be closed"):
            async with runtime.open():
                pass
        assert 0.3 <= time.perf_counter() - started < 3
        async with runtime.slots.scratch_slot():
            with pytest.raises(NoSlot, match="no scratch"):
                await ctx.ask("q")
        expect_same(await snap(ctx), before)
        waiting = asyncio.create_task(_visit(runtime))
        await asyncio.sleep(0.02)
        await other.aclose()
        assert await waiting == "visited", "the one that waits gets the slot that comes free"
        cancelled = asyncio.create_task(ctx.ask("q"))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert isinstance((await asyncio.gather(cancelled, return_exceptions=True))[0], asyncio.CancelledError)
        expect_free(runtime, taken=1)


async def _visit(runtime) -> str:
    async with runtime.open() as ctx:
        await ctx.feed("x")
    return "visited"


# -- event loops and runtimes ---------------------------------------------------------------------------------------


def test_several_event_loops_use_one_runtime():
    runtime = unstarted(max_live=2)  # fewer slots than loops, so that they wait for each other
    runtime.start()
    found: dict[int, list[dict]] = {}

    async def session(n: int) -> None:
        async with asyncio.timeout(50):
            for _ in range(2):
                async with runtime.open() as ctx:
                    await ctx.feed(CountedAsync(TEXT.splitlines(keepends=True)))
                    answer = await ctx.ask("q?", max_new_tokens=4, seed=1, temperature=1.0)
                    assert answer == await ctx.ask("q?", max_new_tokens=4, seed=1, temperature=1.0)
                    found.setdefault(n, []).append((await snap(ctx)).tensors)

    errors: list[BaseException] = []

    def run(n: int) -> None:
        try:
            asyncio.run(session(n))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    states = [state for states in found.values() for state in states]
    assert len(states) == 8
    for state in states[1:]:
        assert_same(state, states[0])
    expect_free(runtime)
    asyncio.run(runtime.aclose())


async def test_two_runtimes_on_one_model_share_its_thread():
    async with tiny(units=16) as one:
        async with tiny(units=24, policy="keydiff") as two:
            assert one.worker is two.worker and one.attachment is two.attachment and one.worker.users == 2
            async with one.open() as a, two.open() as b, one.open() as c:
                await asyncio.gather(a.feed(TEXT), b.feed(TEXT), c.feed(TEXT * 2))
                assert await a.ask("q", max_new_tokens=3) is not None
                for ctx in (a, b, c):
                    await expect_pure(ctx)
        assert one.worker.users == 1 and one.worker._thread.is_alive()
        async with tiny(on=model(seed=5)) as other:
            assert other.worker is not one.worker
        async with one.open() as ctx:
            await ctx.feed(TEXT)
    assert not [t for t in threading.enumerate() if t.name.startswith("locret")]


# -- closing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
async def test_a_runtime_closed_while_everything_runs(shared: bool):
    """A feed, a paused feed, a reply, a question, one that waits for a slot, one that opens: each ends with
    ContextClosed, none hangs or is cancelled, and the thread ends (or serves the other runtime)."""
    async with asyncio.timeout(50):
        keeper = unstarted(units=16) if shared else None
        if keeper:
            await keeper.__aenter__()
        runtime = unstarted(max_live=3, slot_timeout_s=30)
        await runtime.__aenter__()
        a, b, c = [await runtime.open().__aenter__() for _ in range(3)]
        for ctx in (a, b, c):
            await ctx.feed("text")
        paused = b.feed(iter(["one", "two\n", "three\n"]))
        await anext(paused)

        async def opens():
            async with runtime.open():
                raise AssertionError("there was no slot")

        async def reply():
            async for _ in c.generate("q", max_new_tokens=10_000, ignore_eos=True):
                pass

        tasks = [asyncio.create_task(quiet(work)) for work in (
            a.feed([7] * 100_000)._drain(), reply(), a.ask("q", max_new_tokens=10_000, ignore_eos=True),
            a.ask("q", max_new_tokens=10_000, ignore_eos=True), opens())]
        await asyncio.sleep(0.1)
        assert not [task for task in tasks if task.done()]
        worker, tokenizing = runtime.worker, runtime.tokenizing
        await asyncio.gather(runtime.aclose(), runtime.aclose())
        ended = await asyncio.gather(*tasks)
        assert [type(error) for error in ended] == [ContextClosed] * 5, ended
        with pytest.raises(ContextClosed):
            await anext(paused)
        assert worker._thread.is_alive() == shared and not [t for t in tokenizing._threads if t.is_alive()]
        for use in (a.push("x"), a.ask("q"), a.feed, a.generate, a.receipts(), a.flush(),
                    runtime.slots.acquire(scratch=True)):
            with pytest.raises(ContextClosed):
                await (use("x") if callable(use) else use)
        for use in (lambda: a.memory, a.fork, runtime.open, lambda: runtime.memory, lambda: runtime.engine):
            with pytest.raises(ContextClosed):
                use()
        await a.aclose()
        if keeper:
            async with keeper.open() as ctx:
                await ctx.feed(TEXT)
                await expect_pure(ctx)
            await keeper.aclose()
        assert not worker._thread.is_alive()


async def test_a_context_closed_while_its_operations_run():
    """They end with ContextClosed at their next step; the slot is free only when nothing writes into it any more."""
    async with tiny(max_live=1) as runtime:
        ctx = await runtime.open().__aenter__()
        await ctx.feed("text")
        tasks = [asyncio.create_task(quiet(ctx.feed([7] * 50_000)._drain())),
                 asyncio.create_task(quiet(ctx.ask("q", max_new_tokens=10_000, ignore_eos=True)))]
        await asyncio.sleep(0.05)
        await ctx.aclose()
        async with runtime.open() as fresh:  # the very same slot
            await fresh.feed([9] * 30)
            assert [type(error) for error in await asyncio.gather(*tasks)] == [ContextClosed] * 2
            await fresh.feed([9] * 30)
            async with asyncio.timeout(5):
                with pytest.raises(ContextClosed):
                    await ctx.feed("x")
            state = await snap(fresh)
        async with runtime.open() as alone:
            await alone.feed([9] * 60)
            expect_same(await snap(alone), state)
        await ctx.aclose()
        with pytest.raises(ContextClosed):
            async with ctx:
                pass


async def test_a_context_closed_while_an_ask_copies_it_ends_the_ask(monkeypatch: pytest.MonkeyPatch):
    real = Session.fork

    async def fork(session: Session, slot: int) -> Session:
        copy = await real(session, slot)
        await ctx.aclose()
        return copy

    async with tiny() as runtime:
        ctx = await runtime.open().__aenter__()
        await ctx.feed("text")
        monkeypatch.setattr(Session, "fork", fork)
        with pytest.raises(ContextClosed):
            await ctx.ask("q", max_new_tokens=50, ignore_eos=True)
        expect_free(runtime)


@pytest.mark.parametrize("cancel", [False, True])
async def test_a_slot_is_free_only_when_the_step_in_it_has_ended(cancel: bool):
    """Also if closing itself is cancelled meanwhile."""
    async with tiny(max_live=1) as runtime:
        ctx = await runtime.open(raw=True).__aenter__()
        inside, go_on, commit = threading.Event(), threading.Event(), runtime.engine.commit

        def slow(state) -> None:
            inside.set()
            assert go_on.wait(20)
            commit(state)

        runtime.engine.commit = slow
        feeding = asyncio.create_task(quiet(ctx.feed([7] * 5 * CHUNK)._drain()))
        await asyncio.to_thread(inside.wait, 20)
        closing = asyncio.create_task(ctx.aclose())
        for _ in range(5):
            await asyncio.sleep(0.01)
            if cancel:
                closing.cancel()
            assert runtime.slots.live.free == 0 and not closing.done()
        go_on.set()
        await asyncio.wait([closing])
        assert closing.cancelled() == cancel
        expect_free(runtime)
        assert isinstance(await feeding, ContextClosed)


async def test_an_iterator_that_outlives_its_context_does_no_harm():
    async with tiny(max_live=1) as runtime:
        async with runtime.open() as ctx:
            feed = ctx.feed(iter([[7]] * 40))
            await anext(feed)
        async with runtime.open() as fresh:
            reply = fresh.generate("q", ignore_eos=True, max_new_tokens=90)
            for _ in range(3):
                await anext(reply)
            with pytest.raises(ContextClosed):
                await anext(feed)
            del feed
        async with runtime.open() as last:
            with pytest.raises(ContextClosed):
                await anext(reply)
            before = await snap(last)
            del reply
            expect_same(await snap(last), before)
            assert ids_in(last) == runtime.codec.literal("<|im_start|>user\n")


async def test_a_reply_on_the_same_model_by_stock_transformers_beside_ours():
    """Law 10 at this level: stock generate on the same object, on another thread, while the worker runs."""
    import torch
    async with tiny() as runtime, runtime.open() as ctx:
        prompt = torch.tensor([data(runtime, TEXT)[:30]])

        def stock() -> list[int]:
            return model().generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None,
                                    attention_mask=torch.ones_like(prompt))[0].tolist()

        before = await asyncio.to_thread(stock)
        beside, _ = await asyncio.gather(asyncio.to_thread(stock), ctx.feed([7] * (30 * CHUNK)))
        assert before == beside == await asyncio.to_thread(stock)
