"""An interpreter of the Jinja that chat templates are written in, for templates of strangers.

Jinja's own parser reads the template. What it means is carried out here, node by node, on plain
values, and paid for from a budget: nothing of Python can be reached, and time and memory have
bounds that are the same on every machine. Meaning and messages are those of Jinja
(jinja.palletsprojects.com, Template Designer Documentation), with the extensions and functions
that transformers gives to chat templates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Undefined

from edge.text import jinja_values as values
from edge.text.jinja_values import ELEMENT, FILTERS, MAX_SIZE, TESTS, Budget

MAX_NESTED = 100  # of the syntax
MAX_CALLS = 16  # of macros in macros
_MISSING = object()


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which only marks text in training."""

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


class Program:
    """A template that was read. Threads may run it at once."""

    def __init__(self, source: str) -> None:
        """Raises TemplateError, ValueError, RecursionError."""
        tree = _PARSER.parse(source)
        _check(tree)
        self._body: Sequence[nodes.Node] = tree.body

    def render(self, names: Mapping[str, Any]) -> str:
        """The text for these values of names. Raises TemplateError, and what expressions raise."""
        run = _Run()
        out = _Output(run.budget)
        run.statements(self._body, _Scope(None, dict(names)), out)
        return out.text()


def _check(tree: nodes.Node) -> None:
    """Raise unless everything in the tree is known, without recursion."""
    level: list[tuple[nodes.Node, bool]] = [(tree, False)]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTED:
            raise SecurityError(f"nests more than {MAX_NESTED} deep")
        below: list[tuple[nodes.Node, bool]] = []
        for node, looping in level:
            _check_node(node)
            if isinstance(node, (nodes.Break, nodes.Continue)) and not looping:
                raise TemplateAssertionError("leaves a loop outside of one", node.lineno)
            inside = isinstance(node, nodes.For) or (looping and not isinstance(node, _WRITING))
            below += [(child, inside) for child in node.iter_child_nodes()]
        level = below


def _check_node(node: nodes.Node) -> None:
    kind = type(node)
    if kind not in _STATEMENTS and kind not in _EXPRESSIONS and kind not in _PARTS:
        raise SecurityError(f"line {node.lineno}: uses {kind.__name__}, which is not supported")
    for name in ("name", "attr"):
        said = getattr(node, name, None)
        if isinstance(said, str) and said.startswith("__"):
            raise SecurityError(f"line {node.lineno}: uses the name {said}")
    if isinstance(node, nodes.Filter) and node.name not in FILTERS:
        raise TemplateAssertionError(f"No filter named {node.name!r}.", node.lineno)
    if isinstance(node, nodes.Test) and node.name not in TESTS:
        raise TemplateAssertionError(f"No test named {node.name!r}.", node.lineno)
    if getattr(node, "dyn_args", None) or getattr(node, "dyn_kwargs", None):
        raise SecurityError(f"line {node.lineno}: unpacks arguments")
    if isinstance(node, nodes.For) and node.recursive:
        raise SecurityError(f"line {node.lineno}: loops recursively")
    if isinstance(node, nodes.Const):
        values.measure(node.value)


class _Output:
    """Text that is written part by part."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._parts: list[str] = []
        self._size = 0

    def write(self, part: str) -> None:
        self._size += len(part)
        if self._size > MAX_SIZE:
            raise SecurityError(f"writes more than {MAX_SIZE} characters")
        self._parts.append(part)

    def text(self) -> str:
        self._budget.make(self._size)
        return "".join(self._parts)


class _Scope:
    """Names and values, and those of the scope around it."""

    def __init__(self, outer: _Scope | None, names: dict[str, Any] | None = None) -> None:
        self.outer, self.names = outer, {} if names is None else names

    def find(self, name: str) -> Any:
        scope: _Scope | None = self
        while scope is not None:
            value = scope.names.get(name, _MISSING)
            if value is not _MISSING:
                return value
            scope = scope.outer
        return _MISSING


class _Namespace:
    """`namespace()`: names that a loop can set for what comes after it."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names


class _Function:
    """What a template may call."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name, self.call = name, call


class _Loop:
    """`loop`."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.at = items, -1
        self._before: Any = _MISSING

    def attribute(self, name: str) -> Any:
        at, length = self.at, len(self.items)
        known: dict[str, Any] = {
            "index": at + 1, "index0": at, "first": at == 0, "last": at == length - 1,
            "length": length, "revindex": length - at, "revindex0": length - at - 1,
            "depth": 1, "depth0": 0,
        }  # fmt: skip
        if name in known:
            return known[name]
        if name == "previtem":
            return self.items[at - 1] if at else Undefined("there is no previous item")
        if name == "nextitem":
            return self.items[at + 1] if at + 1 < length else Undefined("there is no next item")
        if name == "cycle":
            return _Function(name, lambda *given: given[at % len(given)])
        if name == "changed":
            return _Function(name, self._changed)
        return Undefined(obj=self, name=name)

    def _changed(self, *given: Any) -> bool:
        changed = self._before is _MISSING or self._before != given
        self._before = given
        return changed


_BREAK, _CONTINUE = "break", "continue"


class _Run:
    """One rendering. Statements return _BREAK or _CONTINUE where a loop is left, else None."""

    def __init__(self) -> None:
        self.budget = Budget()
        self._calls = 0
        self._functions = {
            "namespace": _Function("namespace", self._namespace),
            "dict": _Function("dict", self._dict),
            "range": _Function("range", lambda *b: self.budget.made(values.counted(*b))),
            "raise_exception": _Function("raise_exception", values.raised),
            "strftime_now": _Function("strftime_now", values.now),
        }

    def _namespace(self, *given: Any, **names: Any) -> _Namespace:
        return _Namespace(self._dict(*given, **names))

    def _dict(self, *given: Any, **names: Any) -> dict[Any, Any]:
        self.budget.read(*given, *names.values())
        found: dict[Any, Any] = self.budget.made(values.paired(*given, **names))
        return found

    # -- statements ------------------------------------------------------------------------------

    def statements(self, body: Sequence[nodes.Node], scope: _Scope, out: _Output) -> str | None:
        for node in body:
            self.budget.spend()
            left = _STATEMENTS[type(node)](self, node, scope, out)
            if left:
                return left
        return None

    def _written(self, body: Sequence[nodes.Node], scope: _Scope) -> tuple[str, str | None]:
        """What statements write, in a scope of their own, and whether they left a loop."""
        out = _Output(self.budget)
        left = self.statements(body, _Scope(scope), out)
        return out.text(), left

    def output(self, node: nodes.Output, scope: _Scope, out: _Output) -> None:
        for part in node.nodes:
            if isinstance(part, nodes.TemplateData):
                out.write(part.data)
            else:
                self.budget.spend()
                out.write(values.text_of(self.value(part, scope)))

    def condition(self, node: nodes.If, scope: _Scope, out: _Output) -> str | None:
        for one in (node, *node.elif_):
            self.budget.spend()
            if self.value(one.test, scope):
                return self.statements(one.body, scope, out)
        return self.statements(node.else_, scope, out)

    def loop(self, node: nodes.For, scope: _Scope, out: _Output) -> str | None:
        items = values.items_of(self.value(node.iter, scope), self.budget)
        if node.test is not None:
            kept = []
            for item in items:
                inner = _Scope(scope)
                self.budget.spend()
                self.assign(node.target, item, inner)
                if self.value(node.test, inner):
                    kept.append(item)
            items = kept
        if not items:
            self.statements(node.else_, _Scope(scope), out)
            return None
        loop = _Loop(items)
        for loop.at, item in enumerate(items):
            self.budget.spend()
            inner = _Scope(scope, {"loop": loop})
            self.assign(node.target, item, inner)
            if self.statements(node.body, inner, out) == _BREAK:
                break
        return None

    def set(self, node: nodes.Assign, scope: _Scope, out: _Output) -> None:
        self.assign(node.target, self.value(node.node, scope), scope)

    def set_block(self, node: nodes.AssignBlock, scope: _Scope, out: _Output) -> str | None:
        text, left = self._written(node.body, scope)
        if left:
            return left
        value = text if node.filter is None else self.filter(node.filter, scope, text)
        self.assign(node.target, value, scope)
        return None

    def assign(self, target: nodes.Node, value: Any, scope: _Scope) -> None:
        if isinstance(target, nodes.Name):
            scope.names[target.name] = value
        elif isinstance(target, nodes.NSRef):
            space = scope.find(target.name)
            if not isinstance(space, _Namespace):
                raise SecurityError("cannot assign attribute on non-namespace object")
            space.names[target.attr] = value
        else:
            assert isinstance(target, nodes.Tuple)
            parts = values.items_of(value, self.budget)
            if len(parts) != len(target.items):
                raise ValueError(f"unpacks {len(parts)} values into {len(target.items)} names")
            for name, part in zip(target.items, parts, strict=True):
                self.assign(name, part, scope)

    def with_names(self, node: nodes.With, scope: _Scope, out: _Output) -> str | None:
        inner = _Scope(scope)
        for target, value in zip(node.targets, node.values, strict=True):
            self.assign(target, self.value(value, inner), inner)
        return self.statements(node.body, inner, out)

    def filter_block(self, node: nodes.FilterBlock, scope: _Scope, out: _Output) -> str | None:
        text, left = self._written(node.body, scope)
        if not left:
            out.write(values.text_of(self.filter(node.filter, scope, text)))
        return left

    def macro(self, node: nodes.Macro, scope: _Scope, out: _Output) -> None:
        scope.names[node.name] = self._made(node, node.name, scope)

    def call_block(self, node: nodes.CallBlock, scope: _Scope, out: _Output) -> None:
        caller = self._made(node, "caller", scope)
        out.write(values.text_of(self.call(node.call, scope, caller=caller)))

    def block(self, node: nodes.Block, scope: _Scope, out: _Output) -> None:
        while scope.outer is not None:
            scope = scope.outer
        self.statements(node.body, _Scope(scope), out)

    def _made(self, node: nodes.Macro | nodes.CallBlock, name: str, scope: _Scope) -> _Function:
        """A macro: its names are those around where it is written, when it is called."""
        names = [argument.name for argument in node.args]
        defaults = dict(zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True))

        def call(*given: Any, **named: Any) -> str:
            inner = _Scope(scope, dict(zip(names, given, strict=False)))
            inner.names["varargs"] = list(given[len(names) :])
            inner.names["kwargs"] = {k: v for k, v in named.items() if k not in names}
            inner.names["caller"] = named.pop("caller", Undefined(name="caller"))
            for argument in names:
                if argument in named:
                    inner.names[argument] = named[argument]
                elif argument not in inner.names:
                    default = defaults.get(argument)
                    missing = Undefined(f"parameter {argument!r} was not provided", name=argument)
                    inner.names[argument] = (
                        missing if default is None else self.value(default, inner)
                    )
            self._calls += 1
            if self._calls > MAX_CALLS:
                raise SecurityError(f"calls macros more than {MAX_CALLS} deep")
            out = _Output(self.budget)
            self.statements(node.body, inner, out)
            self._calls -= 1
            return out.text()

        return _Function(name, call)

    # -- expressions -----------------------------------------------------------------------------

    def value(self, node: nodes.Node, scope: _Scope) -> Any:
        self.budget.spend()
        return _EXPRESSIONS[type(node)](self, node, scope)

    def name(self, node: nodes.Name, scope: _Scope) -> Any:
        found = scope.find(node.name)
        if found is _MISSING:
            found = self._functions.get(node.name, _MISSING)
        return Undefined(name=node.name) if found is _MISSING else found

    def constant(self, node: nodes.Const, scope: _Scope) -> Any:
        return node.value

    def data(self, node: nodes.TemplateData, scope: _Scope) -> str:
        return node.data

    def listed(self, node: nodes.List | nodes.Tuple, scope: _Scope) -> list[Any]:
        self.budget.make(ELEMENT * (1 + len(node.items)))
        return [self.value(item, scope) for item in node.items]

    def mapped(self, node: nodes.Dict, scope: _Scope) -> dict[Any, Any]:
        self.budget.make(2 * ELEMENT * (1 + len(node.items)))
        pairs = ((self.value(p.key, scope), self.value(p.value, scope)) for p in node.items)
        return {values.key_of(key): value for key, value in pairs}

    def either(self, node: nodes.CondExpr, scope: _Scope) -> Any:
        if self.value(node.test, scope):
            return self.value(node.expr1, scope)
        if node.expr2 is None:
            return Undefined("the inline if-expression evaluated to false and no else was given")
        return self.value(node.expr2, scope)

    def both(self, node: nodes.And, scope: _Scope) -> Any:
        return self.value(node.left, scope) and self.value(node.right, scope)

    def any(self, node: nodes.Or, scope: _Scope) -> Any:
        return self.value(node.left, scope) or self.value(node.right, scope)

    def negated(self, node: nodes.Not, scope: _Scope) -> bool:
        return not self.value(node.node, scope)

    def joined(self, node: nodes.Concat, scope: _Scope) -> str:
        parts = [values.text_of(self.value(part, scope)) for part in node.nodes]
        self.budget.make(sum(map(len, parts)))
        return "".join(parts)

    def compared(self, node: nodes.Compare, scope: _Scope) -> Any:
        left, holds = self.value(node.expr, scope), True
        for operand in node.ops:
            right = self.value(operand.expr, scope)
            self.budget.read(_plain(left), _plain(right))
            if operand.op in ("in", "notin"):
                _containing(left, right)
            holds = _COMPARISONS[operand.op](left, right)
            if not holds:
                break
            left = right
        return holds

    def sign(self, node: nodes.UnaryExpr, scope: _Scope) -> Any:
        value = self.value(node.node, scope)
        if not isinstance(value, (int, float)):
            _refuse(value, f"bad operand type for unary {node.operator}: {type(value).__name__!r}")
        return value if node.operator == "+" else -value

    def computed(self, node: nodes.BinExpr, scope: _Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        sign = node.operator
        for value in (left, right):
            if isinstance(value, Undefined):
                str(value + 0)  # raises what Jinja says of it
        if _is_number(left) and _is_number(right) and sign in _NUMBERS:
            self.budget.read(left, right)
            return self.budget.made(_NUMBERS[sign](left, right))
        if sign == "+":
            if isinstance(left, str) and isinstance(right, str):
                self.budget.make(len(left) + len(right))
                return left + right
            if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                self.budget.make(ELEMENT * (len(left) + len(right)))
                return [*left, *right]
        if sign == "*":
            many, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(many, (str, list)) and isinstance(times, int):
                self.budget.make(self.budget.read(many) * max(times, 0))
                return many * times
        if sign == "%" and isinstance(left, str):
            raise SecurityError("formats text with %; join it with ~")
        if sign == "**":
            raise SecurityError("uses the power operator")
        raise TypeError(
            f"unsupported operand types for {sign}: {type(left).__name__!r} and "
            f"{type(right).__name__!r}"
        )

    def filter(self, node: nodes.Filter, scope: _Scope, given: Any = _MISSING) -> Any:
        """`given`: what a block wrote, where the filter has no expression."""
        first = given
        if node.node is not None:
            first = (
                self.filter(node.node, scope, given)
                if isinstance(node.node, nodes.Filter) and given is not _MISSING
                else self.value(node.node, scope)
            )
        args, named = self._arguments(node, scope)
        return FILTERS[node.name](self.budget, first, *args, **named)

    def test(self, node: nodes.Test, scope: _Scope) -> bool:
        value = self.value(node.node, scope)
        args, named = self._arguments(node, scope)
        if node.name in values.COMPARING:
            self.budget.read(_plain(value), *map(_plain, args))
        if node.name == "in":
            _containing(value, args[0])
        return bool(TESTS[node.name](value, *args, **named))

    def _arguments(self, node: Any, scope: _Scope) -> tuple[list[Any], dict[str, Any]]:
        args = [self.value(argument, scope) for argument in node.args]
        return args, {pair.key: self.value(pair.value, scope) for pair in node.kwargs}

    def call(self, node: nodes.Call, scope: _Scope, **more: Any) -> Any:
        called = self.value(node.node, scope)
        args, named = self._arguments(node, scope)
        if not isinstance(called, _Function):
            _refuse(called, f"{type(called).__name__!r} object is not callable")
        return called.call(*args, **named, **more)

    def attribute(self, node: nodes.Getattr, scope: _Scope) -> Any:
        return self._attribute(self.value(node.node, scope), node.attr)

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Undefined):
            _refuse(owner, "")
        if isinstance(owner, _Loop):
            return owner.attribute(name)
        if isinstance(owner, _Namespace):
            return owner.names.get(name, Undefined(obj=owner, name=name))
        method = values.method(self.budget, owner, name)
        if method is not None:
            return _Function(name, method)
        if name.startswith("_") or hasattr(type(owner), name):
            raise SecurityError(f"uses {name!r} of a {type(owner).__name__}")
        if isinstance(owner, Mapping):
            return owner.get(name, Undefined(obj=owner, name=name))
        return Undefined(obj=owner, name=name)

    def item(self, node: nodes.Getitem, scope: _Scope) -> Any:
        owner = self.value(node.node, scope)
        if isinstance(owner, Undefined):
            _refuse(owner, "")
        if isinstance(node.arg, nodes.Slice):
            return self._sliced(owner, node.arg, scope)
        key = self.value(node.arg, scope)
        if isinstance(owner, Mapping):
            found = owner.get(values.key_of(key), _MISSING)
        elif isinstance(owner, (str, list, tuple)) and isinstance(key, int):
            found = owner[key] if -len(owner) <= key < len(owner) else _MISSING
        else:
            found = _MISSING
        if found is not _MISSING:
            return found
        return (
            self._attribute(owner, key) if isinstance(key, str) else Undefined(obj=owner, name=key)
        )

    def _sliced(self, owner: Any, node: nodes.Slice, scope: _Scope) -> Any:
        ends = [None if end is None else self.value(end, scope)
                for end in (node.start, node.stop, node.step)]  # fmt: skip
        if not isinstance(owner, (str, list, tuple)):
            return Undefined(obj=owner, name="slice")
        self.budget.make((1 if isinstance(owner, str) else ELEMENT) * len(owner))
        found = owner[slice(*ends)]
        return found if isinstance(found, str) else list(found)


def _plain(value: Any) -> Any:
    """What is measured of a value: functions and namespaces count as one."""
    return value if isinstance(value, (str, int, list, tuple, dict)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _refuse(value: Any, message: str) -> NoReturn:
    """Raise what Jinja says of an undefined value, or TypeError."""
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    raise TypeError(message)


def _containing(left: Any, right: Any) -> None:
    if not isinstance(right, (str, list, tuple, dict, Undefined)):
        raise TypeError(f"argument of type {type(right).__name__!r} is not iterable")
    if isinstance(right, dict):
        values.key_of(left)


_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le,
    "gt": operator.gt, "gteq": operator.ge,
    "in": lambda left, right: left in right, "notin": lambda left, right: left not in right,
}  # fmt: skip
_STATEMENTS: dict[type[nodes.Node], Callable[..., str | None]] = {
    nodes.Output: _Run.output,
    nodes.If: _Run.condition,
    nodes.For: _Run.loop,
    nodes.Assign: _Run.set,
    nodes.AssignBlock: _Run.set_block,
    nodes.With: _Run.with_names,
    nodes.FilterBlock: _Run.filter_block,
    nodes.Macro: _Run.macro,
    nodes.CallBlock: _Run.call_block,
    nodes.Block: _Run.block,
    nodes.Break: lambda run, node, scope, out: _BREAK,
    nodes.Continue: lambda run, node, scope, out: _CONTINUE,
}
_EXPRESSIONS: dict[type[nodes.Node], Callable[..., Any]] = {
    nodes.Name: _Run.name,
    nodes.Const: _Run.constant,
    nodes.TemplateData: _Run.data,
    nodes.List: _Run.listed,
    nodes.Tuple: _Run.listed,
    nodes.Dict: _Run.mapped,
    nodes.CondExpr: _Run.either,
    nodes.And: _Run.both,
    nodes.Or: _Run.any,
    nodes.Not: _Run.negated,
    nodes.Concat: _Run.joined,
    nodes.Compare: _Run.compared,
    nodes.Neg: _Run.sign,
    nodes.Pos: _Run.sign,
    **dict.fromkeys(
        (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
        _Run.computed,
    ),
    nodes.Filter: _Run.filter,
    nodes.Test: _Run.test,
    nodes.Call: _Run.call,
    nodes.Getattr: _Run.attribute,
    nodes.Getitem: _Run.item,
}
# what no loop around it is left from
_WRITING = (nodes.Macro, nodes.CallBlock, nodes.Block)
# nodes of others
_PARTS = {nodes.Template, nodes.Operand, nodes.Pair, nodes.Keyword, nodes.Slice, nodes.NSRef}
