"""`locret-stream serve` where it cannot begin; tests/serving has what it does once it has begun."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from tests.cli.command import invoke
from tests.processes import run_python

LOST = """
import locret_stream.cli.serve as verb
verb._expect_free = lambda host, port: None
from locret_stream.__main__ import main
main()
"""


def test_a_model_without_a_chat_template_is_told_in_one_line(tiny: Path, tmp_path: Path):
    base = tmp_path / "base"
    shutil.copytree(tiny, base, ignore=shutil.ignore_patterns("chat_template*"))
    code, out, err = invoke("serve", "--store", tmp_path / "store", "--port", 0, "--model", base, "--policy", "keydiff",
                            "--budget", 96, "--chunk-size", 32)
    assert (code, out) == (2, ""), err
    [line] = err.splitlines()
    assert line.startswith(f"locret-stream: the tokenizer of {base} has no chat template")
    assert "chat_template.jinja" in line and "template=" not in line, "what it names can be done"


@pytest.mark.thorough
def test_a_port_that_is_lost_while_the_model_loads_is_told_as_a_mistake(small: list[str], tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_python("-c", LOST, "serve", "--store", tmp_path, "--port", port, *small, timeout_s=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    *before, line = done.stderr.splitlines()
    assert line.startswith(f"locret-stream: no server has started on 127.0.0.1:{port}; "), done.stderr
    assert "already in use" in before[-1], done.stderr


@pytest.mark.parametrize(("written", "why"), [
    ("{", "found no JSON"), ("[1]", "cannot be used"), ("{}", "cannot be used"),
    ('{"start_anchor": "x", "fields": {"content": {"content": "nonsense"}}}', "unknown content parser 'nonsense'")])
def test_a_response_template_that_cannot_be_used_is_told_in_one_line_before_a_model_is_loaded(
        tmp_path: Path, written: str, why: str):
    file = tmp_path / "replies.json"
    file.write_text(written)
    code, out, err = invoke("serve", "--store", tmp_path / "store", "--port", 0, "--response-template", file)
    assert (code, out) == (2, ""), err
    [line] = err.splitlines()
    assert line.startswith(f"locret-stream: --response-template {file}: ") and why in line and "ResponseParser" in line
