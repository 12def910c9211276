"""From the first use of a model to its closing, the end of the process, and Ctrl-C."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from langchain_locret import LocretChatModel, StateLost
from locret_stream import ContextClosed, Store
from tests.langchain.support import Script, held, model, receipt, rendered, runtime, thread
from tests.processes import run_python, start_python


def test_without_a_store_threads_last_as_long_as_the_model_and_are_unreadable_on_disk(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    chat = LocretChatModel(model="bundled", max_tokens=4, max_live=1)
    history: list[Any] = [HumanMessage("the password of the vault is 4182 .")]
    history += [chat.invoke(history, thread("a"))]
    chat.invoke("something else", thread("b"))
    answer = chat.invoke([*history, HumanMessage("What is the password of the vault?")], thread("a"))
    assert receipt(answer)["source"] == "live" and answer.text == "4182"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"langchain/" in path.read_bytes()]
    chat.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert receipt(chat.invoke("hello", thread("a")))["source"] == "new"  # used again, it loads again
    chat.close()


def test_models_of_the_same_settings_share_one_runtime_and_weights_load_on_first_use(tmp_path: Path):
    one, two = (LocretChatModel(model="bundled", store=str(tmp_path), max_tokens=n) for n in (3, 4))
    other = LocretChatModel(model="bundled", store=str(tmp_path), budget=256)
    assert one.shared is two.shared and other.shared is not one.shared
    assert not one.shared.loaded
    began = time.perf_counter()
    for _ in range(20):
        LocretChatModel(model="bundled", store=str(tmp_path))
    assert time.perf_counter() - began < 2
    one.invoke("hello", thread("a"))
    assert two.shared.loaded and not other.shared.loaded
    assert not one.shared._loop._running, "calls that ended are let go of"
    one.close()


def test_an_error_of_any_kind_in_one_thread_keeps_no_other_from_being_saved(script: Script, tmp_path: Path,
                                                                            monkeypatch):
    """For example, that the device has no memory left."""
    with model(tmp_path, save="run") as chat:
        for name in "abc":
            chat.invoke("hello", thread(name))
        engine, failed = chat.shared.runtime.engine, []
        real = engine.moment

        def moment(*arguments: Any) -> Any:
            if not failed:
                failed.append(1)
                raise RuntimeError("injected: out of memory")
            return real(*arguments)

        monkeypatch.setattr(engine, "moment", moment)
        with pytest.raises(RuntimeError, match="out of memory"):
            chat.close()
        assert len(chat.list_threads()) == 2


def test_closing_ends_calls_that_run_as_if_cancelled(script: Script, tmp_path: Path):
    """Closing does not wait for the rest of a long answer, and the thread is as it was."""
    with model(tmp_path) as chat:
        said = [HumanMessage("one")]
        said += [chat.invoke(said, thread("a")), HumanMessage("two")]
        say = script.say
        script.say, script.delay = (lambda shown: "word " * 400), 0.05
        begun, failed = script.sampled, []

        def asks() -> None:
            try:
                chat.invoke(said, thread("a"))
            except ContextClosed as error:
                failed.append(error)

        asking = threading.Thread(target=asks)
        asking.start()
        while script.sampled < begun + 3:
            time.sleep(0.01)
        chat.close()
        asking.join(20)
        assert failed and script.sampled < begun + 100
        script.say, script.delay = say, 0.0
        assert receipt(chat.invoke(said, thread("a")))["source"] == "snapshot"


def test_a_runtime_of_ones_own_is_left_running(tmp_path: Path, script: Script):
    async def main() -> None:
        async with runtime(tmp_path) as own:
            chat = LocretChatModel(model="mine", runtime=own)
            assert (await chat.ainvoke("hello", thread("a"))).text == "You said: hello"
            await chat.aclose()
            async with own.open("beside") as ctx:
                await ctx.feed("still here")
            assert sorted(row.name for row in own.store.list()) == ["beside", "langchain/a"]

    asyncio.run(main())


def test_a_model_that_nobody_holds_any_more_is_closed_and_its_weights_are_freed(tmp_path: Path):
    import gc
    import weakref
    chat = LocretChatModel(model="bundled", store=str(tmp_path), save="run")
    chat.invoke("hello", thread("a"))
    weights, before = weakref.ref(chat.shared.runtime.model), threading.active_count()
    del chat
    deadline = time.monotonic() + 20
    while (weights() is not None or threading.active_count() >= before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert weights() is None and threading.active_count() < before
    assert [row.name for row in Store(tmp_path).list()] == ["langchain/a"]  # the thread at rest was saved


def test_without_any_store_a_runtimes_threads_last_as_long_as_their_slots(script: Script):
    with model(None, max_live=2) as chat:
        history: list[Any] = [HumanMessage("one")]
        history += [chat.invoke(history, thread("a")), HumanMessage("two")]
        history += [chat.invoke(history, thread("a"))]
        assert receipt(history[-1])["source"] == "live" and not receipt(history[-1])["saved"]
        stub = chat.ingest("a stream", thread_id="s")
        assert chat.invoke([stub, HumanMessage("what?")], thread("s")).text
        for name in "bcd":
            chat.invoke("hello", thread(name))
        more = chat.invoke([*history, HumanMessage("three")], thread("a"))
        assert receipt(more)["source"] == "rebuild"
        assert held(chat, "a") == rendered([*history, HumanMessage("three"), more])
        with pytest.raises(StateLost):
            chat.invoke([stub, HumanMessage("what?")], thread("s"))
        assert not chat.save_thread("a") and chat.forget_thread("a") and not chat.forget_thread("a")


PROGRAM = """
import sys, time
from langchain_locret import LocretChatModel
chat = LocretChatModel(model="bundled", store=sys.argv[1], max_tokens=100_000)
print("ready", chat.invoke("hello", max_tokens=1).text, flush=True)
try:
    if sys.argv[2] == "stream":
        for chunk in chat.stream("hello", repetition_penalty=3.0, temperature=2.0):
            print(chunk.text, flush=True)
    print("begun", flush=True)
    chat.ingest(iter(lambda: "words without end\\n" * 20, None), thread_id="a")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""

# transformers imports torchao if it is installed, which then warns of its extensions and enums.
TORCHAO = re.compile(r"Failed to load \S+/torchao/_C_\S+\.so: Could not load this library: \S+/torchao/_C_\S+\.so|"
                     r"W\d+ .*torch/utils/_pytree\.py:\d+\] <enum '(KernelPreference|ScaleCalculationMode)'> is an "
                     r"Enum subclass .*")


@pytest.mark.thorough
def test_the_end_of_the_process_saves_what_its_last_holder_let_go(tmp_path: Path):
    program = """
import sys
from langchain_locret import LocretChatModel
def main():
    chat = LocretChatModel(model="bundled", store=sys.argv[1], max_tokens=8, save="run")
    print(chat.invoke("The pin of heron is 1234.", {"configurable": {"thread_id": "x"}}).text)
main()
"""
    for _ in range(2):  # a new session, and one that goes on
        done = run_python("-c", program, tmp_path)
        ours = [line for line in done.stderr.splitlines() if not TORCHAO.fullmatch(line)]
        assert done.returncode == 0 and not ours, done.stderr
        assert [row.name for row in Store(tmp_path).list()] == ["langchain/x"]


@pytest.mark.parametrize(("store", "what"), [("given", "ingest"), ("temporary", "stream")])
@pytest.mark.thorough
def test_ctrl_c_and_the_end_of_the_process_are_clean(tmp_path: Path, store: str, what: str):
    import os
    import signal
    program = PROGRAM if store == "given" else PROGRAM.replace("sys.argv[1]", "None")
    run = start_python("-c", program, tmp_path / "store", what, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert run.stdout.readline().startswith("ready")
    run.stdout.readline()
    time.sleep(0.5 if what == "ingest" else 0)
    run.send_signal(signal.SIGINT)
    out, errors = run.communicate(timeout=30)
    assert "interrupted" in out and run.returncode == 0 and "Traceback" not in errors, errors
    assert not list(tmp_path.glob("locret-*"))
