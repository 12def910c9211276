"""A session that was begun yesterday goes on today and tomorrow, whatever its template writes of the date; and so does
one that an earlier library stored. The clock is the test's own."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import HumanMessage
from transformers import LlamaConfig

from locret_stream import Store
from locret_stream.errors import SnapshotMismatch
from tests.cli.command import invoke
from tests.golden_days.conftest import Clock
from tests.golden_days.make import FOLDER, LOG, TALK
from tests.golden_days.scripted import (
    DATED,
    PLAIN,
    TEMPLATES,
    Say,
    chat_model,
    held,
    model,
    runtime,
    scripted,
    serving,
    tokenizer,
)
from tests.serving.support import Served

TODAY, TOMORROW, NEXT_YEAR = (28, 11, 2026), (29, 11, 2026), (3, 5, 2028)
BEGUN = "Today is 28 November 2026."
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
THREAD: Any = {"configurable": {"thread_id": "thread"}}


@pytest.fixture
def say() -> Iterator[Say]:
    with scripted() as say:
        yield say


@pytest.fixture(params=TEMPLATES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The name of a golden store, and a copy of it."""
    return request.param, shutil.copytree(FOLDER / request.param, tmp_path / "golden")


def dates(text: str) -> list[str]:
    """What a memory holds of the date."""
    return [part[:len(BEGUN)] for part in text.split("diary. ")[1:]]


def answered(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked(served: Served, *, turns: int, session: str = "talk") -> dict[str, Any]:
    """The receipt of a chat's next turn, whose whole history is given."""
    said = {"model": "scripted", "session_id": session, "messages": TALK[:turns]}
    return answered(served.http.post("/v1/chat/completions", json=said))["locret"]


def responded(served: Served, text: str, previous: str | None = None) -> dict[str, Any]:
    said = {"model": "scripted", "input": text} | ({} if previous is None else {"previous_response_id": previous})
    return answered(served.http.post("/v1/responses", json=said))


def ingested(served: Served, session: str = "log") -> None:
    answered(served.http.post(f"/v1/sessions/{session}/ingest", content=LOG.encode()))


def asks_the_log(served: Served) -> str:
    return answered(served.http.post("/v1/sessions/log/ask", json={"question": "Which lamp was lit last?"}))["answer"]


def templates_of(store: Path, session: str) -> list[str]:
    """What each snapshot of a session says of its template."""
    branch = Store(store).branch(session)
    generations, _ = branch.session_folder.generations(session)
    found = [branch.session_folder.read_manifest(session, number)[0].identity.template for number in generations]
    branch.close()
    return found


# -- a session of a runtime ---------------------------------------------------------------------------------------


async def test_a_session_begun_yesterday_goes_on_today_and_tomorrow(clock: Clock, say: Say, tmp_path: Path):
    for number, clock.day in enumerate((TODAY, TOMORROW, (30, 11, 2026), (1, 1, 2027), NEXT_YEAR)):
        async with runtime(tmp_path, DATED) as running, running.open("diary", system="Be brief.") as context:
            assert context.resumed == bool(number)
            await context.push(f"Line {number}.\n")
            async for _ in context.generate("And?"):
                pass
            text = held(context)
            assert dates(text) == [BEGUN] and text.count("Be brief.") == 1
            assert all(text.count(f"Line {before}.") == 1 for before in range(number + 1))
    assert len(set(templates_of(tmp_path, "diary"))) == 1


async def test_it_is_whole_and_right_on_another_day(clock: Clock, say: Say, tmp_path: Path):
    """What is fed again from the log, which is the memory that it would be, is bit for bit what was stored."""
    async with runtime(tmp_path, DATED) as running, running.open("diary") as context:
        await context.push("One line.\n" * 20)
    clock.day = TOMORROW
    async with runtime(tmp_path, DATED) as running, running.open("diary") as context:
        await context.push("Another line.\n" * 20)
    async with runtime(tmp_path, DATED) as running:
        assert (await running.replay("diary")).differs == ()


async def test_a_fork_and_a_rewind_of_another_day(clock: Clock, say: Say, tmp_path: Path):
    async with runtime(tmp_path, DATED) as running, running.open("diary") as context:
        await context.push("One line.\n" * 9)
        first = await context.snapshot()
    clock.day = TOMORROW
    async with runtime(tmp_path, DATED) as running, running.open("diary") as context:
        await context.push("Another line.\n" * 9)
        async with context.fork("diary/other") as other:
            await other.push("A third.\n")
            await other.flush()
        await context.rewind(first)
        assert dates(held(context)) == [BEGUN] and "Another" not in held(context)
    clock.day = NEXT_YEAR
    async with runtime(tmp_path, DATED) as running, running.open("diary/other") as other:
        assert other.resumed and dates(held(other)) == [BEGUN] and "A third." in held(other)


async def test_over_midnight_in_one_process(clock: Clock, say: Say, tmp_path: Path):
    async with runtime(tmp_path, DATED) as running:
        async with running.open("diary") as context:
            await context.push("One line.\n")
            clock.day = TOMORROW
            async for _ in context.generate("And?"):
                pass
            assert dates(held(context)) == [BEGUN]
        async with running.open("diary") as context:
            assert context.resumed and dates(held(context)) == [BEGUN]


async def test_what_is_read_again_is_the_same_on_another_day(clock: Clock, say: Say, tmp_path: Path):
    text = "The diary of today tells of keys. " * 3 + "Cats sleep.\nDogs bark at night in the hall.\n" * 9
    found = []
    for clock.day in (TODAY, TOMORROW, NEXT_YEAR):
        async with runtime(tmp_path, DATED, recall=True) as running, running.open("diary") as context:
            if not context.resumed:
                await context.push(text)
            found.append([await context.recall(words) for words in ("What is in the diary today?", "dogs", "system")])
    assert found[0] == found[1] == found[2] and found[0][0] and not found[0][2]


# -- the command line ---------------------------------------------------------------------------------------------


def test_a_session_of_the_command_line_goes_on_the_next_day(clock: Clock, tmp_path: Path):
    made = model()
    made.save_pretrained(tmp_path / "model")
    tokenizer(DATED).save_pretrained(tmp_path / "model")
    here = ["run", "--session", "builds", "--store", tmp_path / "store", "--model", tmp_path / "model", "--budget", 256,
            "--policy", "streaming_llm", "--chunk-size", 32, "--ask", "What?", "--max-new-tokens", 3, "--json"]
    code, out, _ = invoke(*here, text="The door code of house 1 is 4037.\n" * 20)
    first = json.loads(out)
    for clock.day in (TOMORROW, NEXT_YEAR):
        code, out, err = invoke(*here, text="")
        assert code == 0 and "Session 'builds' goes on:" in err and json.loads(out)["answers"] == first["answers"]


# -- a server -----------------------------------------------------------------------------------------------------


def test_a_server_that_was_restarted_goes_on_with_yesterday(clock: Clock, say: Say, tmp_path: Path):
    with serving(tmp_path, DATED) as served:
        asked(served, turns=1)
        say.replies = ["One it is."]
        first = responded(served, "Say one.")
        ingested(served)
    say.replies = []
    for number, clock.day in enumerate((TOMORROW, (30, 11, 2026), NEXT_YEAR)):
        with serving(tmp_path, DATED) as served:
            talk = [*TALK[:1], {"role": "assistant", "content": "Noted."},
                    {"role": "user", "content": f"And {number}?"}]
            receipt = answered(served.http.post("/v1/chat/completions", json={
                "model": "scripted", "session_id": "talk", "messages": talk}))["locret"]
            assert receipt["source"] == "snapshot" and receipt["fed"] < 30
            assert dates(served.held("talk")) == [BEGUN] == dates(say.seen[-1])
            again = responded(served, "Say two.", first["id"])
            assert again["locret"]["source"] == "snapshot" and again["locret"]["fed"] < 40
            assert dates(say.seen[-1]) == [BEGUN] and "Say one." in say.seen[-1]
            assert asks_the_log(served) == "Noted." and "the lamp of hall 7" in say.seen[-1]
            assert dates(say.seen[-1]) == [BEGUN]


def test_a_chat_over_midnight_in_one_server(clock: Clock, say: Say, tmp_path: Path):
    with serving(tmp_path, DATED) as served:
        say.replies = [turn["content"] for turn in TALK if turn["role"] == "assistant"]
        asked(served, turns=1)
        clock.day = TOMORROW
        receipt = asked(served, turns=3)
        assert receipt["source"] == "live" and receipt["fed"] < 40 and dates(served.held("talk")) == [BEGUN]
        asked(served, turns=1, session="new")  # what begins today has today's date
        assert dates(served.held("new")) == ["Today is 29 November 2026."]


# -- LangChain ----------------------------------------------------------------------------------------------------


async def test_a_stream_that_langchain_absorbed_yesterday_is_asked_today(clock: Clock, say: Say, tmp_path: Path):
    with chat_model(tmp_path, DATED) as chat:
        stub = await chat.aingest(LOG, thread_id="thread")
    for clock.day in (TOMORROW, NEXT_YEAR):
        with chat_model(tmp_path, DATED) as chat:
            answer = await chat.ainvoke([stub, HumanMessage(f"Which lamp on {clock.day}?")], THREAD)
            receipt = answer.response_metadata["locret"]
            assert receipt["source"] == "snapshot" and receipt["fed"] < 80
            assert dates(say.seen[-1]) == [BEGUN] and "the lamp of hall 7" in say.seen[-1]


# -- what an earlier library stored -------------------------------------------------------------------------------


async def test_an_old_session_opens_and_is_saved_as_new_ones_are(clock: Clock, say: Say, golden: tuple[str, Path]):
    name, store = golden
    old = templates_of(store, "diary")
    for clock.day in (TOMORROW, NEXT_YEAR):
        async with runtime(store, TEMPLATES[name]) as running, running.open("diary") as context:
            assert context.resumed and "The door code of house 1 is 4037." in held(context)
            assert dates(held(context)) == [BEGUN] * (name == "dated") and "It is 4037." in held(context)
            await context.push("The next day.\n")
            expected = running.identity.template
        assert templates_of(store, "diary")[-1] == expected and expected not in old


def test_an_old_server_goes_on(clock: Clock, say: Say, golden: tuple[str, Path]):
    name, store = golden
    clock.day = NEXT_YEAR
    with serving(store, TEMPLATES[name]) as served:
        say.replies = ["Three it is.", "Yes.", "Hall 7."]
        again = responded(served, "Say three.", EXPECTED[name]["response"])
        assert again["locret"]["source"] == "snapshot" and again["locret"]["fed"] < 40 and "Say one." in say.seen[-1]
        receipt = answered(served.http.post("/v1/chat/completions", json={
            "model": "scripted", "session_id": "talk", "messages": [*TALK, {"role": "user", "content": "And?"}]}))
        assert receipt["locret"]["source"] == "snapshot" and receipt["locret"]["fed"] < 40
        assert dates(served.held("talk")) == [BEGUN] * (name == "dated")
        assert asks_the_log(served) == "Hall 7." and "the lamp of hall 7" in say.seen[-1]


def test_an_old_thread_of_langchain_goes_on(clock: Clock, say: Say, golden: tuple[str, Path]):
    name, store = golden
    clock.day = NEXT_YEAR
    with chat_model(store, TEMPLATES[name]) as chat:
        said = [HumanMessage(EXPECTED[name]["stream"]), HumanMessage("Which lamp?")]
        answer = asyncio.run(chat.ainvoke(said, THREAD))
    receipt = answer.response_metadata["locret"]
    assert receipt["source"] == "snapshot" and receipt["fed"] < 40 and "the lamp of hall 7" in say.seen[-1]


# -- another version of transformers ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"attention_sinks": 4}, {"clamp": 7.0, "alpha": 1.7}, {"pretraining_tp": None}],
                         ids=["a field more", "two fields more", "a field less"])
async def test_a_version_whose_configs_have_other_fields(clock: Clock, say: Say, tmp_path: Path, change: dict[str, Any],
                                                         monkeypatch: pytest.MonkeyPatch):
    """Back and forth; and what an earlier library stored opens where fields were added."""
    def to_dict(self: LlamaConfig) -> dict[str, Any]:
        fields = {**before(self), **change}
        return {name: value for name, value in fields.items() if name not in change or value is not None}

    before = LlamaConfig.to_dict
    shutil.copytree(FOLDER / "dated", tmp_path / "old")
    for number, version in enumerate((before, to_dict, before, to_dict)):
        monkeypatch.setattr(LlamaConfig, "to_dict", version)
        async with runtime(tmp_path / "new", DATED) as running, running.open("diary") as context:
            assert context.resumed == bool(number)
            await context.push("One line.\n" * 9)
    async with runtime(tmp_path / "old", DATED) as running:
        if "pretraining_tp" in change:  # nobody here knows what it was
            with pytest.raises(SnapshotMismatch, match="other architecture: found"):
                await running.open("diary").__aenter__()
        else:
            async with running.open("diary") as context:
                assert context.resumed
    monkeypatch.setattr(LlamaConfig, "to_dict", lambda self: {**to_dict(self), "rms_norm_eps": 0.5})
    made = LlamaConfig().rms_norm_eps
    async with runtime(tmp_path / "new", DATED) as running:
        with pytest.raises(SnapshotMismatch, match=rf"\(rms_norm_eps\): found {made}, expected 0.5; open it"):
            await running.open("diary").__aenter__()


# -- what is another template all the same ------------------------------------------------------------------------


@pytest.mark.parametrize("other", [DATED.replace("Today is", "It is"), DATED.replace("%B", "%b"), PLAIN,
                                   DATED.replace("strftime_now('%d %B %Y')", "'28 November 2026'")],
                         ids=["other words", "other format", "no date", "fixed date"])
@pytest.mark.parametrize("old", [True, False], ids=["old store", "new store"])
@pytest.mark.thorough(but=5)
async def test_another_template_is_refused_by_name(clock: Clock, say: Say, tmp_path: Path, other: str, old: bool):
    if old:
        shutil.copytree(FOLDER / "dated", tmp_path, dirs_exist_ok=True)
    else:
        async with runtime(tmp_path, DATED) as running, running.open("diary") as context:
            await context.push("One line.\n")
    async with runtime(tmp_path, other) as running:
        if old and "'28" in other:  # it writes just what the old one did, and that is all that is known of the old one
            async with running.open("diary") as context:
                assert context.resumed
            return
        with pytest.raises(SnapshotMismatch, match=r"snapshot \d of 'diary' was made with other template: .*rebuild"
                           ) as caught:
            await running.open("diary").__aenter__()
        assert caught.value.field == "template"
        assert ("whatever day it is" in str(caught.value)) == ("strftime" in other)
        async with running.open("diary", on_mismatch="rebuild") as context:
            assert dates(held(context)) == [BEGUN]


@pytest.mark.parametrize("options", [{"acknowledge": "Yes."}, {"acknowledge": None}])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.thorough(but=3)
async def test_another_acknowledgement_is_refused(clock: Clock, say: Say, tmp_path: Path, template: str, options: Any):
    """It is in the memory between what was fed and the next question, as the template's own text is."""
    shutil.copytree(FOLDER / template, tmp_path / "old")
    async with runtime(tmp_path / "new", TEMPLATES[template]) as running, running.open("diary") as context:
        await context.push("One line.\n")
    for store in (tmp_path / "old", tmp_path / "new"):
        async with runtime(store, TEMPLATES[template], **options) as running:
            with pytest.raises(SnapshotMismatch, match="other template"):
                await running.open("diary").__aenter__()
