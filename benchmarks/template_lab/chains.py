"""What threads of a LocretChatModel do."""

from __future__ import annotations

import asyncio
from typing import Any

from template_lab.chats import LOG
from template_lab.forms import OSLO, ROME, TOOL
from template_lab.scripted import Subject
from template_lab.talking import Thread, long, one_of, tool_result
from template_lab.verdicts import Cells, NotAsked, judged


def chains(subject: Subject, model: Any, cells: Cells) -> None:
    form = subject.form
    for way, asked, answer in ("invoke", "Hi there.", long(1)), ("stream", long(1, "question"), "Hello."), (
            "ainvoke", long(1, "question"), "Hello."):
        with judged(cells, f"langchain.{way}"):
            thread = Thread(subject, model, way)
            thread.turn(asked, reply=form.answer(answer), answer=answer, way=way)
            thread.turn("And how is the mill?", reply=form.answer("It turns."), answer="It turns.", way=way)
    with judged(cells, "langchain.aingest"):
        stand_in = asyncio.run(model.aingest(LOG.decode(), thread_id="log"))
        thread = Thread(subject, model, "log", history=[stand_in], held=1)
        thread.turn("What is the code?", reply=form.answer("48213."), answer="48213.", way="ainvoke",
                    shown=[LOG.decode().strip()])
        thread.turn("Are you sure?", reply=form.answer("Yes."), answer="Yes.", way="ainvoke")
    with judged(cells, "langchain.tools"):
        thread = Thread(subject, model, "tools", tools=[TOOL])
        called = thread.turn("How is the weather there?", reply=one_of(form, ROME), calls=[ROME])
        thread.turn(tool_result(called, 0, "18 degrees"), reply=form.answer("It is fine."), answer="It is fine.")
        thread.turn("Thanks.", reply=form.answer("Gladly."), answer="Gladly.")
    with judged(cells, "langchain.two calls"):
        thread = Thread(subject, model, "two", tools=[TOOL])
        called = thread.turn("And in both towns?", reply=one_of(form, ROME, OSLO), calls=[ROME, OSLO], way="stream")
        thread.turn(tool_result(called, 0, "18 degrees"), tool_result(called, 1, "3 degrees"),
                    reply=form.answer("It is fine."), answer="It is fine.")
        thread.turn("Thanks.", reply=form.answer("Gladly."), answer="Gladly.")
    with judged(cells, "langchain.thoughts"):
        if form.thinks is None:
            raise NotAsked
        thread = Thread(subject, model, "thoughts")
        for said, thought, answer in ("Hi there.", long(1, "thought"), "Hello."), ("And you?", "I am.", "Fine."):
            thread.turn(said, reply=form.thought(thought, answer), answer=answer, thought=thought)
