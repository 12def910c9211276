"""LangChain's ChatOpenAI: with `use_previous_response_id` only what is new is sent.

    locret-stream serve
    pip install langchain-openai
    python examples/clients/langchain_openai_chat.py

In the process of the model, without a server, `langchain_locret.LocretChatModel` does the same and more.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    model = ChatOpenAI(model="bundled", base_url=url, api_key="none", use_responses_api=True,
                       use_previous_response_id=True)
    history: list[Any] = [HumanMessage("The door code of falcon is 48213.")]
    history.append(model.invoke(history))
    history.append(HumanMessage("What is the door code of falcon?"))
    answer = model.invoke(history)
    print("answer:", answer.text, f"({answer.usage_metadata['input_token_details']['cache_read']} tokens in memory)")


if __name__ == "__main__":
    main(*sys.argv[1:])
