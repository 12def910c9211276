"""Sessions that one process leaves in a store and another one goes on with: at once, or on the next day."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from langchain_core.messages import messages_from_dict, messages_to_dict
from template_lab.chats import LOG, ask
from template_lab.forms import ROME, TOOL
from template_lab.scripted import Served, Subject
from template_lab.talking import Chat, Responses, Thread, body_of, long, one_of, result, user
from template_lab.verdicts import OK, Cells, Failed, NotAsked, judged

from locret_stream.conversation.boundaries import session_name

LEFT = "left.json"


def leave(subject: Subject, served: Served) -> dict[str, Any]:
    """Sessions with a few turns, as JSON: each with what is needed to go on, or `failed`, a verdict."""
    form, left = subject.form, dict[str, Any]()

    def keep(name: str, begin: Any) -> None:
        cells: Cells = {}
        with judged(cells, name):
            left[name] = begin()
        if cells[name] != OK:
            left[name] = {"failed": cells[name]}

    def chat() -> Any:
        kept = Chat(subject, served, "kept")
        kept.turn(user(long(1, "question")), reply=form.answer("Hello."), answer="Hello.")
        return {"history": kept.history}

    def response() -> Any:
        return {"id": Responses(subject, served).ask(
            long(2, "question"), reply=form.answer("Hello."), answer="Hello.", held=False)}

    def log(session: str) -> Any:
        body_of(served.http.post(f"/v1/sessions/{session}/ingest", content=LOG))
        return {}

    def tool() -> Any:
        kept = Chat(subject, served, "kept-tool", tools=[TOOL])
        kept.turn(user(f"{long(3, 'question')} How is the weather there?"), reply=one_of(form, ROME), calls=[ROME])
        return {"history": kept.history}

    keep("chat", chat)
    keep("response", response)
    keep("ask a log", lambda: log("kept-ask"))
    keep("respond to a log", lambda: log("kept-log"))
    keep("tool result", tool)
    return left


def leave_thread(subject: Subject, model: Any) -> dict[str, Any]:
    """The same of a LocretChatModel."""
    cells: Cells = {}
    left: dict[str, Any] = {}
    with judged(cells, "thread"):
        kept = Thread(subject, model, "kept")
        kept.turn(long(1, "question"), reply=subject.form.answer("Hello."), answer="Hello.")
        left = {"messages": messages_to_dict(kept.history)}
    return left if cells["thread"] == OK else {"failed": cells["thread"]}


def _begun(left: dict[str, Any]) -> dict[str, Any]:
    """Raises what went wrong where it was begun."""
    failed = left.get("failed")
    if failed == "-":
        raise NotAsked
    if failed:
        kind, _, why = failed.partition(": ")
        raise Failed(kind, f"before: {why}")
    return left


def go_on(subject: Subject, served: Served, left: dict[str, Any], cells: Cells, when: str) -> None:
    form = subject.form
    with judged(cells, f"{when}.chat"):
        history = _begun(left["chat"])["history"]
        kept = Chat(subject, served, "kept", history=history, held=len(history))
        kept.turn(user("And then?"), reply=form.answer("So."), answer="So.", cold=True)
        kept.turn(user("And now?"), reply=form.answer("Now."), answer="Now.")
    with judged(cells, f"{when}.response"):
        Responses(subject, served).ask(
            "And then?", reply=form.answer("So."), answer="So.", held=True, cold=True, shown=[long(2, "question")],
            previous_response_id=_begun(left["response"])["id"])
    with judged(cells, f"{when}.ask a log"):
        _begun(left["ask a log"])
        ask(subject, served, "kept-ask", [LOG.decode().strip()])
    with judged(cells, f"{when}.respond to a log"):
        _begun(left["respond to a log"])
        Responses(subject, served).ask(
            "Which room?", reply=form.answer("The falcon's."), answer="The falcon's.", held=True, cold=True,
            shown=[LOG.decode().strip()], conversation="kept-log")
    with judged(cells, f"{when}.tool result"):
        history = _begun(left["tool result"])["history"]
        kept = Chat(subject, served, "kept-tool", tools=[TOOL], history=history, held=len(history))
        kept.turn(result(history[-1], 0, "18 degrees"), reply=form.answer("It is fine."), answer="It is fine.",
                  cold=True)


def go_on_with_thread(subject: Subject, model: Any, left: dict[str, Any], cells: Cells, when: str) -> None:
    with judged(cells, f"{when}.langchain"):
        history = messages_from_dict(_begun(left)["messages"])
        Thread(subject, model, "kept", history=history, held=len(history)).turn(
            "And then?", reply=subject.form.answer("So."), answer="So.", cold=True)


def replayed(served: Served, cells: Cells) -> None:
    """Whether what sessions hold is, bit for bit, what this process makes of the ids in their logs."""
    stored = {snapshot.name for snapshot in served.service.runtime.store.list()}
    for name, session in ("chat", "chat"), ("tool loop", "loop"):
        with judged(cells, f"replay.{name}"):
            if session_name(session) not in stored:
                raise NotAsked
            found = served.do(served.service.runtime.replay(session_name(session)))
            if found.differs or not found.tokens:
                raise Failed("differs", f"{', '.join(found.differs[:4])} of {found.tokens} tokens")


def write_left(folder: Path, subject: Subject, left: dict[str, Any], thread: dict[str, Any]) -> None:
    (folder / LEFT).write_text(json.dumps({
        "name": subject.name, "template": subject.tokenizer.chat_template, "left": left, "thread": thread}))
