"""A progress bar on a terminal for `train_heads` and `allocate(progress=...)`. Knows rich and Progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from locret_stream.training.config import Progress, ProgressCallback


@contextmanager
def progress_bar(console: Console | None = None, title: str = "training heads") -> Iterator[ProgressCallback]:
    """A callback that draws steps, smoothed loss, held-out loss and top-10 % overlap; on stderr unless told."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))
    smooth: list[float] = []
    with RichProgress(*columns, console=console or Console(stderr=True)) as bar:
        task = bar.add_task("train", total=None, figures="")

        def show(at: Progress) -> None:
            if at.loss is not None:
                smooth[:] = [at.loss if not smooth else 0.9 * smooth[0] + 0.1 * at.loss]
            figures = [f"{name} {value:{form}}" for name, value, form in (
                ("loss", smooth[0] if smooth else None, ".4f"), ("held-out", at.held_out_loss, ".4f"),
                ("top-10% overlap", at.overlap, ".1%")) if value is not None]
            bar.update(task, total=at.steps, completed=at.step, figures="  ".join([*figures, at.note]).strip())

        yield show
