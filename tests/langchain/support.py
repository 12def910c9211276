"""A real runtime over a tiny random model with a scripted sampler: its replies follow from the prompt.

Everything but the choice of the next token is the real thing: template, tokenizer, memory, eviction, snapshots. The
script reads the ids that memory accepted last, so a reply proves what was fed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, BaseMessage
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import locret_stream
from langchain_locret import LocretChatModel
from langchain_locret.messages import ROLES
from locret_stream import Runtime
from locret_stream.context import StreamingContext, streams
from locret_stream.engine import state
from locret_stream.models import attach
from locret_stream.text import TextCodec

BUNDLED = Path(locret_stream.__file__).parent / "assets" / "bundled"
CHUNK = 64
PROMPT = "<|im_start|>assistant\n"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BUNDLED)


@cache
def pieces() -> list[bytes]:
    """The bytes of each token; of a control token those of its name."""
    codec = TextCodec(tokenizer())
    return [codec.decode([token], skip_special=False).encode() if token in codec.control_ids else codec.piece(token)
            for token in range(codec.vocab)]


@cache
def tiny_model() -> LlamaForCausalLM:
    """It stays attached, as to attach it anew would take most of the time of a small test."""
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(
        vocab_size=1536, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=65536, eos_token_id=tokenizer().eos_token_id)).eval()
    attach(made)
    return made


class Script:
    """The replies of the model. `seen` is the whole prompt of the last one, as text, control tokens included.

    Attributes:
        say: from the prompt to the reply. delay: seconds that a token takes. sampled: the number of tokens.
        refused: what a script would have said that a grammar does not let through; a test that has some fails.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], str] = answer
        self.delay, self.sampled, self.seen = 0.0, 0, ""
        self.refused: list[str] = []
        self._plans: dict[tuple[int, ...], list[int]] = {}
        self._held: dict[tuple[int, ...], bytes] = {}
        self.on_token: Callable[[], None] = lambda: None

    def sample(self, logits: Any, recent: list[int], position: int, sampling: Any, using: Any,
               allowed: torch.Tensor | None = None) -> int:
        known = tokenizer()
        self.sampled += 1
        self.on_token()
        if self.delay:
            time.sleep(self.delay)
        if allowed is not None:
            return self._held_token(recent, allowed)
        plan = self._plans.pop(tuple(recent), None)
        if plan is None:  # a new reply
            plan = [*known.encode(self._begin(recent), add_special_tokens=False), known.eos_token_id]
        token, *rest = plan
        if rest:
            self._plans[(*recent, token)] = rest
        return token

    def _begin(self, recent: list[int]) -> str:
        """What is to be said behind what the prompt has of the reply."""
        text = tokenizer().decode(recent, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self.seen, _, begun = text.rpartition(PROMPT)
        reply = self.say(self.seen + PROMPT)
        assert reply.startswith(begun), f"asked to go on from {begun!r}; the script would say {reply!r}"
        return reply[len(begun):]

    def _held_token(self, recent: list[int], allowed: torch.Tensor) -> int:
        """The longest token that goes on with what is to be said, of those that a grammar lets through."""
        rest = self._held.pop(tuple(recent), None)
        if rest is None:
            rest = self._begin(recent).encode()
        ids = allowed.nonzero()[:, 0].tolist()
        fits = [token for token in ids if pieces()[token] and rest.startswith(pieces()[token])]
        token = max(fits, key=lambda token: len(pieces()[token]), default=tokenizer().eos_token_id)
        if not fits and (rest or token not in ids):
            self.refused.append(f"{rest!r}, where only {sorted(pieces()[token] for token in ids)[:9]} may come")
            raise AssertionError(f"the script would say {self.refused[-1]}")
        if fits:
            self._held[(*recent, token)] = rest[len(pieces()[token]):]
        return token


def answer(shown: str) -> str:
    """A tool call if the prompt shows tools and its last message is the user's, else an echo of that message."""
    last = shown.removesuffix(PROMPT).removesuffix("<|im_end|>\n").rpartition("<|im_start|>")[2]
    role, _, said = last.partition("\n")
    shelf = shown.partition("<|im_end|>")[0].partition("Tools:\n")[2].partition("To call one")[0]
    tools = [json.loads(line) for line in shelf.splitlines()]
    if role == "user" and tools:
        return call(tools[0], said)
    return f"You said: {said[:60]}" if role == "user" else "Done."


def call(tool: dict[str, Any], hint: str) -> str:
    arguments = json.dumps(_fitting(tool["parameters"], tool["parameters"], hint), ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{tool["name"]}", "arguments": {arguments}}}\n</tool_call>'


def _fitting(schema: dict[str, Any], root: dict[str, Any], hint: str) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _fitting(schema["anyOf"][0], root, hint)
    if "$ref" in schema:
        return _fitting(root["$defs"][schema["$ref"].rpartition("/")[2]], root, hint)
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: _fitting(inner, root, hint) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [_fitting(schema.get("items", {"type": "string"}), root, hint)]
    number, quoted = re.search(r"\((\d+)\)", hint), re.search(r"'([^']+)'", hint)
    return {"integer": int(number[1]) if number else 3, "number": 1.0, "boolean": True, "null": None}.get(
        kind, quoted[1] if quoted else "text")


@contextmanager
def scripted() -> Iterator[Script]:
    """Every generation follows a script, which sees up to 65,536 tokens. Under a grammar a script has to fit it."""
    script = Script()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "HISTORY", 65536)
        patch.setattr(streams, "sample", script.sample)
        yield script
    assert not script.refused, f"the script would say {script.refused}"


def runtime(store: Any = None, **options: Any) -> Runtime:
    options = {"policy": "streaming_llm", "budget": 4096, "chunk_size": CHUNK, "max_live": 8} | options
    return Runtime(tiny_model(), tokenizer(), store=store, **options)


@contextmanager
def model(store: Any, *, on: Runtime | None = None, **options: Any) -> Iterator[LocretChatModel]:
    """A model over a runtime of its own with that store, or over `on`; it is closed afterwards."""
    of_runtime = {name: options.pop(name) for name in ("budget", "chunk_size", "max_live", "policy", "key")
                  if name in options}
    chat = LocretChatModel(model="scripted", runtime=on or runtime(store, **of_runtime), **options)
    try:
        yield chat
    finally:
        chat.close()


def thread(name: Any, **more: Any) -> dict[str, Any]:
    return {"configurable": {"thread_id": name, **more}}


def receipt(message: BaseMessage) -> dict[str, Any]:
    assert isinstance(message, AIMessage)
    return message.response_metadata["locret"]


def held(chat: LocretChatModel, name: Any) -> str:
    """All tokens of a thread's memory, as text."""
    return tokenizer().decode(memory(chat, name)._session.state.history, skip_special_tokens=False,
                              clean_up_tokenization_spaces=False)


def memory(chat: LocretChatModel, name: Any) -> StreamingContext:
    """The open context of a thread."""
    return chat.shared._loop.threads.named(str(name)).ctx


def rendered(messages: list[BaseMessage], tools: list[dict[str, Any]] | None = None) -> str:
    """The messages as the chat template alone renders them."""
    shown = []
    for message in messages:
        one: dict[str, Any] = {"role": ROLES[message.type], "content": message.text}
        if isinstance(message, AIMessage) and message.tool_calls:
            one["tool_calls"] = [{"type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
                                 for call in message.tool_calls]
        shown.append(one)
    return tokenizer().apply_chat_template(shown, tools=tools, tokenize=False)
