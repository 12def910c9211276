"""pydantic-ai: only what is new is sent, behind the last response that the history holds.

    locret-stream serve
    pip install "pydantic-ai-slim[openai]"
    python examples/clients/pydantic_ai_agent.py
"""

from __future__ import annotations

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    model = OpenAIResponsesModel("bundled", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, instructions="You keep notes.",
                  model_settings=OpenAIResponsesModelSettings(openai_previous_response_id="auto"))
    told = agent.run_sync("The door code of falcon is 48213.")
    asked = agent.run_sync("What is the door code of falcon?", message_history=told.all_messages())
    print("answer:", asked.output, f"({asked.usage.cache_read_tokens} tokens in memory)")


if __name__ == "__main__":
    main(*sys.argv[1:])
