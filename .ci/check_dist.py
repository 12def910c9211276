"""What is to be released: a wheel with the library alone, small, whose version the changelog and the citation have.

    python .ci/check_dist.py dist [--tag v0.1.0]
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"locret_stream", "langchain_locret", "locret_serve"}
MOST_MB = 12
IN_ARCHIVE = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "constraints.txt", "Makefile")


def of_wheel(path: Path) -> list[str]:
    """What is wrong with a wheel."""
    size_mb = path.stat().st_size / 1e6
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [info] = [name.partition("/")[0] for name in names if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(wheel.read(f"{info}/METADATA").decode())
    wrong = [] if size_mb <= MOST_MB else [f"{path.name} has {size_mb:.1f} MB; expected at most {MOST_MB}"]
    tops = {name.partition("/")[0] for name in names} - {info}
    if tops != PACKAGES:
        wrong.append(f"{path.name} has {sorted(tops)}; expected {sorted(PACKAGES)}")
    missing = [name for name in ("locret_stream/py.typed", f"{info}/licenses/LICENSE", f"{info}/entry_points.txt",
                                 *(f"{package}/__init__.py" for package in PACKAGES)) if name not in names]
    missing += [field for field in ("License-Expression", "Requires-Python", "Summary") if not metadata[field]]
    wrong += [f"{path.name} lacks {name}" for name in missing]
    return wrong + [f"{path.name} has {name}" for name in names
                    if re.search(r"(^|/)(tests?|benchmarks|research|__pycache__)/", name)]


def of_archive(path: Path) -> list[str]:
    """What is wrong with a source archive."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return [f"{path.name} lacks {name}" for name in IN_ARCHIVE if name not in names]


def of_version(version: str, tag: str | None, root: Path = ROOT) -> list[str]:
    """What in the changelog and the citation does not fit a version; with a tag also whether it is to be released."""
    wrong = []
    heading = re.search(r"^## (\S+) \((.*)\)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    said, when = heading.groups() if heading else ("nothing", "")
    if said != version:
        wrong.append(f"CHANGELOG.md begins with {said}; expected {version}")
    citation = dict(re.findall(r"^([\w-]+): \"?(.*?)\"?$", (root / "CITATION.cff").read_text(), re.MULTILINE))
    if citation.get("version") != version:
        wrong.append(f"CITATION.cff has version {citation.get('version')}; expected {version}")
    if tag is not None:
        if tag.removeprefix("v") != version:
            wrong.append(f"the tag is {tag}; expected v{version}, the version in locret_stream/version.py")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", when):
            wrong.append(f"CHANGELOG.md dates {version} '{when}'; expected the day of the release, such as 2027-01-31")
        if citation.get("date-released") != when:
            wrong.append(f"CITATION.cff has date-released {citation.get('date-released')}; expected {when}")
    return wrong


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", help="of the release that this is to be")
    given = parser.parse_args(words)
    wheels, archives = sorted(given.folder.glob("*.whl")), sorted(given.folder.glob("*.tar.gz"))
    if (len(wheels), len(archives)) != (1, 1):
        print(f"{given.folder} has {len(wheels)} wheels and {len(archives)} source archives; expected one of each",
              file=sys.stderr)
        return 1
    version = wheels[0].name.split("-")[1]
    wrong = of_wheel(wheels[0]) + of_archive(archives[0]) + of_version(version, given.tag)
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(f"{wheels[0].name}: {wheels[0].stat().st_size / 1e6:.1f} MB; {archives[0].name}: "
              f"{archives[0].stat().st_size / 1e6:.1f} MB")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
