"""generate and ask: frames, ends, stop strings, sampling; and that memory holds exactly what was accepted."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import pickle
from pathlib import Path

import pytest
import torch

from locret_stream import Answer, ConfigError, Sampling
from locret_stream.context import Token
from tests import tiny_tokenizers
from tests.context.support import (
    ASK,
    CHUNK,
    END,
    TEXT,
    USER,
    chat,
    data,
    expect_pure,
    expect_same,
    expect_within_cap,
    ids_in,
    literals,
    model,
    scripted,
    snap,
    tiny,
    tokenizer,
)

EOS, IM_END = 2, tokenizer().convert_tokens_to_ids("<|im_end|>")


def spelled(text: str) -> list[int]:
    """A reply that says this."""
    return tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids


# -- how a generation ends ------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


async def run(ctx, how: str, reply: list[int]) -> list[int]:
    """Take a scripted reply until it ends that way; returns the sampled ids."""
    options = {"length": {"max_new_tokens": len(reply)}, "stop": {"stop": "pass"}}.get(how, {})
    generation, seen = ctx.generate("q?", **options), []
    try:
        async for token in generation:
            seen.append(token.id)
            if len(seen) == 3:
                if how == "break":
                    break
                if how == "raises":
                    raise Stop
                if how == "aclose":
                    await generation.aclose()
    except Stop:
        pass
    if how == "break":
        assert generation.finish_reason is None, "a variable still holds it"
        await generation.aclose()
    expected = {"break": "closed", "raises": None, "aclose": "closed", "marker": "eos"}.get(how, how)
    assert generation.finish_reason == expected
    return seen


@pytest.mark.parametrize("how", ["eos", "marker", "length", "stop", "break", "raises", "aclose"])
@pytest.mark.thorough(but=2)
async def test_the_reply_is_closed_and_memory_exact_however_it_ends(monkeypatch, how: str):
    reply = spelled("the pass key is") + ([EOS] if how == "eos" else [IM_END] if how == "marker" else [])
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("some text")
        scripted(monkeypatch, reply)
        seen = await run(ctx, how, reply)
        gc.collect()
        if how in ("break", "raises", "aclose"):
            assert seen == reply[:3]
        elif how == "stop":
            assert len(seen) < len(reply) and "pass" in runtime.codec.decode(seen)
        else:
            assert seen == reply
        # The marker that it sampled is the frame's own, or one that the template does not write.
        in_memory = seen[:-1] if how in ("marker", "eos") else seen
        assert ids_in(ctx) == chat(runtime, ("some text\n\nq?", in_memory))
        scripted(monkeypatch, spelled("yes") + [IM_END])
        assert "".join([t.text async for t in ctx.generate("again?")]) == "yes"
        assert ids_in(ctx) == chat(runtime, ("some text\n\nq?", in_memory), ("again?", spelled("yes")))
        await expect_pure(ctx)


async def test_a_dropped_reply_is_closed_too(monkeypatch):
    async with tiny() as runtime, runtime.open() as ctx:
        scripted(monkeypatch, spelled("one two three") * 4)
        async for _ in ctx.generate("a"):
            break
        await anext(ctx.generate("b"))
        with pytest.warns(RuntimeWarning, match="a generation was dropped before it began"):
            never = ctx.generate("c")
            del never
        await ctx.feed("d")
        first = spelled("one two three")[:2]
        replies = chat(runtime, ("a", first[:1]), ("b", first[1:]))
        assert ids_in(ctx) == replies + literals(runtime, USER) + data(runtime, "d")


async def test_a_cancelled_reply_keeps_what_was_sampled(monkeypatch):
    """Cancelled while the last token is being sampled: it was accepted, so it is in memory, and the reply is closed."""
    async with tiny() as runtime, runtime.open() as ctx:
        reply = spelled("one two three four five")
        queue = scripted(monkeypatch, reply)
        generation = ctx.generate("a")
        await anext(generation)
        task = asyncio.create_task(anext(generation))
        await asyncio.sleep(0)
        task.cancel()
        assert (await asyncio.wait([task]))[0] and task.cancelled()
        assert generation.finish_reason == "failed"
        taken = len(reply) - len(list(queue))
        assert ids_in(ctx) == chat(runtime, ("a", reply[:taken])) and taken in (1, 2)
        await ctx.feed("next")
        await expect_pure(ctx)


async def test_a_failing_step_ends_the_reply_and_the_next_call_works(monkeypatch):
    async with tiny() as runtime, runtime.open() as ctx:
        reply = spelled("one two")
        scripted(monkeypatch, reply)
        generation = ctx.generate("a")
        with pytest.raises(RuntimeError):  # the script ran out: an error inside a step
            async for _ in generation:
                pass
        assert generation.finish_reason == "failed" and generation.text == "one two"
        assert ids_in(ctx) == chat(runtime, ("a", reply))
        scripted(monkeypatch, [IM_END])
        assert await ctx.ask("b") == ""


# -- frames ---------------------------------------------------------------------------------------------------------


async def test_turns_are_what_the_template_renders(monkeypatch):
    async with tiny() as runtime, runtime.open(system="You watch.") as ctx:
        said = [("first\nline\n\nwhat?", "It is so."), ("and now?", "Naïve 日本語 🙂."), ("more text", "ok")]
        await ctx.feed("first\nline")
        for (prompt, reply), n in zip([("what?", said[0][1]), ("and now?", said[1][1])], (1, 2), strict=True):
            scripted(monkeypatch, [*spelled(reply), IM_END])
            assert "".join([t.text async for t in ctx.generate(prompt)]) == reply, n
        await ctx.feed("more text")
        scripted(monkeypatch, [*spelled("ok"), IM_END])
        assert "".join([t.text async for t in ctx.generate()]) == "ok"
        messages = [{"role": "system", "content": "You watch."}] + [
            {"role": role, "content": content} for turn in said for role, content in zip(("user", "assistant"), turn,
                                                                                         strict=True)]
        rendered = tokenizer().apply_chat_template(messages, tokenize=False)
        assert runtime.codec.decode(ids_in(ctx), skip_special=False) == rendered
        await expect_pure(ctx)


@pytest.mark.parametrize("name", ["llama3", "gemma", "mistral"])
async def test_other_templates(monkeypatch, name: str):
    reads = tiny_tokenizers.wrap(tokenizer().backend_tokenizer, template=tiny_tokenizers.TEMPLATES[name],
                                 marks=tiny_tokenizers.MARKS)
    on = model()
    wide = type(on)(type(on.config)(**{**on.config.to_dict(), "vocab_size": len(reads)})).eval()
    async with tiny(on=wide, reads=reads) as runtime, runtime.open() as ctx:
        word = "yes"
        for prompt in ("what?", "when?"):
            await ctx.feed("text")
            scripted(monkeypatch, spelled(word))
            async for _ in ctx.generate(prompt, max_new_tokens=len(spelled(word))):
                pass
        messages = [{"role": role, "content": content} for role, content in (
            ("user", "text\n\nwhat?"), ("assistant", word), ("user", "text\n\nwhen?"), ("assistant", word))]
        assert runtime.codec.decode(ids_in(ctx), skip_special=False).rstrip("\n") == reads.apply_chat_template(
            messages, tokenize=False).rstrip("\n")


async def test_without_a_prompt_it_replies_to_what_was_fed():
    async with tiny() as runtime, runtime.open() as ctx:
        with pytest.raises(ConfigError, match="nothing was fed since"):
            await anext(ctx.generate())
        assert ids_in(ctx) == literals(runtime, USER)
        await ctx.push("held")
        tokens = [t.id async for t in ctx.generate(max_new_tokens=4, ignore_eos=True)]
        assert len(tokens) == 4
        assert ids_in(ctx) == chat(runtime, ("held", tokens)) or tokens[-1] == IM_END
        with pytest.raises(ConfigError, match="nothing was fed since"):
            await ctx.ask(None)


async def test_an_end_that_the_template_does_not_write_is_not_held_when_a_copy_speaks(monkeypatch):
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("some text")
        reply = spelled("the pass key")
        scripted(monkeypatch, [*reply, EOS])
        seen = [token.id async for token in ctx.generate("q?", aside=spelled("read again"))]
        assert seen == [*reply, EOS]
        assert ids_in(ctx) == chat(runtime, ("some text\n\nq?", reply))
        scripted(monkeypatch, [*reply, EOS])  # whoever frames text himself has what was sampled
        [_ async for _ in ctx.generate("q?", unheld=())]
        assert ids_in(ctx).count(EOS) == 1


async def test_an_empty_reply_is_closed_though_the_prompt_ends_as_replies_do(monkeypatch):
    template = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    async with tiny(template=template) as runtime, runtime.open() as ctx:
        for text, reply in (("One.", []), ("Two.", spelled("Yes."))):
            scripted(monkeypatch, [*reply, EOS])
            [_ async for _ in ctx.generate(text)]
        held = runtime.codec.decode(ids_in(ctx), skip_special=False)
        assert held.replace("<s>", "") == "One.<|im_end|><|im_end|>Two.<|im_end|>Yes.<|im_end|>"


async def test_a_raw_context_has_no_frame(monkeypatch):
    async with tiny() as runtime, runtime.open() as framed, runtime.open(raw=True) as ctx:
        assert ctx.raw and not framed.raw and ctx.memory.tokens == 0
        with pytest.raises(ConfigError, match="nothing"):
            await anext(ctx.generate())
        await ctx.feed("once upon")
        scripted(monkeypatch, [*spelled(" a time"), EOS])
        assert "".join([t.text async for t in ctx.generate(" there was")]) == " a time"
        expected = data(runtime, "once upon") + data(runtime, " there was") + spelled(" a time") + [EOS]
        assert ids_in(ctx) == expected
        scripted(monkeypatch, spelled("x"))
        await anext(ctx.generate())
        assert ids_in(ctx) == expected + spelled("x")
        with pytest.raises(ConfigError, match="raw context"):
            async with runtime.open(raw=True, system="no place"):
                pass
    base = tiny_tokenizers.wrap(tokenizer().backend_tokenizer, template=None)
    async with tiny(reads=base) as runtime, runtime.open() as ctx:
        await ctx.feed("a base model")
        assert ids_in(ctx) == data(runtime, "a base model")


async def test_what_a_broken_off_feed_holds_waits_behind_the_reply(monkeypatch):
    async with tiny() as runtime, runtime.open() as ctx:
        async for token in ctx.feed(iter(["one ", "two\n", "three\n", "four"])):
            if token.position + 1 == len(literals(runtime, USER)) + 3:
                break
        scripted(monkeypatch, [*spelled("ok"), IM_END])
        async for _ in ctx.generate("what?"):
            pass
        await ctx.flush()
        decoded = runtime.codec.decode(ids_in(ctx), skip_special=False)
        head, tail = decoded.split("ok")
        assert head.startswith(USER + "one") and head.endswith("\n\nwhat?" + ASK)
        assert head[len(USER):-len("\n\nwhat?" + ASK)] + tail[len(END + USER):] == "one two\nthree\n"
        assert len(tail) > len(END + USER) and "four" not in decoded, "it was never pulled"


async def test_prompts_may_be_text_bytes_or_ids(monkeypatch):
    async with tiny() as runtime:
        found = []
        for prompt in ("größe", "größe".encode(), data(runtime, "größe"), tuple(data(runtime, "größe")),
                       torch.tensor(data(runtime, "größe"))):
            async with runtime.open() as ctx:
                scripted(monkeypatch, [IM_END])
                async for _ in ctx.generate(prompt):
                    pass
                found.append(ids_in(ctx))
        assert found == [chat(runtime, ("größe", []))] * 5


# -- stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reply", "stop", "shown"), [
    ("the pass key is 48213.", "key", "the pass "),
    ("the pass key is 48213.", "482", "the pass key is "),  # one digit a token: across three
    ("the pass key is 48213.", ["zzz", "is", "key"], "the pass "),
    ("aaab", "aab", "a"),
    ("日本語です", "本", "日"),
    ("one\n\ntwo", "\n\n", "one"),
    ("no stop here", "stopp", "no stop here"),
    ("ends with st", "stop", "ends with st"),
    ("🙂🙃", "🙃", "🙂"),
])
async def test_a_stop_string_never_leaks(monkeypatch, reply: str, stop, shown: str):
    """Neither whole nor in part, even across tokens; and what only looked like its beginning is not lost."""
    async with tiny() as runtime:
        for ids in (spelled(reply), [i for letter in reply for i in spelled(letter)]):
            async with runtime.open() as ctx:
                scripted(monkeypatch, [*ids, IM_END])
                generation, texts = ctx.generate("q", stop=stop), []
                async for token in generation:
                    texts.append(token.text)
                    assert shown.startswith("".join(texts))
                assert "".join(texts) == generation.text == shown
                assert generation.finish_reason == ("eos" if shown == reply else "stop")
                sampled = ids_in(ctx)[len(chat(runtime, ("q", []))) - len(literals(runtime, END)):]
                assert sampled[:len(texts) - (shown == reply)] == ids[:len(texts)], "the last sampled token included"
                scripted(monkeypatch, [*ids, IM_END])
                assert await ctx.ask("q", stop=stop) == shown


async def test_what_was_kept_back_comes_out_at_the_last_token(monkeypatch):
    async with tiny() as runtime, runtime.open() as ctx:
        scripted(monkeypatch, spelled("so sto"))
        generation = ctx.generate("q", stop=["stop"], max_new_tokens=len(spelled("so sto")))
        assert "".join([t.text async for t in generation]) == "so sto" and generation.finish_reason == "length"


async def test_text_never_splits_a_character(monkeypatch):
    async with tiny() as runtime, runtime.open() as ctx:
        reply = [i for byte in "日本🙂é".encode() for i in spelled_byte(byte)]
        assert len(reply) == 12
        scripted(monkeypatch, reply)
        texts = [t.text async for t in ctx.generate("q", max_new_tokens=12)]
        assert texts == ["", "", "日", "", "", "本", "", "", "", "🙂", "", "é"]
        scripted(monkeypatch, reply[:5])
        texts = [t.text async for t in ctx.generate("q", max_new_tokens=5)]
        assert texts == ["", "", "日", "", ""], "a character that a limit cut off is held back"
        assert ids_in(ctx)[-5 - len(literals(runtime, END)):][:5] == reply[:5]
        scripted(monkeypatch, [*reply[:5], IM_END])
        texts = [t.text async for t in ctx.generate("q", max_new_tokens=9)]
        assert texts == ["", "", "日", "", "", "\ufffd"], "what never became a character is shown as such, once"


def spelled_byte(byte: int) -> list[int]:
    from locret_stream.text.codec import _BYTES
    letter = next(letter for letter, value in _BYTES.items() if value == byte)
    return [tokenizer().convert_tokens_to_ids(letter)]


# -- sampling -------------------------------------------------------------------------------------------------------


async def test_every_end_marker_ends_a_reply_and_only_those(monkeypatch):
    on = model(seed=1)
    kept = on.generation_config.eos_token_id
    on.generation_config.eos_token_id = [17, 18]
    try:
        async with tiny(on=on) as runtime, runtime.open() as ctx:
            assert runtime.frames.eos_ids == {17, 18, EOS, IM_END}
            for marker in (17, 18, EOS, IM_END):
                scripted(monkeypatch, [40, marker, 41, 42])
                generation = ctx.generate("q", max_new_tokens=3)
                assert [t.id async for t in generation] == [40, marker] and generation.finish_reason == "eos"
                scripted(monkeypatch, [40, marker, 41, 42])
                generation = ctx.generate("q", max_new_tokens=3, ignore_eos=True)
                assert [t.id async for t in generation] == [40, marker, 41] and generation.finish_reason == "length"
            await expect_pure(ctx)
    finally:
        on.generation_config.eos_token_id = kept


async def test_sampling_is_a_function_of_seed_and_position():
    options = dict(max_new_tokens=2 * CHUNK, temperature=1.5, top_k=50, top_p=0.95, min_p=0.001, ignore_eos=True)
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed(TEXT)
        async with ctx.fork() as one, ctx.fork() as other:
            first = [t.id async for t in one.generate("q", seed=7, **options)]
            again, beside = await asyncio.gather(_ids(other.generate("q", seed=7, **options)),
                                                 ctx.ask("q", seed=7, **options))
            assert first == again and beside == runtime.codec.decode(first)
            expect_same(await snap(one), await snap(other))
        assert await ctx.ask("q", seed=8, **options) != beside
        assert await ctx.ask("q", sampling=Sampling(seed=7, **options)) == beside
        assert await ctx.ask("q", sampling=Sampling(seed=8, **options), seed=7) == beside, "options win"
        greedy = [await ctx.ask("q", max_new_tokens=5, seed=seed) for seed in (1, 2)]
        assert greedy[0] == greedy[1]


@pytest.mark.parametrize("rest", ["goes on", "fork", "opened anew", "ids were fed"])
async def test_a_reply_that_is_interrupted_goes_on_with_the_same_noise(rest: str, tmp_path: Path):
    """Noise is of the position: not of how many tokens this reply has, nor of the process."""
    options = dict(temperature=1.5, seed=7, ignore_eos=True)
    async with tiny(store=tmp_path) as runtime:
        async with runtime.open(raw=True) as ctx:
            whole = await _ids(ctx.generate(TEXT, max_new_tokens=3 * CHUNK, **options))
        async with runtime.open("a", raw=True) as ctx:
            if rest == "ids were fed":
                await ctx.feed([*data(runtime, TEXT), *whole[:CHUNK + 3]])
            else:
                assert await _ids(ctx.generate(TEXT, max_new_tokens=CHUNK + 3, **options)) == whole[:CHUNK + 3]
            if rest == "opened anew":
                await ctx.aclose()
                ctx = runtime.open("a", raw=True)
                await ctx.__aenter__()
            async with ctx.fork() if rest == "fork" else contextlib.nullcontext(ctx) as goes_on:
                assert await _ids(goes_on.generate(max_new_tokens=2 * CHUNK - 3, **options)) == whole[CHUNK + 3:]
            await ctx.aclose()


async def _ids(generation) -> list[int]:
    return [t.id async for t in generation]


async def test_a_repetition_penalty_sees_prompt_and_reply():
    async with tiny() as runtime, runtime.open(raw=True) as ctx:
        prompt = [9, 10, 11, 12]
        free = await _ids_of(ctx, prompt)
        assert len(set(free)) < len(free), "without it this model repeats itself"
        found = await _ids_of(ctx, prompt, repetition_penalty=1e4)
        assert len({*prompt, *found}) == len(prompt) + len(found)


async def _ids_of(ctx, prompt: list[int], **options) -> list[int]:
    async with ctx.fork() as fork:
        return [t.id async for t in fork.generate(prompt, max_new_tokens=60, ignore_eos=True, **options)]


# -- a long decode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["h2o", "sirllm", "streaming_llm", "random"])
async def test_a_decode_of_five_chunks_stays_within_the_cap_and_commits_on_the_grid(policy: str):
    async with tiny(policy=policy) as runtime, runtime.open() as ctx:
        await ctx.feed(TEXT)
        pool = [t.data_ptr() for layer in runtime.engine.pool.layers for t in layer.tensors]
        resident, state, start = runtime.memory.bytes_pool, ctx._session.state, ctx.memory.tokens
        async for token in ctx.generate("on and on", max_new_tokens=5 * CHUNK + 3, ignore_eos=True, temperature=1.0):
            expect_within_cap(ctx)
            assert state.seen % CHUNK == 0 and token.position + 1 - state.seen <= CHUNK
        assert ctx.memory.tokens >= start + 5 * CHUNK
        assert pool == [t.data_ptr() for layer in runtime.engine.pool.layers for t in layer.tensors]
        assert resident == runtime.memory.bytes_pool
        await expect_pure(ctx)


# -- ask ------------------------------------------------------------------------------------------------------------


async def test_ask_leaves_memory_bit_for_bit(monkeypatch):
    async with tiny(scratch=2) as runtime, runtime.open() as ctx:
        await ctx.feed(TEXT)
        await ctx.push("half a li")
        before = await snap(ctx)
        answer = await ctx.ask("who?", max_new_tokens=3 * CHUNK, temperature=1.0, seed=3)
        expect_same(await snap(ctx, settle=False), before)
        assert await asyncio.gather(*(ctx.ask("who?", max_new_tokens=3 * CHUNK, temperature=1.0, seed=3)
                                      for _ in range(5))) == [answer] * 5
        task = asyncio.create_task(ctx.ask("who?", max_new_tokens=200, ignore_eos=True))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            scripted(patch, [])
            await ctx.ask("who?")
        for wrong in ("\ud800", [10**6], 3.5):
            with pytest.raises(ValueError):
                await ctx.ask(wrong)
        expect_same(await snap(ctx, settle=False), before)
        assert runtime.slots.scratch.free == 2


async def test_ask_tells_each_token_as_it_comes():
    async with tiny(scratch=1) as runtime, runtime.open() as ctx:
        await ctx.feed(TEXT)
        told: list[Token] = []
        answer = await ctx.ask("who?", max_new_tokens=9, ignore_eos=True, on_token=told.append)
        assert len(told) == 9 and "".join(token.text for token in told) == answer
        before = await snap(ctx)

        async def awaited(token: Token) -> None:
            told.append(token)

        for wrong in (awaited, "print", 3):
            with pytest.raises(ConfigError, match="expected a plain function"):
                await ctx.ask("who?", max_new_tokens=9, on_token=wrong)

        def second(token: Token) -> None:
            if told.append(token) or len(told) == 11:
                raise KeyError("enough")

        with pytest.raises(KeyError, match="enough"):
            await ctx.ask("who?", max_new_tokens=9, ignore_eos=True, on_token=second)
        assert len(told) == 11 and runtime.slots.scratch.free == 1, "the slot came back at once"
        expect_same(await snap(ctx), before)
        assert await ctx.ask("who?", max_new_tokens=9, ignore_eos=True) == answer


@pytest.mark.parametrize(("how", "options"), [("length", {"max_new_tokens": 4}), ("stop", {"stop": "pass"}),
                                              ("eos", {})])
async def test_an_answer_is_text_that_says_how_it_ended(monkeypatch, how: str, options: dict):
    script = [*spelled("the pass key"), EOS]
    scripted(monkeypatch, script * 2)
    async with tiny(scratch=1) as runtime, runtime.open() as ctx:
        await ctx.feed(TEXT)
        answer = await ctx.ask("who?", **options)
        assert answer.finish_reason == how and type(str(answer)) is str and answer.recalled == ()
        assert json.loads(json.dumps({"answer": answer})) == {"answer": str(answer)}
        for again in (copy.deepcopy(answer), pickle.loads(pickle.dumps(answer))):
            assert again == answer and again.finish_reason == how and isinstance(again, Answer)


@pytest.mark.thorough
async def test_an_answer_depends_on_the_tokens_alone():
    """Not on what was asked or generated before, so not on which units are provisional."""
    async with tiny() as runtime, runtime.open(raw=True) as ctx:
        for n in range(2 * CHUNK + 3):
            await ctx.feed([20 + n])
            asked = await ctx.ask([7], max_new_tokens=4, ignore_eos=True)
            async for _ in ctx.generate([9], max_new_tokens=n % 3 + 1, ignore_eos=True):
                pass
            answer = await ctx.ask([8], max_new_tokens=CHUNK + 2, ignore_eos=True)
            async with runtime.open(raw=True) as fresh:
                await fresh.feed(ids_in(ctx))
                assert await fresh.ask([8], max_new_tokens=CHUNK + 2, ignore_eos=True) == answer
            assert asked is not None


async def test_an_answer_is_what_generate_would_say():
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed(TEXT)
        asked = await ctx.ask("who?", max_new_tokens=20, temperature=0.8)
        assert "".join([t.text async for t in ctx.generate("who?", max_new_tokens=20, temperature=0.8)]) == asked
        between = await ctx.ask("and?", max_new_tokens=4)
        assert "".join([t.text async for t in ctx.generate("and?", max_new_tokens=4)]) == between
