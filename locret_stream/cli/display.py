"""The table on stderr that shows a stream while it is read: tokens, speed, units and bytes of every memory."""

from __future__ import annotations

import time
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from locret_stream.cli.output import describe, err, in_bytes

if TYPE_CHECKING:
    from locret_stream.context import Memory


class Row:
    """One memory of the table: its tokens, the seconds they took to read, and its state; None before the first."""

    def __init__(self, name: str):
        self.name, self.tokens, self.seconds = name, 0, 0.0
        self.memory: Memory | None = None

    @property
    def tok_per_s(self) -> float:
        """Mean speed over all tokens read; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, tokens: int, seconds: float, memory: Memory) -> None:
        """Add what was read since the last call."""
        self.set(self.tokens + tokens, self.seconds + seconds, memory)

    def set(self, tokens: int, seconds: float, memory: Memory) -> None:
        """Replace the counts by totals."""
        self.tokens, self.seconds, self.memory = tokens, seconds, memory


class Board:
    """Shows rows while they fill: live on a terminal, else one line for every tenth of the stream (or 15 seconds).

    Args:
        title: a line above the table.
        names: of the memories; the progress shown is that of the first.
        total: tokens of the whole stream; None if its end is unknown.
    """

    def __init__(self, title: str, names: list[str], total: int | None = None):
        self.title, self.total, self.rows = title, total, [Row(name) for name in names]
        self._live = Live(console=err, refresh_per_second=8, get_renderable=self._render) if err.is_terminal else None
        self._printed_tenth, self._printed_at = 0, time.monotonic()

    def __enter__(self) -> Board:
        if self._live:
            self._live.start()
        else:
            err.print(self.title, soft_wrap=True)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()
        elif self.rows[0].tokens:
            self._print()

    def tick(self) -> None:
        """Print how far the stream is, where there is no live display. Cheap enough to be called after every piece."""
        if self._live:
            return
        row, now = self.rows[0], time.monotonic()
        tenth = row.tokens * 10 // self.total if self.total else 0
        if tenth > self._printed_tenth or now - self._printed_at > 15:
            self._printed_tenth, self._printed_at = tenth, now
            if not self.total or row.tokens < self.total:
                self._print()

    def _print(self) -> None:
        row = self.rows[0]
        if row.memory:
            speed = f" ({row.tok_per_s:,.0f} tok/s)" if sum(row.memory.units) else ""  # nothing was computed yet
            err.print(f"{row.name}: {describe(row.memory)}{speed}", soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("memory", "tokens", "tok/s", "units", "kept", "full cache", "less by"):
            table.add_column(heading, justify="left" if heading == "memory" else "right", no_wrap=True)
        for row in self.rows:
            memory = row.memory
            if memory is None:
                table.add_row(row.name, "0", *"–" * 5)
                continue
            factor = memory.bytes_full_cache / max(1, memory.bytes_resident)
            table.add_row(row.name, f"{row.tokens:,}", f"{row.tok_per_s:,.0f}", f"{fmean(memory.units):,.0f}",
                          in_bytes(memory.bytes_resident), in_bytes(memory.bytes_full_cache),
                          f"{factor:,.0f} ×" if factor >= 1.5 else "–")
        parts: list[RenderableType] = [Text(self.title, style="bold")]
        if self.total:
            grid = Table.grid()
            grid.add_row(ProgressBar(total=self.total, completed=min(self.total, self.rows[0].tokens), width=72))
            parts.append(grid)
        return Group(*parts, table)
