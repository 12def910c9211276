"""A server, or a LangChain model, of one template, over a tiny random model whose replies are a script. Everything but
the choice of the next token is the real thing: HTTP, template, tokenizer, memory, snapshots, store."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers.utils.chat_template_utils as clock
from template_lab.collection import tokenizer_of
from template_lab.forms import Form, form_of
from transformers import LlamaConfig, LlamaForCausalLM

from langchain_locret import LocretChatModel
from locret_stream import Runtime, Store
from locret_stream.context import streams
from locret_stream.engine import state
from locret_stream.serving.app import make_app
from locret_stream.serving.server import Server
from locret_stream.serving.service import Service
from locret_stream.text import dated

MODEL, HISTORY = "scripted", 65536
SETTINGS = {"policy": "streaming_llm", "budget": 4096, "chunk_size": 64, "max_live": 4}


class Script:
    """What the model writes next, and what it was shown.

    Attributes:
        replies: texts to come, the marks that end them included. seen: the prompt of the last reply, as text, special
            tokens included.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.replies: list[str] = []
        self.seen = ""
        self._rest, self._shown = list[int](), list[int]()

    def say(self, *replies: str) -> None:
        """The next replies; those that nobody asked for are dropped."""
        self.replies = [*replies]

    def sample(self, logits: Any, recent: list[int], position: int, sampling: Any, using: Any,
               allowed: torch.Tensor | None = None) -> int:
        if not self._rest or [*recent] != self._shown:  # a new reply
            self.seen = self._tokenizer.decode(recent, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            text = self.replies.pop(0) if self.replies else f"Noted.{self._tokenizer.eos_token}"
            self._rest = self.ids(text)
        token, *self._rest = self._rest
        if allowed is not None and not bool(allowed[token]):
            token, self._rest = int(allowed.nonzero()[0, 0]), []
        self._shown = [*recent, token]
        return token

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class Subject:
    """One template with all that is needed to talk to a model of it."""

    def __init__(self, name: str, template: str):
        self.name, self.tokenizer = name, tokenizer_of(template)
        self.form: Form = form_of(self.tokenizer)
        self.script = Script(self.tokenizer)

    def runtime(self, store: Path) -> Runtime:
        torch.manual_seed(0)
        ends = [self.tokenizer.convert_tokens_to_ids(mark) for mark in self.form.ends]
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(self.tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=HISTORY, eos_token_id=ends)).eval()
        return Runtime(model, self.tokenizer, store=Store(store, keep_last=32), **SETTINGS)

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Meanwhile every reply of this process is the script's."""
        old, quiet = (streams.sample, state.HISTORY), logging.root.manager.disable
        streams.sample, state.HISTORY = self.script.sample, HISTORY
        logging.disable(logging.CRITICAL)  # what is refused is told in the table
        try:
            yield
        finally:
            streams.sample, state.HISTORY = old
            logging.disable(quiet)

    @contextmanager
    def served(self, store: Path) -> Iterator[Served]:
        with self.speaking(), _serving(lambda: Service(self.runtime(store), model=MODEL)) as served:
            yield served

    @contextmanager
    def langchain(self, store: Path, **options: Any) -> Iterator[LocretChatModel]:
        with self.speaking(), contextlib.closing(LocretChatModel(
                model=MODEL, runtime=self.runtime(store), tool_prompt="auto", **options)) as model:
            yield model


class Served:
    """A server that runs in this process, and a client of it."""

    def __init__(self, port: int, service: Service, loop: asyncio.AbstractEventLoop):
        self.service, self._loop = service, loop
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def do(self, work: Any) -> Any:
        """The result of a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@contextmanager
def _serving(make: Any) -> Iterator[Served]:
    up, ended, found = threading.Event(), list[BaseException](), list[tuple[Served, Server]]()

    async def run() -> None:
        service = make()
        start = service.start

        async def started() -> None:
            try:
                await start()
            except BaseException as error:  # uvicorn would only log it
                ended.append(error)
                raise

        service.start = started

        def listening(port: int) -> None:
            found.append((Served(port, service, asyncio.get_running_loop()), server))
            up.set()

        server = Server(make_app(service), service, host="127.0.0.1", port=0, grace_s=10, listening=listening)
        await server.serve()

    def in_thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            ended.append(error)
        up.set()

    thread = threading.Thread(target=in_thread, daemon=True)
    thread.start()
    if not up.wait(60) or not found:
        raise ended[0] if ended else RuntimeError("the server did not start")
    served, server = found[0]
    try:
        with contextlib.closing(served.http):
            yield served
    finally:
        served._loop.call_soon_threadsafe(server._drain, 0)
        thread.join(60)
        assert not thread.is_alive() and not ended, ended


@contextmanager
def later(days: float) -> Iterator[None]:
    """Meanwhile templates read a clock that is so many days ahead."""
    real = datetime.datetime

    class Later(real):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.now(tz) + datetime.timedelta(days=days)

    for each in (clock, dated):
        each.datetime = Later
    try:
        yield
    finally:
        for each in (clock, dated):
            each.datetime = real
