"""Draws reports and maps into files, with matplotlib (the extra [plots]) and without a display. Computes nothing."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from locret_stream.errors import ConfigError
from locret_stream.evaluation.maps import Consistency, Maps, Retention
from locret_stream.evaluation.report import LEAST_FULL, Estimate, Report, Row, Table
from locret_stream.evaluation.variants import FULL, ORACLES
from locret_stream.files import replace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI, WIDTH = 150, 8.4  # 1,260 pixels wide
STYLES = {  # by policy: colour and marker, the same in all figures; other policies get those of OTHERS
    "locret": ("#0072b2", "o"), "kvzap": ("#d55e00", "s"), "trimkv": ("#cc79a7", "^"), "keydiff": ("#7b4fa3", "X"),
    "sirllm": ("#8c6d31", "*"), "h2o": ("#009e73", "D"), "snapkv": ("#e69f00", "v"), "tova": ("#56b4e9", "P"),
    "nacl": ("#882255", "h"), "infllm": ("#44aa99", "<"), "scissorhands": ("#999933", ">"),
}
OTHERS = tuple(STYLES.values())
LINES = "-", "--", ":", "-."  # of the variants of a policy, in the order of their labels; the first has filled markers
FRAME: dict[str, dict[str, Any]] = {  # the policies that every comparison is seen against
    FULL: {"color": "black", "linestyle": "-"},
    ORACLES[0]: {"color": "#555555", "linestyle": "--"}, ORACLES[1]: {"color": "#555555", "linestyle": ":"},
    "streaming_llm": {"color": "#999999", "linestyle": "-."}, "random": {"color": "#bbbbbb", "linestyle": "-"},
}


def expect_matplotlib() -> None:
    """Raises ConfigError, which names the extra, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib, which is not installed; expected: pip install 'locret-stream[plots]'")


def draw(folder: Path, report: Report, maps: Maps | None = None, prefix: str = "") -> list[Path]:
    """Draw all curves of the report, and the maps, as PNGs in `folder`; returns their paths. A curve needs at least two
    budgets or lengths.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    expect_matplotlib()
    figures: dict[str, Figure] = {}
    for length in sorted({table.length for table in report.tables}):
        if len({table.units for table in report.tables if table.length == length} - {None}) > 1:
            figures[f"by_budget_{length or 'files'}"] = by_budget(report, length)
    for units in sorted({table.units for table in report.tables if table.units is not None}):
        if len({table.length for table in report.tables if table.units == units and table.length}) > 1:
            figures[f"by_length_{units}"] = by_length(report, units)
    if maps is not None and maps.retention:
        figures["retention"] = retention(maps.retention)
    if maps is not None and maps.consistency is not None:
        figures["consistency"] = consistency(maps.consistency)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{prefix}{name}.png")
        replace(paths[-1], functools.partial(figure.savefig, format="png", dpi=DPI))
    return paths


# -- curves -------------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """One of several small plots, and what it shows of a row."""

    title: str
    y_label: str
    value_of: Callable[[Row], Estimate | None]


def by_budget(report: Report, length: int) -> Figure:
    """Quality against the budget on streams of one length, or on files: the mean over tasks, then each task."""
    figure = _curves(report, [(table.units, table) for table in report.tables
                              if table.length == length and table.units is not None], "units per KV head")
    material = f"streams of {length:,} tokens" if length else "files"
    figure.suptitle(f"Quality against budget, {material}", fontsize=11, fontweight="bold")
    return figure


def by_length(report: Report, units: int) -> Figure:
    """Quality against the length of the stream with one budget; the full cache where it was run. Files are left out."""
    figure = _curves(report, [(table.length, table) for table in report.tables
                              if table.units == units and table.length], "tokens of the stream")
    figure.suptitle(f"Quality against stream length, {units:,} units per KV head", fontsize=11, fontweight="bold")
    return figure


def _panels(report: Report, tables: list[Table]) -> list[Panel]:
    """The mean, and each task that any table has."""
    panels = [Panel("mean of tasks", "score / full cache", lambda row: row.mean)]
    for task in report.tasks:
        if not any(task in row.cells for table in tables for row in table.rows):
            continue
        title, y_label = task, "score by its benchmark" if task in report.files else "exact answers"
        if task in report.bits:
            y_label = "bits per byte (lower is better)"
        elif any(task in table.references and not table.references[task].counted for table in tables):
            title += f" (not in the mean: full {'= 0' if task in report.files else f'< {LEAST_FULL}'})"
        panels.append(Panel(title, y_label, functools.partial(_score, task)))
    return panels


def _score(task: str, row: Row) -> Estimate | None:
    return row.cells[task].score if task in row.cells else None


def _curves(report: Report, points: list[tuple[int, Table]], x_label: str) -> Figure:
    panels = _panels(report, [table for _, table in points])
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = _figure(0.9 + 2.35 * lines)
    axes = figure.subplots(lines, columns, squeeze=False)
    styles = _styles({row.label: row.variant.policy for _, table in points for row in table.rows})
    for panel, ax in zip(panels, axes.flat, strict=False):
        _panel(ax, panel, points, styles)
        ax.set_xlabel(x_label)
    axes.flat[0].axhline(1, color="black", linewidth=0.6, linestyle=":")
    for ax in axes.flat[len(panels):]:
        ax.set_axis_off()
    handles = {line.get_label(): line for ax in axes.flat[:len(panels)] for line in ax.get_lines()}
    figure.legend(handles=[handles[label] for label in styles if label in handles], loc="outside lower center",
                  ncols=min(4, len(styles)), frameon=False, fontsize=8)
    return figure


def _panel(ax: Axes, panel: Panel, points: list[tuple[int, Table]], styles: dict[str, dict[str, Any]]) -> None:
    for label, style in styles.items():
        estimates = [(x, estimate) for x, table in points for row in table.rows if row.label == label
                     and (estimate := panel.value_of(row)) is not None]
        if estimates:
            xs = [x for x, _ in estimates]
            alone = {"marker": "o"} if len(xs) == 1 and not style["marker"] else {}  # a line of one point is invisible
            ax.plot(xs, [estimate.value for _, estimate in estimates], label=label, **{**style, **alone})
            if "bits" in panel.y_label:  # their intervals are those of different texts, and say nothing of a difference
                continue
            ax.fill_between(xs, [estimate.low for _, estimate in estimates],
                            [estimate.high for _, estimate in estimates], color=style["color"], alpha=0.15, linewidth=0)
    ax.set_title(panel.title, fontsize=9)
    ax.set_xscale("log", base=2)
    shown = sorted({x for x, _ in points})
    shown = shown[::-(-len(shown) // 5)]
    ax.set_xticks(shown, [_short(x) for x in shown])
    ax.minorticks_off()
    ax.set_ylabel(panel.y_label)
    if "bits" not in panel.y_label:
        ax.set_ylim(-0.04, max(1.04, ax.get_ylim()[1]))
    _plain(ax)


def _styles(policies: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The style of the line of each label, given its policy; the same in all figures. Policies of `FRAME` are black and
    grey."""
    styles: dict[str, dict[str, Any]] = {}
    unstyled = sorted(set(policies.values()) - {*STYLES, *FRAME})
    for label, policy in policies.items():
        nth = sorted(other for other, name in policies.items() if name == policy).index(label)
        if policy in FRAME and label == policy:
            styles[label] = {**FRAME[policy], "marker": "", "linewidth": 1.4, "zorder": 1.5}
            continue
        if policy in FRAME:
            colour, marker = FRAME[policy]["color"], "o"
        elif policy in STYLES:
            colour, marker = STYLES[policy]
        else:
            more, at = divmod(unstyled.index(policy), len(OTHERS))
            colour, marker = OTHERS[at]
            nth += more
        styles[label] = {"color": colour, "marker": marker, "linestyle": LINES[nth % len(LINES)], "linewidth": 1.6,
                         "markersize": 4.5, "markerfacecolor": "white" if nth else colour}
    return styles


# -- maps ---------------------------------------------------------------------------------------------------------


def retention(maps: list[Retention]) -> Figure:
    """A panel for each map: position in the stream to the right, layers and KV heads downwards, dark what stayed."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=1)
    rows = [max(1.0, min(3.6, 0.13 * life.layers * life.kv_heads)) for life in maps]
    figure = _figure(1.3 + sum(rows) + 0.42 * len(rows))
    axes = figure.subplots(len(maps), 1, squeeze=False, height_ratios=rows)[:, 0]
    for life, ax in zip(maps, axes, strict=True):
        total = life.layers * life.kv_heads
        ax.imshow(life.life, aspect="auto", interpolation="nearest", cmap="Blues", norm=norm,
                  extent=(0, len(life.life[0]) * life.column, total, 0))
        middles = [(start + end) / 2 for start, end in life.wanted]
        ax.plot(middles, [0] * len(middles), "v", color="#d55e00", markersize=5, clip_on=False,
                label="lines that are asked about")
        ax.vlines(middles, 0, total, color="#d55e00", linewidth=0.5, alpha=0.35)
        for layer in range(1, life.layers):
            ax.axhline(layer * life.kv_heads, color="black", linewidth=0.4, alpha=0.5)
        every = math.ceil(life.layers / 12)
        ax.set_yticks([(layer + 0.5) * life.kv_heads for layer in range(0, life.layers, every)],
                      [str(layer) for layer in range(0, life.layers, every)])
        ax.set_xlim(0, life.tokens)
        ax.set_ylim(total, 0)
        ax.set_title(f"{life.label}: {life.cell.units:,} of {life.tokens:,} units, {life.cell.task}", fontsize=9, pad=8)
        ax.set_ylabel(f"layer ({life.kv_heads} KV heads)", fontsize=8)
        ax.tick_params(labelsize=8)
    axes[-1].set_xlabel("position in the stream, tokens", fontsize=8)
    bar = figure.colorbar(ScalarMappable(norm, "Blues"), ax=list(axes), fraction=0.025, pad=0.015)
    bar.set_label("held for this share of the rest of the stream (square-root scale)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", frameon=False, fontsize=8)
    figure.suptitle("What stays of the stream", fontsize=11, fontweight="bold")
    return figure


def consistency(foresight: Consistency) -> Figure:
    """How far the scores after a prefix foresee those after the whole stream, one line for each policy."""
    figure = _figure(4.6)
    ax = figure.subplots()
    labels = sorted(foresight.overlaps, key=lambda label: (-sum(foresight.overlaps[label]), label))
    styles = _styles({label: label.partition(",")[0] for label in labels})
    for number, label in enumerate(labels):  # lines of 1.0 cover each other: thinner ones on top
        ax.plot(foresight.prefixes, foresight.overlaps[label], label=label, **styles[label] | {
            "markersize": max(4, 11 - 2 * number), "linewidth": max(1.5, 5.5 - 1.2 * number)})
    ax.set_xlabel("tokens of the prefix")
    ax.set_ylabel(f"top {foresight.share:.0%} tokens that stay on top")
    ax.set_ylim(-0.03, 1.04)
    ax.set_xlim(0, foresight.tokens * 1.01)
    _plain(ax)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"What is on top after a prefix, and still after {foresight.tokens:,} tokens", fontsize=11,
                    fontweight="bold")
    return figure


def _figure(height: float) -> Figure:
    """An empty figure, made without pyplot, which has windows, global state and backends."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _plain(ax: Axes) -> None:
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    ax.xaxis.label.set_fontsize(8)
    ax.yaxis.label.set_fontsize(8)


def _short(count: int) -> str:
    """512, 4Ki, 1M: multiples of a power of two or ten with its letter, other numbers as they are."""
    for size, unit in ((1 << 20, "Mi"), (10**6, "M"), (1 << 10, "Ki"), (1000, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
