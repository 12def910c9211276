"""Writes the reports on all results in a folder, one for each origin: report.md, report.json and, drawn, PNGs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from locret_stream.errors import InputError
from locret_stream.evaluation import cells, maps, plots
from locret_stream.evaluation.report import Report, report_of
from locret_stream.evaluation.tables import markdown
from locret_stream.files import replace


class Written(NamedTuple):
    """The reports, and the files that were written: report.md, report.json, and the pictures."""

    reports: list[Report]
    files: list[Path]
    pictures: list[Path]


def write_reports(folder: Path, draw: bool = False) -> Written:
    """Report on all results in the folder; with `draw`, draw curves, and the maps that were made before.

    Raises:
        InputError: no results, or damaged ones. ConfigError: matplotlib is not installed. OSError: as `replace`.
    """
    reports = [report_of(results) for _, results in cells.by_origin(cells.read_all(folder))]
    if not reports:
        raise InputError(f"{folder} holds no results of an evaluation; expected a folder that `locret-stream eval` "
                         "wrote results into")
    files = [folder / "report.md", folder / "report.json"]
    data = msgspec.json.format(msgspec.json.encode({"reports": reports}), indent=1)
    replace(files[1], lambda part: part.write_bytes(data))
    texts: list[str] = []
    pictures: list[Path] = []
    for report in reports:
        drawn, mapped = list[Path](), None
        if draw:
            path = maps.path_of(report.origin, folder)
            made = maps.read(path) if path.is_file() else None
            drawn = plots.draw(folder, report, made, f"{cells.tag_of(report.origin)}_" if len(reports) > 1 else "")
            mapped = made.cells[0] if made and made.cells else None
        texts.append(markdown(report, [picture.name for picture in drawn], mapped))
        pictures += drawn
    replace(files[0], lambda part: part.write_text("\n".join(texts), encoding="utf-8"))
    return Written(reports, [*files, *pictures], pictures)
