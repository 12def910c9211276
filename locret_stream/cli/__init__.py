"""The command line, one file per verb; `demo_stream` and `display` serve verbs, and the other files are shared by all.

Uses the public API. torch is imported only when a verb runs.
"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from locret_stream.cli import demo, eval, inspect, make_data, run, serve, snapshots, train_heads
from locret_stream.cli.errors import OneLineGroup
from locret_stream.version import __version__

app = typer.Typer(
    name="locret-stream", cls=OneLineGroup, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]},
    help="An endless stream of tokens through a fixed amount of memory.",
    epilog="Start with: locret-stream demo",
)
app.command("demo", help=demo.HELP)(demo.demo)
app.command("run", help=run.HELP)(run.run)
app.command("serve", help=serve.HELP)(serve.serve)
app.command("make-data", help=make_data.HELP)(make_data.make_data)
app.command("train-heads", help=train_heads.HELP)(train_heads.train_heads)
app.add_typer(snapshots.app, name="snapshots")
app.command("eval", help=eval.HELP)(eval.evaluate)
app.command("inspect", help=inspect.HELP)(inspect.inspect)


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
