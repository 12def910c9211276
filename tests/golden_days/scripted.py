"""A runtime that depends on nothing that changes: weights by exact arithmetic, a tokenizer of bytes built in code, two
chat templates of our own, and a sampler that says given replies. What the golden store was made with, and is opened by.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from langchain_locret import LocretChatModel
from locret_stream import Runtime, Store
from locret_stream.context import streams
from locret_stream.engine import state
from locret_stream.serving.limits import Limits
from locret_stream.serving.service import Service
from tests.serving.support import Served, running

_TURN = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = "{% for message in messages %}" + _TURN + "{% endfor %}" + _PROMPT
DATED = ("{{ '<|im_start|>system\\nYou keep a diary. Today is ' + strftime_now('%d %B %Y') + '.' }}"
         "{% if messages[0].role == 'system' %}{{ '\\n' + messages[0].content }}{% set messages = messages[1:] %}"
         "{% endif %}{{ '<|im_end|>\\n' }}") + PLAIN
TEMPLATES = {"dated": DATED, "plain": PLAIN}
MARKS = ("<|end|>", "<|im_start|>", "<|im_end|>")
BUDGET, CHUNK, WINDOW = 1024, 32, 4096


def tokenizer(template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    """A token for each byte, in the order of the letters that byte-level tokenizers write for them; and three marks."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def model() -> LlamaForCausalLM:
    """Weights that are multiples of 1/64 between -1/8 and 1/8, by a rule."""
    made = LlamaForCausalLM(LlamaConfig(
        vocab_size=256 + len(MARKS), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=WINDOW, eos_token_id=256 + MARKS.index("<|im_end|>"),
        bos_token_id=None, pad_token_id=None)).eval()
    with torch.no_grad():
        for number, (_, weight) in enumerate(sorted(made.named_parameters())):
            steps = torch.arange(weight.numel(), dtype=torch.int64) * (2 * number + 3) % 17 - 8
            weight.copy_((steps.float() / 64).reshape(weight.shape))
    return made


class Say:
    """Says `replies` one after another, then "Noted." for ever. `seen`: the text of all that memory held each time."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer(None)
        self.replies, self.seen = list[str](), list[str]()
        self._plans: dict[tuple[int, ...], list[int]] = {}
        self._lock = threading.Lock()

    def sample(self, logits: Any, recent: list[int], *_: Any) -> int:
        with self._lock:
            plan = self._plans.pop(tuple(recent), None)
            if plan is None:
                self.seen.append(self.tokenizer.decode(recent, skip_special_tokens=False))
                text = self.replies.pop(0) if self.replies else "Noted."
                plan = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
            token, *rest = plan
            if rest:
                self._plans[(*recent, token)] = rest
            return token


@contextmanager
def scripted() -> Iterator[Say]:
    """Every reply follows the script, which sees up to 65,536 tokens."""
    say = Say()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "HISTORY", 65536)
        patch.setattr(streams, "sample", say.sample)
        yield say


def runtime(store: Path | Store, template: str | dict[str, str], **options: Any) -> Runtime:
    """One whose tokenizer has that template."""
    settings = {"policy": "streaming_llm", "budget": BUDGET, "chunk_size": CHUNK, "max_live": 4} | options
    store = store if isinstance(store, Store) else Store(store, keep_last=32)
    return Runtime(model(), tokenizer(template), store=store, **settings)


def serving(store: Path | Store, template: str | dict[str, str], **options: Any) -> AbstractContextManager[Served]:
    """A server over such a runtime, in which nothing expires."""
    @asynccontextmanager
    async def make() -> AsyncIterator[Service]:
        yield Service(runtime(store, template, **options), model="scripted", limits=Limits(unnamed_days=100_000))

    return running(make, Served)


@contextmanager
def chat_model(store: Path | Store, template: str | dict[str, str], **options: Any) -> Iterator[LocretChatModel]:
    """LangChain's model over such a runtime."""
    chat = LocretChatModel(model="scripted", runtime=runtime(store, template, acknowledge=None, **options))
    try:
        yield chat
    finally:
        chat.close()


def held(context: Any) -> str:
    """All tokens of an open context's memory, as text."""
    return tokenizer(None).decode(context._session.state.history, skip_special_tokens=False)
