"""Checks before a model is loaded: whether its chat template shows tools, whether it has the heads that its policy
needs, and whether policy and key are valid."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from locret_stream import ConfigError
from locret_stream.named_models import named_model


def may_show_tools(model: str, chat_template: str, runtime: Any = None) -> bool:
    """Whether the text of the chat template mentions tools; True if it cannot be read yet, as for a model of the hub or
    a runtime that was not started."""
    text: str | None
    if chat_template not in ("auto", "raw"):
        text = chat_template
    elif runtime is not None:
        text = runtime.tokenizer.chat_template or "" if getattr(runtime, "running", False) else None
    else:
        named = named_model(model)
        text = _template_in(Path(model).expanduser()) if named is None else "tools" if named.tools else ""
    return text is None or re.search(r"\btools\b", str(text)) is not None


def _template_in(folder: Path) -> str | None:
    with suppress(OSError, ValueError, AttributeError):
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        return None if template is None else str(template)
    return None


def check_heads(model: str, heads: Any, policy: str | None) -> None:
    """Raises:
        ConfigError: the model is a folder, the policy named scores with retaining heads, and none were given.
    """
    if named_model(model) is None and heads is None and policy == "locret" and (
            Path(model).expanduser() / "config.json").is_file():
        raise ConfigError(f"{model} was given without heads=, which the policy 'locret' scores with; expected "
                          'policy="keydiff", which needs none, or heads=<folder> made by `locret-stream train-heads`')


def check_policy(policy: str | None) -> None:
    """Raises UnknownPolicy, which names the closest one."""
    if policy is not None:
        from locret_stream.policies import POLICIES, make_policy
        if policy not in POLICIES:
            make_policy(policy)


def check_key(key: str | None) -> None:
    """Raises ConfigError: the key is not valid, or the `cryptography` package is not installed."""
    if key is not None:
        from locret_stream.snapshot.encryption import user_key
        user_key(key)
