"""A cluster of two replicas on this machine, with the bundled model: sessions stay, replicas are killed, both may claim
one session. Figures are printed (`-s`)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import processes
from tests.serving import test_openai_client as one

pytestmark = pytest.mark.real
ray = pytest.importorskip("ray", reason="needs the extra [ray]")
FACT, QUESTION = "The door code of falcon is {}.", "What is the door code of falcon?"
SMALL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_object_store_memory": str(120 << 20)}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    began = time.perf_counter()
    with processes.leaving_none():
        process = processes.start_python(
            "-m", "locret_stream", "serve", "--ray", "--replicas", "2", "--max-live", "8", "--port", "0", "--json",
            "--store", tmp_path_factory.mktemp("cluster"), env=os.environ | SMALL, stderr=None)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the cluster did not start"
        print(f"\nthe cluster was up after {time.perf_counter() - began:.1f} s; load {os.getloadavg()}")
        yield json.loads(line)["url"]
        process.send_signal(signal.SIGINT)
        process.wait(120)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def pid_of(answer: Any) -> int:
    return int(answer.locret["replica"].rpartition(".")[2])


def names(url: str) -> set[str]:
    text = httpx.get(url.removesuffix("/v1") + "/metrics", timeout=60).text
    return {name for name in re.findall(r'replica="([^"]+)"', text) if not name.startswith("front")}


def wait_for_both(url: str) -> float:
    """Seconds until two replicas answer."""
    began = time.perf_counter()
    while len(names(url)) < 2:
        assert time.perf_counter() - began < 120
        time.sleep(0.2)
    return time.perf_counter() - began


async def test_sessions_stay_where_they_are(url: str):
    """24 sessions over 16 slots, 4 rounds."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        talks = {number: [user(FACT.format(10000 + number))] for number in range(24)}
        owners: dict[int, set[str]] = {number: set() for number in talks}
        took, sources = list[float](), Counter[str]()

        async def turn(number: int, round_: int) -> bool:
            began = time.perf_counter()
            answer = await client.chat.completions.create(
                model="bundled", messages=talks[number], max_tokens=8, extra_headers={"X-Session-Id": f"s{number}"})
            took.append(time.perf_counter() - began)
            owners[number].add(answer.locret["replica"])
            sources[answer.locret["source"]] += 1
            assert not round_ or answer.usage.prompt_tokens_details.cached_tokens > 0
            said = answer.choices[0].message.content
            talks[number] += [{"role": "assistant", "content": said}, user(QUESTION)]
            return str(10000 + number) in said

        for round_ in range(4):
            right = sum(await asyncio.gather(*[turn(number, round_) for number in talks]))
    moved = sum(len(each) - 1 for each in owners.values())
    print(f"moved {moved} of 96; {sources}; per replica {Counter(next(iter(each)) for each in owners.values())}; "
          f"right {right} of 24; median {1e3 * statistics.median(took):.0f} ms")
    assert moved == 0 and right >= 22 and len({name for each in owners.values() for name in each}) == 2


def test_a_replica_that_is_killed_between_turns(url: str, client: openai.OpenAI):
    talk: list[Any] = [user(FACT.format(48213))]
    headers = {"X-Session-Id": "killed"}
    first = client.chat.completions.create(model="bundled", messages=talk, max_tokens=8, extra_headers=headers)
    response = client.responses.create(model="bundled", input=FACT.format(48213), extra_headers=headers)
    talk += [{"role": "assistant", "content": first.choices[0].message.content}, user(QUESTION)]
    os.kill(pid_of(first), signal.SIGKILL)
    began = time.perf_counter()
    second = client.chat.completions.create(model="bundled", messages=talk, max_tokens=8, extra_headers=headers)
    gap = time.perf_counter() - began
    assert "48213" in second.choices[0].message.content and second.locret["source"] == "snapshot"
    assert pid_of(second) != pid_of(first)
    more = client.responses.create(model="bundled", input=QUESTION, previous_response_id=response.id)
    assert "48213" in more.output_text
    print(f"killed between turns: next answer after {gap:.2f} s; back after {wait_for_both(url):.1f} s")


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"])
def test_a_replica_that_is_killed_in_mid_stream(url: str, client: openai.OpenAI, sampled: dict[str, Any]):
    wait_for_both(url)
    name = f"mid{len(sampled)}"
    talk: list[Any] = [user(FACT.format(48213))]
    for session in (name, name + "-undisturbed"):
        first = client.chat.completions.create(model="bundled", messages=talk, max_tokens=8,
                                               extra_headers={"X-Session-Id": session})
        if session == name:
            pid = pid_of(first)
    talk += [{"role": "assistant", "content": first.choices[0].message.content}, user(QUESTION)]
    asked: dict[str, Any] = {"model": "bundled", "messages": talk, "max_tokens": 300, **sampled}
    want = client.chat.completions.create(**asked, extra_body={"ignore_eos": True}, extra_headers={
        "X-Session-Id": name + "-undisturbed"}).choices[0].message.content
    text, times, end = "", list[float](), None
    for chunk in client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True},
                                                extra_headers={"X-Session-Id": name}):
        times.append(time.perf_counter())
        text += chunk.choices[0].delta.content or ""
        end = getattr(chunk, "locret", None) or end
        if len(times) == 40:
            os.kill(pid, signal.SIGKILL)
    gap = max(after - before for before, after in pairwise(times))
    assert text == want and len(text) > 300 and end is not None and int(end["replica"].rpartition(".")[2]) != pid
    print(f"killed in mid-stream {sampled}: {len(text)} characters, the same; longest gap {gap:.2f} s; saved "
          f"{end['saved']}; back after {wait_for_both(url):.1f} s")


def test_a_response_whose_replica_is_killed_in_mid_stream(url: str, client: openai.OpenAI):
    wait_for_both(url)
    first = client.responses.create(model="bundled", input=FACT.format(48213))
    asked: dict[str, Any] = {"model": "bundled", "input": QUESTION, "previous_response_id": first.id,
                             "max_output_tokens": 300, "extra_body": {"ignore_eos": True}}
    want = client.responses.create(**asked).output_text
    text, numbers, ids = "", list[int](), set[str]()
    for event in client.responses.create(**asked, stream=True):
        numbers.append(event.sequence_number)
        if hasattr(event, "response"):
            ids.add(event.response.id)
        text += event.delta if event.type == "response.output_text.delta" else ""
        if len(numbers) == 40:
            os.kill(pid_of(first), signal.SIGKILL)
    assert text == want and numbers == list(range(len(numbers))) and len(ids) == 1
    more = client.responses.create(model="bundled", input=QUESTION, previous_response_id=ids.pop())
    assert more.usage.input_tokens_details.cached_tokens > 300


def test_two_owners_of_one_session(url: str, client: openai.OpenAI):
    """Both replicas are told to answer in one conversation at once, past the front: one saves, one is refused."""
    wait_for_both(url)
    made = client.conversations.create(items=[{"type": "message", "role": "user", "content": FACT.format(48213)}])
    done = processes.run_python("-c", OWNERS, made.id, env=os.environ | SMALL)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert sorted(each[0] for each in told) == ["saved", "stale_owner"], told
    assert told[0][1] != told[1][1]
    answer = client.responses.create(model="bundled", input=QUESTION, conversation=made.id)
    assert "48213" in answer.output_text


OWNERS = """
import asyncio, json, sys
import ray
from ray import serve
from locret_stream.conversation.messages import Message
from locret_stream.conversation.parts import End
from locret_stream.conversation.request import Request
from locret_stream.serving.errors import ApiError
from locret_stream.serving.names import new_mark

async def ask(handle, key, thread, tokens):
    request = Request([Message("user", "Note " + key)], thread=thread, mark=new_mark(), append=True, unthinking=True,
                      timeout_s=60.0, sampling={"max_new_tokens": tokens, "ignore_eos": True})
    last = None
    async for part in handle.options(stream=True, session_id=key).answer.remote(request, False):
        last = part[-1] if isinstance(part, list) else part
    if isinstance(last, ApiError):
        return [last.code, key]
    return ["saved" if last.receipt["saved"] else "not saved", last.receipt["replica"]]

async def main(thread):
    handle = serve.get_deployment_handle("Memory", app_name="locret")
    owners = {}
    for number in range(40):
        name = "probe%d" % number
        owners.setdefault((await ask_probe(handle, name)), name)
        if len(owners) == 2:
            break
    print(json.dumps(await asyncio.gather(*[ask(handle, key, thread, 200) for key in owners.values()])))

async def ask_probe(handle, key):
    return (await handle.options(session_id=key).metrics.remote())[0]

ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
asyncio.run(main(sys.argv[1]))
"""


def test_a_client_that_leaves_frees_its_slot(url: str, client: openai.OpenAI):
    with httpx.Client(timeout=60) as http, http.stream("POST", f"{url}/chat/completions", json={
            "messages": [user("Hello.")], "session_id": "left", "max_tokens": 3000, "ignore_eos": True,
            "stream": True}) as stream:
        for number, _ in enumerate(stream.iter_lines()):
            if number > 20:
                break
    began = time.perf_counter()
    while re.search(r"^locret_running\{.*\} [1-9]", httpx.get(url.removesuffix("/v1") + "/metrics").text, re.M):
        assert time.perf_counter() - began < 10
        time.sleep(0.01)
    print(f"a slot is free {1e3 * (time.perf_counter() - began):.0f} ms after its client left")


def children(pid: int) -> int:
    """The process that a launcher of `tests.processes` became, or started."""
    return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or [pid])[0])


def cpu_ms() -> dict[str, float]:
    """Of each process of the cluster, and of every other one as "one <pid>"."""
    found, tick = {}, 1000 / os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            title = stat.with_name("cmdline").read_bytes().partition(b"\0")[0].decode()
        except OSError:
            continue
        name = title if title.startswith("ray::") else "one"
        found[f"{name} {stat.parent.name}"] = (int(fields[11]) + int(fields[12])) * tick
    return found


MISTAKES = [("chat/completions", *row[:3]) for row in one.CHAT_MISTAKES] + [
    ("responses", *row, ...) for row in one.RESPONSES_MISTAKES]


def test_mistakes_are_told_as_by_one_process(url: str):
    """Every body that tests/serving refuses, but for the model's name, which is another here."""
    for path, body, status, code in MISTAKES:
        answer = httpx.post(f"{url}/{path}", content=json.dumps({**body, "session_id": body.get("session_id", "odd")}),
                            headers={"content-type": "application/json"}, timeout=60)
        error = answer.json()["error"]
        assert answer.status_code == status and error["message"], (body, answer.text)
        assert code in (None, ...) or error["code"] == code, (body, answer.text)
    assert "odd" not in [row["id"] for row in httpx.get(f"{url}/sessions", timeout=60).json()["data"]]


def test_the_official_client_finds_all_of_it(url: str, client: openai.OpenAI):
    """Branches, conversations, tools that are refused or called, JSON that fits its schema, and what is deleted."""
    first = client.responses.create(model="bundled", input=FACT.format(48213), instructions="Be brief.")
    left = client.responses.create(model="bundled", input=QUESTION, previous_response_id=first.id)
    right = client.responses.create(model="bundled", input=QUESTION, previous_response_id=first.id)
    assert left.id != right.id and left.output_text == right.output_text and "48213" in left.output_text
    made = client.conversations.create(items=[{"type": "message", "role": "user", "content": FACT.format(30111)}])
    told = client.responses.create(model="bundled", input=QUESTION, conversation=made.id)
    assert "30111" in told.output_text and told.conversation is not None and told.conversation.id == made.id
    assert client.conversations.retrieve(made.id).id == made.id and client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="bundled", input=QUESTION, conversation=made.id)
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
              "required": ["age"], "additionalProperties": False}
    held = client.chat.completions.create(model="bundled", messages=[user("How old?")], response_format={
        "type": "json_schema", "json_schema": {"name": "age", "schema": schema, "strict": True}})
    assert set(json.loads(held.choices[0].message.content or "")) == {"age"}
    unstored = client.responses.create(model="bundled", input="one", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="bundled", input="two", previous_response_id=unstored.id)
    log = "".join(f"At {number} nothing happened.\n" for number in range(2000)) + FACT.format(71234) + "\n"
    put = httpx.put(f"{url}/sessions/log/ingest?label=log", content=log.encode(), timeout=300)
    assert put.status_code == 200 and put.json()["characters"] == len(log), put.text
    asked = httpx.post(f"{url}/sessions/log/ask", json={"question": QUESTION}, timeout=60).json()
    assert "71234" in asked["answer"], asked


def test_the_cost_of_a_token(url: str, client: openai.OpenAI, tmp_path: Path):
    """One stream, here and at one process, in turn; the fastest of five, as others use the machine, too."""
    def per_token(at: str) -> float:
        with openai.OpenAI(base_url=at, api_key="none", timeout=120) as each:
            times = [time.perf_counter() for _ in each.chat.completions.create(
                model="bundled", messages=[user("Hello.")], max_tokens=300, stream=True,
                extra_body={"ignore_eos": True})]
        return (times[-2] - times[1]) / 299 * 1e3

    with processes.leaving_none():
        process = processes.start_python("-m", "locret_stream", "serve", "--port", "0", "--json", "--store", tmp_path,
                                         "--max-live", "8", stderr=None, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert process.stdout is not None
        single = json.loads(process.stdout.readline())["url"]
        per_token(url), per_token(single)
        before = cpu_ms()
        rows = [(per_token(url), per_token(single)) for _ in range(4)]
        spent = {name: round((ms - before.get(name, 0)) / 1200, 2) for name, ms in cpu_ms().items()
                 if "Memory" in name or "Front" in name or "Proxy" in name or name == f"one {children(process.pid)}"}
    print(f"decode: {min(row[0] for row in rows):.2f} ms per token here, {min(row[1] for row in rows):.2f} at one "
          f"process with one thread; medians {statistics.median(row[0] for row in rows):.2f} and "
          f"{statistics.median(row[1] for row in rows):.2f}; load {os.getloadavg()}; CPU ms per token {spent}")
    memory = Counter[str]()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            title = status.with_name("cmdline").read_bytes().partition(b"\0")[0].decode()
        except OSError:
            continue
        if title.startswith("ray::"):
            memory[f"{title} {status.parent.name}"] = int(re.search(r"VmRSS:\s+(\d+)", text)[1]) >> 10
    print("MiB resident", dict(memory))
