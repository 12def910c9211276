"""A tokenizer's chat template: its source, what that asks for, and the one way to let it write.

Knows Jinja, and neither turns nor tokens. What a template does with messages is tried out in `traits`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import meta, nodes

from locret_stream.errors import ConfigError
from locret_stream.text.dated import CLOCK, DATES, MACRO, date_formats
from locret_stream.text.dated import now as dated_now
from locret_stream.text.syntax import parsed

_LOOKING = {"split", "rsplit", "startswith", "endswith", "replace", "find", "rfind", "index", "count", "partition",
            "rpartition", "removeprefix", "removesuffix"}
NO_OPTIONS = {  # variables that every template is given
    "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token",
    "sep_token", "cls_token", "mask_token", "raise_exception", "namespace", "range", "dict", "lipsum", "cycler",
    "joiner", CLOCK, DATES}

_NO_TOOLS: tuple[list[Any] | None, ...] = (None, [])  # some templates go through the tools without asking whether


class Template:
    """A chat template as its tokenizer writes it. Immutable.

    Args:
        tokenizer: whose own template it is, unless another one is given.
        given: a Jinja template; None: the tokenizer's own, which may be several by name.
        options: variables of the template (`enable_thinking`, ...).

    Raises:
        ConfigError: an option that it does not have. One that would change nothing is a wrong name.
    """

    def __init__(self, tokenizer: Any, given: str | None = None, options: Mapping[str, Any] | None = None):
        self.tokenizer, self.given, self.options = tokenizer, given, dict(options or {})
        if self.by_transformers and (unknown := [*self.options.keys() - self.variables]):
            raise ConfigError(f"the chat template has no option {', '.join(map(repr, sorted(unknown)))}; expected "
                              f"{', '.join(sorted(self.variables)) or 'none: it has no options'}")

    @property
    def by_transformers(self) -> bool:
        """Whether transformers itself renders it. A tokenizer that does so in a way of its own may know other options.
        """
        return type(self.tokenizer).apply_chat_template.__module__ == "transformers.tokenization_utils_base"

    @cached_property
    def source(self) -> str:
        """The template's source; of several, that of conversations without tools."""
        return self._source(tools=False)

    def _source(self, *, tools: bool) -> str:
        written = self.given or self.tokenizer.chat_template
        if isinstance(written, str):
            return written
        if isinstance(written, dict):
            chosen = "tool_use" if tools and "tool_use" in written else "default"
            return str(written.get(chosen, ""))
        return str(written or "")

    def write(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, prompt: bool,
              now: datetime | None = None, options: Mapping[str, Any] | None = None) -> str:
        """What the template writes.

        Args:
            messages, tools: as transformers takes them. prompt: with the generation prompt.
            now: the date that it writes, if it asks for one; None: today's.
            options: further variables.

        Raises:
            ConfigError: the template refuses these messages, or fails.
        """
        variables = {**self._missing(tools, now), **self.options, **(options or {})}
        given = self.given
        source = self._source(tools=bool(tools))
        if now is not None and (formats := date_formats(source)):
            given = MACRO + source
            variables[DATES] = {form: now.strftime(form) for form in formats}
        shown = _in_parts(messages) if self._wants_parts else [dict(message) for message in messages]
        no_tools: list[Any] | None = [] if self._wants_list else None
        try:
            return self.tokenizer.apply_chat_template(
                shown, tools=list(tools) or no_tools, tokenize=False, add_generation_prompt=prompt, chat_template=given,
                **variables)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages[-4:])
            raise ConfigError(f"the chat template cannot show this conversation ({'..., ' if len(messages) > 4 else ''}"
                              f"{roles}): {error}") from error

    # -- what its source says ---------------------------------------------------------------------------------

    @property
    def date_formats(self) -> frozenset[str] | None:
        """The formats in which it asks for the date; None where they are not in its text."""
        return date_formats(self.source)

    @cached_property
    def looked_up(self) -> tuple[str, ...]:
        """Texts that it looks for in other texts, such as the flag of a model that thinks; the longest first."""
        found = set[str]()
        for compared in self._nodes(nodes.Compare):
            if any(operand.op in ("in", "notin") for operand in compared.ops):
                found |= _texts(compared.expr)
        for call in self._nodes(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr in _LOOKING:
                found |= set().union(*map(_texts, call.args))
        for used in self._nodes(nodes.Filter):
            if used.name == "replace" and used.args:
                found |= _texts(used.args[0])
        return tuple(sorted((text for text in found if text.strip()), key=lambda text: (-len(text), text)))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that it reads and that not every conversation has (`enable_thinking`, ...)."""
        read, own, optional = set[str](), set[str](), set[str]()
        for tree in self._trees:
            read |= meta.find_undeclared_variables(tree)
            own |= {name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")}
            own |= {macro.name for macro in tree.find_all(nodes.Macro)}
            for asked in (*tree.find_all(nodes.Test), *tree.find_all(nodes.Filter)):
                if asked.name in ("defined", "undefined", "default", "d") and isinstance(asked.node, nodes.Name):
                    optional.add(asked.node.name)
        return frozenset(read - NO_OPTIONS - (own - optional))

    @property
    def _sources(self) -> list[str]:
        return [self._source(tools=False), self._source(tools=True)]

    @cached_property
    def _trees(self) -> list[nodes.Template]:
        trees = map(parsed, dict.fromkeys(self._sources))
        return [tree for tree in trees if tree is not None]  # of what is none, whoever lets it write is told

    def _nodes(self, kind: type[Any]) -> Iterator[Any]:
        for tree in self._trees:
            yield from tree.find_all(kind)

    # -- what it cannot do without ----------------------------------------------------------------------------

    @cached_property
    def _wants_list(self) -> bool:
        """Whether it goes through the tools without asking if there are any: it is given an empty list of them."""
        asked, variables = [{"role": "user", "content": "?"}], {**self._missing((), None), **self.options}
        for no_tools in _NO_TOOLS:
            try:
                self.tokenizer.apply_chat_template(asked, tools=no_tools, tokenize=False, add_generation_prompt=True,
                                                   chat_template=self.given, **variables)
                return no_tools is not None
            except Exception:  # whoever lets it write is told
                continue
        return False

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether it shows contents only as lists of parts, as those of models that see pictures may."""
        word, variables = "Probe0eborP", {**self._missing((), None), **self.options}
        for messages in ([{"role": "user", "content": word}], _in_parts([{"role": "user", "content": word}])):
            for no_tools in _NO_TOOLS:
                try:
                    text = self.tokenizer.apply_chat_template(
                        messages, tools=no_tools, tokenize=False, add_generation_prompt=True, chat_template=self.given,
                        **variables)
                    if word in text and "'text':" not in text:  # else the list itself was written
                        return messages[0]["content"] != word
                except Exception:  # whoever lets it write is told
                    continue
        return False

    def _missing(self, tools: Sequence[Mapping[str, Any]], now: datetime | None) -> dict[str, Any]:
        """Variables under which older templates take what later ones take as `tools`, and the date."""
        missing: dict[str, Any] = {}
        if "functions" in self.variables and "tools" not in self._names:
            functions = [tool.get("function", tool) for tool in tools]
            missing["functions"] = json.dumps(functions, ensure_ascii=False, indent=4)
        if "datetime" in self.variables:
            missing["datetime"] = (now or dated_now()).strftime("%B %d, %Y")
        return missing

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(node.name for node in self._nodes(nodes.Name))


def _in_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with their contents as lists of parts."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _texts(node: nodes.Node) -> set[str]:
    """The text constants in a node, if it is one or a list of them."""
    if isinstance(node, nodes.Const):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return set().union(*map(_texts, node.items))
    return set()
