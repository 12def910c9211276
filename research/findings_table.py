"""Kept findings as tables, in research/results/NAME.md:

    python -m research.findings_table findings
"""

from __future__ import annotations

import argparse
import json

from research import RESULTS


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="that research.findings --keep was given")
    return parser.parse_args()


def section(finding: dict) -> list[str]:
    """What a paper says, and a row for each variant; bold what `findings.best` names."""
    name, claim = (words[0].upper() + words[1:] for words in (finding["finding"], finding["claim"]))
    lines = [f"## {name}", "", f"{claim}.", "", "| variant | score | units |",
             "|---|---|---|"]
    for label, variant in finding["variants"].items():
        text = "{score:.3f} [{low:.3f}, {high:.3f}]".format(**variant)
        if variant.get("best"):
            text = f"**{text}**"
        if "dropped" in variant:
            label += " (loss {before:.3f} before, {after:.3f} after: not kept, so the same heads)".format(
                **variant["dropped"])
        lines.append(f"| {label} | {text} | {' '.join(map(str, variant['units']))} |")
    if "scored_above" in finding:
        lines += ["", "Share of a stream's units that score above the value of the fact that is asked about, layer by "
                  "layer (median; 0: it is on top), with the query in front (told) and without it, and by the "
                  "attention of what answers:", "", "| scored by | layers |", "|---|---|",
                  *(f"| {words} | {' '.join(f'{share:.2f}' for share in shares)} |"
                    for words, shares in finding["scored_above"].items())]
    return [*lines, ""]


def markdown(kept: dict, name: str) -> str:
    """The whole page, ending in a newline; `name` is the name under which the findings are kept."""
    head = [
        "# What the papers found, tried here", "",
        f"`{kept['command']}`, commit {kept['commit']}, {kept['hardware']}, {kept['date']}.", "",
        "Scores are shares of questions answered exactly right, with 95 % intervals (bootstrap over streams, at least "
        "Wilson's); of text bits per byte, where less is better. Bold: the best of a finding, and all that are not "
        "worse beyond the 95 % interval of their differences on the same streams. Units: per KV head, layer by layer. "
        "What intervals do not cover is the chance in training heads: see the seeds under the first finding. "
        f"[{name}.tar.xz]({name}.tar.xz) has every answer.", ""]
    sections = [line for finding in kept["result"]["findings"] for line in section(finding)]
    return "\n".join(head + sections).rstrip() + "\n"


def main() -> None:
    name = parse().name
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise SystemExit(f"there is no {path}; expected a name that research.findings --keep was given")
    path.with_suffix(".md").write_text(markdown(json.loads(path.read_bytes()), name))


if __name__ == "__main__":
    main()
