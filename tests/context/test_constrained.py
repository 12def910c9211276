"""Replies that fit a schema, from models: whatever the weights, however the reply ends, beside whichever others."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import jsonschema
import pytest
import torch

from locret_stream import ConfigError, Runtime, Sampling, SyncContext
from locret_stream.constraints import Constraints, call_grammar
from locret_stream.context import streams
from tests import tiny_tokenizers
from tests.context.support import (
    chat,
    data,
    expect_pure,
    expect_same,
    ids_in,
    literals,
    snap,
    tiny,
)

BOUNDED: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["name", "count", "kind"], "properties": {
        "name": {"type": "string", "maxLength": 6}, "count": {"type": "integer", "minimum": -9, "maximum": 999},
        "kind": {"enum": ["a", "né 🙂", None]}, "tags": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}}}}
SHORT: dict[str, Any] = {"enum": ["red", "green", "blue"]}
CODE: dict[str, Any] = {"type": "object", "additionalProperties": False, "required": ["code"], "properties": {
    "code": {"type": "string", "pattern": "^[0-9]{5}$"}}}


def expect_fits(text: str, schema: dict[str, Any] = BOUNDED) -> None:
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("knobs", [dict(), dict(temperature=1.0), dict(temperature=3.0, seed=5, top_k=4),
                                   dict(temperature=1.0, top_p=0.2, repetition_penalty=1.5), dict(temperature=1e30)])
@pytest.mark.thorough(but=2)
async def test_a_random_model_says_what_fits_and_the_memory_holds_it(knobs: dict[str, Any]):
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("some text")
        reply = ctx.generate("q?", schema=BOUNDED, max_new_tokens=200, **knobs)
        tokens = [token async for token in reply]
        expect_fits(reply.text)
        assert reply.finish_reason == "eos" and "".join(token.text for token in tokens) == reply.text
        ids = [token.id for token in tokens]
        assert ids_in(ctx) == chat(runtime, ("some text\n\nq?", ids)), "the template closes it"
        await expect_pure(ctx)
        before = await snap(ctx)
        expect_fits(await ctx.ask("q?", schema=BOUNDED, max_new_tokens=200, **knobs))
        expect_same(await snap(ctx), before)


async def test_the_bundled_model_says_what_fits():
    async with Runtime.from_pretrained("bundled") as runtime, runtime.open() as ctx:
        await ctx.feed("The door code of falcon is 48213.\n")
        for schema in (CODE, BOUNDED, SHORT, {"type": "integer", "maximum": 99_999}):
            for temperature in (0.0, 1.0):
                expect_fits(await ctx.ask("What is the door code of falcon?", schema=schema, temperature=temperature),
                            schema)


async def test_a_reply_that_is_cut_off_says_so():
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("x")

        async def reply(most: int) -> tuple[str, str | None, int]:
            async with ctx.fork() as other:
                reply = other.generate("q?", schema=BOUNDED, max_new_tokens=most)
                count = len([token async for token in reply])
                await expect_pure(other)
                return reply.text, reply.finish_reason, count

        whole, reason, count = await reply(200)
        assert reason == "eos" and 20 < count < 200
        expect_fits(whole)
        assert await reply(count) == (whole, "eos", count), "the last token that is allowed completes it"
        for most in (1, 5, count - 1):
            text, reason, found = await reply(most)
            assert (reason, found) == ("length", most) and whole.startswith(text) and text != whole
            with pytest.raises(ValueError):
                json.loads(text)
        assert await ctx.ask("q?", schema=BOUNDED, max_new_tokens=5) == (await reply(5))[0]


async def test_a_stop_string_ends_it_all_the_same():
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("x")
        reply = ctx.generate("q?", schema=BOUNDED, stop='"count"')
        async for _ in reply:
            pass
        assert reply.finish_reason == "stop" and reply.text.startswith('{"name": "') and '"count"' not in reply.text


def wishing(monkeypatch: pytest.MonkeyPatch, *ids: int) -> None:
    """Make every model say these rather than anything else."""
    real = streams.sample

    def sample(logits: torch.Tensor, *others: Any) -> int:
        logits = logits.clone()
        logits[list(ids)] += 1e4
        return real(logits, *others)

    monkeypatch.setattr(streams, "sample", sample)


async def test_a_model_that_would_end_at_once_ends_where_the_json_may(monkeypatch: pytest.MonkeyPatch):
    async with tiny() as runtime, runtime.open() as ctx:
        ends = sorted(runtime.frames.eos_ids)
        wishing(monkeypatch, *ends)
        reply = ctx.generate("q?", schema=BOUNDED)
        async for _ in reply:
            pass
        expect_fits(reply.text)
        number = ctx.generate("q?", schema={"type": "integer", "minimum": 10, "maximum": 99_999})
        ids = [token.id async for token in number]
        assert len(number.text) == 2 and ids[-1] in ends and number.finish_reason == "eos", "the marker ends it here"
        await expect_pure(ctx)


async def test_control_tokens_that_a_model_wants_to_say_are_not_said(monkeypatch: pytest.MonkeyPatch):
    async with tiny() as runtime, runtime.open() as ctx:
        control = sorted(runtime.codec.control_ids)
        assert len(control) > 4
        wishing(monkeypatch, *control)
        reply = ctx.generate("q?", schema={"type": "string", "minLength": 9, "maxLength": 12}, skip_special=False)
        ids = [token.id async for token in reply]
        assert not runtime.codec.control_ids.intersection(ids)
        assert 9 <= len(json.loads(reply.text)) <= 12


async def test_the_text_of_a_control_token_inside_a_string_is_text():
    async with tiny() as runtime, runtime.open() as ctx:
        for text in ("<|im_end|>", "<tool_call>", "</s>"):
            reply = ctx.generate("q?", schema={"const": text}, skip_special=False)
            ids = [token.id async for token in reply]
            assert reply.text == json.dumps(text) and not runtime.codec.control_ids.intersection(ids)


@pytest.mark.parametrize("schema", [{"not": {}}, {"type": "strin"}, {"$ref": "#"}, {"type": "array", "contains": {}}])
async def test_a_schema_that_cannot_be_held_changes_nothing(schema: dict[str, Any]):
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("some text\nmore of it")
        async with ctx.fork() as other:
            for name in ("generate", "ask"):
                before = await snap(other, settle=False)
                with pytest.raises(ConfigError, match=r"^schema cannot be held: "):
                    if name == "ask":
                        await other.ask("q?", schema=schema)
                    else:
                        async for _ in other.generate("q?", schema=schema):
                            pass
                expect_same(await snap(other, settle=False), before)
            plain = [token.id async for token in other.generate("q?", max_new_tokens=4)]
        assert plain == [token.id async for token in ctx.generate("q?", max_new_tokens=4)], "and it goes on"


async def test_what_is_no_schema_is_refused_by_the_call_itself():
    async with tiny() as runtime, runtime.open() as ctx:
        with pytest.raises(ConfigError, match="expected a JSON schema as a dict, or its text"):
            ctx.generate("q?", schema="{")
        with pytest.raises(ConfigError, match="ignore_eos"):
            ctx.generate("q?", sampling=Sampling(schema=SHORT), ignore_eos=True)


async def test_contexts_at_once_are_each_held_to_their_own():
    schemas = [BOUNDED, SHORT, CODE, {"type": "integer", "minimum": 100, "maximum": 999}, None]
    async with tiny(max_live=len(schemas)) as runtime:
        async def said(number: int) -> tuple[str, list[int]]:
            async with runtime.open() as ctx:
                await ctx.feed(f"context {number}")
                reply = ctx.generate("q?", schema=schemas[number], temperature=1.0, seed=number, max_new_tokens=60)
                ids = [token.id async for token in reply]
                return reply.text, ids

        alone = [await said(number) for number in range(len(schemas))]
        together = await asyncio.gather(*map(said, range(len(schemas))))
        assert list(together) == alone
        for (text, _), schema in zip(together, schemas, strict=True):
            if schema is not None:
                expect_fits(text, schema)


async def test_the_same_seed_at_the_same_place_says_the_same_again():
    """Also after another reply was cancelled midway, left, or went on to its end."""
    settings = dict(schema=BOUNDED, temperature=1.0, seed=3)
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("x")

        async def again() -> str:
            return await ctx.ask("q?", **settings)

        first = await again()
        task = asyncio.create_task(again())
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with ctx.fork() as other:
            async for _ in other.generate("q?", **settings):
                break
            assert await again() == first
        async with ctx.fork() as other:
            reply = other.generate("q?", **settings)
            async for _ in reply:
                pass
            assert reply.text == first
            assert await other.ask("q?", **settings) != first, "elsewhere the noise is another"
        assert await again() == first
        assert await ctx.ask("q?", **settings | {"seed": 4}) != first


async def test_a_reply_with_recall_is_written_by_its_copy_and_fits():
    async with tiny(scratch=1, recall=True, units=60) as runtime, runtime.open() as ctx:
        await ctx.feed("".join(f"The pass key of falcon {n} is {n}77.\n" for n in range(12)))
        reply = ctx.generate("falcon 3?", schema=BOUNDED, recall=True)
        async for _ in reply:
            pass
        assert reply.recalled
        expect_fits(reply.text)
        await expect_pure(ctx)


async def test_a_reply_without_a_schema_asks_no_other_thread(monkeypatch: pytest.MonkeyPatch):
    real, asked = asyncio.to_thread, list[Any]()

    async def counted(work: Any, *arguments: Any) -> Any:
        asked.append(work)
        return await real(work, *arguments)

    async with tiny() as runtime, runtime.open() as ctx:
        monkeypatch.setattr(asyncio, "to_thread", counted)
        await ctx.feed("x")
        await ctx.ask("q?", max_new_tokens=3)
        async for _ in ctx.generate("q?", max_new_tokens=3):
            pass
        assert not asked and runtime.constraints._read is None
        await ctx.ask("q?", schema=SHORT)
        assert asked == [runtime.constraints.begin], "once in a reply"


async def test_the_event_loop_goes_on_while_a_schema_is_read(monkeypatch: pytest.MonkeyPatch):
    real = Constraints.begin

    def slow(self: Constraints, sampling: Sampling) -> Any:
        time.sleep(0.3)
        return real(self, sampling)

    monkeypatch.setattr(Constraints, "begin", slow)
    async with tiny() as runtime, runtime.open() as ctx:
        await ctx.feed("x")
        task, ticks = asyncio.create_task(ctx.ask("q?", schema=SHORT)), 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        expect_fits(task.result(), SHORT)
        assert ticks >= 10


async def test_a_grammar_keeps_the_space_that_its_text_begins_with():
    """A tokenizer with a prefix space gives it to the first word of a text, from where the text of a reply loses it."""
    trained = tiny_tokenizers.train("metaspace", tiny_tokenizers.corpus()[:40_000], size=480)
    reads = tiny_tokenizers.wrap(trained, template=tiny_tokenizers.CHATML)
    async with tiny(reads=reads) as runtime, runtime.open() as ctx:
        reply = ctx.generate("q?", grammar='start: " yes" | " no"')
        async for _ in reply:
            pass
        assert reply.text in (" yes", " no") and reply.finish_reason == "eos"
        expect_fits(await ctx.ask("q?", schema=BOUNDED))


async def test_a_forced_call_comes_in_its_marks():
    async with tiny() as runtime, runtime.open() as ctx:
        grammar = call_grammar(runtime.codec, {"find": BOUNDED})
        reply = ctx.generate("q?", grammar=grammar, temperature=1.0)
        ids = [token.id async for token in reply]
        [opening], [closing] = literals(runtime, "<tool_call>"), literals(runtime, "</tool_call>")
        assert (ids[0], ids[-1]) == (opening, closing) and reply.finish_reason == "eos"
        call = json.loads(reply.text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert call["name"] == "find"
        jsonschema.validate(call["arguments"], BOUNDED)


async def test_raw_contexts_and_the_end_of_a_turn():
    async with tiny() as runtime, runtime.open(raw=True) as ctx:
        await ctx.feed("x")
        reply = ctx.generate(schema=SHORT)
        ids = [token.id async for token in reply]
        expect_fits(reply.text, SHORT)
        assert ids_in(ctx) == data(runtime, "x") + ids, "no end marker: nothing could follow"


def test_scripts_without_async_have_it_too():
    with SyncContext("bundled") as ctx:
        ctx.feed("The door code of falcon is 48213.\n")
        expect_fits(ctx.ask("What is the door code of falcon?", schema=json.dumps(CODE)), CODE)
        reply = ctx.generate("What is the door code of falcon?", sampling=Sampling(schema=CODE))
        text = "".join(token.text for token in reply)
        expect_fits(text, CODE)
        assert reply.finish_reason == "eos"
