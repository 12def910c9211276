"""An agent whose thread continues in another process: python examples/langgraph_agent.py [FOLDER]

LangGraph keeps the messages, in SQLite; the model keeps the memory, in its store. Deleting the thread deletes both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite import SqliteSaver

from langchain_locret import LocretChatModel
from langchain_locret.middleware import LocretMiddleware, forget_with
from locret_stream import Store

CONFIG = {"configurable": {"thread_id": "alice"}}
CODES = {"falcon": "48213", "heron": "7755"}

@tool
def lookup(key: str) -> str:
    """Look up the door code of a name."""
    return f"The door code of {key} is {CODES.get(key, 'unknown')}."


@wrap_model_call
def begin_the_call(request, handler):
    """Forces a tool call where the user wants one, as the bundled model never makes one by itself."""
    wanted = isinstance(request.messages[-1], HumanMessage) and request.messages[-1].text.startswith("Look up")
    return handler(request.override(tool_choice="lookup") if wanted else request)


def part(number: int, folder: Path) -> None:
    model = LocretChatModel(model="bundled", store=folder / "memory", max_tokens=32)
    with SqliteSaver.from_conn_string(str(folder / "messages.sqlite")) as saver:
        agent = create_agent(model, [lookup], middleware=[begin_the_call, LocretMiddleware(model)],
                             checkpointer=forget_with(saver, model))

        def ask(text: str) -> None:
            before = len(agent.get_state(CONFIG).values.get("messages", []))
            for message in agent.invoke({"messages": [HumanMessage(text)]}, CONFIG)["messages"][before:]:
                calls = [f"{call['name']}({call['args']})" for call in getattr(message, "tool_calls", ())]
                print(f"  {message.type}:", message.text, *calls, end="")
                receipt = message.response_metadata.get("locret")
                print(f"   [{receipt['source']}: {receipt['reused']} reused, {receipt['fed']} fed]" if receipt else "")

        if number == 1:
            saver.delete_thread("alice")  # which an earlier run may have left
            ask('Look up the door code of "falcon".')
        else:
            ask("What is the door code of falcon?")
            saver.delete_thread("alice")
            left = agent.get_state(CONFIG).values.get("messages", [])
            print(f"Deleted: {len(left)} messages and {len(Store(folder / 'memory').list())} memories are left.")
            ask("What is the door code of falcon?")
    model.close()


with tempfile.TemporaryDirectory() as temporary:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
    place.mkdir(parents=True, exist_ok=True)
    if "--part" in sys.argv:
        part(int(sys.argv[-1]), place)
    else:
        part(1, place)
        again = [sys.executable, __file__, str(place), "--part", "2"]
        print("In another process:", subprocess.check_output(again, text=True), sep="\n", end="")
