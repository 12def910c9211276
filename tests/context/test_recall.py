"""Recall: what a question's words find in all that was read, and that nothing committed depends on it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from locret_stream import (
    ConfigError,
    ContextClosed,
    InputError,
    InvalidText,
    InvalidTokens,
    NoSlot,
    Recall,
    Store,
    StoreError,
)
from locret_stream.config import Budget
from locret_stream.context import recalling, streams
from locret_stream.context.session import Session
from locret_stream.context.session_index import SessionIndex
from locret_stream.engine import Engine, EngineState
from locret_stream.recall import Index
from tests.context.support import TEXT, USER, data, expect_same, ids_in, literals, scripted, snap
from tests.context.support import few_commits as tiny

FACT = "The door code of the library is 48213.\n"
LINES = [f"Line {n} says that it is cold and wet today.\n" for n in range(40)]
STORY = "".join([*LINES[:10], FACT, *LINES[10:]])
QUESTION = "Which door code has the library?"
SEVERAL = "Line 31, 32, 33, 34, 35, 36, 37, 38?"
RECALL = Recall(tokens=64)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every conversation at the moment where its reply begins, control tokens included."""
    seen: list[str] = []
    begin = Session.begin_reply

    async def record(self: Session) -> None:
        await begin(self)
        seen.append(self.services.codec.decode(self.state.history, skip_special=False))

    monkeypatch.setattr(Session, "begin_reply", record)
    return seen


async def test_a_question_reads_again_what_has_its_words(asked: list[str]):
    async with tiny(acknowledge="OK.", recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        before = await snap(ctx)
        answer = await ctx.ask(QUESTION, max_new_tokens=2)
        passage, *others = await ctx.recall(QUESTION)
        assert passage.text == FACT.strip() and not others and answer.recalled == (passage,)
        ids = data(runtime, STORY)
        whole = literals(runtime, USER) + ids
        assert runtime.codec.decode(whole[passage.start:passage.end]).strip() == passage.text
        end = "<|im_end|>\n<|im_start|>assistant\nOK.<|im_end|>\n<|im_start|>user\n"
        closed = "<|im_end|>\n<|im_start|>assistant\n"
        assert asked[0].endswith(f"today.\n\n\n{passage.text}{end}{QUESTION}{closed}"), \
            "at the end of what is being read: of two turns that end with 'OK.' a small model makes a third"
        expect_same(await snap(ctx), before)
        assert ctx.memory.bytes_recall >= len(STORY.encode()), "the text is there"
        assert not (await ctx.ask(QUESTION, recall=False, max_new_tokens=2)).recalled
        assert FACT.strip() not in asked[1].rpartition("today.\n")[2]


async def test_it_is_off_unless_it_is_asked_for(asked: list[str]):
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        await ctx.ask(QUESTION, max_new_tokens=1)
        assert FACT.strip() not in asked[0].rpartition("today.\n")[2] and ctx._session.index is None
        assert ctx.memory.bytes_recall == 0
        for ask in (ctx.ask(QUESTION, recall=True), ctx.recall(QUESTION), anext(ctx.generate(QUESTION, recall=True))):
            with pytest.raises(ConfigError, match=r"keeps nothing for recall; expected Runtime\(\.\.\., recall=True\)"):
                await ask


async def test_without_a_template_it_stands_before_the_question():
    async with tiny(recall=RECALL) as runtime, runtime.open(raw=True) as ctx:
        await ctx.feed(STORY)
        seen: list[list[int]] = []
        take = Session.take

        async def record(self, ids, paced=False):
            seen.append(list(ids))
            await take(self, ids, paced)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "take", record)
            await ctx.ask(QUESTION, max_new_tokens=1)
        assert runtime.codec.decode(seen[0]) == f"\n\n{FACT.strip()}\n\n{QUESTION}"


async def test_nothing_is_put_before_a_question_of_which_nothing_is_known(asked: list[str]):
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed("a b c")
        await ctx.ask("zebra?", max_new_tokens=1)
        assert await ctx.recall("zebra?") == () and await ctx.recall("???") == ()
        assert await ctx.recall("a b c") == (), "what is pending is seen anyway"
        assert asked[0].count("<|im_start|>") == 2
        await ctx.ask(data(runtime, QUESTION), max_new_tokens=1)
        assert asked[1].count("<|im_start|>") == 2
        with pytest.raises(InvalidTokens):
            await ctx.recall([10**9])


async def test_how_much_is_recalled_can_be_said_for_each_question(asked: list[str]):
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        few, many = await ctx.recall(SEVERAL), await ctx.recall(SEVERAL, Recall(tokens=200))
        assert 0 < len(few) < len(many)
        assert [one.start for one in many] == sorted(one.start for one in many)
        await ctx.ask(SEVERAL, recall=Recall(tokens=200), max_new_tokens=1)
        assert "\n".join(one.text for one in many) in asked[0]
        assert sum(len(data(runtime, one.text)) for one in many) <= 200
    for wrong in (63, 64.5, True, "many"):
        with pytest.raises(ConfigError, match=r"recall: tokens is .*; expected a whole number, at least 64"):
            Recall(tokens=wrong)
    with pytest.raises(ConfigError, match=r"recall is 128; expected True, False or Recall\(tokens=\.\.\.\)"):
        async with tiny(recall=128):
            pass


async def test_the_copy_that_reads_again_keeps_its_best_units_and_the_memory_all(monkeypatch: pytest.MonkeyPatch):
    thinned: list[tuple[list[int], list[int]]] = []
    thin = Engine.thin

    def record(self: Engine, state: EngineState, share: float, reading: int) -> None:
        before = list(state.store.counts)
        thin(self, state, share, reading)
        thinned.append((before, list(state.store.counts)))

    monkeypatch.setattr(Engine, "thin", record)
    async with tiny(budget=Budget(units=64, sinks=2, stabilizers=4), recall=True) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        before = await snap(ctx)
        layers = len(ctx._session.state.store.counts)
        await ctx.ask(QUESTION, max_new_tokens=1)
        await ctx.ask(QUESTION, max_new_tokens=1, recall=Recall(memory=0.5))
        await ctx.ask(QUESTION, max_new_tokens=1, recall=Recall(memory=1))
        await ctx.ask(QUESTION, max_new_tokens=1, recall=False)
        await ctx.ask("zebra?", max_new_tokens=1)
        assert thinned == [([64] * layers, [left] * layers) for left in (16, 32, 64)]
        expect_same(await snap(ctx), before)
        thinned.clear()
        await anext(ctx.generate(QUESTION, max_new_tokens=1))
        await anext(ctx.generate(QUESTION, max_new_tokens=1, aside=data(runtime, FACT)))
        await anext(ctx.generate(QUESTION, max_new_tokens=1, aside=data(runtime, FACT), recall=Recall(memory=0.5)))
        await anext(ctx.generate(QUESTION, max_new_tokens=1, recall=False))
        assert thinned == [([64] * layers, [left] * layers) for left in (16, 16, 32)]
        assert ctx._session.state.store.counts == [64] * layers
    for wrong in (0, -0.1, 1.01, True, "half", float("nan")):
        with pytest.raises(ConfigError, match=r"recall: memory is .*; expected a share of the budget: above 0"):
            Recall(memory=wrong)


@pytest.mark.parametrize("pending", [0, 1, 100, 128, 200, 255])
async def test_in_a_small_budget_all_that_is_read_again_stands_before_the_reply(monkeypatch: pytest.MonkeyPatch,
                                                                                pending: int):
    """However much is pending: no more is read than has room, and what is pending is committed first."""
    read, begin = list[int](), Session.begin_reply
    async with tiny(budget=Budget(units=16, sinks=2, stabilizers=2), chunk_size=256,
                    recall=Recall(tokens=4096)) as runtime, runtime.open() as ctx:
        async def record(self: Session) -> None:
            await begin(self)
            assert runtime.engine.receipts(self.state, ctx.memory.tokens).kept.all()
            read.append(self.state.position - ctx.memory.tokens)

        await ctx.feed(STORY)
        while ctx.memory.pending != pending:
            await ctx.feed(data(runtime, "a"))
        monkeypatch.setattr(Session, "begin_reply", record)
        before = await snap(ctx)
        await ctx.ask(SEVERAL, max_new_tokens=1)
        await ctx.ask(QUESTION, max_new_tokens=1, recall=Recall(tokens=64))
        assert 150 < read[0] < 256 - recalling.REPLY + 1 and read[1] < 150
        expect_same(await snap(ctx), before)
        found, as_asked = await ctx.recall(SEVERAL), await ctx.recall(SEVERAL, Recall(tokens=4096))
        assert found and set(found) <= set(as_asked) and (pending or len(found) < len(as_asked))


async def test_nothing_committed_depends_on_it():
    async with tiny() as plain, tiny(recall=True) as runtime, plain.open() as other, runtime.open() as ctx:
        for piece in (STORY[:500], STORY[500:1200], STORY[1200:]):
            await ctx.feed(piece)
            await other.feed(piece)
            await ctx.ask(QUESTION, max_new_tokens=3)
        expect_same(await snap(ctx), await snap(other))


async def test_what_is_undone_is_not_found():
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed("".join(LINES))
        with pytest.raises(KeyError):
            async with ctx.turn():
                await ctx.feed(FACT * 3 + "".join(LINES[:5]))
                assert await finds(ctx)
                raise KeyError
        assert not await finds(ctx)
        await ctx.feed(STORY)
        assert await finds(ctx)
        assert held(ctx) == ids_before(ctx)


async def test_a_fork_goes_on_by_itself():
    async with tiny(recall=RECALL, max_live=2) as runtime, runtime.open() as ctx:
        await ctx.feed("".join(LINES))
        async with ctx.fork() as fork:
            await fork.feed(STORY)
            assert await finds(fork)
            assert held(fork) == ids_before(fork)
        assert not await finds(ctx)


@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["plain", "encrypted"])
async def test_a_stored_session_finds_what_it_read_in_another_process(tmp_path: Path, key):
    options = {"recall": RECALL, "store": tmp_path / "store", "key": key}
    async with tiny(**options) as runtime, runtime.open("s") as ctx:
        await ctx.feed(STORY)
        assert ctx._session.index._index._private is (key is not None)
        async with runtime.open() as nameless:
            assert nameless._session.index._index._private is (key is not None)
    async with tiny(**options) as runtime, runtime.open("s") as ctx:
        assert not ctx._session.index.complete, "the log is read when it is needed"
        await ctx.feed("".join(LINES[:9]))
        assert await finds(ctx)
        await ctx.feed("".join(LINES[:9]))
        assert held(ctx) == ids_before(ctx)
        async with ctx.fork("t") as fork:
            await fork.feed("The door code of the library is 7 now.\n" + "".join(LINES[:9]))
            assert "is 7 now" in (await fork.recall(QUESTION, Recall(tokens=200)))[-1].text
            assert held(fork) == ids_before(fork)


async def test_what_was_rewound_is_not_found(tmp_path: Path):
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed("".join(LINES))
        first = await ctx.snapshot()
        await ctx.feed(STORY)
        second = await ctx.snapshot()
        for _ in range(2):
            await ctx.rewind(first)
            assert not await finds(ctx)
            assert held(ctx) == ids_before(ctx)
            await ctx.rewind(second)
            assert await finds(ctx)
            assert held(ctx) == ids_before(ctx)
        await ctx.rewind(0)
        assert await ctx.recall(QUESTION) == ()
        await ctx.feed(STORY)
        assert await finds(ctx)


async def test_a_session_without_a_log_says_that_it_cannot(tmp_path: Path):
    options = {"recall": True, "store": Store(tmp_path, log=False)}
    async with tiny(**options) as runtime, runtime.open("s") as ctx:
        await ctx.feed(STORY)
        assert await ctx.recall(QUESTION), "what was read since it began is known"
    async with tiny(**options) as runtime, runtime.open("s") as ctx:
        with pytest.raises(ConfigError, match="cannot be recalled, as its store keeps no log"):
            await ctx.ask(QUESTION)
        assert isinstance(await ctx.ask(QUESTION, recall=False, max_new_tokens=1), str)
        await ctx.feed("more")


async def test_it_holds_through_swaps(tmp_path: Path):
    async with tiny(recall=RECALL, store=tmp_path, max_live=1) as runtime:
        async with runtime.open("a") as a, runtime.open("b") as b:
            for piece in range(4):
                await a.feed("".join(LINES[piece * 9:piece * 9 + 9]))
                await b.feed(FACT + "".join(LINES[:9]))
            assert held(a) == ids_before(a) and held(b) == ids_before(b)
            assert await finds(b)


async def test_a_fault_of_the_index_is_mended_from_the_log(tmp_path: Path, caplog):
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed(STORY[:900])
        ctx._session.index._index._db.execute("drop table passages")
        await ctx.feed(STORY[900:])
        assert "will be made again from the log" in caplog.text
        assert await finds(ctx) and held(ctx) == ids_before(ctx)
        ctx._session.index._index._db.execute("drop table passages")
        with pytest.raises(StoreError, match="the index for recall cannot be used: no such table"):
            await ctx.ask(QUESTION)
        assert await finds(ctx) and held(ctx) == ids_before(ctx)


async def test_an_index_without_a_log_that_is_lost_is_missed(caplog):
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY[:900])
        ctx._session.index._index._db.execute("drop table passages")
        await ctx.feed(STORY[900:])
        with pytest.raises(ConfigError, match="cannot be recalled"):
            await ctx.recall(QUESTION)
        assert isinstance(await ctx.ask(QUESTION, recall=False, max_new_tokens=1), str)


async def test_closing_while_it_is_searched(monkeypatch):
    async with tiny(recall=RECALL) as runtime:
        async with runtime.open() as ctx:
            await ctx.feed(STORY)
            task = asyncio.create_task(ctx.recall(QUESTION))
            await asyncio.sleep(0)
            ctx._session.index._index.close()
            await ctx.aclose()
            (found,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(found, (tuple, ContextClosed)), found


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.thorough(but=1)
async def test_no_more_is_read_again_than_was_said(raw: bool):
    facts = "".join(f"The door code of falcon {number} is {48_000 + number}.\n{TEXT[:90]}\n" for number in range(12))
    async with tiny(budget=512, recall=True) as runtime, runtime.open(raw=raw) as ctx:
        await ctx.feed(facts + TEXT * 4)
        for most in range(64, 220, 3):
            again = await recalling.read_again(ctx._live, "What is the door code of falcon?", Recall(tokens=most))
            assert again.passages and len(again.ids) <= most


@pytest.mark.thorough
async def test_questions_at_the_same_time(asked: list[str]):
    async with tiny(recall=RECALL, scratch=2, max_live=3) as runtime:
        async def one(number: int) -> None:
            async with runtime.open() as ctx:
                fact = f"The code of gate {number} is {number}{number}71.\n"
                await ctx.feed("".join(LINES[:15]) + fact + "".join(LINES[15:30]))
                for _ in range(3):
                    before = len(asked)
                    generation = ctx.generate("Which code has the gate?", max_new_tokens=2)
                    assert await drained(generation) and len(asked) > before
                    assert any(fact.strip() in one.text for one in generation.recalled)
                    await ctx.ask("Which code has the gate?", max_new_tokens=2)
                    await ctx.feed("".join(LINES[:7]))
                assert held(ctx) == ids_before(ctx)

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(one(number))


async def test_a_question_that_is_cancelled_leaves_nothing(monkeypatch):
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        before = await snap(ctx)
        for delay in (0, .001, .003, .01):
            task = asyncio.create_task(ctx.ask(QUESTION, max_new_tokens=50))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        expect_same(await snap(ctx), before)
        scripted(monkeypatch, data(runtime, "y"))
        assert await ctx.ask(QUESTION, max_new_tokens=1) == "y"


async def finds(ctx) -> bool:
    """Whether the fact is among what the question finds."""
    return any(FACT.strip() in one.text for one in await ctx.recall(QUESTION))


async def test_a_reply_with_recall_takes_in_what_one_without_does(asked: list[str], monkeypatch):
    """The copy that reads again speaks; the memory has the prompt and the reply, as if it had spoken itself."""
    async with tiny(acknowledge="OK.", recall=RECALL, max_live=2) as runtime:
        reply = data(runtime, "It is 48213, of course, as was said before.")
        async with runtime.open() as ctx, runtime.open() as other:
            for each, recall in ((ctx, None), (other, False)):
                await each.feed(STORY)
                scripted(monkeypatch, reply * 2)
                for _ in range(2):
                    generation = each.generate(QUESTION, recall=recall, max_new_tokens=len(reply))
                    assert [token.id async for token in generation] == reply
                    passages = [one.text for one in generation.recalled]
                    assert passages[:1] == ([FACT.strip()] if recall is None else [])
            expect_same(await snap(ctx), await snap(other))
        copy, _, own, _ = asked
        assert copy.endswith(own[-60:]) and FACT.strip() in copy[-300:] and FACT.strip() not in own[-300:]


async def test_a_reply_is_spoken_by_the_copy(monkeypatch):
    """Its tokens are those of a context that was fed what the copy read."""
    async with tiny(acknowledge="OK.", recall=RECALL, max_live=2) as runtime:
        async with runtime.open() as ctx, runtime.open() as other:
            await ctx.feed(STORY)
            generation = ctx.generate(QUESTION, max_new_tokens=9, ignore_eos=True)
            found = [token.id async for token in generation]
            await other.feed(STORY)
            assert await other.recall(QUESTION) == generation.recalled != ()
            assert await other.ask(QUESTION, max_new_tokens=9, ignore_eos=True) == generation.text
            assert len(found) == 9


async def test_ids_aside_are_read_by_the_copy_alone(asked: list[str], monkeypatch):
    async with tiny(max_live=1) as runtime, runtime.open() as ctx:
        await ctx.feed(TEXT)
        scripted(monkeypatch, data(runtime, "y") * 2)
        before = ids_in(ctx)
        async for _ in ctx.generate("so?", aside=data(runtime, "only once"), max_new_tokens=1):
            pass
        assert len(asked) == 1 and "only once" in asked[0]
        assert ids_in(ctx)[:len(before)] == before and "only once" not in runtime.codec.decode(ids_in(ctx))
        with pytest.raises(InvalidTokens):
            ctx.generate("so?", aside=[10**9])
        with pytest.raises(InvalidTokens):
            await ctx.ask("so?", aside=[10**9])


async def test_replies_with_recall_that_end_early_give_their_slot_back(monkeypatch):
    async with tiny(recall=RECALL, slot_timeout_s=0.5) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        for _ in range(3):
            async for _token in ctx.generate(QUESTION, max_new_tokens=50, ignore_eos=True):
                break
        generation = ctx.generate(QUESTION, max_new_tokens=50, ignore_eos=True)
        await anext(generation)
        with pytest.raises(NoSlot):
            await ctx.ask(QUESTION)
        await generation.aclose()
        for delay in (0, .001, .005, .02):
            task = asyncio.create_task(drained(ctx.generate(QUESTION, max_new_tokens=50, ignore_eos=True)))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await ctx.ask(QUESTION, max_new_tokens=1) is not None
        generation = ctx.generate(QUESTION, max_new_tokens=50, ignore_eos=True)
        await anext(generation)
        await ctx.aclose()
        with pytest.raises(ContextClosed):
            await anext(generation)


async def test_inside_a_turn_it_needs_a_scratch_slot_more(monkeypatch):
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        async with ctx.turn():
            await ctx.feed("".join(LINES[:3]))  # the turn takes the scratch slot with its first commit
            with pytest.raises(NoSlot, match=r"the only scratch slot since its first commit; expected a reply with"):
                await drained(ctx.generate(QUESTION, max_new_tokens=3))
            assert await drained(ctx.generate(QUESTION, recall=False, max_new_tokens=3, ignore_eos=True)) == 3
    async with tiny(recall=RECALL, scratch=2) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        before = await snap(ctx)
        with pytest.raises(KeyError):
            async with ctx.turn():
                assert await drained(ctx.generate(QUESTION, max_new_tokens=20, ignore_eos=True)) == 20
                raise KeyError
        expect_same(await snap(ctx), before)
        assert held(ctx) == held(ctx)[:ctx._session.state.seen]


@pytest.mark.thorough
async def test_a_talk_with_recall_is_committed_as_it_goes_on():
    async with tiny(recall=RECALL, max_live=2) as runtime, runtime.open() as ctx, runtime.open() as other:
        for each, recall in ((ctx, True), (other, False)):
            await each.feed(STORY)
            for _ in range(6):
                assert await drained(each.generate(QUESTION, recall=recall, max_new_tokens=20, ignore_eos=True)) == 20
                assert each.memory.pending < 2 * runtime.engine.chunk_size
            assert each._session.state.seen > len(data(runtime, STORY)) + 5 * 20, recall


@pytest.mark.thorough
async def test_a_reply_whose_session_finds_no_slot_ends_all_the_same(tmp_path: Path, monkeypatch):
    """What it said is committed by the next operation."""
    async with tiny(recall=RECALL, store=tmp_path, max_live=1, slot_timeout_s=0.2) as runtime:
        async with runtime.open("a") as ctx, runtime.open("b") as other:
            await other.feed(STORY)
            await ctx.feed(STORY)
            reply = ctx.generate(QUESTION, max_new_tokens=20, ignore_eos=True)
            await anext(reply)
            await other.feed("y ")  # it has the only live slot from here on
            assert await drained(reply) == 19 and reply.finish_reason == "length"
            await ctx.feed("z " * 20)
            assert held(ctx) == ids_before(ctx)


async def test_a_context_that_ends_ends_its_replies(tmp_path: Path):
    """Their slots are free, also where somebody still holds the reply."""
    async with tiny(recall=RECALL, store=tmp_path, slot_timeout_s=0.2, max_live=2) as runtime:
        async with runtime.open("other") as other:
            await other.feed(STORY)
            ctx = runtime.open("s")
            await ctx.__aenter__()
            await ctx.feed(STORY)
            reply = ctx.generate(QUESTION, max_new_tokens=50, ignore_eos=True)
            await anext(reply)
            await ctx.aclose()
            assert isinstance(await other.ask(QUESTION, max_new_tokens=1), str)
            with pytest.raises(ContextClosed):
                await anext(reply)
            async with runtime.open("s") as ctx:
                waiting = ctx.generate(QUESTION, max_new_tokens=10_000, ignore_eos=True)
                task = asyncio.create_task(drained(waiting))
                await asyncio.sleep(0.05)
                await ctx.aclose(save=False)
                with pytest.raises(ContextClosed):
                    await task
            assert isinstance(await other.ask(QUESTION, max_new_tokens=1), str)


@pytest.mark.thorough
async def test_a_question_between_the_tokens_of_a_reply_says_at_once_what_it_lacks():
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        async for _ in ctx.generate(QUESTION, max_new_tokens=3, ignore_eos=True):
            with pytest.raises(NoSlot, match="a reply with recall of this context holds the only scratch slot"):
                await asyncio.wait_for(ctx.ask(QUESTION), 1)
            break
    async with tiny(recall=RECALL, scratch=2) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        async for _ in ctx.generate(QUESTION, max_new_tokens=2, ignore_eos=True):
            assert isinstance(await ctx.ask(QUESTION, max_new_tokens=1), str)


@pytest.mark.parametrize("wrong", [0, 1, "no", {}, 128])
@pytest.mark.thorough(but=2)
async def test_what_says_how_to_recall_is_checked(wrong):
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        expected = r"recall is .*; expected True, False or Recall\(tokens=...\)"
        with pytest.raises(ConfigError, match=expected):
            await ctx.ask(QUESTION, recall=wrong)
        with pytest.raises(ConfigError, match=expected):
            ctx.generate(QUESTION, recall=wrong)
        with pytest.raises(ConfigError, match=r"recall is .*; expected Recall\(tokens=...\)"):
            await ctx.recall(QUESTION, wrong)


async def test_a_question_in_bytes_or_ids_is_one_in_text(asked: list[str]):
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        for question in (QUESTION, QUESTION.encode(), np.array(data(runtime, QUESTION))):
            await ctx.ask(question, max_new_tokens=1)
        assert asked[0] == asked[1] == asked[2]
        with pytest.raises(InvalidText):
            await ctx.ask(b"\xff\xfe", max_new_tokens=1)
        with pytest.raises(InputError, match="found 5 as a question"):
            await ctx.ask(5)


async def test_a_memory_that_evicted_nothing_stays_whole():
    """Its answers are those of the stock model, which saw the passages twice."""
    async with tiny(budget=1500, recall=RECALL, max_live=2) as runtime, runtime.open() as ctx, runtime.open() as other:
        for each in (ctx, other):
            await each.feed(STORY[:1200])
        kept = await ctx.ask(QUESTION, max_new_tokens=9, ignore_eos=True)
        assert kept == await other.ask(QUESTION, max_new_tokens=9, ignore_eos=True, recall=Recall(tokens=64, memory=1))


async def test_where_nothing_is_ever_evicted_nothing_is_read_again(asked: list[str]):
    async with tiny(policy="full", budget=1500, recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY[:1200])
        await ctx.ask(QUESTION, max_new_tokens=1)
        assert await finds(ctx) and FACT.strip() not in asked[0].rpartition("today.\n")[2]


async def test_a_search_holds_up_no_commit():
    async with tiny(recall=RECALL, max_live=2) as runtime, runtime.open() as ctx, runtime.open() as other:
        await ctx.feed(STORY)
        with ctx._session.index._lock:  # as a search on another thread has it
            await asyncio.wait_for(ctx.feed(FACT + STORY[:900]), 30)
            await asyncio.wait_for(other.feed(STORY), 30)
        assert await finds(ctx)
        assert held(ctx) == held(ctx)[:ctx._session.state.seen] and len(held(ctx)) == ctx._session.state.seen


@pytest.mark.thorough
async def test_an_index_that_is_made_again_misses_no_commit_that_runs_meanwhile(tmp_path: Path, monkeypatch):
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed(STORY)
    add = SessionIndex.add

    def late(self, *args):
        time.sleep(0.05)
        add(self, *args)

    monkeypatch.setattr(SessionIndex, "add", late)
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        feeding = asyncio.create_task(ctx.feed("".join(LINES[:9])))
        await asyncio.sleep(0.02)
        await ctx.recall(QUESTION)
        await feeding
        assert ctx._session.index.complete and held(ctx) == ids_before(ctx)


@pytest.mark.thorough
async def test_nothing_is_committed_between_the_reading_of_the_log_and_the_index_of_it(tmp_path: Path, monkeypatch):
    """What was would be dropped, as the log is taken to have it, and not be found."""
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed("".join(LINES))
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        read, feeding = recalling._log_of, []

        def late(session: Session):
            ids = read(session)
            if not feeding:
                feeding.append(asyncio.run_coroutine_threadsafe(ctx.feed(FACT + LINES[0])._drain(), loop))
                time.sleep(0.3)  # time enough for it to be committed, if it may
            return ids

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(recalling, "_log_of", late)
        await ctx.recall(QUESTION)
        await asyncio.wrap_future(feeding[0])
        assert await finds(ctx) and held(ctx) == ids_before(ctx)


@pytest.mark.thorough
async def test_other_text_behind_the_same_snapshot_is_another_index(tmp_path: Path):
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed("".join(LINES))
        first = await ctx.snapshot()
        await ctx.feed(STORY)
        second = await ctx.snapshot()
        await ctx.rewind(first)
        await ctx.feed("Something else is told in this place, word by word.\n" * 80)
        assert not await finds(ctx)
        await ctx.rewind(second)
        assert await finds(ctx) and held(ctx) == ids_before(ctx)


async def test_an_index_ends_with_its_context():
    async with tiny(recall=RECALL) as runtime:
        async with runtime.open() as ctx:
            await ctx.feed(STORY)
            database = ctx._session.index._index._db
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            database.execute("select 1")


async def test_tokens_of_a_reply_have_the_places_that_the_memory_gives_them():
    """Positions, noise and the penalty on repetitions are those of the session, which does not see the passages."""
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        before, reply = ctx.memory.tokens, ctx.generate(QUESTION, max_new_tokens=4, ignore_eos=True)
        tokens = [token async for token in reply]
        assert reply.recalled and tokens[0].position > before
        state = ctx._session.state
        for token in tokens:
            assert state.history[token.position - state.position] == token.id


async def test_an_index_takes_ids_from_its_session_alone():
    """A step of a session that ended by then, undone or rewound, adds nothing."""
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        index, before = ctx._session.index, held(ctx)
        index.add(object(), data(runtime, FACT), len(before))
        await ctx.recall(QUESTION)
        assert held(ctx) == before and index.complete


async def test_a_penalty_on_repetitions_is_on_those_of_the_session(monkeypatch):
    """Not on the words of the passages, which only the copy has read."""
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        seen, choose = [], streams.sample
        monkeypatch.setattr(streams, "sample", lambda logits, history, *rest: seen.append(list(history)) or choose(
            logits, history, *rest))
        reply = ctx.generate(QUESTION, max_new_tokens=3, ignore_eos=True)
        assert await drained(reply) == 3 and reply.recalled
        fact = runtime.codec.encode_text(reply.recalled[0].text)
        for history in seen:
            assert not any(history[at:at + len(fact)] == fact for at in range(len(history)))
        assert [len(history) for history in seen] == [1024] * 3


async def drained(generation) -> int:
    return len([token async for token in generation])


def held(ctx) -> list[int]:
    """All ids that its index has."""
    return ctx._session.index._index._ids_from(0)


def ids_before(ctx) -> list[int]:
    """The committed ids of a stored or a short session, from where they are known."""
    session = ctx._session
    if session.branch is not None:
        return np.asarray(session.branch.committed_ids(session.state.seen)).tolist()
    return ids_in(ctx)[:session.state.seen] if ctx.memory.tokens <= 1024 else held(ctx)[:session.state.seen]


@pytest.mark.thorough
async def test_a_prompt_of_many_chunks_is_stored_and_comes_back(tmp_path: Path):
    """A reply with recall leaves its whole prompt pending."""
    prompt = QUESTION + " and the word is cold and wet." * 120
    async with tiny(recall=RECALL, store=tmp_path, max_live=1) as runtime:
        async with runtime.open("s") as ctx, runtime.open("other") as other:
            await ctx.feed(STORY)
            async for _ in ctx.generate(prompt, max_new_tokens=9, ignore_eos=True):
                break
            assert ctx.memory.pending > 64 * runtime.engine.chunk_size
            await other.feed(STORY)  # swaps the first one out
            assert ctx.memory.pending and await ctx.feed("more\n")
            async for _ in ctx.generate(prompt, max_new_tokens=9, ignore_eos=True):
                break
            tokens, last = ctx.memory.tokens, ctx._session.state.history[-500:]
        async with runtime.open("s") as again:
            assert again.memory.tokens == tokens and again._session.state.history[-500:] == last


async def test_more_than_can_be_stored_is_not_accepted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("locret_stream.engine.core.MOST_PENDING", 300)
    long = QUESTION + " cold" * 400
    async with tiny(recall=RECALL) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        before = await snap(ctx)
        with pytest.raises(ConfigError, match=r"at most 300 at once: feed\(\) it before .*, or ask with recall=False"):
            await anext(ctx.generate(long))
        expect_same(await snap(ctx), before)
        assert await drained(ctx.generate(long, recall=False, max_new_tokens=2, ignore_eos=True)) == 2


@pytest.mark.parametrize("way", ["opened again", "rewound"])
@pytest.mark.thorough(but=1)
async def test_a_fork_without_a_name_finds_what_a_session_read_before(tmp_path: Path, way: str):
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed(STORY)
    async with tiny(recall=RECALL, store=tmp_path, max_live=2) as runtime, runtime.open("s") as ctx:
        if way == "rewound":
            saved = await ctx.snapshot()
            await ctx.feed("".join(LINES[:9]))
            await ctx.rewind(saved)
        assert not ctx._session.index.complete
        async with ctx.fork() as fork:
            assert await finds(fork) and held(fork) == ids_before(fork)


@pytest.mark.parametrize("way", ["undo", "rewind", "fork"])
@pytest.mark.thorough(but=1)
async def test_a_fault_of_the_index_costs_the_index_alone(tmp_path: Path, way: str):
    async with tiny(recall=RECALL, store=tmp_path, max_live=2) as runtime, runtime.open("s") as ctx:
        await ctx.feed("".join(LINES))
        saved = await ctx.snapshot()
        turn = ctx.turn()
        if way == "undo":
            await turn.__aenter__()
        await ctx.feed(STORY)
        ctx._session.index._index._db.execute("drop table passages")
        if way == "undo":
            assert not await turn.__aexit__(KeyError, KeyError(), None)
        elif way == "rewind":
            await ctx.rewind(saved)
        else:
            async with ctx.fork() as fork:
                assert await fork.ask(QUESTION, recall=False, max_new_tokens=1, ignore_eos=True)
        await ctx.feed(STORY)
        with contextlib.suppress(StoreError):  # what it finds is damaged, which it says once
            await ctx.recall(QUESTION)
        assert await finds(ctx) and held(ctx) == ids_before(ctx)


@pytest.mark.thorough
async def test_what_was_undone_while_the_log_was_read_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed("".join(LINES))
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        read, asking, was_read, undone = recalling._log_of, [], threading.Event(), threading.Event()

        def late(session: Session):
            ids = read(session)
            was_read.set()
            undone.wait(10)
            return ids

        with pytest.raises(KeyError):
            async with ctx.turn():
                await ctx.feed(STORY)
                monkeypatch.setattr(recalling, "_log_of", late)
                asking.append(asyncio.create_task(ctx.recall("cold and wet")))
                await asyncio.to_thread(was_read.wait, 10)
                monkeypatch.setattr(recalling, "_log_of", read)
                threading.Timer(0.3, undone.set).start()
                raise KeyError
        undone.set()
        await asyncio.gather(*asking, return_exceptions=True)
        assert not await finds(ctx) and held(ctx) == ids_before(ctx)


async def test_a_fork_of_a_session_whose_index_cannot_be_made_is_made_all_the_same(tmp_path: Path, monkeypatch):
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed(STORY)
    async with tiny(recall=RECALL, store=tmp_path, max_live=2) as runtime, runtime.open("s") as ctx:
        def full(*_):
            raise StoreError("the index for recall cannot be used: no room")

        monkeypatch.setattr(SessionIndex, "follow", full)
        async with ctx.fork() as fork:
            assert await fork.ask(QUESTION, recall=False, max_new_tokens=1, ignore_eos=True)
            with pytest.raises(ConfigError, match="cannot be recalled any more"):
                await fork.recall(QUESTION)


@pytest.mark.thorough
async def test_a_reply_is_given_whole_where_the_memory_cannot_commit_it_just_now(tmp_path: Path, monkeypatch):
    """Its session was swapped out meanwhile, and the store cannot be read: the next call says so."""
    monkeypatch.setattr("locret_stream.runtime.sharing.TURN_S", 0.05)
    async with tiny(recall=RECALL, store=tmp_path, max_live=1) as runtime:
        async with runtime.open("a") as ctx, runtime.open("b") as other:
            await other.feed(STORY)
            await ctx.feed(STORY)
            reply = ctx.generate(QUESTION, max_new_tokens=20, ignore_eos=True)
            await anext(reply)
            await asyncio.sleep(0.1)
            await other.feed(STORY)
            await other.aclose()
            assert ctx.swapped_out
            with monkeypatch.context() as patch:
                async def unreadable(*_):
                    raise StoreError("the disk cannot be read just now")

                patch.setattr("locret_stream.context.saving.storing_on", unreadable)
                assert await drained(reply) == 19 and reply.finish_reason == "length"
            await ctx.feed("more\n")
            assert "more" in runtime.codec.decode(ctx._session.state.history)


@pytest.mark.thorough
async def test_an_undo_waits_for_no_more_of_a_log_than_a_slice(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("locret_stream.context.session_index.SLICE", 64)
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        await ctx.feed("".join(LINES))
    async with tiny(recall=RECALL, store=tmp_path) as runtime, runtime.open("s") as ctx:
        assert ctx.memory.tokens // 64 > 15
        add, slices, two, undone = Index.add, [], threading.Event(), threading.Event()

        def slow(self: Index, ids):
            add(self, ids)
            if threading.current_thread().name.startswith("locret-recall"):
                slices.append(len(ids))
                if len(slices) == 2:
                    two.set()
                undone.wait(1)

        monkeypatch.setattr(Index, "add", slow)
        with pytest.raises(KeyError):
            async with ctx.turn():
                await ctx.feed(STORY)
                asking = asyncio.create_task(ctx.recall("cold and wet"))
                await asyncio.to_thread(two.wait, 20)
                raise KeyError
        assert len(slices) < 9, "each of them takes a second"
        undone.set()
        await asyncio.gather(asking, return_exceptions=True)
        assert max(slices) == 64 and not await finds(ctx) and held(ctx) == ids_before(ctx)


@pytest.mark.thorough
async def test_a_context_that_ends_while_a_prompt_is_read_beside_an_open_reply_says_so(tmp_path: Path, monkeypatch):
    """The reply that was left open is closed by the next prompt: of a closed session it cannot be any more."""
    async with tiny(recall=RECALL, store=tmp_path, acknowledge="OK.") as runtime, runtime.open("s") as ctx:
        await ctx.feed(STORY)
        reply = ctx.generate(QUESTION, max_new_tokens=50, ignore_eos=True)
        await anext(reply)
        await ctx.snapshot()
        await ctx.aclose(save=False)
    async with tiny(recall=RECALL, store=tmp_path, acknowledge="OK.") as runtime, runtime.open("s") as ctx:
        begin = Session.begin_reply

        async def then_end(self: Session) -> None:
            await begin(self)
            await ctx.aclose(save=False)

        monkeypatch.setattr(Session, "begin_reply", then_end)
        with pytest.raises(ContextClosed):
            await drained(ctx.generate(QUESTION, max_new_tokens=5, ignore_eos=True))


@pytest.mark.thorough
async def test_a_fork_without_a_name_holds_up_nobody_while_its_index_is_copied(monkeypatch: pytest.MonkeyPatch):
    ticks, while_copied, copy = 0, list[int](), Index.copy

    def slow(self: Index) -> Index:
        before = ticks
        time.sleep(0.3)
        while_copied.append(ticks - before)
        return copy(self)

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async with tiny(recall=RECALL, max_live=2) as runtime, runtime.open() as ctx:
        await ctx.feed(STORY)
        monkeypatch.setattr(Index, "copy", slow)
        ticking = asyncio.create_task(tick())
        async with ctx.fork() as fork:
            assert await finds(fork) and held(fork) == ids_before(fork)
        ticking.cancel()
        assert len(while_copied) == 1 and while_copied[0] > 10
