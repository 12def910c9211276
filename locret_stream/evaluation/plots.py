"""Draws reports and maps (matplotlib, the extra [plots]), into files and without a display. Computes nothing."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from locret_stream.errors import ConfigError
from locret_stream.evaluation.maps import Consistency, Maps, Retention
from locret_stream.evaluation.report import LEAST_FULL, Estimate, Report, Row, Table
from locret_stream.evaluation.variants import FULL, ORACLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI, WIDTH = 150, 8.4  # 1,260 pixels wide
OWN = {  # of each policy a colour and a mark, the same in all figures; others get those of OTHERS
    "locret": ("#0072b2", "o"), "kvzap": ("#d55e00", "s"), "trimkv": ("#cc79a7", "^"), "keydiff": ("#7b4fa3", "X"),
    "sirllm": ("#8c6d31", "*"), "h2o": ("#009e73", "D"), "snapkv": ("#e69f00", "v"), "tova": ("#56b4e9", "P"),
    "nacl": ("#882255", "h"), "infllm": ("#44aa99", "<"), "scissorhands": ("#999933", ">"),
}
OTHERS = tuple(OWN.values())
LINES = "-", "--", ":", "-."  # of a policy's variants, in the order of their labels; the first has filled marks
FRAME: dict[str, dict[str, Any]] = {  # what every comparison is seen against
    FULL: {"color": "black", "linestyle": "-"},
    ORACLES[0]: {"color": "#555555", "linestyle": "--"}, ORACLES[1]: {"color": "#555555", "linestyle": ":"},
    "streaming_llm": {"color": "#999999", "linestyle": "-."}, "random": {"color": "#bbbbbb", "linestyle": "-"},
}


def expect_matplotlib() -> None:
    """Raises ConfigError, which names the extra, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib, which is not installed; expected: pip install 'locret-stream[plots]'")


def draw(folder: Path, report: Report, maps: Maps | None = None, prefix: str = "") -> list[Path]:
    """Everything there is to draw, as PNGs in `folder`; their paths. A curve needs at least two budgets or lengths.

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
        part = paths[-1].with_suffix(".part")
        figure.savefig(part, format="png", dpi=DPI)
        part.replace(paths[-1])
    return paths


# -- curves -------------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """One of several small plots, and what it shows of a row."""

    title: str
    y_label: str
    of: Callable[[Row], Estimate | None]


def by_budget(report: Report, length: int) -> Figure:
    """Quality against the budget on streams of one length, or on files: the mean over tasks, then each task."""
    tables = [table for table in report.tables if table.length == length and table.units is not None]
    figure = _curves(report, [(table.units, table) for table in tables], "units per KV head")
    of = f"streams of {length:,} tokens" if length else "files"
    figure.suptitle(f"Quality against budget, {of}", fontsize=11, fontweight="bold")
    return figure


def by_length(report: Report, units: int) -> Figure:
    """Quality against the length of the stream with one budget; the full cache where it was run. Files are left out."""
    tables = [table for table in report.tables if table.units == units and table.length]
    figure = _curves(report, [(table.length, table) for table in tables], "tokens of the stream")
    figure.suptitle(f"Quality against stream length, {units:,} units per KV head", fontsize=11, fontweight="bold")
    return figure


def _panels(report: Report, tables: list[Table]) -> list[Panel]:
    """The mean, and each task that any table has."""
    found = [Panel("mean of tasks", "score / full cache", lambda row: row.mean)]
    for task in report.tasks:
        if any(task in row.cells for table in tables for row in table.rows):
            low = any(task in table.references and not table.references[task].counted for table in tables)
            bits = task in report.bits
            why = "= 0" if task in report.files else f"< {LEAST_FULL}"
            found.append(Panel(f"{task} (not in the mean: full {why})" if low and not bits else task,
                               "bits per byte (lower is better)" if bits else
                               "score by its benchmark" if task in report.files else "exact answers",
                               lambda row, task=task: row.cells[task].score if task in row.cells else None))
    return found


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
        found = [(x, one) for x, table in points for row in table.rows if row.label == label
                 and (one := panel.of(row)) is not None]
        if found:
            xs = [x for x, _ in found]
            alone = {"marker": "o"} if len(xs) == 1 and not style["marker"] else {}  # a line of one point is none
            ax.plot(xs, [one.value for _, one in found], label=label, **{**style, **alone})
            if "bits" in panel.y_label:  # these are of different texts, and say nothing of who is better
                continue
            ax.fill_between(xs, [one.low for _, one in found], [one.high for _, one in found],
                            color=style["color"], alpha=0.15, linewidth=0)
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
    """For each label (and its policy) a line, the same in all figures. What frames the comparison is grey."""
    styles: dict[str, dict[str, Any]] = {}
    strange = sorted({policy for label, policy in policies.items() if policy not in {*OWN, *FRAME}})
    for label, policy in policies.items():
        alike = sorted(other for other, name in policies.items() if name == policy)
        nth = alike.index(label)
        if policy in FRAME and label == policy:
            styles[label] = {**FRAME[policy], "marker": "", "linewidth": 1.4, "zorder": 1.5}
            continue
        if policy in FRAME:
            colour, mark = FRAME[policy]["color"], "o"
        else:
            round_, number = (0, 0) if policy in OWN else divmod(strange.index(policy), len(OTHERS))
            colour, mark = OWN.get(policy, OTHERS[number])
            nth += round_
        styles[label] = {"color": colour, "marker": mark, "linestyle": LINES[nth % len(LINES)], "linewidth": 1.6,
                         "markersize": 4.5, "markerfacecolor": "white" if nth else colour}
    return styles


# -- maps ---------------------------------------------------------------------------------------------------------


def retention(maps: list[Retention]) -> Figure:
    """A panel for each: position in the stream to the right, layers and KV heads downwards, dark where it stayed."""
    from matplotlib.colors import PowerNorm

    rows = [max(1.0, min(3.6, 0.13 * one.layers * one.kv_heads)) for one in maps]
    figure = _figure(1.3 + sum(rows) + 0.42 * len(rows))
    axes = figure.subplots(len(maps), 1, squeeze=False, height_ratios=rows)[:, 0]
    image = None
    for one, ax in zip(maps, axes, strict=True):
        total = one.layers * one.kv_heads
        image = ax.imshow(one.life, aspect="auto", interpolation="nearest", cmap="Blues",
                          norm=PowerNorm(0.5, vmin=0, vmax=1), extent=(0, len(one.life[0]) * one.column, total, 0))
        middles = [(start + end) / 2 for start, end in one.wanted]
        ax.plot(middles, [0] * len(middles), "v", color="#d55e00", markersize=5, clip_on=False,
                label="lines that are asked about")
        ax.vlines(middles, 0, total, color="#d55e00", linewidth=0.5, alpha=0.35)
        for layer in range(1, one.layers):
            ax.axhline(layer * one.kv_heads, color="black", linewidth=0.4, alpha=0.5)
        every = math.ceil(one.layers / 12)
        ax.set_yticks([(layer + 0.5) * one.kv_heads for layer in range(0, one.layers, every)],
                      [str(layer) for layer in range(0, one.layers, every)])
        ax.set_xlim(0, one.tokens)
        ax.set_ylim(total, 0)
        ax.set_title(f"{one.label}: {one.cell.units:,} of {one.tokens:,} units, {one.cell.task}", fontsize=9, pad=8)
        ax.set_ylabel(f"layer ({one.kv_heads} KV heads)", fontsize=8)
        ax.tick_params(labelsize=8)
    axes[-1].set_xlabel("position in the stream, tokens", fontsize=8)
    bar = figure.colorbar(image, ax=list(axes), fraction=0.025, pad=0.015)
    bar.set_label("held for this share of the rest of the stream (square-root scale)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", frameon=False, fontsize=8)
    figure.suptitle("What stays of the stream", fontsize=11, fontweight="bold")
    return figure


def consistency(found: Consistency) -> Figure:
    """How far the scores of a prefix foresee those of the whole, one line for each policy."""
    figure = _figure(4.6)
    ax = figure.subplots()
    labels = sorted(found.overlaps, key=lambda label: (-sum(found.overlaps[label]), label))
    styles = _styles({label: label.partition(",")[0] for label in labels})
    for number, label in enumerate(labels):  # those of 1.0, which score once and for all, are all seen
        ax.plot(found.prefixes, found.overlaps[label], label=label, **styles[label] | {
            "markersize": max(4, 11 - 2 * number), "linewidth": max(1.5, 5.5 - 1.2 * number)})
    ax.set_xlabel("tokens of the prefix")
    ax.set_ylabel(f"top {found.share:.0%} tokens that stay on top")
    ax.set_ylim(-0.03, 1.04)
    ax.set_xlim(0, found.tokens * 1.01)
    _plain(ax)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"What is on top after a prefix, and still after {found.tokens:,} tokens", fontsize=11,
                    fontweight="bold")
    return figure


def _figure(height: float) -> Figure:
    """Without pyplot: no window, no state, no choice of backend."""
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
    """512, 4k, 1M: whole numbers of the powers of two or ten, else as they are."""
    for size, unit in ((1 << 20, "Mi"), (10**6, "M"), (1 << 10, "Ki"), (1000, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
