"""Sessions of models whose layers keep other things than keys and values of equal shape, and of memories of codes with
exact units in the host's memory: they go on in another runtime as if they had never stopped, forks and questions leave
no trace, and a turn reads new tokens alone."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from locret_stream.config import Budget, Recall
from locret_stream.engine import Engine, EngineState
from locret_stream.errors import SnapshotError
from locret_stream.host_tier import HostTier
from tests.architectures import CONFIGS, make
from tests.context import killed
from tests.context.support import CHUNK, TEXT, expect_same, snap, tiny, tokenizer
from tests.kit import assert_same
from tests.processes import leaving_none, start_python

TIERS = {"host": HostTier(units=4, residual=3),
         "host by a guess": HostTier(units=4, residual=2, prefill="codes", chosen_by="guess"),
         "host by the last": HostTier(units=3, residual=0, chosen_by="last"),
         "host in codes": HostTier(units=4, residual=3, prefill="codes", saves="codes")}
TIERED = ["llama, host", "gemma4-moe, host by a guess", "lfm2, host by the last", "deepseek-v3, host"]
ROUNDED = ["deepseek-v3, host in codes", "llama, host in codes"]  # their replies differ behind a restart
QUESTION = "What is the pass key of falcon?"


@cache
def model(name: str) -> PreTrainedModel:
    config = CONFIGS[name]()
    config.vocab_size = len(tokenizer())
    if getattr(config, "vocab_size_per_layer_input", None):
        config.vocab_size_per_layer_input = len(tokenizer())
    return make(name, config=config)


def options(name: str, **more: object) -> dict:
    """Of a kind of model; behind a comma, how exact units in the host's memory serve codes of 2 bits."""
    name, _, tier = name.partition(", ")
    if tier:
        more = {"store_bits": 2, "exact": TIERS[tier], **more}
    return dict(on=model(name), policy="keydiff", budget=Budget(units=20, sinks=2, stabilizers=3), chunk_size=8,
                **more)


@pytest.mark.parametrize("name", ["qwen3.5", "gemma4-moe", "deepseek-v3", "llama4", "hunyuan", "falcon-h1", "lfm2",
                                  "granite4-h", "gemma4-e2b", "mimo", *TIERED])
@pytest.mark.thorough(but=2)
async def test_a_session_goes_on_as_if_it_had_never_stopped(name: str, tmp_path: Path):
    """Through a question, a save in the midst of a chunk, another runtime, a fork, and more text."""
    async with tiny(**options(name)) as runtime, runtime.open() as never:
        async with tiny(**options(name, store=tmp_path)) as first, first.open("talk") as ctx:
            for each in (never, ctx):
                await each.feed(TEXT)
                await each.ask(QUESTION, max_new_tokens=3)
                await each.feed(TEXT[:50])
        async with tiny(**options(name, store=tmp_path)) as second, second.open("talk") as ctx:
            expect_same(await snap(ctx), await snap(never))
            async with ctx.fork("branch") as fork:
                await fork.feed("The fork reads this.")
            for each in (never, ctx):
                await each.feed(TEXT)
            expect_same(await snap(ctx), await snap(never))
            async with second.open("branch") as branch:
                assert branch.memory.tokens > 0
            answers = [await each.ask(QUESTION, max_new_tokens=6) for each in (never, ctx)]
            assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["lfm2", "deepseek-v3", "qwen3.5", "granite4-h", "falcon-h1", "gemma4-e2b",
                                  "gemma4-moe", "mimo"])
@pytest.mark.thorough(but=1)
async def test_what_is_swapped_out_comes_back_as_it_was(name: str, tmp_path: Path):
    """Three sessions take turns in one slot."""
    async with tiny(**options(name, store=tmp_path, max_live=1)) as runtime, tiny(**options(name)) as alone:
        contexts = [await runtime.open(f"{number}").__aenter__() for number in range(3)]
        for part in (TEXT, TEXT[30:90], TEXT[:40]):
            for number, ctx in enumerate(contexts):
                await ctx.feed(f"{number}: {part}")
        for number, ctx in enumerate(contexts):
            async with alone.open() as never:
                for part in (TEXT, TEXT[30:90], TEXT[:40]):
                    await never.feed(f"{number}: {part}")
                expect_same(await snap(ctx), await snap(never))
        for ctx in contexts:
            await ctx.aclose()


@pytest.mark.parametrize("name", ["lfm2", "deepseek-v3", "gemma4-e2b"])
@pytest.mark.thorough(but=2)
async def test_a_question_with_recall_leaves_no_trace(name: str):
    """Its copy is thinned and reads passages again, with the state that the memory has."""
    async with tiny(**options(name), recall=Recall(tokens=64)) as runtime, runtime.open() as ctx:
        await ctx.feed(TEXT + "Nothing else happened.\n" * 30)
        before = await snap(ctx)
        answer = await ctx.ask(QUESTION, max_new_tokens=3)
        assert answer.recalled, "the words were found"
        expect_same(await snap(ctx), before)


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
@pytest.mark.thorough(but=1)
async def test_a_long_chat_reads_new_tokens_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Fifty turns, over a restart and a fork: each token is committed once, and provisional tokens are fewer than a
    chunk in any forward."""
    committed: list[int] = []
    engines: list[Engine] = []
    real = Engine._commit

    def counted(self: Engine, state: EngineState, count: int) -> None:
        if self in engines:  # another one tries the model at the start
            committed.append(count)
        real(self, state, count)

    monkeypatch.setattr(Engine, "_commit", counted)
    for process in range(2):
        async with tiny(**options(name, store=tmp_path)) as runtime, runtime.open("chat") as ctx:
            engines.append(runtime.engine)
            for turn in range(25):
                async for _ in ctx.generate(f"Message {25 * process + turn}.", max_new_tokens=2, ignore_eos=True):
                    pass
            assert sum(committed) == ctx._session.state.seen, "each token was committed once"
            if process:
                before, tokens = len(committed), ctx.memory.tokens
                async with ctx.fork() as fork:
                    await fork.feed("One more message of the fork.")
                    assert sum(committed[before:]) <= fork.memory.tokens - tokens + CHUNK, "it reads nothing again"


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "falcon-h1", "deepseek-v3", "gemma4-e2b", *TIERED,
                                  *ROUNDED])
@pytest.mark.thorough
async def test_what_a_killed_process_said_it_saved_is_there(name: str, tmp_path: Path):
    """Killed twice, in the midst of reading and saving; each goes on where the one before was."""
    said = [0]
    for lines in (4, 9):
        with leaving_none():
            process = start_python("-m", "tests.context.killed", name, tmp_path)
            assert process.stdout is not None
            for _ in range(lines):
                said.append(int(process.stdout.readline()))
            await asyncio.sleep(0.01 * lines)  # somewhere in what comes next
            process.kill()
            said += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    assert said == sorted(said) and said[-1] > 40
    async with tiny(**options(name, store=tmp_path)) as runtime, runtime.open("talk", raw=True) as ctx:
        tokens = ctx.memory.tokens
        assert tokens in (said[-1], said[-1] + killed.AT_ONCE), "one save may have been done and not been said"
        async with runtime.open(raw=True) as again:
            await again.feed(killed.ids(tokens))
            assert_same((await snap(ctx)).tensors, (await snap(again)).tensors)


def files_of(folder: Path) -> list[Path]:
    """All that hold anything, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-v3", "lfm2", "granite4-h", "falcon-h1", "gemma4-moe", "llama4",
                                  "ministral3", *TIERED, *ROUNDED])
@pytest.mark.thorough(but=1)
async def test_a_byte_that_changed_in_any_file_is_refused_or_does_no_harm(name: str, tmp_path: Path):
    async with tiny(**options(name, store=tmp_path, autosave=False)) as runtime:
        async with runtime.open("talk") as ctx:
            await ctx.feed(TEXT)
            await ctx.snapshot()
            whole = await snap(ctx)
        refused = 0
        for file in files_of(tmp_path):
            sound = file.read_bytes()
            damaged = bytearray(sound)
            damaged[len(sound) // 2] ^= 4
            file.write_bytes(damaged)
            try:
                async with runtime.open("talk") as ctx:
                    expect_same(await snap(ctx), whole)
            except SnapshotError:
                refused += 1
            file.write_bytes(sound)
        assert refused >= 2, "its manifest, and a page"
        async with runtime.open("talk") as ctx:
            expect_same(await snap(ctx), whole)
