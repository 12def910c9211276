"""A conversation in which no message is read twice, also after a restart: python examples/langchain_chat.py [FOLDER]"""

from __future__ import annotations

import sys
import tempfile

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from langchain_locret import LocretChatModel

CONFIG = {"configurable": {"thread_id": "alice"}}


def show(reply: AIMessage) -> None:
    """Print the answer and its receipt: where the memory was found, tokens reused and tokens fed."""
    receipt, usage = reply.response_metadata["locret"], reply.usage_metadata
    print(f"  {reply.text}   [{receipt['source']}: {usage['input_token_details']['cache_read']} of "
          f"{usage['input_tokens']} prompt tokens reused, {receipt['fed']} fed]")


def main(folder: str) -> None:
    model = LocretChatModel(model="bundled", store=folder, max_tokens=16)
    model.forget_thread("alice")  # which an earlier run may have left
    history: list[BaseMessage] = []

    print("Two messages. Every call is given the whole history, and only the new messages are fed:")
    for text in ("The door code of falcon is 48213. The pass key of heron is 7755.",
                 "What is the door code of falcon?"):
        history.append(HumanMessage(text))
        history.append(reply := model.invoke(history, CONFIG))
        show(reply)

    print("Streamed:")
    history.append(HumanMessage("What is the pass key of heron?"))
    whole = None
    for chunk in model.stream(history, CONFIG):
        print(f"  {chunk.text!r}", end="")
        whole = chunk if whole is None else whole + chunk
    print()
    history.append(whole)
    show(whole)

    print("The same question again (regenerate), from the memory that ends with it:")
    history[-1] = model.invoke(history[:-1], CONFIG)
    show(history[-1])

    print("Another question in its place (edit), from the memory that ends before it:")
    show(model.invoke([*history[:-2], HumanMessage("Tell me the door code of falcon.")], CONFIG))

    model.close()  # frees weights and memory; the store keeps what another process would find
    model = LocretChatModel(model="bundled", store=folder, max_tokens=16)
    print("Closed, and made again over the same store:")
    history.append(HumanMessage("What is the door code of falcon?"))
    history.append(reply := model.invoke(history, CONFIG))
    show(reply)
    model.close()


with tempfile.TemporaryDirectory() as temporary:
    main(sys.argv[1] if len(sys.argv) > 1 else temporary)
