"""What the command line says of itself, and how soon."""

from __future__ import annotations

import pytest

from tests.cli.command import invoke
from tests.processes import run_python


def test_without_arguments_it_says_where_to_start():
    code, out, _ = invoke()
    assert code == 0 and "locret-stream demo" in out


@pytest.mark.parametrize("verb", ["demo", "run", "snapshots", "make-data", "train-heads", "eval", "inspect"])
def test_help_teaches_with_examples(verb: str):
    code, out, _ = invoke(verb, "--help")
    assert code == 0 and "Examples:" in out and f"locret-stream {verb}" in out and "--json" in out


def test_the_command_starts_without_torch():
    code = "import sys; from locret_stream.cli import app; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = run_python("-c", code)
    assert done.stdout.strip() == "False False", done.stderr
