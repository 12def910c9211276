"""The command line, one file per verb; `demo_stream` and `display` serve verbs, and the other files are shared by all.

Uses the public API. A verb is imported when it runs, or tells of its options; torch, only when it runs.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from locret_stream.cli.errors import OneLineGroup
from locret_stream.version import __version__

VERBS = {  # the first line of the help of each, in the order in which a user meets them
    "demo": "Stream real text past a small memory, then ask what was in it.",
    "run": "Read text into a bounded memory, then ask about it.",
    "serve": "Serve a model with endless memories behind OpenAI's API, and a page that shows them.",
    "make-data": "Make conversations for train-heads: texts with facts in them, and questions about the facts.",
    "train-heads": "Train retaining heads for a model.",
    "snapshots": "Manage stored sessions: list, info, show, verify, delete, gc, forget.",
    "eval": "Measure how much a bounded memory remembers.",
    "inspect": "Show a model's shape, its budgets and the memory they take, or what its chat template does."}


class Verbs(OneLineGroup):
    """The verbs, each imported when it is named: a list of all of them needs none."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        verb = typer.main.get_command(import_module(f"locret_stream.cli.{cmd_name.replace('-', '_')}").app)
        verb.name = cmd_name
        return verb

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = typer.Typer(
    name="locret-stream", cls=Verbs, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]},
    help="An endless stream of tokens through a fixed amount of memory.",
    epilog="Start with: locret-stream demo",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"locret-stream {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]
    = False,
) -> None:
    """Options that stand before the verb."""
    for name in ("torchao", "torch.utils._pytree"):  # both log when transformers is imported where torchao is installed
        logging.getLogger(name).setLevel(logging.ERROR)
