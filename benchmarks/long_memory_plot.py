"""The figure of `long_memory.py`: score against the length of the stream, a line for each system, from kept results."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import RESULTS

from locret_stream.errors import ConfigError
from locret_stream.evaluation.plots import DPI, FRAME, OTHERS, STYLES, WIDTH, expect_matplotlib
from locret_stream.files import replace

OWN = {"truncation": ("#56b4e9", "P"), "summary": ("#cc79a7", "^"), "bm25": ("#e69f00", "v")}
TITLES = {"streaming_llm": "first + recent tokens (streaming_llm)", "truncation": "last tokens (truncation)",
          "summary": "rolling summary", "bm25": "search, whole text kept (bm25)", "oracle": "told the fact (oracle)",
          "recall": "with recall, text kept (recall)", "gathered": "told all facts (gathered)",
          "pinned": "facts go last (pinned)"}


def draw(picture: Path, names: Sequence[str]) -> None:
    """Draw the results of those names, or in files of those paths; the suffix of `picture` says in which format.

    Raises:
        ConfigError: matplotlib is not installed, a result is missing, or two are of streams of one length.
        OSError: the picture cannot be written.
    """
    expect_matplotlib()
    from matplotlib.figure import Figure

    results = sorted(map(read, names), key=lambda result: result["tokens"])
    lengths = [result["tokens"] for result in results]
    if len(set(lengths)) < len(lengths):
        raise ConfigError(f"results of streams of {', '.join(map(str, lengths))} tokens; expected one of each length")
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    ax = figure.subplots()
    systems = styles(list(dict.fromkeys(name for result in results for name in result["systems"])))
    for number, (system, style) in enumerate(systems.items()):
        some = [(result["tokens"], result["systems"][system]) for result in results if system in result["systems"]]
        aside = 2 ** (0.03 * (number - (len(systems) - 1) / 2))  # so that intervals do not cover each other
        xs = [tokens * aside for tokens, _ in some]
        ax.plot(xs, [own["score"] for _, own in some], label=TITLES.get(system, system), **style)
        low, high = zip(*(own["interval"] for _, own in some), strict=True)
        ax.vlines(xs, low, high, color=style["color"], alpha=0.4, linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.minorticks_off()
    ax.set_xlabel("tokens of the stream", fontsize=8)
    ax.set_ylabel("facts answered", fontsize=8)
    ax.set_ylim(-0.04, 1.04)
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    room = results[0]["budget"] + results[0]["chunk_size"]
    figure.suptitle(f"Facts of a book, asked at its end; room for {room:,} tokens", fontsize=11, fontweight="bold")
    kind = picture.suffix.removeprefix(".") or "png"
    replace(picture, functools.partial(figure.savefig, format=kind, dpi=DPI))


def read(name: str) -> dict[str, Any]:
    """The result that was kept under that name, or lies at that path. Raises ConfigError: there is none."""
    path = Path(name) if name.endswith(".json") else RESULTS / f"{name}.json"
    try:
        result = json.loads(path.read_text())["result"]
        return {key: result[key] for key in ("tokens", "budget", "chunk_size", "systems")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no result of this benchmark: {error!r}; expected what --keep wrote") from error


def styles(systems: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Policies look as in the other figures of the library; `policy:NAME` as NAME."""
    found: dict[str, dict[str, Any]] = {}
    for number, system in enumerate(systems):
        kind, _, more = system.partition(":")
        name = more if kind == "policy" else kind
        if name in FRAME:
            found[system] = {**FRAME[name], "marker": "o", "markersize": 3.5, "linewidth": 1.4}
            continue
        colour, marker = OWN.get(name) or STYLES.get(name) or OTHERS[number % len(OTHERS)]
        found[system] = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.6,
                         "linestyle": "--" if more and kind != "policy" else "-"}
    return found
