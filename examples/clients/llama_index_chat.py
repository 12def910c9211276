"""LlamaIndex: OpenAILike sends the whole history, and the server reads what is new of it.

    locret-stream serve
    pip install llama-index-llms-openai-like
    python examples/clients/llama_index_chat.py
"""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    model = OpenAILike(model="bundled", api_base=url, api_key="none", is_chat_model=True, context_window=1_000_000,
                       additional_kwargs={"extra_body": {"session_id": "llama-index"}})
    history = [ChatMessage(role="user", content="The door code of falcon is 48213.")]
    history += [model.chat(history).message, ChatMessage(role="user", content="What is the door code of falcon?")]
    answer = model.chat(history)
    held = answer.raw.usage.prompt_tokens_details.cached_tokens
    print("answer:", answer.message.content, f"({held} tokens in memory)")


if __name__ == "__main__":
    main(*sys.argv[1:])
