"""What the command line says of itself, and how soon."""

from __future__ import annotations

from importlib import import_module

import pytest

from locret_stream.cli import VERBS
from tests.cli.command import invoke
from tests.processes import run_python


def test_without_arguments_it_says_where_to_start():
    code, out, _ = invoke()
    assert code == 0 and "locret-stream demo" in out


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches_with_examples(verb: str):
    code, out, _ = invoke(verb, "--help")
    assert code == 0 and "Examples:" in out and f"locret-stream {verb}" in out and "--json" in out


def test_the_command_starts_without_torch():
    code = "import sys; from locret_stream.cli import app; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = run_python("-c", code)
    assert done.stdout.strip() == "False False", done.stderr


def test_the_list_of_verbs_needs_none_of_them():
    """Most of the time that `--help` took was their imports."""
    code = ("import sys; from locret_stream.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
            "print('asyncio' in sys.modules, sorted(n for n in sys.modules if n.startswith('locret_stream.cli.')))")
    done = run_python("-c", code)
    assert done.stdout.splitlines()[-1] == "False ['locret_stream.cli.errors', 'locret_stream.cli.output']", done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_the_list_says_of_a_verb_what_its_own_help_begins_with(verb: str):
    module = import_module(f"locret_stream.cli.{verb.replace('-', '_')}")
    assert module.HELP.partition("\n")[0] == VERBS[verb]
