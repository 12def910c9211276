"""What would be released fits its changelog and citation, and what is wrong with a wheel or a tag is said."""

from __future__ import annotations

import importlib.util
import tarfile
import zipfile
from pathlib import Path

import pytest

from locret_stream.version import __version__
from tests.processes import ROOT, run

_spec = importlib.util.spec_from_file_location("check_dist", ROOT / ".ci" / "check_dist.py")
assert _spec is not None and _spec.loader is not None
check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check)
NAMES = ["locret_stream/py.typed", "i.dist-info/METADATA", "i.dist-info/licenses/LICENSE",
         "i.dist-info/entry_points.txt", *(f"{package}/__init__.py" for package in check.PACKAGES)]
METADATA = "License-Expression: A\nRequires-Python: >=3\nSummary: B\n\n"


def wheel(folder: Path, *names: str, size: int = 0) -> Path:
    path = folder / f"locret_stream-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(name, METADATA if "METADATA" in name else "")
        made.writestr("locret_stream/heads", b"0" * size)
    return path


def archive(folder: Path, *names: str) -> Path:
    path = folder / "locret_stream-0.1.0.tar.gz"
    (folder / "empty").write_text("")
    with tarfile.open(path, "w:gz") as made:
        for name in names:
            made.add(folder / "empty", f"locret_stream-0.1.0/{name}")
    return path


def test_the_version_is_that_of_changelog_and_citation():
    assert not check.of_version(__version__, None)


def test_a_wheel_of_the_library_alone_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert not check.of_wheel(wheel(tmp_path, *NAMES)) and not check.of_archive(archive(tmp_path, *check.IN_ARCHIVE))
    assert check.main([str(tmp_path)]) == 0 and "0.0 MB" in capsys.readouterr().out


@pytest.mark.parametrize(("names", "size", "why"), [
    (NAMES, 12_100_000, "12.1 MB; expected at most 12"), (NAMES[1:], 0, "lacks locret_stream/py.typed"),
    ([*NAMES, "tests/kit.py"], 0, "expected ['langchain_locret', 'locret_serve', 'locret_stream']"),
    ([*NAMES, "locret_stream/tests/kit.py"], 0, "has locret_stream/tests/kit.py"),
    ([name for name in NAMES if "LICENSE" not in name], 0, "lacks i.dist-info/licenses/LICENSE"),
    ([name for name in NAMES if "locret_serve" not in name], 0, "lacks locret_serve/__init__.py")])
def test_what_is_wrong_with_a_wheel_is_said(tmp_path: Path, names: list[str], size: int, why: str):
    wrong = check.of_wheel(wheel(tmp_path, *names, size=size))
    assert any(why in line for line in wrong), wrong
    archive(tmp_path, *check.IN_ARCHIVE)
    assert check.main([str(tmp_path)]) == 1


def test_an_archive_without_what_builds_it_is_wrong(tmp_path: Path):
    [line] = check.of_archive(archive(tmp_path, *(set(check.IN_ARCHIVE) - {"CITATION.cff"})))
    assert "lacks CITATION.cff" in line


@pytest.mark.parametrize(("heading", "citation", "tag", "why"), [
    ("0.2.0 (2027-01-31)", "version: 0.2.0\ndate-released: 2027-01-31", "v0.2.0", None),
    ("0.2.0 (unreleased)", "version: 0.2.0", None, None),
    ("0.2.0 (unreleased)", "version: 0.2.0", "v0.2.0", "'unreleased'; expected the day"),
    ("0.2.0 (2027-01-31)", "version: 0.2.0", "v0.2.0", "date-released None; expected 2027-01-31"),
    ("0.2.0 (2027-01-31)", "version: 0.1.0\ndate-released: 2027-01-31", "v0.2.0", "CITATION.cff has version 0.1.0"),
    ("0.1.0 (2027-01-31)", "version: 0.2.0\ndate-released: 2027-01-31", None, "CHANGELOG.md begins with 0.1.0"),
    ("0.2.0 (2027-01-31)", "version: 0.2.0\ndate-released: 2027-01-31", "v0.3.0", "the tag is v0.3.0; expected")])
def test_a_tag_is_released_only_where_everything_has_its_version_and_day(
        tmp_path: Path, heading: str, citation: str, tag: str | None, why: str | None):
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n- New.\n")
    (tmp_path / "CITATION.cff").write_text(f"cff-version: 1.2.0\n{citation}\n")
    wrong = check.of_version("0.2.0", tag, tmp_path)
    assert not wrong if why is None else any(why in line for line in wrong), wrong


def test_a_folder_without_a_wheel_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert check.main([str(tmp_path)]) == 1 and "0 wheels and 0 source archives" in capsys.readouterr().err


def test_continuous_integration_begins_with_an_empty_home(tmp_path: Path):
    """And with nothing of the environment that names another place; only pip's downloads stay where they are."""
    script = (ROOT / ".ci" / "run").read_text()
    script, _, steps = script.partition("step() {")
    assert "make test-real" in steps and "make test-wheel" in steps and "make lint" in steps
    script = script.replace('"$(dirname "${BASH_SOURCE[0]}")/.."', str(ROOT)) + "env\n"
    done = run("bash", "-c", script, env={
        "HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_HOME": "/hf", "LOCRET_STORE": "/store", "TORCH_HOME": "/t",
        "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path), "PIP_FIND_LINKS": "/wheels"})
    assert done.returncode == 0, done.stderr
    env = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert "with 0 files" in done.stdout and env["HOME"].startswith(str(tmp_path / "ci-"))
    assert not {"HF_HOME", "LOCRET_STORE", "TORCH_HOME", "XDG_CACHE_HOME"} & env.keys()
    assert env["PIP_CACHE_DIR"] == str(tmp_path / "cache" / "pip") and env["PIP_FIND_LINKS"] == "/wheels"
    assert not list(tmp_path.glob("ci-*")), "it is removed at the end"
