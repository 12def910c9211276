"""What the site makes of links that leave docs/: GitHub follows them, the site names the file instead."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A link to a file of the repository that is no page, as its words and its path."""
    folder = PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent

    def named(found: re.Match[str]) -> str:
        path = normpath(str(folder / found[2]))
        if path.startswith("docs/"):
            return found[0]
        if not (ROOT / path).exists():
            raise ValueError(f"{page.file.src_uri} leads to {path}, which is not there")
        words = found[1].strip("`")
        return f"`{path}`" if words in (path, PurePosixPath(path).name) else f"{found[1]} (`{path}`)"

    return LINK.sub(named, markdown)
