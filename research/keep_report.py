"""Keep the report of an evaluation with the other results, and what it was made with:

    python -m research.keep_report results-of-eval --name policies --model recall-model --by "research/policies.sh"

The report, its plots and the cells with every answer (cells.tar.xz: unpacked into a folder of its own, `locret-stream
eval --out FOLDER --report-only --plots` makes the report again, and the command that ran them goes on with what is
missing) go to research/results/NAME/, in the place of what was kept under that name; NAME.json holds the means of
every table, the digests that the cells are bound to, how the model was trained, and the circumstances in which it is
kept: cells do not know their own, so keep it where they ran, and say at which commit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
from pathlib import Path

from benchmarks.record import record
from locret_stream.evaluation import cells
from research import RESULTS


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder that `locret-stream eval --out` wrote")
    parser.add_argument("--name", required=True, help="under which it is kept")
    parser.add_argument("--by", required=True, help="the command that ran the cells")
    parser.add_argument("--cells-at", metavar="COMMIT", help="that ran the cells, where it is not the current one")
    parser.add_argument("--model", type=Path, help="folder that research.train_recall_model wrote")
    return parser.parse_args()


def means(report: dict) -> list[dict]:
    """For every table of a report the mean over the tasks of each row."""
    return [{"length": table["length"], "units": table["units"], "focus": table["focus"],
             "means": {row["label"]: row["mean"] and "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row["mean"])
                       for row in table["rows"]}} for table in report["tables"]]


def pack(paths: list[Path], archive: Path) -> None:
    """Pack the files under their names alone, so that the same files give the same bytes."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in paths:
            member = tarfile.TarInfo(path.name)
            member.size = path.stat().st_size
            with path.open("rb") as file:
                packed.addfile(member, file)


def main() -> None:
    options = parse()
    if not options.name.isidentifier():
        raise SystemExit(f"--name is {options.name!r}; expected letters, digits and _")
    folder = RESULTS / options.name
    made = RESULTS / f"{options.name}.part"
    if any(options.out.resolve().is_relative_to(kept.resolve()) for kept in (folder, made)):
        raise SystemExit(f"{options.out} is what is kept already; expected another folder")
    for needed in [options.out / "report.json", options.out / "report.md",
                   *([options.model / "training.json"] if options.model else [])]:
        if not needed.is_file():
            raise SystemExit(f"there is no {needed}; expected what `locret-stream eval --out` and the recipe write")
    results = cells.paths(options.out)
    if not results:
        raise SystemExit(f"{options.out} holds a report and no cells; expected the folder that eval wrote")
    trained = json.loads((options.model / "training.json").read_bytes()) if options.model else None
    reports = json.loads((options.out / "report.json").read_bytes())["reports"]
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for path in [options.out / "report.md", *sorted(options.out.glob("*.png"))]:
        shutil.copy(path, made)
    pack([*results, *sorted(options.out.glob("maps-*.json"))], made / "cells.tar.xz")
    (made / "report.json").write_text(json.dumps({"reports": reports}, separators=(",", ":")) + "\n")
    shutil.rmtree(folder, ignore_errors=True)  # once there is another one
    made.rename(folder)
    record(options.name, {"by": options.by, "cells_at": options.cells_at, "model": trained,
                          "origins": [report["origin"] for report in reports],
                          "tables": [table for report in reports for table in means(report)]}, keep=True,
           results=RESULTS)


if __name__ == "__main__":
    main()
