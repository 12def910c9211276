"""Chat templates of which it can be proved that they write each message by itself: from this message and the first
ones. Of a conversation of thousands of messages only the last ones then have to be rendered.

The proof is read off the template's syntax tree. It knows one shape, a loop over the messages whose body keeps nothing
for the next round, and where a template does anything else it is not local, whatever it would write.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from jinja2 import nodes

from locret_stream.text.syntax import parsed

MESSAGES, LOOP, PROMPT = "messages", "loop", "add_generation_prompt"
_PURE = (  # what computes from its operands alone, and keeps nothing
    nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Name, nodes.Const, nodes.Getattr,
    nodes.Getitem, nodes.Slice, nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr, nodes.Filter, nodes.Test,
    nodes.Call, nodes.Keyword, nodes.Concat, nodes.CondExpr, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)
_KEEPING = {"cycler", "joiner", "lipsum", "namespace", "dict", "self", "caller", "varargs", "kwargs"}
_DRAWING = {"random"}
_LAZY = {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "unique", "items", "reverse"}
_OF_LOOP = {"first", "last"}  # what a loop tells that is the same when messages in its middle are left out


@lru_cache(maxsize=64)
def messages_ahead(template: str) -> int | None:
    """How many of the first messages must be given with the last ones, and the one ahead of these, so that they are
    written as in the whole conversation; None for a template of which that cannot be proved."""
    tree, proof = parsed(template), _Proof()
    return 2 + proof.slices if tree is not None and proof.holds_for(tree) else None


class _Proof:
    """Attributes: slices: how often the list of messages is cut behind its first one."""

    def __init__(self) -> None:
        self._lists, self.slices, self._loops = {MESSAGES}, 0, 0  # names of the list, or of it without its first ones

    def holds_for(self, tree: nodes.Template) -> bool:
        return all(self._outside(node) for node in tree.body) and self._loops == 1

    def _outside(self, node: nodes.Node) -> bool:
        """Of a node that stands in no loop over the messages."""
        if isinstance(node, nodes.For):
            if self._is_list(node.iter):
                self._loops += 1
                return (isinstance(node.target, nodes.Name) and not (node.test or node.else_ or node.recursive)
                        and node.target.name not in self._lists | {LOOP}
                        and all(self._inside(inner) for inner in node.body))
            loops = self._loops
            return self._is_pure(node, self._outside) and self._loops == loops  # and none over the messages in it
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            if self._is_list(node.node) or self._is_slice(node.node):
                self.slices += self._is_slice(node.node)
                self._lists.add(node.target.name)
                return not self._loops
            return node.target.name not in self._lists and self._outside(node.node)
        if isinstance(node, (nodes.If, nodes.CondExpr)):
            return self._is_asked(node.test) and all(
                self._outside(child) for child in node.iter_child_nodes() if child is not node.test)
        if isinstance(node, nodes.Filter) and node.name in _LAZY:  # what is left of it could be used up in the loop
            return False
        return self._is_first(node) or bool(self._loops and self._is_last(node)) or self._is_pure(node, self._outside)

    def _is_asked(self, node: nodes.Node) -> bool:
        """Of a condition outside: whether there is any message may be asked there, too."""
        if isinstance(node, (nodes.And, nodes.Or, nodes.Not)):
            return all(self._is_asked(child) for child in node.iter_child_nodes())
        return self._is_list(node) or self._outside(node)

    def _inside(self, node: nodes.Node) -> bool:
        """Of a node in the loop over the messages."""
        if isinstance(node, nodes.Name) and node.name == PROMPT:
            return False
        if isinstance(node, nodes.Getattr) and self._is_loop(node.node):
            return node.attr in _OF_LOOP
        if isinstance(node, nodes.For):  # its `loop` is another one
            return (self._inside(node.iter) and not (node.test or node.recursive)
                    and all(self._further_inside(inner) for inner in node.body)
                    and all(self._inside(inner) for inner in node.else_))
        return self._is_first(node) or self._is_pure(node, self._inside)

    def _further_inside(self, node: nodes.Node) -> bool:
        """Of a node in a loop inside that loop."""
        if isinstance(node, nodes.Name) and node.name == PROMPT:
            return False
        if isinstance(node, nodes.Getattr) and self._is_loop(node.node):
            return True
        return self._is_first(node) or self._is_pure(node, self._further_inside)

    def _is_pure(self, node: nodes.Node, child_is: Callable[[nodes.Node], bool]) -> bool:
        if isinstance(node, nodes.Name):
            return node.name not in self._lists | _KEEPING | {LOOP}
        if isinstance(node, nodes.Assign) and not isinstance(node.target, nodes.Name):
            return False
        if isinstance(node, nodes.Filter) and node.name in _DRAWING:
            return False
        return isinstance(node, _PURE) and all(child_is(child) for child in node.iter_child_nodes())

    def _is_list(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name in self._lists

    def _is_slice(self, node: nodes.Node) -> bool:
        """`messages[1:]`"""
        if not isinstance(node, nodes.Getitem) or not isinstance(cut := node.arg, nodes.Slice):
            return False
        return self._is_list(node.node) and _is_number(cut.start, 1) and cut.stop is None and cut.step is None

    def _is_first(self, node: nodes.Node) -> bool:
        """`messages[0]`"""
        return isinstance(node, nodes.Getitem) and self._is_list(node.node) and _is_number(node.arg, 0)

    def _is_last(self, node: nodes.Node) -> bool:
        """`messages[-1]`"""
        return (isinstance(node, nodes.Getitem) and self._is_list(node.node) and isinstance(node.arg, nodes.Neg)
                and _is_number(node.arg.node, 1))

    @staticmethod
    def _is_loop(node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name == LOOP


def _is_number(node: nodes.Node | None, value: int) -> bool:
    return isinstance(node, nodes.Const) and node.value is not True and node.value is not False and node.value == value
