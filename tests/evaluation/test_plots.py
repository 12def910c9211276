"""Plots on results made by hand, looked at through their axes; maps on a random model, against what must hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import pytest
import torch

from locret_stream.errors import ConfigError, InputError
from locret_stream.evaluation import maps, plots
from locret_stream.evaluation.cells import Cell
from locret_stream.evaluation.maps import Consistency, Retention, lives, overlap
from locret_stream.evaluation.report import report_of
from locret_stream.evaluation.runner import Bench
from tests.context.support import model, tokenizer
from tests.evaluation.results import ORIGIN, result
from tests.evaluation.test_runner import PROSE

PLOTS = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra [plots]")

RESULTS = [result("full", [4, 4, 4, 4]), result("full", [2, 2, 2, 2], task="variables"),
           result("full", bits=[2.0, 2.2]),
           *(result(policy, [right] * 4, units=units) for policy, units, right in (
               ("locret", 64, 3), ("locret", 128, 4), ("random", 64, 0), ("random", 128, 1))),
           result("locret", [1] * 4, task="variables"), result("locret", [1] * 4, task="variables", units=128),
           *(result("locret", bits=[2.5, 2.7], units=units) for units in (64, 128)),
           *(result(policy, [1] * 4, units=64, length=8000) for policy in ("locret", "random"))]

LIFE = [*([0.25 * row] * 20 for row in range(3)), [n / 20 for n in range(20)]]
MAP = Retention(label="locret", cell=Cell(task="recall", policy="locret", length=40, units=8), tokens=40, layers=2,
                kv_heads=2, column=2, life=LIFE, wanted=[(4, 8), (30, 34)])
FORESEEN = Consistency(tokens=40, chunk_size=8, share=0.1, prefixes=[8, 24, 40],
                       overlaps={"h2o": [0.2, 0.5, 1.0], "locret": [1.0, 1.0, 1.0]})
MAPS = maps.Maps(origin=ORIGIN, cells=[MAP.cell], retention=[MAP, MAP], consistency=FORESEEN)


def lines(ax) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in ax.get_lines()
            if not line.get_label().startswith("_")}


# -- curves -------------------------------------------------------------------------------------------------------


@PLOTS
def test_curves_against_budget_show_what_the_report_says():
    figure = plots.by_budget(report_of(RESULTS), 1000)
    by_title = {ax.get_title(): ax for ax in figure.axes if ax.get_title()}
    assert list(by_title) == ["mean of tasks", "recall", "variables (not in the mean: full < 0.9)", "text"]
    assert lines(by_title["recall"]) == {"full": [(64, 1.0), (128, 1.0)], "locret": [(64, 0.75), (128, 1.0)],
                                         "random": [(64, 0.0), (128, 0.25)]}
    assert lines(by_title["mean of tasks"])["locret"] == [(64, 0.75), (128, 1.0)], "variables are not in it"
    assert lines(by_title["text"])["full"] == [(64, pytest.approx(2.1)), (128, pytest.approx(2.1))]
    assert by_title["text"].get_ylabel() == "bits per byte (lower is better)"
    assert by_title["recall"].get_xlabel() == "units per KV head" and by_title["recall"].get_xscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["full", "locret", "random"]


@PLOTS
def test_bands_are_the_intervals():
    report = report_of([result("full", [4] * 6), *(result("locret", [4, 0, 2, 4, 1, 3], units=units)
                                                   for units in (64, 128))])
    ax = next(ax for ax in plots.by_budget(report, 1000).axes if ax.get_title() == "recall")
    entry = report.tables[0].rows[1].cells["recall"].score
    heights = {y for band in ax.collections for path in band.get_paths() for _, y in path.vertices}
    assert entry.low < entry.value < entry.high and {entry.low, entry.high} <= heights


@PLOTS
def test_curves_against_length_show_the_full_cache_where_it_was_run():
    figure = plots.by_length(report_of(RESULTS), 64)
    ax = next(ax for ax in figure.axes if ax.get_title() == "recall")
    assert lines(ax) == {"full": [(1000, 1.0)], "locret": [(1000, 0.75), (8000, 0.25)],
                         "random": [(1000, 0.0), (8000, 0.25)]}
    assert next(line for line in ax.get_lines() if line.get_label() == "full").get_marker() == "o", "one point is seen"


@PLOTS
def test_lines_are_told_apart():
    labels = {name: name for name in ("full", "oracle", "oracle_per_head", "random", "streaming_llm")}
    labels |= {f"policy {n}": f"policy {n}" for n in range(16)} | {"random, pyramid": "random"}
    styles = plots._styles(labels)
    assert len({(s["color"], s["linestyle"]) for s in styles.values()}) >= len(labels) - 1


# -- maps ---------------------------------------------------------------------------------------------------------


@PLOTS
def test_the_map_of_what_stays_shows_rows_columns_and_needed_lines():
    figure = plots.retention([MAP, MAP])
    ax = figure.axes[0]
    [image] = ax.get_images()
    torch.testing.assert_close(torch.tensor(image.get_array()), torch.tensor(MAP.life, dtype=torch.float64))
    assert list(image.get_extent()) == [0, 40, 4, 0] and ax.get_xlim() == (0, 40) and ax.get_ylim() == (4, 0)
    assert list(lines(ax)["lines that are asked about"]) == [(6, 0), (32, 0)]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1"]
    assert "8 of 40 units" in ax.get_title()


@PLOTS
def test_the_plot_of_foresight_shows_each_policy():
    [ax] = plots.consistency(FORESEEN).axes
    assert lines(ax) == {"locret": [(8, 1), (24, 1), (40, 1)], "h2o": [(8, 0.2), (24, 0.5), (40, 1)]}
    assert ax.get_ylabel() == "top 10% tokens that stay on top"


@PLOTS
@pytest.mark.thorough
def test_everything_is_drawn_as_real_pictures_without_a_display(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    paths = plots.draw(tmp_path, report_of(RESULTS), MAPS, prefix="a_")
    assert [path.name for path in paths] == ["a_by_budget_1000.png", "a_by_length_64.png", "a_retention.png",
                                             "a_consistency.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    for path in paths:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
        width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
        assert 1200 <= width <= 1300 and 300 <= height <= 2400 and len(data) > 10_000


@PLOTS
def test_one_point_is_no_curve(tmp_path: Path):
    assert plots.draw(tmp_path, report_of([result("full", [4]), result("locret", [4])])) == []


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'locret-stream\[plots\]'"):
        plots.draw(tmp_path, report_of(RESULTS))


def test_maps_are_kept_whole_and_damage_is_named(tmp_path: Path):
    maps.write(MAPS, tmp_path / "maps.json")
    assert maps.read(tmp_path / "maps.json") == MAPS and [path.name for path in tmp_path.iterdir()] == ["maps.json"]
    (tmp_path / "maps.json").write_text("{}")
    with pytest.raises(InputError, match="holds no maps"):
        maps.read(tmp_path / "maps.json")


# -- what is looked at --------------------------------------------------------------------------------------------


def cell(policy: str, **more) -> Cell:
    return Cell(**{"task": "last_write", "policy": policy, "length": 600, "units": 64, "chunk_size": 32, "sinks": 4,
                   "stabilizers": 8} | more)


def bench() -> Bench:
    return Bench(model(), tokenizer(), PROSE)


def test_lives_are_shares_of_the_rest_by_hand():
    kept = [torch.tensor([[[True, True]]]), torch.tensor([[[True, False, True, True]]]),
            torch.tensor([[[True, False, False, True, True]]])]
    found = lives(list(zip((2, 4, 5), kept, strict=True)))
    torch.testing.assert_close(found, torch.tensor([[[1.0, (2 - 1) / (5 - 1), (4 - 2) / (5 - 2), 1.0, 1.0]]]))


def test_sinks_and_recent_tokens_live_as_they_must():
    found = maps.retention(bench(), cell("streaming_llm"), "recent")
    assert (found.layers, found.kv_heads, found.column) == (2, 2, 1) and 600 <= found.tokens < 700
    assert len(found.life) == 4 and {len(row) for row in found.life} == {found.tokens}
    for row in found.life:
        assert row[:4] == [1.0] * 4 and row[-60:] == [1.0] * 60 and all(value < 0.5 for value in row[4:300])
    assert len(found.wanted) >= 12 and all(0 <= start < end <= found.tokens for start, end in found.wanted)


def test_long_streams_are_put_into_columns(monkeypatch):
    monkeypatch.setattr(maps, "COLUMNS", 100)
    found = maps.retention(bench(), cell("streaming_llm"), "recent")
    assert found.column == -(-found.tokens // 100) == 7 and len(found.life[0]) == -(-found.tokens // 7)
    assert found.life[0][-1] == 1.0


def test_overlap_by_hand():
    local = torch.tensor([[[9.0, 8.0, 1.0, 1.0, 1.0]]])
    last = torch.tensor([[[1.0, 8.0, 9.0, float("nan"), 1.0]]])
    assert overlap(local, last, 0.4) == 0.5 and overlap(local, local, 0.4) == 1.0
    ties = torch.zeros(1, 1, 10)
    newest = torch.arange(10.0)[None, None]
    assert overlap(ties, newest, 0.3) == 1.0, "ties go to the newer"


def test_static_scores_foresee_all_and_attention_does_not(monkeypatch):
    seen, real = [], maps.overlap
    monkeypatch.setattr(maps, "overlap", lambda *scores: seen.extend(scores[:2]) or real(*scores))
    found = maps.consistency(bench(), {name: cell(name) for name in ("random", "sirllm", "h2o", "snapkv")})
    assert found.prefixes[-1] == found.tokens <= 600 and all(n % 32 == 0 for n in found.prefixes)
    assert set(found.overlaps["random"]) == set(found.overlaps["sirllm"]) == {1.0}
    for name in ("h2o", "snapkv"):
        assert found.overlaps[name][-1] == 1.0 and min(found.overlaps[name]) < 0.9
    again = maps.consistency(bench(), {"h2o": cell("h2o", units=16, sinks=0, stabilizers=1)})
    assert again.overlaps["h2o"] == found.overlaps["h2o"], "whatever the budget"
    assert not any(scores.isnan().any() for scores in seen), "nothing is evicted"


def test_a_stream_beyond_the_window_is_cut():
    found = maps.consistency(bench(), {"random": cell("random", length=3000, chunk_size=512)})
    assert found.tokens == 1536, "a chunk less than the 2,048 positions"


@pytest.mark.parametrize("wrong", [cell("oracle"), cell("full", units=None)])
def test_maps_of_what_is_known_beforehand_are_refused(wrong: Cell):
    with pytest.raises(ConfigError, match="not an oracle, with a budget"):
        maps.retention(bench(), wrong, "x")
    with pytest.raises(ConfigError, match="not an oracle, with a budget"):
        maps.consistency(bench(), {"x": wrong})


def test_too_short_a_stream_has_no_foresight():
    with pytest.raises(ConfigError, match="two whole chunks"):
        maps.consistency(bench(), {"h2o": cell("h2o", chunk_size=512)})
    with pytest.raises(ConfigError, match="no policy"):
        maps.consistency(bench(), {})


def test_json_holds_all_of_it():
    assert msgspec.json.decode(msgspec.json.encode(MAPS), type=maps.Maps) == MAPS
