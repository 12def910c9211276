"""The systems of `langchain_dialogue.py`, each as a function that answers the last of some messages."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, trim_messages

from locret_stream.named_models import NAMED_MODELS, model_path

MAX_TOKENS, SUMMARY_TOKENS, SUMMARY_PENALTY = 40, 256, 1.08
TALK = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.05}
SYSTEMS = ("locret", "recall", "newest", "newest_recall", "trimming", "summarisation", "window", "ceiling", "gathered",
           "gathered_recent")
LIMITS = "ceiling", "gathered", "gathered_recent"
History = list[BaseMessage]
Turn = Callable[[History, str | None, bool], History]
"""Answers the last message, which is one of the questions (True) or talk, to which the script may have a reply. Returns
what is given again at the next turn; it ends with the answer."""


def locret(options: argparse.Namespace, store: Path, stack: contextlib.ExitStack, *, thread: str | None = "dialogue",
           **settings: Any) -> Turn:
    """LocretChatModel on a thread of the store; None: on nobody's, each history by itself."""
    from langchain_locret import LocretChatModel
    model = LocretChatModel(model=options.model, store=str(store), max_tokens=MAX_TOKENS, **settings)
    stack.callback(model.close)
    model.invoke("Hello")  # loads the weights, before the clock starts
    config: Any = {"configurable": {"thread_id": thread}}

    def turn(history: History, reply: str | None, asking: bool) -> History:
        if reply is not None:
            read = model.invoke(history, config, max_tokens=1, recall=False)  # nothing of its reply is used
            return [*history, AIMessage(reply, response_metadata={"read": read.response_metadata["locret"]})]
        how = {} if asking else {**TALK, "seed": len(history)}
        return [*history, model.invoke(history, config, **how)]

    return turn


class Weights:
    """The same weights for ChatHuggingFace, in the precision that our runtime chooses."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from locret_stream.runtime.loading import cpu_dtype
        folder, named = model_path(options.model), NAMED_MODELS[options.model]
        dtype = cpu_dtype(torch.bfloat16) if named.dtype == "auto" else named.dtype
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.response_template = None  # with one, the pipeline leaves end markers in the answer

    def chat_model(self, **options: Any) -> Any:
        """Greedy, unless `options` say otherwise."""
        from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
        from transformers import pipeline

        # Without return_full_text=False an answer would begin with the whole prompt.
        pipe = pipeline("text-generation", model=self.model, tokenizer=self.tokenizer, return_full_text=False,
                        **{"do_sample": False} | options)
        model = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=pipe, model_id="the same"), tokenizer=self.tokenizer)
        model.invoke("Hello")
        return model

    def both(self) -> dict[bool, Any]:
        """What answers the questions (True), and what talks."""
        talk = self.chat_model(max_new_tokens=MAX_TOKENS, do_sample=True, top_k=0, **TALK)
        return {True: self.chat_model(max_new_tokens=MAX_TOKENS), False: talk}


def counter(options: argparse.Namespace) -> Callable[[Any], int]:
    """Counts the tokens of messages as the chat template writes them, the opening of an answer included."""
    from transformers import AutoTokenizer
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path(options.model))
    roles = {"human": "user", "ai": "assistant", "system": "system"}

    @cache
    def written(*messages: tuple[str, str]) -> int:
        text = tokenizer.apply_chat_template([{"role": roles[role], "content": content} for role, content in messages],
                                             tokenize=False, add_generation_prompt=True)
        return len(tokenizer.encode(text, add_special_tokens=False))

    one = ("human", "Hello")
    around = 2 * written(one) - written(one, one)

    def count(messages: Any) -> int:
        """Message by message, as their ends are tokens of their own; written anew each time they would take seconds."""
        return around + sum(written(one, (message.type, message.text)) - written(one) for message in messages)

    return count


def trimming(options: argparse.Namespace, most: int) -> Turn:
    """ChatHuggingFace, given the newest messages of at most so many tokens."""
    models, count = Weights(options).both(), counter(options)

    def turn(history: History, reply: str | None, asking: bool) -> History:
        if reply is not None:
            return [*history, AIMessage(reply)]
        kept = trim_messages(history, max_tokens=most, token_counter=count, strategy="last", start_on="human")
        torch.manual_seed(len(history))
        return [*history, models[asking].invoke(kept)]

    return turn


def summarisation(options: argparse.Namespace, most: int) -> Turn:
    """An agent whose older messages are replaced by a summary as soon as there are so many tokens."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import SummarizationMiddleware
    weights = Weights(options)
    middleware = SummarizationMiddleware(
        weights.chat_model(max_new_tokens=SUMMARY_TOKENS, repetition_penalty=SUMMARY_PENALTY), trigger=("tokens", most),
        keep=("tokens", most // 2), token_counter=counter(options))
    agents: dict[bool, Any] = {asking: create_agent(model, [], middleware=[middleware])
                               for asking, model in weights.both().items()}

    def turn(history: History, reply: str | None, asking: bool) -> History:
        torch.manual_seed(len(history))
        agent = agents[asking] if reply is None else create_agent(
            FakeListChatModel(responses=[reply]), [], middleware=[middleware])
        return agent.invoke({"messages": history})["messages"]

    return turn


def room(options: argparse.Namespace) -> int:
    """Tokens that the memory of `locret` holds."""
    named = NAMED_MODELS[options.model]
    return named.budget + named.chunk_size


def start(options: argparse.Namespace, name: str, store: Path, stack: contextlib.ExitStack) -> Turn:
    """The system of that name; the stack closes it."""
    most = room(options)
    if name in ("locret", "recall", "newest", "newest_recall"):
        newest = {"policy": "streaming_llm"} if name.startswith("newest") else {}
        return locret(options, store, stack, **newest, recalls="recall" in name or None)
    if name == "summarisation":
        return summarisation(options, most)
    window = json.loads((Path(model_path(options.model)) / "config.json").read_text())["max_position_embeddings"]
    return trimming(options, most if name == "trimming" else window - MAX_TOKENS)
