"""A cluster whose store is an object store ends, and another one begins."""

from __future__ import annotations

import time

import httpx
import openai
import pytest

from tests.ray_serve.test_cluster import FACT, QUESTION, user
from tests.ray_serve.test_cluster_s3 import cluster, s3  # noqa: F401  # a fixture

pytestmark = pytest.mark.real


def test_sessions_go_on_after_a_restart(s3: dict[str, str]):  # noqa: F811
    with cluster(s3) as url, openai.OpenAI(base_url=url, api_key="none", timeout=120) as to:
        first = to.responses.create(model="bundled", input=FACT.format(48213))
        took = list[float]()
        for _ in range(5):
            began = time.perf_counter()
            to.chat.completions.create(model="bundled", messages=[user("Hello.")], max_tokens=1,
                                           extra_headers={"X-Session-Id": "short"})
            took.append(time.perf_counter() - began)
        print(f"\na turn of one token with its save: {sorted(took)[2]:.2f} s")
        log = "".join(f"At {number} nothing happened.\n" for number in range(500)) + FACT.format(71234) + "\n"
        assert httpx.put(f"{url}/sessions/log/ingest?label=log", content=log.encode(), timeout=120).status_code == 200
    with cluster(s3) as url, openai.OpenAI(base_url=url, api_key="none", timeout=120) as to:
        more = to.responses.create(model="bundled", input=QUESTION, previous_response_id=first.id)
        assert "48213" in more.output_text and more.locret["source"] == "snapshot"
        asked = httpx.post(f"{url}/sessions/log/ask", json={"question": QUESTION}, timeout=60).json()
        assert "71234" in asked["answer"], asked
