"""The guide to the server runs as it stands there, against the bundled model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests import processes
from tests.test_docs import FACTS, SERVER, blocks, commands


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a server as the guide starts one, on a port that is free."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "service.log").write_text(FACTS)
    process = processes.start_python("-m", "locret_stream", "serve", "--port", "0", "--json", "--store",
                                     folder / "store")
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["url"].removesuffix("/v1")
    process.terminate()
    process.communicate(timeout=60)


def test_the_python_of_the_guide_runs(url: str, capsys: pytest.CaptureFixture[str]):
    (block,) = [block for block in blocks(SERVER) if block.language == "python"]
    exec(block.code.replace("http://127.0.0.1:8000", url), {"__name__": "__main__"})
    said = capsys.readouterr().out
    for line in re.findall(r"^print\(.*\) +# (\d+)$", block.code, re.MULTILINE):
        assert line in said.splitlines(), said
    assert "tokens were in memory already" in said


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_of_the_guide_runs(url: str, tmp_path: Path):
    (tmp_path / "service.log").write_text(FACTS)
    ran = []
    for block in blocks(SERVER):
        for command in commands(block.code) if block.language == "sh" else ():
            if command.startswith("curl"):
                words = shlex.split(command.replace("http://127.0.0.1:8000", url))
                done = processes.run(*words, "--fail-with-body", "--silent", cwd=tmp_path)
                assert done.returncode == 0, (command, done.stdout, done.stderr)
                ran.append(json.loads(done.stdout))
    assert "7304" in ran[-1]["answer"] and ran[0]["message"]["content"].startswith("[absorbed stream")
