"""Progress of `train_heads`, `allocate` and `tune`: a bar on a terminal; elsewhere a line for every tenth of the steps
and every 15 seconds. Knows rich and Progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from locret_stream.training.results import Progress, ProgressCallback


@contextmanager
def progress_bar(console: Console | None = None, title: str = "training heads") -> Iterator[ProgressCallback]:
    """A callback that shows steps, smoothed loss, held-out loss and top-10 % overlap; by default on stderr."""
    console = console or Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))
    smooth: list[float] = []
    printed, printed_at = 0, time.monotonic()
    with RichProgress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("train", total=None, figures="")

        def show(at: Progress) -> None:
            nonlocal printed, printed_at
            if at.loss is not None:
                smooth[:] = [at.loss if not smooth else 0.9 * smooth[0] + 0.1 * at.loss]
            figures = [f"{name} {value:{form}}" for name, value, form in (
                ("loss", smooth[0] if smooth else None, ".4f"), ("held-out", at.held_out_loss, ".4f"),
                ("top-10% overlap", at.overlap, ".1%")) if value is not None]
            text = "  ".join([*figures, at.note]).strip()
            bar.update(task, total=at.steps, completed=at.step, figures=text)
            tenth, now = at.step * 10 // max(1, at.steps), time.monotonic()
            if not console.is_terminal and (tenth > printed or now - printed_at > 15):
                printed, printed_at = tenth, now
                console.print(f"{title}: {at.step:,} of {at.steps:,}  {text}".rstrip(), soft_wrap=True, highlight=False)

        yield show
