"""Reports on results made by hand, against ratios computed by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from locret_stream.errors import ConfigError, InputError
from locret_stream.evaluation import cells as files
from locret_stream.evaluation import metrics
from locret_stream.evaluation.cells import CellResult
from locret_stream.evaluation.report import Report, Row, Table, report_of
from locret_stream.evaluation.reporting import markdown
from locret_stream.evaluation.variants import Settings, Variant, settings_of
from locret_stream.evaluation.variants import labels as labels_of
from tests.evaluation.results import ORIGIN, result

FULL = [result("full", [4, 4, 4, 4]), result("full", [4, 4, 4, 3], task="decoys"),
        result("full", [2, 2, 3, 3], task="variables"), result("full", bits=[2.0, 2.0])]
LOCRET = [result("locret", [4, 4, 3, 3]), result("locret", [3, 3, 3, 3], task="decoys"),
          result("locret", [1, 0, 0, 0], task="variables"), result("locret", bits=[2.5, 2.5])]
RECENT = [result("streaming_llm", [0, 1, 0, 0]), result("streaming_llm", [0, 0, 0, 0], task="decoys"),
          result("streaming_llm", bits=[2.2, 2.3])]


def only(results: list[CellResult]) -> Table:
    [table] = report_of(results).tables
    return table


def labels(results: list[CellResult]) -> dict[Variant, str]:
    return labels_of((one.cell, one.origin) for one in results)


def rows(table: Table) -> dict[str, Row]:
    return {row.label: row for row in table.rows}


def line(text: str, label: str) -> list[str]:
    """The cells of the row that begins with that label."""
    [found] = [one for one in text.splitlines() if one.startswith(f"| {label} |")]
    return [word.strip() for word in found.strip("|").split("|")][1:]


# -- ratios -------------------------------------------------------------------------------------------------------


def test_the_mean_is_that_of_the_ratios_by_hand():
    found = rows(only(FULL + LOCRET + RECENT))
    assert found["locret"].cells["recall"].ratio.value == pytest.approx(14 / 16)
    assert found["locret"].cells["decoys"].ratio.value == pytest.approx(12 / 15)
    assert found["locret"].mean.value == pytest.approx((14 / 16 + 12 / 15) / 2) and found["locret"].mean.tasks == 2
    assert found["streaming_llm"].mean.value == pytest.approx((1 / 16 + 0) / 2)
    assert found["full"].mean.value == found["full"].mean.low == found["full"].mean.high == 1.0


def test_what_the_full_cache_fails_is_shown_and_left_out_of_the_mean():
    table = only(FULL + LOCRET)
    assert not table.references["variables"].counted and table.references["variables"].score == 10 / 16
    entry = rows(table)["locret"].cells["variables"]
    assert entry.score.value == 1 / 16 and entry.ratio is None
    text = markdown(report_of(FULL + LOCRET))
    assert "variables †" in text and "recall |" in text and "0.06 [" in line(text, "locret")[2]
    on_the_edge = [result("full", [4] * 9 + [0]), result("locret", [2] * 10)]  # 0.9 itself is enough
    assert rows(only(on_the_edge))["locret"].mean.value == pytest.approx(0.5 / 0.9)


def test_bits_per_byte_have_a_ratio_of_their_own_and_the_lower_is_the_better():
    found = rows(only(FULL + LOCRET + RECENT))
    assert found["locret"].cells["text"].ratio.value == pytest.approx(2.0 / 2.5)
    assert found["locret"].mean.tasks == 2, "text is none of them"
    assert "text" in found["streaming_llm"].best and "text" not in found["locret"].best
    text = markdown(report_of(FULL + LOCRET + RECENT))
    assert "text: full / own" in text and "text †" not in text
    assert line(text, "locret")[3:6] == ["2.50 [2.50, 2.50]", line(text, "locret")[4], "0.80 [0.80, 0.80]"]


def test_without_a_full_row_there_are_no_ratios():
    text = markdown(report_of(LOCRET + RECENT))
    assert "recall ‡" in text and "text ‡" in text and line(text, "locret")[4] == "–" and "full / own |" not in text
    assert rows(only(LOCRET + RECENT))["locret"].mean is None


def test_full_at_another_length_is_the_longest_and_said():
    full = [result("full", [4, 4], length=500), result("full", [4, 4, 4, 4, 4, 4, 4, 1], length=800)]
    tables = report_of([*full, result("locret", [2, 2], length=16_000)]).tables
    assert [(one.length, one.units) for one in tables] == [(500, None), (800, None), (16_000, 64)]
    assert tables[-1].references["recall"].length == 800
    assert [row.label for row in tables[-1].rows] == ["locret"]
    assert tables[-1].rows[0].mean.value == pytest.approx(0.5 / (29 / 32))
    assert "recall 0.91 at 800" in markdown(report_of([*full, result("locret", [2, 2], length=16_000)]))


def test_the_full_cache_is_that_of_the_same_length_where_there_is_one():
    far = [result("full", [2, 2, 2, 2], length=2000), result("locret", [4, 4, 4, 4], length=1000),
           result("locret", [2, 2, 2, 2], length=2000), result("locret", [2, 2, 2, 2], length=4000)]
    tables = {table.length: table.references["recall"] for table in report_of([FULL[0], *far]).tables}
    assert {length: (one.length, one.score) for length, one in tables.items()} == {
        1000: (1000, 1.0), 2000: (2000, 0.5), 4000: (2000, 0.5)}


def test_shares_that_differ_in_the_seventh_digit_have_labels_that_differ():
    found = labels([result("locret", [4], allocation=shares) for shares in ((1.0, 1.0), (1.0000001, 1.0), (0.1, 2.0))])
    assert sorted(found.values()) == ["locret, 0.1:2", "locret, 1.0000001:1", "locret, 1:1"]


def test_knobs_are_said_that_were_given_or_whose_default_changed():
    def of(knobs: str, **given) -> CellResult:
        return result("infllm", [4], knobs=given, origin=msgspec.structs.replace(ORIGIN, knobs=knobs))

    old, new = of('{"block":128,"decay":0.1}'), of('{"block":64,"decay":0.1}')
    assert set(labels([old]).values()) == {"infllm"}
    assert set(labels([old, new]).values()) == {"infllm, block=128", "infllm, block=64"}
    assert set(labels([of('{"block":16,"decay":0.1}', block=16)]).values()) == {"infllm, block=16"}


# -- intervals ----------------------------------------------------------------------------------------------------


def test_intervals_hold_their_values_and_shrink_with_more_streams():
    few, many = [4, 0], [4, 0] * 40
    narrow, wide = (rows(only([result("full", [4] * len(right)), result("locret", right)]))["locret"].mean
                    for right in (many, few))
    assert wide.low == 0 and wide.high == 1 and 0.35 < narrow.low < narrow.value == 0.5 < narrow.high < 0.65


def test_the_interval_of_a_ratio_is_that_of_the_score_where_full_never_fails():
    groups = [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0] * 4, [0.0, 1.0, 1.0, 0.0]] * 4
    low, high = metrics.ratio_interval([(groups, [[1.0] * 4] * 16, True)])
    assert (low, high) == pytest.approx(metrics.interval(groups), abs=0.03)


def test_what_makes_a_stream_hard_for_both_cancels_out():
    own = [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert metrics.ratio_interval([(own, own, True)]) == (1.0, 1.0)
    low, high = metrics.ratio_interval([(own, own, False)])
    assert low < 1 < high


def test_a_full_cache_that_fails_a_whole_draw_divides_nothing():
    low, high = metrics.ratio_interval([([[1.0], [1.0]], [[0.0], [1.0]], True)])
    assert (low, high) == (1, 2), "1 / 1 and 1 / 0.5; where nothing can be divided nothing is said"
    own = [[0.0]] * 9 + [[1.0]]
    assert metrics.ratio_interval([(own, own, True)]) == (1.0, 1.0), "a third of all draws are without the 1"


def test_of_a_single_stream_the_questions_are_drawn_so_that_nothing_looks_certain():
    low, high = metrics.interval([[1.0, 0.0, 0.0, 0.0]])
    assert low == 0 and 0.5 <= high <= 1
    one = rows(only([result("full", [4]), result("locret", [2])]))["locret"]
    assert one.cells["recall"].score.low < 0.5 < one.cells["recall"].score.high and one.mean.low < 0.5 < one.mean.high
    assert metrics.ratio_interval([([[1.0, 0.0]], [[1.0, 1.0]], True)]) == (0.0, 1.0)


def test_what_was_told_beforehand_is_judged_by_what_was_told_beforehand():
    """One question a stream, and another full cache: tables of their own, each against its own reference."""
    report = report_of([result("full", [4, 4]), result("locret", [2, 2]), result("full", [2, 2], focus=True),
                        result("locret", [2, 2], focus=True)])
    plain, told = report.tables
    assert (plain.focus, told.focus) == (False, True)
    assert {row.label: row.mean and row.mean.value for row in plain.rows} == {"full": 1.0, "locret": 0.5}
    assert told.references["recall"].score == 0.5 and not told.references["recall"].counted
    fine = report_of([result("full", [4, 4]), result("locret", [2, 2]), result("full", [4, 4], focus=True),
                      result("locret", [4, 4], focus=True)]).tables[1]
    assert {row.mean.value for row in fine.rows} == {1.0}
    assert "the question told beforehand" in markdown(report)


# -- best ---------------------------------------------------------------------------------------------------------


def test_bold_is_the_best_and_what_overlaps_it_but_never_who_knows_the_questions():
    results = [result("full", [4] * 8), result("oracle", [4] * 8), result("locret", [4, 4, 4, 4, 4, 4, 2, 3]),
               result("keydiff", [4, 4, 4, 4, 3, 3, 2, 3]), result("random", [0] * 7 + [1])]
    found = {label: row.best for label, row in rows(only(results)).items()}
    assert found == {"full": (), "oracle": (), "locret": ("recall", "mean"), "keydiff": ("recall", "mean"),
                     "random": ()}
    text = markdown(report_of(results))
    assert line(text, "locret")[0].startswith("**0.91 [") and "**" not in "".join(line(text, "oracle"))


def test_who_is_worse_on_every_stream_is_not_bold_however_wide_the_intervals():
    """What makes a stream hard for all says nothing of who is better."""
    best, worse = [4, 3, 1, 0, 4, 2, 1, 3], [3, 2, 0, 0, 3, 1, 0, 2]
    both = [result("full", [4] * 8), result("locret", best), result("keydiff", worse)]
    found = rows(only(both))
    assert found["keydiff"].cells["recall"].score.high > found["locret"].cells["recall"].score.low, "they overlap"
    assert found["keydiff"].best == () and found["locret"].best == ("recall", "mean")
    few = rows(only([result("full", [4] * 4), result("locret", best[:4]), result("keydiff", worse[:4])]))
    assert few["keydiff"].best == ("recall", "mean"), "four streams tell nothing"


def test_bits_of_other_texts_have_no_ratio():
    longer = [msgspec.structs.replace(one, cell=msgspec.structs.replace(one.cell, length=4096))
              for one in (*LOCRET, *RECENT)]
    [table] = [table for table in report_of([*FULL, *longer]).tables if table.length == 4096]
    assert rows(table)["locret"].cells["text"].ratio is None and rows(table)["locret"].mean.tasks == 2
    assert "text: full / own" not in markdown(report_of([*FULL, *longer])).partition("of 4,096 tokens")[2]


def test_a_single_rival_and_nothing_right_are_not_bold():
    assert not any(row.best for row in only([result("full", [4]), result("locret", [4])]).rows)
    assert not any(row.best for row in only([result("random", [0]), result("locret", [0])]).rows)


def test_a_row_of_fewer_tasks_says_so_and_wins_no_mean():
    table = only([*FULL, *LOCRET, result("h2o", [4, 4, 4, 4]), *RECENT])
    found = rows(table)
    assert found["h2o"].mean.value == 1.0 and "mean" not in found["h2o"].best and "mean" in found["locret"].best
    assert line(markdown(report_of([*FULL, *LOCRET, result("h2o", [4, 4, 4, 4])])), "h2o")[4].endswith("(1 of 2 tasks)")


# -- labels -------------------------------------------------------------------------------------------------------


def test_labels_say_what_differs_and_no_more():
    heads = msgspec.structs.replace(ORIGIN, heads="aa"), msgspec.structs.replace(ORIGIN, heads="bb")
    results = [result("locret", [1], heads="m/heads", origin=heads[0]),
               result("locret", [1], heads="m/heads", origin=heads[0], allocation="pyramid"),
               result("locret", [1], heads="m/heads-logit", origin=heads[1]),
               result("h2o", [1], knobs={"recent": 0.1}), result("h2o", [1]),
               result("keydiff", [1], knobs={}), result("keydiff", [1], units=32),
               result("random", [1], allocation=(1.0, 2.5)), result("random", [1], sinks=0),
               result("full", [1]), result("full", [1], sinks=0)]
    assert sorted(labels(results).values()) == [
        "full", "h2o", "h2o, recent=0.1", "keydiff", "locret, pyramid, heads", "locret, uniform, heads",
        "locret, uniform, heads-logit", "random, 1:2.5, 4 sinks", "random, uniform, 0 sinks"]


@pytest.mark.parametrize(("more", "label"), [
    ({"knobs": {"recent": 0.1}}, "h2o, recent=0.1"), ({"allocation": "pyramid"}, "h2o, pyramid"),
    ({"allocation": (1.0, 2.5)}, "h2o, 1:2.5"), ({"sinks": 0}, "h2o, 0 sinks"),
    ({"stabilizers": 7}, "h2o, 7 stabilizers"), ({"chunk_size": 32}, "h2o, chunks of 32"),
])
def test_one_difference_is_one_word(more: dict, label: str):
    found = list(labels([result("h2o", [1]), result("h2o", [1], **more)]).values())
    assert found[1] == label and found[0] != label
    alone = list(labels([result("h2o", [1], **more)]).values())
    assert alone == ["h2o, recent=0.1" if "knobs" in more else "h2o"], "what all have in common is said in the header"


def test_what_differs_between_policies_is_said_too():
    results = [result("h2o", [1], chunk_size=16, sinks=0), result("random", [1]), result("keydiff", [1]),
               result("locret", [1], allocation="pyramid"), result("locret", [1]), result("full", [1], chunk_size=16)]
    assert sorted(labels(results).values()) == ["full", "h2o, 0 sinks, chunks of 16", "keydiff", "locret, pyramid",
                                                "locret, uniform", "random"]
    assert settings_of((one.cell, one.origin) for one in results) == Settings(
        chunk_size=128, sinks=4, stabilizers=16, allocation="uniform")
    assert ("Where a row does not say otherwise: chunks of 128 tokens, 4 sinks, 16 stabilizers, allocation uniform"
            in markdown(report_of(results)))
    assert "does not say otherwise" not in markdown(report_of([result("full", [1])]))


def test_how_much_of_a_stream_was_read_is_said():
    longer = result("random", [1, 1])
    longer.streams[1] = msgspec.structs.replace(longer.streams[1], tokens=1432)
    assert "Read of a stream: 1,000 to 1,432 tokens." in markdown(report_of([longer]))
    assert only([longer]).tokens == (1000, 1432)


def test_heads_are_called_by_the_end_of_their_folder_or_by_what_is_in_them():
    def three(*folders: str) -> list[str]:
        return list(labels([result("locret", [1], heads=folder, origin=msgspec.structs.replace(
            ORIGIN, heads=f"{n}23456789")) for n, folder in enumerate(folders)]).values())

    assert three("a/heads", "b/heads") == ["locret, a/heads", "locret, b/heads"]
    assert three("a/heads", "a/heads") == ["locret, heads 02345678", "locret, heads 12345678"]
    assert three("a/heads", "") == ["locret, heads", "locret, heads 12345678"]


def test_policies_without_a_budget_are_named_apart():
    assert list(labels([result("h2o", [1], units=None), result("h2o", [1]), result("full", [1])]).values()) == [
        "h2o, everything", "h2o", "full"]


# -- what is reported on ------------------------------------------------------------------------------------------


def test_the_order_of_results_does_not_matter(tmp_path: Path):
    results = FULL + LOCRET + RECENT + [result("oracle", [4, 4]), result("random", [0, 0])]
    first = report_of(results)
    for seed in range(4):
        random.Random(seed).shuffle(results)
        assert msgspec.json.encode(report_of(results)) == msgspec.json.encode(first)
    for one in results:
        files.write(one, tmp_path / files.file_name(one.cell, one.origin))
    assert markdown(report_of(files.read_all(tmp_path))) == markdown(first), "from a folder"
    assert [row.label for row in first.tables[0].rows] == ["full", "oracle", "locret", "random", "streaming_llm"]


def test_of_a_cell_run_twice_the_one_with_more_questions_counts():
    report = report_of([result("locret", [4, 4]), result("locret", [0, 0, 0, 0]), result("full", [4, 4])])
    assert rows(report.tables[0])["locret"].cells["recall"].score.value == 0 and report.superseded == 1
    assert "1 results" in markdown(report)


def test_speed_space_and_footprint():
    text = markdown(report_of(FULL + LOCRET))
    assert line(text, "locret")[-3:] == ["2,000", "1.0 MiB", "60"]


def test_the_header_says_what_it_is_about():
    text = markdown(report_of(FULL + LOCRET))
    assert "weights `3f5a0c`" in text and "tokenizer `77b1`" in text and "prose; tasks version 1" in text
    assert "recall 16" in text and "text 2 streams" in text and "`full` evicts nothing" in text


def test_json_says_the_same_and_comes_back():
    report = report_of(FULL + LOCRET)
    data = msgspec.json.encode(report)
    assert msgspec.json.decode(data, type=Report) == report and json.loads(data)["tables"][0]["length"] == 1000
    assert markdown(msgspec.json.decode(data, type=Report)) == markdown(report)


@pytest.mark.parametrize("field", ["weights", "tokenizer", "text", "tasks"])
def test_results_of_other_origins_are_never_mixed(field: str):
    other = msgspec.structs.replace(ORIGIN, **{field: 2 if field == "tasks" else "other"})
    with pytest.raises(ConfigError, match="2 origins"):
        report_of([*FULL, result("locret", [4], origin=other)])


def test_nothing_to_report_on_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="0 origins"):
        report_of(files.read_all(tmp_path))
    (tmp_path / "9b2c1f0e-1b2c-4d5e-8f90-a1b2c3d4e5f6.json").write_text("[]")
    assert files.read_all(tmp_path) == [], "somebody else's file"
    (tmp_path / "a-b-64-100-0123456789ab.json").write_text("[]")
    with pytest.raises(InputError, match="no result of an evaluation"):
        files.read_all(tmp_path)
