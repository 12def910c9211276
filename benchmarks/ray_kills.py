"""Replicas that are killed at random moments, and what is held afterwards: `python benchmarks/ray_kills.py`. Needs the
extra [ray].

`locret-stream serve --ray` runs two replicas of the bundled model. Sessions of every kind take turns with pauses
between them: chats that send their whole history, chains of responses, conversations that are told items too, and
streams that are taken in; answers are streamed, greedy and sampled in turn. --kills times one of the two replicas gets
SIGKILL while both are up: at a random moment, and every other time in the middle of an answer. Measured:

  held         after each kill, and at the end: the log of every session has all that was acknowledged, each once, in
               its order
  states       at the end, in this process: the stored memory of every session is bit for bit that of a new one which
               reads the same log
  under_way    answers that were under way at a replica as it was killed, against what is generated here behind the
               same tokens
  silence_s    of each kill: the longest time that a client heard nothing, of those whose session was at that replica
               and who waited then or asked within 5 s. In an answer that is under way, what was sent is decoded anew
               within it
  errors       requests that were refused or broke off; a stream that is lost with its replica (409 upload_lost) is sent
               again

--store takes a URL, as of an object store; its credentials are those of the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import torch
from record import record

from locret_stream import Runtime, Sampling, Store
from locret_stream.snapshot.transcript import read_transcript

ANIMALS = ("falcon", "otter", "badger", "heron", "lynx", "marten", "stoat", "raven")
TOKENS = 30  # of an answer
TURNS = 24  # of a session, before the next one begins
NEAR_S = 5.0  # how long after a kill a new request still tells how long its session was away
KINDS = {"chat": 2, "responses": 2, "conversation": 1, "ingest": 1}
PAUSES_S = {"chat": (1.0, 6.0), "responses": (1.0, 6.0), "conversation": (1.0, 6.0), "ingest": (4.0, 16.0)}
END, ANSWER = "<|im_end|>", "<|im_start|>assistant\n"


@dataclass
class Asked:
    """One answer: at which replica its session was before, and when something of it came."""

    said: str
    owner: str
    times: list[float]
    sampling: dict[str, Any]
    text: str = ""


@dataclass
class Talk:
    """What one session was told and answered, as far as that was acknowledged."""

    name: str
    told: list[str] = field(default_factory=list)
    history: list[dict[str, str]] = field(default_factory=list)
    owner: str = ""
    response: str | None = None


class Load:
    """The clients."""

    def __init__(self, http: httpx.AsyncClient, seed: int):
        self.http, self.random = http, random.Random(seed)
        self.talks: list[Talk] = []
        self.asked: list[Asked] = []
        self.running: list[Asked] = []
        self.errors = Counter[str]()
        self.ended = False

    async def until_under_way(self, at: list[str]) -> str:
        """One of these replicas, at a random moment of an answer that it gives."""
        while True:
            found = [one.owner for one in self.running if len(one.times) > 2 and one.owner in at]
            if found:
                await asyncio.sleep(self.random.uniform(0, 0.2))
                return found[0]
            await asyncio.sleep(0.01)

    async def run(self, kind: str, number: int) -> None:
        talk, count, turns = Talk(""), 0, 0
        while not self.ended:
            if not talk.name or turns >= TURNS:
                talk, turns = await self._begin(kind, f"{kind}-{number}-{count}"), 0
                count += 1
            said = f"Note {turns} of {talk.name}: the door code of {self.random.choice(ANIMALS)} is " \
                   f"{self.random.randrange(10000, 99999)}."
            turns += await self._try(kind, talk, said, turns)
            await asyncio.sleep(self.random.uniform(*PAUSES_S[kind]))

    async def _begin(self, kind: str, name: str) -> Talk:
        if kind == "conversation":
            name = (await self.http.post("/v1/conversations", json={})).json()["id"]
        talk = Talk(name)
        self.talks.append(talk)
        return talk

    async def _try(self, kind: str, talk: Talk, said: str, turn: int) -> bool:
        """Whether it was acknowledged."""
        try:
            if kind == "ingest":
                return await self._ingest(talk, said)
            if kind == "conversation" and turn % 3 == 1:
                return await self._tell(talk, said)
            return await self._answer(kind, talk, said, turn)
        except httpx.HTTPError as error:
            self.errors[f"{kind}: {type(error).__name__}"] += 1
            return False
        finally:
            self.running = [one for one in self.running if one.said != said]

    def _refused(self, kind: str, answer: httpx.Response) -> bool:
        self.errors[f"{kind}: {answer.status_code} {answer.json()['error']['code']}"] += 1
        return False

    async def _tell(self, talk: Talk, said: str) -> bool:
        told = await self.http.post(f"/v1/conversations/{talk.name}/items", json={
            "items": [{"type": "message", "role": "user", "content": said}]})
        if told.status_code != 200:
            return self._refused("items", told)
        talk.told.append(said)
        return True

    async def _ingest(self, talk: Talk, said: str) -> bool:
        lines = [f"{said}\n", *(f"At {at} of {len(talk.told)} nothing happened.\n" for at in range(60))]

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(lines), 20):
                yield "".join(lines[at:at + 20]).encode()
                await asyncio.sleep(0.05)

        put = await self.http.put(f"/v1/sessions/{talk.name}/ingest", params={"label": "log"}, content=pieces())
        if put.status_code != 200:
            return self._refused("ingest", put)
        talk.told += [said, lines[-1].strip()]
        return True

    async def _answer(self, kind: str, talk: Talk, said: str, turn: int) -> bool:
        sampling: dict[str, Any] = {"temperature": 0.9, "seed": turn} if turn % 2 else {"temperature": 0}
        message = {"role": "user", "content": said}
        body: dict[str, Any] = {**sampling, "stream": True, "ignore_eos": True}
        if kind == "chat":
            path, body = "/v1/chat/completions", {**body, "messages": [*talk.history, message], "max_tokens": TOKENS,
                                                  "session_id": talk.name}
        else:
            path, body = "/v1/responses", {**body, "input": said, "max_output_tokens": TOKENS}
            if kind == "conversation":
                body["conversation"] = talk.name
            elif talk.response is not None:
                body["previous_response_id"] = talk.response
            else:
                body["session_id"] = talk.name
        one = Asked(said, talk.owner, [time.monotonic()], sampling)
        self.asked.append(one)
        self.running.append(one)
        whole = None
        async with self.http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return self._refused(kind, answer)
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("error"):
                    self.errors[f"{kind}: {event['error'].get('code')}"] += 1
                    return False
                delta = event["choices"][0]["delta"].get("content") if event.get("choices") else (
                    event.get("delta") if event.get("type") == "response.output_text.delta" else None)
                if delta:
                    one.times.append(time.monotonic())
                    one.text += delta
                found = event.get("locret") or (event.get("response") or {}).get("locret")
                if found and "replica" in found:
                    whole = found
                    if kind != "chat":
                        talk.response = event["response"]["id"]
        one.times.append(time.monotonic())
        if whole is None:
            self.errors[f"{kind}: ended before its end"] += 1
            return False
        talk.owner = whole["replica"]
        talk.told += [said, one.text.strip()]
        talk.history += [message, {"role": "assistant", "content": one.text}]
        return True

    async def log(self, name: str) -> str:
        """All that a session was told, as text."""
        text, at = "", 0
        while True:
            found = await self.http.get(f"/v1/sessions/{name}/text", params={"start": at})
            if found.status_code == 404:  # it was told nothing
                return text
            if found.status_code == 400 and at:  # a turn that its replica did not outlive was undone meanwhile
                text, at = "", 0
                continue
            found.raise_for_status()
            if found.json()["end"] == at:
                return text
            text, at = text + found.json()["text"], found.json()["end"]

    async def missing(self, talk: Talk) -> list[str]:
        """What a session does not hold of what was acknowledged, or holds twice, or in another order."""
        told, at, wrong = list(talk.told), 0, list[str]()
        log = (await self.log(talk.name)).replace(END, "")  # the model says it, too, and goes on
        for each in told:
            found = log.find(each, at)
            if found < 0 or (each.startswith("Note ") and log.count(each) != 1):
                wrong.append(f"{talk.name}: {each!r}")
            at = max(at, found)
        return wrong


async def replicas(http: httpx.AsyncClient) -> list[str]:
    text = (await http.get("/metrics")).text
    return sorted({name for name in re.findall(r'replica="([^"]+)"', text) if not name.startswith("front")})


def silence(asked: list[Asked], at: float, replica: str) -> float | None:
    """The longest time that a client of a replica heard nothing after it was killed."""
    found = [after - max(before, at)
             for one in asked if one.owner == replica and one.times[0] < at + NEAR_S
             for before, after in pairwise(one.times) if after > at]
    return max(found, default=None)


async def drive(options: argparse.Namespace, url: str) -> dict[str, Any]:
    kills, wrong, back, loads = list[tuple[float, str]](), list[str](), list[float](), list[float]()
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=64)) as http:
        load = Load(http, options.seed)
        async with asyncio.TaskGroup() as group:
            for kind, count in KINDS.items():
                for number in range(count):
                    group.create_task(load.run(kind, number))
            await asyncio.sleep(5)
            while len(kills) < options.kills:
                began = time.monotonic()
                while len(up := await replicas(http)) < 2:
                    if time.monotonic() - began > 180:
                        raise SystemExit("no second replica came within 180 s")
                    await asyncio.sleep(0.5)
                if kills:
                    back.append(time.monotonic() - kills[-1][0])
                await asyncio.sleep(load.random.uniform(0, 4))
                victim = await load.until_under_way(up) if len(kills) % 2 else load.random.choice(up)
                loads.append(round(os.getloadavg()[0], 1))
                kills.append((time.monotonic(), victim))
                os.kill(int(victim.rpartition(".")[2]), signal.SIGKILL)
                await asyncio.sleep(NEAR_S)  # looking takes the time of the replica that is left
                wrong += [each for talk in load.talks[-8:] for each in await load.missing(talk)]
                print(f"{len(kills)} kills, {len(load.asked)} answers, wrong {wrong}, errors {dict(load.errors)}, "
                      f"silence {silence(load.asked, *kills[-1])}, load {os.getloadavg()[0]:.1f}",
                      file=sys.stderr, flush=True)
            await asyncio.sleep(NEAR_S)
            load.ended = True
        wrong += [each for talk in load.talks for each in await load.missing(talk)]
    under_way = [one for at, replica in kills for one in load.asked
                 if one.owner == replica and len(one.times) > 2 and one.times[1] < at < one.times[-1]]
    silences = [each for each in (silence(load.asked, *kill) for kill in kills) if each is not None]
    usual = [one.times[1] - one.times[0] for one in load.asked if len(one.times) > 2]
    return {
        "kills": len(kills), "sessions": len(load.talks), "answers": len(load.asked),
        "acknowledged": sum(len(talk.told) for talk in load.talks), "wrong": wrong, "errors": dict(load.errors),
        "under_way": under_way,
        "silence_s": {"of_kills": len(silences), "median": round(statistics.median(silences), 2),
                      "most": round(max(silences), 2), "above_2": sum(each > 2 for each in silences),
                      "all": [round(each, 2) for each in silences]},
        "loads": loads, "first_text_s": {"median": round(statistics.median(usual), 3)},
        "replica_back_s": {"median": round(statistics.median(back), 1), "most": round(max(back), 1)} if back else {},
    }


async def states(url: str, under_way: list[Asked]) -> dict[str, Any]:
    """How many stored memories are those of a new one that reads the same tokens, and how many of the answers are what
    that one says."""
    same, tokens, other, store, said = 0, 0, list[str](), Store(url), list[bool]()
    async with Runtime.from_pretrained("bundled", store=store, max_live=2) as runtime:
        answer = runtime.codec.literal(ANSWER)
        for name in sorted({row.name for row in store.list()}):
            ids = [int(each) for _, page in read_transcript(store, name).ids() for each in page]
            async with runtime.open(name) as kept, runtime.open(raw=True) as anew:
                await anew.push(ids)
                first, second = (runtime.engine.export(each._session.state) for each in (kept, anew))
            equal = first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
            same, tokens = same + equal, tokens + len(ids)
            if not equal:
                other.append(name)
            starts = [at + len(answer) for at in range(len(ids)) if ids[at:at + len(answer)] == answer]
            for before, start in pairwise([0, *starts]):
                asked = runtime.codec.decode(ids[before:start], skip_special=False)
                said += [await goes_on(runtime, ids, start, one) for one in under_way if one.said in asked]
    return {"same": same, "other": other, "tokens": tokens,
            "under_way": {"answers": len(under_way), "in_the_logs": len(said), "same": sum(said)}}


async def goes_on(runtime: Runtime, ids: list[int], start: int, one: Asked) -> bool:
    """Whether a memory that reads the log up to an answer says that answer, and the client had it."""
    async with runtime.open(raw=True) as anew:
        await anew.push(ids[:start])
        sampling = Sampling(**one.sampling, max_new_tokens=TOKENS, ignore_eos=True)
        again = [token.id async for token in anew.generate(sampling=sampling)]
    text = runtime.codec.decode(again, skip_special=True)
    return again == ids[start:start + TOKENS] and text.strip() == one.text.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", help="a folder or URL; a temporary folder unless it is given")
    parser.add_argument("--keep", metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or folder
        process = subprocess.Popen(
            [sys.executable, "-m", "locret_stream", "serve", "--ray", "--replicas", "2", "--max-live", "8", "--port",
             "0", "--json", "--store", store], stdout=subprocess.PIPE, text=True,
            env={"RAY_object_store_memory": str(120 << 20), **os.environ})
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the cluster did not start; its messages are above")
            result = asyncio.run(drive(options, json.loads(line)["url"].removesuffix("/v1")))
        finally:
            process.terminate()
            process.communicate(timeout=120)
        result["states"] = asyncio.run(states(store, result.pop("under_way")))
    record(options.keep or "ray_kills", result, keep=options.keep is not None)


if __name__ == "__main__":
    main()
