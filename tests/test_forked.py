"""A process forked from one that has a runtime: every use raises at once, the parent's goes on, a new one works."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.processes import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

# In the child SIGALRM ends what hangs. What each use raised is told on stdout, which both processes write to.
PROGRAM = '''
import asyncio, json, os, signal, sys
import torch
torch.set_num_threads(1)
from locret_stream import SyncContext
from tests.context.support import TEXT, model, tokenizer, unstarted

def told(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def tried(name, use):
    async def within():
        async with asyncio.timeout(10):
            return await use()
    try:
        found = asyncio.run(within()) if asyncio.iscoroutinefunction(use) else use()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    told(use=name, found=str(found))

async def listed(tokens):
    return [token.text async for token in tokens]

async def opened(runtime):
    async with runtime.open(raw=True) as ctx:
        await ctx.feed(TEXT * 40)
        return await ctx.ask("q?", max_new_tokens=4)

def in_child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            work()
        finally:
            os._exit(0)
    told(status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
'''

ASYNC = '''
def main():
    with asyncio.Runner() as runner:
        runtime = unstarted(store=sys.argv[1])
        runner.run(runtime.__aenter__())
        ctx = runtime.open("a")
        runner.run(ctx.__aenter__())
        runner.run(ctx.push(TEXT))
        reply = ctx.generate("q?", max_new_tokens=8, ignore_eos=True)
        runner.run(anext(reply))

        async def turn():
            async with ctx.turn():
                pass

        async def fork():
            async with ctx.fork():
                pass

        def uses():
            async def going_on(): return await anext(reply)
            async def new(): return await opened(unstarted())
            for name, use in {
                    "open": lambda: opened(runtime), "push": lambda: ctx.push([5, 6]), "feed": lambda: ctx.feed(TEXT),
                    "long text": lambda: ctx.feed(TEXT * 40), "ask": lambda: ctx.ask("q?"), "going on": going_on,
                    "generate": lambda: listed(ctx.generate("q?")), "turn": turn, "fork": fork,
                    "snapshot": lambda: ctx.snapshot(), "close": lambda: ctx.aclose(),
                    "forget": lambda: runtime.forget("a"), "close all": lambda: runtime.aclose()}.items():
                async def run(use=use): return await use()
                tried(name, run)
            tried("memory", lambda: ctx.memory)
            tried("identity", lambda: runtime.identity)
            tried("new", new)

        in_child(uses)
        runner.run(reply.aclose())
        told(parent=runner.run(ctx.ask("q?", max_new_tokens=4)))
        runner.run(ctx.aclose())
        runner.run(runtime.aclose())
        told(stored=[one.generation for one in runtime.store.list()])
main()
'''

SYNC = '''
def main():
    for part in (model(), tokenizer()):
        part.save_pretrained(sys.argv[1])
    with SyncContext(sys.argv[1], policy="keydiff", budget=20, chunk_size=8) as ctx:
        ctx.feed(TEXT)

        def uses():
            for name, use in {"feed": lambda: ctx.feed(TEXT), "ask": lambda: ctx.ask("q?"),
                              "generate": lambda: list(ctx.generate("q?")), "memory": lambda: ctx.memory,
                              "close": lambda: ctx.__exit__(None, None, None)}.items():
                tried(name, use)

        in_child(uses)
        told(parent=ctx.ask("q?", max_new_tokens=4))
main()
'''


def expect_refused(program: str, folder: object) -> dict[str, str]:
    """What the uses in the child found; of a context of the parent all are refused, and the child ends by itself."""
    done = run_python("-c", PROGRAM + program, folder)
    assert done.returncode == 0 and not re.search("Traceback|ignored|Warning", done.stderr), done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    told = {name: one for what in said for name, one in what.items() if name not in ("use", "found")}
    uses = {one["use"]: one["found"] for one in said if "use" in one}
    assert {what["status"] for what in said if "status" in what} == {0} and isinstance(told["parent"], str), said
    for name, found in uses.items():
        if name != "new":
            assert re.match(r"ContextClosed: this is process \d+, a fork of process \d+, .*; expected a runtime made "
                            "in this process, .*'spawn'", found), (name, found)
    return told | {"uses": uses}


@pytest.mark.thorough
def test_every_use_of_a_runtime_in_a_forked_process_is_refused_at_once(tmp_path: Path):
    told = expect_refused(ASYNC, tmp_path)
    assert len(told["uses"]) == 16 and "Error" not in told["uses"]["new"]
    assert told["stored"] == [1], "the parent's own, saved when it closed"


@pytest.mark.thorough
def test_every_use_of_a_sync_context_in_a_forked_process_is_refused_at_once(tmp_path: Path):
    assert len(expect_refused(SYNC, tmp_path)["uses"]) == 5


LANGCHAIN = '''
import multiprocessing
from langchain_locret import LocretChatModel

def main():
    chat = LocretChatModel(model="bundled", max_tokens=4)
    chat.invoke("hello")

    def uses():
        tried("invoke", lambda: chat.invoke("hello").text)
        tried("close", chat.close)

    for work in (uses, lambda: None):  # one that uses it, one that only ends, as the workers of a data loader do
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join(30)
        told(status=child.exitcode)
        child.kill()
    told(parent=chat.invoke("hello").text)
main()
'''


@pytest.mark.thorough
def test_a_chat_model_is_refused_in_a_forked_process_which_ends_by_itself(tmp_path: Path):
    pytest.importorskip("langchain_core")
    assert len(expect_refused(LANGCHAIN, tmp_path)["uses"]) == 2


LOCKED = """
import os, sys, threading
import langchain_locret.runtimes as runtimes
held = threading.Event()
def hold():
    with runtimes._LOCK:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    os._exit(0 if runtimes._LOCK.acquire(timeout=5) else 1)
sys.stdout.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
sys.stdout.flush()
os._exit(0)
"""


def test_a_lock_that_another_thread_held_at_the_fork_is_free_in_the_child():
    """That thread is not there, so nobody would ever give it back, and the child could not end."""
    assert run_python("-c", LOCKED).stdout == "0"
