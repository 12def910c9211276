"""What a server's sessions do without tools: chats, responses, streams taken in, items told, thoughts, system texts."""

from __future__ import annotations

from template_lab.scripted import Served, Subject, later
from template_lab.talking import Chat, Responses, body_of, expect_shown, long, thinks, user
from template_lab.verdicts import Cells, Failed, NotAsked, judged

LOG = b"The door code of the falcon room is 48213.\n" * 3


def plain(subject: Subject, served: Served, cells: Cells) -> None:
    with judged(cells, "chat.three turns"):
        chat, form = Chat(subject, served, "chat"), subject.form
        for said, answer in (
                ("Hi there.", long(1)), ("And how is the mill?", "It turns."), ("What of the sea?", "It is calm.")):
            chat.turn(user(said), reply=form.answer(answer), answer=answer)
    with judged(cells, "chat.over midnight"):
        chat = Chat(subject, served, "midnight")
        chat.turn(user(long(1, "evening")), reply=form.answer("Good evening."), answer="Good evening.")
        with later(days=1):
            chat.turn(user("Good morning."), reply=form.answer("Good."), answer="Good.")


def by_id(subject: Subject, served: Served, cells: Cells) -> None:
    responses, form = Responses(subject, served), subject.form
    with judged(cells, "responses.by id"):
        first = responses.ask(
            f"One cat? {long(1, 'question')}", reply=form.answer(long(1)), answer=long(1), held=False)
        second = responses.ask("Two cats?", reply=form.answer("Two."), answer="Two.", held=True, shown=[long(1)],
                               previous_response_id=first)
        responses.ask("Three cats?", reply=form.answer("Three."), answer="Three.", held=True,
                      shown=["One cat?", long(1)], previous_response_id=second)
    with judged(cells, "responses.instructions"):
        first = responses.ask("Four cats?", reply=form.answer("Four."), answer="Four.", held=False,
                              shown=["Be brief and kind."], instructions="Be brief and kind.")
        responses.ask("Five cats?", reply=form.answer("Five."), answer="Five.", held=True,
                      shown=["Be brief and kind."], previous_response_id=first)


def ask(subject: Subject, served: Served, session: str, shown: list[str], reply: str = "") -> None:
    """A question on a copy of a session's memory. Raises Failed."""
    subject.script.say(reply or subject.form.answer("It is 48213."))
    given = body_of(served.http.post(f"/v1/sessions/{session}/ask", json={"question": "What is the code?"}))
    expect_shown(subject, ["What is the code?", *shown])
    if given["answer"] != "It is 48213.":
        raise Failed("thought" if thinks(given["answer"]) else "wrong", f"answer is {given['answer']!r}")


def ingested(subject: Subject, served: Served, cells: Cells) -> None:
    responses, form, log = Responses(subject, served), subject.form, LOG.decode().strip()

    def take_in(session: str) -> None:
        body_of(served.http.post(f"/v1/sessions/{session}/ingest", content=LOG))

    with judged(cells, "ingest.ask"):
        take_in("log")
        ask(subject, served, "log", [log])
    with judged(cells, "ingest.response"):
        take_in("log2")
        responses.ask("Which room?", reply=form.answer("The falcon's."), answer="The falcon's.", held=True,
                      shown=[log], conversation="log2")
        responses.ask("Are you sure?", reply=form.answer("Yes."), answer="Yes.", held=True, shown=[log],
                      conversation="log2")
    with judged(cells, "ingest.behind a chat"):
        chat = Chat(subject, served, "log3")
        chat.turn(user("Hello."), reply=form.answer("Good day."), answer="Good day.")
        take_in("log3")
        responses.ask("Which room?", reply=form.answer("The falcon's."), answer="The falcon's.", held=True,
                      shown=["Good day.", log], conversation="log3")
        ask(subject, served, "log3", [log])


TOLD = {
    "user": [("user", "The code of the barn is 77.")],
    "system": [("system", "The code of the barn is 77.")],
    "user and assistant": [("user", "The code of the barn is 77."), ("assistant", "I see, it is 77.")],
}


def told(subject: Subject, served: Served, cells: Cells) -> None:
    responses, form = Responses(subject, served), subject.form
    for name, items in TOLD.items():
        with judged(cells, f"told.{name}"):
            given = body_of(served.http.post("/v1/conversations", json={"items": [
                {"type": "message", "role": role, "content": text} for role, text in items]}))
            shown = [text for _, text in items]
            responses.ask("What is it?", reply=form.answer("77."), answer="77.", held=True, shown=shown,
                          conversation=given["id"])
            responses.ask("Really?", reply=form.answer("Yes."), answer="Yes.", held=True, shown=shown,
                          conversation=given["id"])


def thoughts(subject: Subject, served: Served, cells: Cells) -> None:
    form = subject.form
    with judged(cells, "thoughts.three turns"):
        if form.thinks is None:
            raise NotAsked
        chat = Chat(subject, served, "thoughts")
        for said, thought, answer in (
                ("Hi there.", long(1, "thought"), "Hello."), ("And how is the mill?", "I see it.", "It turns."),
                ("What of the sea?", "It is calm.", "Calm.")):
            chat.turn(user(said), reply=form.thought(thought, answer), answer=answer, thought=thought)


    with judged(cells, "thoughts.responses"):
        if form.thinks is None:
            raise NotAsked
        responses, thought = Responses(subject, served), long(1, "thought")
        first = responses.ask("Hi there.", reply=form.thought(thought, "Hello."), answer="Hello.", thought=thought,
                              held=False)
        responses.ask("And you?", reply=form.thought("I am.", "Fine."), answer="Fine.", thought="I am.", held=True,
                      previous_response_id=first)
    with judged(cells, "thoughts.ask"):
        if form.thinks is None:
            raise NotAsked
        body_of(served.http.post("/v1/sessions/thought-of/ingest", content=LOG))
        ask(subject, served, "thought-of", [], form.thought("I look for it.", "It is 48213."))


_S = {"role": "system", "content": "Be brief and kind."}
_A, _U = {"role": "assistant", "content": "Welcome to the mill!"}, user(long(1, "question"))
SYSTEMS = {
    "first": [_S, _U],
    "two": [_S, {"role": "system", "content": "Speak of cats."}, _U],
    "behind a user's": [_U, {"role": "system", "content": "Speak of cats."}, user("And now?")],
    "behind an answer": [_U, _A, {"role": "system", "content": "Speak of cats."}, user("And now?")],
    "developer": [{"role": "developer", "content": "Be brief and kind."}, _U],
    "user, user": [_U, user("Are you awake?")],
    "assistant first": [_A, _U],
    "system, assistant": [_S, _A, _U],
    "assistant, assistant": [_U, _A, {"role": "assistant", "content": "Come in."}, user("Thanks.")],
}


def systems(subject: Subject, served: Served, cells: Cells) -> None:
    form = subject.form
    for name, messages in SYSTEMS.items():
        with judged(cells, f"roles.{name}"):
            chat = Chat(subject, served, f"roles {name}".replace(" ", "-").replace(",", "").replace("'", ""))
            chat.turn(*messages, reply=form.answer("Well."), answer="Well.")
            chat.turn(user("And then?"), reply=form.answer("So."), answer="So.")
