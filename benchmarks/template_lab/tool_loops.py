"""What a server's sessions do with tools, and how answers end that are cut."""

from __future__ import annotations

import json

from template_lab.forms import OSLO, ROME, TOOL
from template_lab.scripted import MODEL, Served, Subject
from template_lab.talking import Chat, Responses, body_of, expect_calls, long, made, one_of, result, user
from template_lab.verdicts import Cells, Failed, NotAsked, judged


def loops(subject: Subject, served: Served, cells: Cells) -> None:
    form = subject.form

    def chat(session: str) -> Chat:
        return Chat(subject, served, session, tools=[TOOL])

    def end(chat: Chat, *last: dict) -> None:
        """The last messages of a loop, an answer, and one more turn."""
        chat.turn(*last, reply=form.answer("It is fine there."), answer="It is fine there.")
        chat.turn(user("Thanks."), reply=form.answer("Gladly."), answer="Gladly.")

    with judged(cells, "tools.one call"):
        loop = chat("loop")
        called = loop.turn(user("How is the weather there?"), reply=one_of(form, ROME), calls=[ROME])
        end(loop, result(called, 0, "18 degrees"))
    with judged(cells, "tools.two calls"):
        loop = chat("two")
        called = loop.turn(user("And in both towns?"), reply=one_of(form, ROME, OSLO), calls=[ROME, OSLO])
        end(loop, result(called, 0, "18 degrees"), result(called, 1, "3 degrees"))
    with judged(cells, "tools.two loops"):
        loop = chat("loops")
        called = loop.turn(user("First here, then there?"), reply=one_of(form, ROME), calls=[ROME])
        called = loop.turn(result(called, 0, "18 degrees"), reply=one_of(form, OSLO), calls=[OSLO])
        end(loop, result(called, 0, "3 degrees"))
    with judged(cells, "tools.result, then user"):
        loop = chat("then")
        called = loop.turn(user("How is the weather there?"), reply=one_of(form, ROME), calls=[ROME])
        end(loop, result(called, 0, "18 degrees"), user("And is it windy?"))
    with judged(cells, "tools.no result"):
        loop = chat("none")
        loop.turn(user("How is the weather there?"), reply=one_of(form, ROME), calls=[ROME])
        end(loop, user("Never mind, tell me of the mill."))
    with judged(cells, "tools.from elsewhere"):
        called = made(ROME)
        end(chat("other"), user("How is the weather there?"), called, result(called, 0, "18 degrees"))
    with judged(cells, "tools.two from elsewhere"):
        called = made(ROME, OSLO)
        end(chat("others"), user("And in both towns?"), called, result(called, 0, "18 degrees"),
            result(called, 1, "3 degrees"))
    with judged(cells, "tools.responses"):
        subject.script.say(one_of(form, ROME))
        given = body_of(served.http.post("/v1/responses", json={
            "model": MODEL, "input": "How is the weather there?", "tools": [{"type": "function", **TOOL["function"]}]}))
        items = [item for item in given["output"] if item["type"] == "function_call"]
        expect_calls([(item["name"], json.loads(item["arguments"])) for item in items], [ROME], "")
        Responses(subject, served).ask(
            [{"type": "function_call_output", "call_id": items[0]["call_id"], "output": "18 degrees"}],
            reply=form.answer("It is fine there."), answer="It is fine there.", held=True,
            previous_response_id=given["id"], tools=[{"type": "function", **TOOL["function"]}])


def cut(subject: Subject, served: Served, cells: Cells) -> None:
    form, script = subject.form, subject.script

    def tokens(text: str) -> int:
        return len(script.ids(text))

    def stream(limit: int, reply: str, said: str, **body: object) -> str:
        """The finish reason of the same, streamed."""
        script.say(reply)
        ended = ""
        with served.http.stream("POST", "/v1/chat/completions", json={
                "model": MODEL, "messages": [user(said)], "stream": True, "max_tokens": limit, **body}) as response:
            if response.status_code != 200:
                response.read()
                raise Failed("refused", f"{response.status_code} {response.text}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        ended = choice["finish_reason"] or ended
        return ended

    with judged(cells, "finish.answer"):
        whole = form.answer(long(1))
        half = tokens(whole[:whole.index("line 2")])
        given = Chat(subject, served, "cut").turn(user("Hi."), reply=whole, finish="length", max_tokens=half)
        if not long(1).startswith(given["content"] or "-"):
            raise Failed("wrong", f"content is {given['content']!r:.120}, expected a beginning of {long(1)!r:.40}")
    with judged(cells, "finish.second call"):
        whole = one_of(form, ROME, OSLO)
        limit = tokens(whole[:whole.index("Oslo") + 2])
        Chat(subject, served, "cut-calls", tools=[TOOL]).turn(
            user("And in both towns?"), reply=whole, finish="length", max_tokens=limit)
        if (ended := stream(limit, whole, "And in both towns?", tools=[TOOL])) != "length":
            raise Failed("wrong", f"streamed, finish_reason is {ended!r}, expected 'length'")
    with judged(cells, "finish.thought"):
        if form.thinks is None:
            raise NotAsked
        thought = long(1, "thought")
        whole = form.thought(thought, "So.")
        limit = tokens(whole[:whole.index("line 2")])
        chat = Chat(subject, served, "cut-thought")
        given = chat.turn(user("Hi."), reply=whole, finish="length", max_tokens=limit)
        if (given["content"] or "").strip():
            raise Failed("thought", f"content is {given['content']!r:.100}, expected none")
        if not thought.startswith((given.get("reasoning_content") or "-").strip()):
            raise Failed("wrong", f"reasoning_content is {given.get('reasoning_content')!r:.100}")
        chat.history.pop()  # a client keeps nothing of it
        chat._held = 0
        chat.turn(user("Go on."), reply=form.answer("So."), answer="So.")
