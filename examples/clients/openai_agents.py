"""OpenAI's Agents SDK: an agent whose memory is the server's, by conversation and by the id of its last response.

    locret-stream serve
    pip install openai-agents
    python examples/clients/openai_agents.py
"""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def look_up(name: str) -> str:
    """Look up a name in the address book."""
    return f"The door code of {name} is 4711."


async def run(url: str) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        model = OpenAIResponsesModel(model="bundled", openai_client=client)
        agent = Agent(name="notes", instructions="You keep notes.", model=model)

        conversation = await client.conversations.create()
        await Runner.run(agent, "The port of gateway is 8088.", conversation_id=conversation.id)
        asked = await Runner.run(agent, "What is the port of gateway?", conversation_id=conversation.id)
        print("conversation:", asked.final_output)

        told = await Runner.run(agent, "The door code of falcon is 48213.")
        streamed = Runner.run_streamed(agent, "What is the door code of falcon?",
                                       previous_response_id=told.last_response_id)
        async for _ in streamed.stream_events():
            pass
        print("response:", streamed.final_output)

        # The bundled model is too small to choose a tool, so this one is chosen for it.
        caller = Agent(name="caller", instructions="You look things up.", model=model, tools=[look_up],
                       model_settings=ModelSettings(tool_choice="look_up", max_tokens=40))
        called = await Runner.run(caller, "What is the door code of otter?", max_turns=3)
        print("items:", *(item.type for item in called.new_items))


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    asyncio.run(run(url))


if __name__ == "__main__":
    main(*sys.argv[1:])
