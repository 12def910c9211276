"""The server's modules load neither torch nor transformers: `--help` and mistakes in options are told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_python

PROGRAM = """
import sys
import locret_stream.cli.serve, locret_stream.serving.app, locret_stream.serving.server
print([name for name in ("torch", "transformers", "triton", "langchain_core") if name in sys.modules])
"""

FROZEN = """
import gc, sys
from locret_stream.serving import server
def run(self):
    print("frozen", gc.get_freeze_count(), gc.collect())
    raise SystemExit
server.Server.serve = run
from locret_stream.__main__ import main
main()
"""


def test_importing_the_server_is_light():
    done = run_python("-c", PROGRAM, timeout_s=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_mistakes_are_one_line(tmp_path: Path):
    for options, expected in ((["--host", "0.0.0.0"], "--api-key"), (["--api-key", "x:"], "API key"),
                              (["--port", "99999"], "port")):
        done = run_python("-m", "locret_stream", "serve", "--store", tmp_path, *options, timeout_s=60)
        assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.thorough
def test_what_was_loaded_is_left_out_of_garbage_collections(tmp_path: Path):
    """A full collection would stop every stream for a third of a second."""
    done = run_python("-c", FROZEN, "serve", "--store", tmp_path, timeout_s=120)
    frozen = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("frozen ")]
    assert frozen and int(frozen[0]) > 100_000, done.stdout + done.stderr
