"""README's table of the kept findings but for its last column, the verdicts, which are written by hand:

    python benchmarks/findings_table.py findings
"""

from __future__ import annotations

import argparse
import json

from record import RESULTS


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="that findings.py --keep was given")
    return parser.parse_args()


def score(found: dict) -> str:
    """With its 95 % interval, bold where `findings.best` says so; what came of a tuning that was not kept."""
    text = "{score:.2f} [{low:.2f}, {high:.2f}]".format(**found)
    if found.get("best"):
        text = f"**{text}**"
    if "dropped" in found:
        text += " (loss {before:.3f} before, {after:.3f} after: not kept, so the same heads)".format(**found["dropped"])
    return text


def rows(kept: dict) -> list[str]:
    """In Markdown, a row for each finding: its name, what the paper says, and the variants."""
    return [f"| {one['finding']} | {one['claim']} | "
            + "; ".join(f"{label}: {score(found)}" for label, found in one["variants"].items()) + " |"
            for one in kept["result"]["findings"]]


def main() -> None:
    options = parse()
    print("\n".join(rows(json.loads((RESULTS / f"{options.name}.json").read_bytes()))))


if __name__ == "__main__":
    main()
