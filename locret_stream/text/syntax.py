"""The syntax tree of a chat template, as transformers reads one. Knows Jinja alone."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """Transformers' block around what an assistant wrote; it is parsed here, and never rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(maxsize=64)
def parsed(source: str) -> nodes.Template | None:
    """The tree, which nobody may change; None for what is no template."""
    try:
        return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[
            "jinja2.ext.loopcontrols", _Generation]).parse(source)
    except TemplateError:
        return None
