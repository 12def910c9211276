"""The code of the adapter's README runs as it stands, and prints what its comments say."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "adapters" / "langchain" / "README.md"


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]):
    """All blocks run in order, in one namespace. A comment behind a print is its output, with … for anything."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    promised = 0
    with contextlib.ExitStack() as closing:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)):
            exec(compile(code, f"{README.name}, block {number}", "exec"), names)
            for name in {"model", "keyed"} & names.keys():
                closing.callback(names[name].close)
            said = capsys.readouterr().out
            for line in re.findall(r"^ *print\(.*\) +# (.+)$", code, re.MULTILINE):
                pattern = ".*".join(map(re.escape, line.split("…")))
                assert re.search(rf"^{pattern}$", said, re.MULTILINE), (line, said)
                promised += 1
    assert promised >= 14
