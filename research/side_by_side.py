"""The table in docs/benchmarks.md, of a kept evaluation: one length and budget, scores alone, the best mean first. Of a
policy that was run in several ways it has the way with the best mean. Means over only some of the tasks say so, and
stand behind the others.

    python -m research.side_by_side policies --length 4096 --units 128
"""

from __future__ import annotations

import argparse
import json

from research import RESULTS


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of a report that research.keep_report kept")
    parser.add_argument("--length", type=int, required=True, help="tokens of a stream")
    parser.add_argument("--units", type=int, required=True, help="budget: units per KV head, mean over the layers")
    return parser.parse_args()


def table(report: dict, length: int, units: int) -> str:
    """In Markdown. Raises SystemExit: the report has no such table."""
    tables = {(kept["length"], kept["units"]): kept for kept in report["tables"] if not kept["focus"]}
    if (length, units) not in tables:
        raise SystemExit(f"the report has no table of {length} tokens and {units} units; expected one of "
                         f"{', '.join(f'{tokens} and {budget}' for tokens, budget in tables)}")
    chosen = tables[length, units]
    references = chosen["references"]
    tasks = [task for task in report["tasks"] if any(task in row["cells"] for row in chosen["rows"])]
    named = [f"{task}, bits per byte" if task in report["bits"] else task for task in tasks]
    lines = ["| policy | mean of score / full | " + " | ".join(named) + " |", "|---|---" + "|---" * len(tasks) + "|"]
    full = [f"{references[task]['score']:.2f}" if task in references else "–" for task in tasks]
    lengths = sorted({reference["length"] for reference in references.values()})
    if lengths:
        lines.append(f"| full cache at {' and '.join(f'{tokens:,}' for tokens in lengths)} tokens | 1 | "
                     + " | ".join(full) + " |")
    bounded = [row for row in chosen["rows"] if not row["variant"]["everything"]]
    shown = set[str]()
    ranks = [((row["mean"] or {"tasks": 0})["tasks"], (row["mean"] or {"value": 0.0})["value"]) for row in bounded]
    most = max((tasks for tasks, _ in ranks), default=0)
    for row, _ in sorted(zip(bounded, ranks, strict=True), key=lambda ranked: ranked[1], reverse=True):
        if row["variant"]["policy"] in shown:
            continue
        shown.add(row["variant"]["policy"])
        mean = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["mean"]) if row["mean"] else "–"
        if row["mean"] and row["mean"]["tasks"] < most:
            mean += f" ({row['mean']['tasks']} of {most} tasks)"
        scores = [f"{row['cells'][task]['score']['value']:.2f}" if task in row["cells"] else "–" for task in tasks]
        lines.append(f"| {row['label']} | {mean} | " + " | ".join(scores) + " |")
    return "\n".join(lines)


def main() -> None:
    options = parse()
    path = RESULTS / options.name / "report.json"
    if not path.is_file():
        raise SystemExit(f"there is no {path}; expected a name that research.keep_report was given")
    reports = json.loads(path.read_bytes())["reports"]
    if len(reports) != 1:
        raise SystemExit(f"{path} holds {len(reports)} reports; expected that of one model and text")
    print(table(reports[0], options.length, options.units))


if __name__ == "__main__":
    main()
