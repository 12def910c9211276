"""A home of the tests' own, so that none finds what the user keeps, and a watch that none writes elsewhere.

`begin` makes it before anything else is imported: HOME and the temporary folder lie in it, and whatever names another
place for caches, stores or keys is unset. Processes that tests start inherit that. It is removed at the end; what tests
write to `tmp_path` stays, as pytest keeps that of the last three runs.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "LOCRET_TESTS_HOME"  # set for the workers of one run: they share it
NAMES_PLACES = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR",
                "LOCRET_CACHE", "LOCRET_STORE", "LOCRET_KEY", "LOCRET_API_KEY", "LOCRET_URL", "HF_HOME", "HF_HUB_CACHE",
                "HF_TOKEN", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR",
                "TRITON_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR", "RAY_TMPDIR")
OURS = (".hypothesis", ".pytest_cache", ".ruff_cache", ".mypy_cache")  # in the checkout, ignored by git
_watched: list[str] | None = None  # what was touched while somebody watches
_allowed: tuple[str, ...] = ()
_private: tuple[str, ...] = ()
_folders: dict[str, str] = {}  # where each really is, as found by the test that runs


def begin() -> None:
    """Make the home, or share that of the run which started this process, and watch from now on."""
    global _allowed, _private
    user = os.environ.get("LOCRET_TESTS_USER") or os.path.expanduser("~")
    if MARK not in os.environ:
        outside = [os.environ[name] for name in NAMES_PLACES if os.path.isabs(os.environ.get(name, ""))]
        os.environ |= {"LOCRET_TESTS_USER": user, "LOCRET_TESTS_PRIVATE": os.pathsep.join(outside)}
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        home = tempfile.mkdtemp(prefix="locret-")
        os.mkdir(f"{home}/t")  # a short name: paths of sockets end after 107 characters
        for name in NAMES_PLACES:
            os.environ.pop(name, None)
        os.environ |= {MARK: home, "HOME": home, "USERPROFILE": home, "TMPDIR": f"{home}/t"}
    tempfile.tempdir = None  # found again
    home, kept = os.environ[MARK], os.environ["PYTEST_DEBUG_TEMPROOT"]
    places = (home, f"{kept}/pytest-of-", "/dev", "/proc", *(str(ROOT / name) for name in OURS))
    _allowed = tuple(map(os.path.realpath, places))
    _private = tuple(os.path.realpath(path) for path in (
        *(f"{user}/{name}" for name in (".cache", ".config", ".local", ".triton", ".locret", ".huggingface")),
        *filter(None, os.environ["LOCRET_TESTS_PRIVATE"].split(os.pathsep))))
    sys.addaudithook(_heard)


def end() -> None:
    """Remove the home; for the process that began it."""
    shutil.rmtree(os.environ[MARK], ignore_errors=True)


@contextmanager
def watched() -> Iterator[list[str]]:
    """A list that gets, while the block runs, a sentence for each file that this process writes outside of the places
    of tests, or opens among the user's own."""
    global _watched
    before, _watched = _watched, []
    _folders.clear()
    try:
        yield _watched
    finally:
        _watched = before


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None or event not in ("open", "os.mkdir", "os.rename", "os.remove"):
        return
    path = arguments[1] if event == "os.rename" else arguments[0]
    if not isinstance(path, (str, bytes, os.PathLike)):
        return  # a descriptor that is open already
    path = os.fsdecode(path)
    within = arguments[-1] != -1 if event != "open" else arguments[1] is None
    if within and not os.path.isabs(path):
        return  # in a folder that was opened before: `os.open` does not say whether it is
    writes = event != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if (why := complaint(path, writes=writes)) is not None:
        _watched.append(why)


def _real(path: str) -> str:
    """`os.path.realpath`, which looks at every folder on the way, but once in a test."""
    folder, name = os.path.split(path)
    if name in ("", ".", "..") or not os.path.isabs(path) or os.path.islink(path):
        return os.path.realpath(path)
    if folder not in _folders:
        _folders[folder] = os.path.realpath(folder)
    return os.path.join(_folders[folder], name)


def complaint(path: str, *, writes: bool) -> str | None:
    """What is wrong with opening a file; None where nothing is."""
    if not writes and not path.startswith(("/", "~")):
        return None
    real = _real(path)
    if real.startswith(_allowed):
        return None
    if writes and "__pycache__" not in real:
        return f"{real} was written; expected tmp_path"
    of_python = (sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages(), str(ROOT))
    if real.startswith(_private) and not real.startswith(tuple(map(os.path.realpath, of_python))):
        return f"{real} was read, which is the user's; expected files of the tests"
    return None
