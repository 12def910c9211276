"""OpenAI's client on a memory that lasts: responses that go on from each other, a branch, a conversation, a chat.

    locret-stream serve
    pip install openai
    python examples/clients/openai_client.py
"""

from __future__ import annotations

import sys

from openai import OpenAI

MODEL = "bundled"


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    with OpenAI(base_url=url, api_key="none") as client:
        told = client.responses.create(model=MODEL, input="The door code of falcon is 48213.")
        asked = client.responses.create(model=MODEL, input="What is the door code of falcon?",
                                        previous_response_id=told.id)
        print("responses:", asked.output_text, f"({asked.usage.input_tokens_details.cached_tokens} tokens in memory)")

        # An older response is a place to branch off; the other branch does not know of this one.
        changed = client.responses.create(model=MODEL, input="The pass key of heron is 7755.",
                                          previous_response_id=told.id)
        with client.responses.stream(model=MODEL, input="What is the pass key of heron?",
                                     previous_response_id=changed.id) as stream:
            print("streamed:", "".join(event.delta for event in stream if event.type == "response.output_text.delta"))

        conversation = client.conversations.create()
        client.responses.create(model=MODEL, input="The port of gateway is 8088.", conversation=conversation.id)
        answer = client.responses.create(model=MODEL, input="What is the port of gateway?",
                                         conversation=conversation.id)
        print("conversation:", answer.output_text)

        history = [{"role": "user", "content": "The door code of raven is 31337."}]
        for question in ("What is the door code of raven?", "And the door code of raven?"):
            reply = client.chat.completions.create(model=MODEL, messages=history, extra_body={"session_id": "chat"})
            history += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": question}]
        reply = client.chat.completions.create(model=MODEL, messages=history, extra_body={"session_id": "chat"})
        print("chat:", reply.choices[0].message.content, f"({reply.locret['fed']} tokens read)")


if __name__ == "__main__":
    main(*sys.argv[1:])
