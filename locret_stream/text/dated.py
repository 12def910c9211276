"""Chat templates that write the date: in which formats they ask for it, and what one writes at another time. Knows
Jinja and transformers' `strftime_now`; knows no turns and no tokens.

Transformers passes to a template no function that a caller gives, and what a template calls to ask the clock cannot be
replaced from outside. A macro of the same name can, which stands ahead of the template and looks its result up among
the variables.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes

from locret_stream.text.syntax import parsed

CLOCK, DATES = "strftime_now", "locret_dates"
# It ends with a newline, which is dropped behind a block: so the template begins a line, as it does alone.
MACRO = f"{{% macro {CLOCK}(format) %}}{{{{ {DATES}[format] }}}}{{% endmacro %}}\n"
_OF_DAYS = frozenset("aAbBdDeFgGhjmuUVwWxyYC%nt")  # what `strftime` writes that is the same all day
_CODE = re.compile(r"%[-_0^#:]*([a-zA-Z%])")


@functools.lru_cache(maxsize=64)
def date_formats(source: str) -> frozenset[str] | None:
    """The formats in which a template asks for the time: none for one that never does; None where they are not in its
    text, so that it cannot be written at another time."""
    if CLOCK not in source:
        return frozenset()
    tree = parsed(source)
    if tree is None:
        return None
    calls = [node for node in tree.find_all(nodes.Call) if _is_clock(node.node)]
    tests = [node for node in tree.find_all(nodes.Test) if _is_clock(node.node)]  # `strftime_now is defined`
    own = any(node.name == CLOCK for node in tree.find_all(nodes.Macro))
    if own or len(calls) + len(tests) < sum(map(_is_clock, tree.find_all(nodes.Name))):
        return None
    formats = [node.args[0].value if len(node.args) == 1 and isinstance(node.args[0], nodes.Const) else None
               for node in calls]
    texts = [each for each in formats if isinstance(each, str)]
    return frozenset(texts) if len(texts) == len(formats) and not any(node.kwargs for node in calls) else None


def _is_clock(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == CLOCK


def is_of_days(formats: frozenset[str]) -> bool:
    """Whether these formats write the same text all day long."""
    return all(_OF_DAYS.issuperset(_CODE.findall(each)) for each in formats)


def now() -> datetime:
    """The time that a template is told."""
    return datetime.now()


Write = Callable[[Sequence[Mapping[str, str]], bool], str]
"""Messages, and whether a generation prompt follows them, to what a template writes."""


def writer_at(tokenizer: Any, source: str, when: datetime) -> Write:
    """The template as it writes at another time. Its `date_formats` must be known."""
    formats = date_formats(source)
    assert formats is not None, "the template cannot be written at another time"
    dates = {each: when.strftime(each) for each in formats}

    def write(messages: Sequence[Mapping[str, str]], prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt,
                                                 chat_template=MACRO + source, **{DATES: dates}))

    return write
