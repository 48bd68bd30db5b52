"""An interpreter for the Jinja of chat templates that come from strangers.

Jinja's own parser reads the template. Its nodes are evaluated here on plain values, at the expense
of a budget: a template cannot reach Python, and its time and memory have the same bounds on every
machine. Semantics and messages are those of Jinja (jinja.palletsprojects.com, Template Designer
Documentation), with the extensions and functions that transformers adds for chat templates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Undefined

from edge.text import jinja_values as values
from edge.text.jinja_expressions import EXPRESSIONS, Expressions
from edge.text.jinja_filters import FILTERS, TESTS
from edge.text.jinja_scope import (
    LoopVariable,
    NameScope,
    TemplateFunction,
    TemplateNamespace,
    TextOutput,
)

MAX_NESTED = 100  # depth of the syntax
MAX_CALLS = 16  # depth of calls of macros


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which only marks text for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_PARSER = Environment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols", _Generation],
    autoescape=False,
    cache_size=0,
)


class ParsedTemplate:
    """A parsed template. Threads may render it at once."""

    def __init__(self, source: str) -> None:
        """Raises TemplateError, ValueError, RecursionError."""
        tree = _PARSER.parse(source)
        _check(tree)
        self._body: Sequence[nodes.Node] = tree.body

    def render(self, names: Mapping[str, Any]) -> str:
        """Render with these names. Raises TemplateError, and the errors of expressions."""
        renderer = _Renderer()
        out = TextOutput(renderer.budget)
        renderer.statements(self._body, NameScope(None, dict(names)), out)
        return out.text()


def _check(tree: nodes.Node) -> None:
    """Raise an error unless every node of the tree is supported. Works without recursion."""
    level: list[tuple[nodes.Node, bool]] = [(tree, False)]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTED:
            raise SecurityError(f"nests more than {MAX_NESTED} deep")
        children: list[tuple[nodes.Node, bool]] = []
        for node, in_loop in level:
            _check_node(node)
            if isinstance(node, (nodes.Break, nodes.Continue)) and not in_loop:
                raise TemplateAssertionError("break or continue outside a loop", node.lineno)
            children_in_loop = isinstance(node, nodes.For) or (
                in_loop and not isinstance(node, _BREAK_BARRIERS)
            )
            children += [(child, children_in_loop) for child in node.iter_child_nodes()]
        level = children


def _check_node(node: nodes.Node) -> None:
    kind = type(node)
    if kind not in _STATEMENTS and kind not in EXPRESSIONS and kind not in _PARTS:
        raise SecurityError(f"line {node.lineno}: uses {kind.__name__}, which is not supported")
    for name in ("name", "attr"):
        identifier = getattr(node, name, None)
        if isinstance(identifier, str) and identifier.startswith("__"):
            raise SecurityError(f"line {node.lineno}: uses the name {identifier}")
    if isinstance(node, nodes.Filter) and node.name not in FILTERS:
        raise TemplateAssertionError(f"No filter named {node.name!r}.", node.lineno)
    if isinstance(node, nodes.Test) and node.name not in TESTS:
        raise TemplateAssertionError(f"No test named {node.name!r}.", node.lineno)
    unpacks = getattr(node, "dyn_args", None) and kind is not nodes.Call
    if unpacks or getattr(node, "dyn_kwargs", None):
        raise SecurityError(f"line {node.lineno}: unpacks arguments")
    if isinstance(node, nodes.For) and node.recursive:
        raise SecurityError(f"line {node.lineno}: loops recursively")
    if isinstance(node, nodes.Const):
        values.measure(node.value)


_BREAK, _CONTINUE = "break", "continue"


class _Renderer(Expressions):
    """One rendering. Statements return _BREAK or _CONTINUE to leave a loop, else None."""

    _calls = 0  # depth of calls of macros

    def statements(
        self, body: Sequence[nodes.Node], scope: NameScope, out: TextOutput
    ) -> str | None:
        for node in body:
            self.budget.spend()
            signal = _STATEMENTS[type(node)](self, node, scope, out)
            if signal:
                return signal
        return None

    def _captured(self, body: Sequence[nodes.Node], scope: NameScope) -> tuple[str, str | None]:
        """Return what statements write, in a scope of their own, and whether they left a loop."""
        out = TextOutput(self.budget)
        signal = self.statements(body, NameScope(scope), out)
        return out.text(), signal

    def output(self, node: nodes.Output, scope: NameScope, out: TextOutput) -> None:
        for part in node.nodes:
            if isinstance(part, nodes.TemplateData):
                out.write(part.data)
            else:
                self.budget.spend()
                out.write(values.spelled(self.budget, self.value(part, scope)))

    def condition(self, node: nodes.If, scope: NameScope, out: TextOutput) -> str | None:
        for branch in (node, *node.elif_):
            self.budget.spend()
            if self.value(branch.test, scope):
                return self.statements(branch.body, scope, out)
        return self.statements(node.else_, scope, out)

    def loop(self, node: nodes.For, scope: NameScope, out: TextOutput) -> str | None:
        items = values.items_of(self.value(node.iter, scope), self.budget)
        if node.test is not None:
            kept = []
            for item in items:
                inner = NameScope(scope)
                self.budget.spend()
                self.assign(node.target, item, inner)
                if self.value(node.test, inner):
                    kept.append(item)
            items = kept
        if not items:
            self.statements(node.else_, NameScope(scope), out)
            return None
        loop = LoopVariable(items, self.budget)
        for loop.at, item in enumerate(items):
            self.budget.spend()
            inner = NameScope(scope, {"loop": loop})
            self.assign(node.target, item, inner)
            if self.statements(node.body, inner, out) == _BREAK:
                break
        return None

    def set(self, node: nodes.Assign, scope: NameScope, out: TextOutput) -> None:
        self.assign(node.target, self.value(node.node, scope), scope)

    def set_block(self, node: nodes.AssignBlock, scope: NameScope, out: TextOutput) -> str | None:
        text, signal = self._captured(node.body, scope)
        if signal:
            return signal
        value = text if node.filter is None else self.filter(node.filter, scope, text)
        self.assign(node.target, value, scope)
        return None

    def assign(self, target: nodes.Node, value: Any, scope: NameScope) -> None:
        if isinstance(target, nodes.Name):
            scope.names[target.name] = value
        elif isinstance(target, nodes.NSRef):
            namespace = scope.find(target.name)
            if not isinstance(namespace, TemplateNamespace):
                raise SecurityError("cannot assign attribute on non-namespace object")
            namespace.names[target.attr] = value
        else:
            assert isinstance(target, nodes.Tuple)
            parts = values.items_of(value, self.budget)
            if len(parts) != len(target.items):
                raise ValueError(f"unpacks {len(parts)} values into {len(target.items)} names")
            for name, part in zip(target.items, parts, strict=True):
                self.assign(name, part, scope)

    def with_names(self, node: nodes.With, scope: NameScope, out: TextOutput) -> str | None:
        inner = NameScope(scope)
        for target, value in zip(node.targets, node.values, strict=True):
            self.assign(target, self.value(value, inner), inner)
        return self.statements(node.body, inner, out)

    def filter_block(
        self, node: nodes.FilterBlock, scope: NameScope, out: TextOutput
    ) -> str | None:
        text, signal = self._captured(node.body, scope)
        if not signal:
            out.write(values.text_of(self.filter(node.filter, scope, text)))
        return signal

    def macro(self, node: nodes.Macro, scope: NameScope, out: TextOutput) -> None:
        scope.names[node.name] = self._macro(node, node.name, scope)

    def call_block(self, node: nodes.CallBlock, scope: NameScope, out: TextOutput) -> None:
        caller = self._macro(node, "caller", scope)
        out.write(values.text_of(self.call(node.call, scope, caller=caller)))

    def block(self, node: nodes.Block, scope: NameScope, out: TextOutput) -> None:
        while scope.outer is not None:
            scope = scope.outer
        self.statements(node.body, NameScope(scope), out)

    def _macro(
        self, node: nodes.Macro | nodes.CallBlock, name: str, scope: NameScope
    ) -> TemplateFunction:
        """Return a macro. A call sees the current names of the scope the macro is written in."""
        self.budget.spend(len(node.args))
        names = [argument.name for argument in node.args]
        defaults = dict(zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True))

        def call(*args: Any, **kwargs: Any) -> str:
            self.budget.spend(4 * len(names))
            inner = NameScope(scope, dict(zip(names, args, strict=False)))
            inner.names["varargs"] = list(args[len(names) :])
            inner.names["kwargs"] = {k: v for k, v in kwargs.items() if k not in names}
            inner.names["caller"] = kwargs.pop("caller", Undefined(name="caller"))
            for argument in names:
                if argument in kwargs:
                    inner.names[argument] = kwargs[argument]
                elif argument not in inner.names:
                    default = defaults.get(argument)
                    missing = Undefined(f"parameter {argument!r} was not provided", name=argument)
                    inner.names[argument] = (
                        missing if default is None else self.value(default, inner)
                    )
            self._calls += 1
            if self._calls > MAX_CALLS:
                raise SecurityError(f"calls macros more than {MAX_CALLS} deep")
            out = TextOutput(self.budget)
            self.statements(node.body, inner, out)
            self._calls -= 1
            return out.text()

        return TemplateFunction(name, call)


_STATEMENTS: dict[type[nodes.Node], Callable[..., str | None]] = {
    nodes.Output: _Renderer.output,
    nodes.If: _Renderer.condition,
    nodes.For: _Renderer.loop,
    nodes.Assign: _Renderer.set,
    nodes.AssignBlock: _Renderer.set_block,
    nodes.With: _Renderer.with_names,
    nodes.FilterBlock: _Renderer.filter_block,
    nodes.Macro: _Renderer.macro,
    nodes.CallBlock: _Renderer.call_block,
    nodes.Block: _Renderer.block,
    nodes.Break: lambda run, node, scope, out: _BREAK,
    nodes.Continue: lambda run, node, scope, out: _CONTINUE,
}
# nodes inside which `break` cannot leave a loop around them
_BREAK_BARRIERS = (nodes.Macro, nodes.CallBlock, nodes.Block)
# parts of other nodes
_PARTS = {nodes.Template, nodes.Operand, nodes.Pair, nodes.Keyword, nodes.Slice, nodes.NSRef}
