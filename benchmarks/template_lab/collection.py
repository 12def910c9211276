"""A collection of chat templates, and the bundled tokenizer with the marks of one of them as added tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer

import locret_stream

BUNDLED = Path(locret_stream.__file__).parent / "assets" / "bundled"
BOS, EOS = "<s>", "</s>"
_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"|｜]{1,40}[|｜]>|<(?:start|end)_of_turn>|<end_of_utterance>|\[gMASK\]|<sop>|<extra_id_\d>|"
    r"\[/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|SYSTEM_PROMPT|ARGS|CALL_ID|THINK)\]")
_PLAIN = re.compile(r"</?think>|</?tool_call>|</?tool_response>")


def read_collection(path: Path) -> dict[str, str]:
    """Templates by name: of a JSON object of sources, or of a folder of `*.jinja`. Raises ValueError, OSError."""
    if path.is_dir():
        found = {file.stem: file.read_text(encoding="utf-8") for file in sorted(path.glob("*.jinja"))}
    else:
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not found or not all(
            isinstance(name, str) and isinstance(source, str) for name, source in found.items()):
        raise ValueError(f"{path} holds no templates; expected a JSON object of names with sources, or a folder of "
                         "*.jinja")
    return found


def tokenizer_of(template: str) -> Any:
    """A new tokenizer with that template. Marks in angle or square brackets are special tokens of it, those that
    published tokenizers leave ordinary (`<think>`, `<tool_call>`) are added tokens."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    special, plain = (sorted(set(marks.findall(template))) for marks in (_SPECIAL, _PLAIN))
    tokenizer.add_tokens([AddedToken(mark, special=mark in special, normalized=False) for mark in [*special, *plain]])
    tokenizer.add_special_tokens({"bos_token": BOS, "eos_token": EOS})
    tokenizer.chat_template = template
    return tokenizer


def marks_at_start(text: str) -> str:
    """The marks that close a turn, with which a text begins: up to the first character, or mark, of something else."""
    text, found = text.lstrip(" "), ""
    while (mark := _SPECIAL.match(text)) or (not found and text.startswith(EOS)):
        each = mark[0] if mark else EOS
        if "start" in each.lower():  # it opens the next turn
            break
        found += each
        text = text[len(each):]
    return found


def last_mark(text: str) -> str:
    """The last mark of such a text."""
    return EOS if text.endswith(EOS) else ([*_SPECIAL.findall(text)] or [""])[-1]
