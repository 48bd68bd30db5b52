"""The expressions of templates, evaluated at the expense of the rendering's budget."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

from edge.text import jinja_values as values
from edge.text.jinja_filters import COMPARING, FILTERS, TESTS
from edge.text.jinja_scope import (
    MISSING,
    LoopVariable,
    NameScope,
    TemplateFunction,
    TemplateNamespace,
)
from edge.text.jinja_values import ELEMENT, Budget


class Expressions:
    """The expressions that one rendering can evaluate."""

    def __init__(self) -> None:
        self.budget = Budget()
        self._functions = {
            "namespace": TemplateFunction("namespace", self._namespace),
            "dict": TemplateFunction("dict", self._dict),
            "range": TemplateFunction("range", lambda *b: self.budget.made(values.counted(*b))),
            "raise_exception": TemplateFunction("raise_exception", values.raised),
            "strftime_now": TemplateFunction("strftime_now", values.now),
        }

    def _namespace(self, *args: Any, **names: Any) -> TemplateNamespace:
        return TemplateNamespace(self._dict(*args, **names))

    def _dict(self, *args: Any, **names: Any) -> dict[Any, Any]:
        self.budget.read(*args, *names.values())
        result: dict[Any, Any] = self.budget.made(values.paired(*args, **names))
        return result

    def value(self, node: nodes.Node, scope: NameScope) -> Any:
        self.budget.spend()
        return EXPRESSIONS[type(node)](self, node, scope)

    def name(self, node: nodes.Name, scope: NameScope) -> Any:
        found = scope.find(node.name)
        if found is MISSING:
            found = self._functions.get(node.name, MISSING)
        return Undefined(name=node.name) if found is MISSING else found

    def constant(self, node: nodes.Const, scope: NameScope) -> Any:
        return node.value

    def data(self, node: nodes.TemplateData, scope: NameScope) -> str:
        return node.data

    def listed(self, node: nodes.List | nodes.Tuple, scope: NameScope) -> list[Any]:
        self.budget.make(ELEMENT * (1 + len(node.items)))
        return [self.value(item, scope) for item in node.items]

    def mapped(self, node: nodes.Dict, scope: NameScope) -> dict[Any, Any]:
        self.budget.make(2 * ELEMENT * (1 + len(node.items)))
        pairs = ((self.value(p.key, scope), self.value(p.value, scope)) for p in node.items)
        return {values.key_of(key): value for key, value in pairs}

    def either(self, node: nodes.CondExpr, scope: NameScope) -> Any:
        if self.value(node.test, scope):
            return self.value(node.expr1, scope)
        if node.expr2 is None:
            return Undefined("the inline if-expression evaluated to false and no else was given")
        return self.value(node.expr2, scope)

    def both(self, node: nodes.And, scope: NameScope) -> Any:
        return self.value(node.left, scope) and self.value(node.right, scope)

    def any(self, node: nodes.Or, scope: NameScope) -> Any:
        return self.value(node.left, scope) or self.value(node.right, scope)

    def negated(self, node: nodes.Not, scope: NameScope) -> bool:
        return not self.value(node.node, scope)

    def joined(self, node: nodes.Concat, scope: NameScope) -> str:
        parts = [values.spelled(self.budget, self.value(part, scope)) for part in node.nodes]
        self.budget.make(sum(map(len, parts)))
        return "".join(parts)

    def compared(self, node: nodes.Compare, scope: NameScope) -> Any:
        left, holds = self.value(node.expr, scope), True
        for operand in node.ops:
            right = self.value(operand.expr, scope)
            self.budget.read(_plain(left), _plain(right))
            if operand.op in ("in", "notin"):
                _check_containment(left, right)
            holds = _COMPARISONS[operand.op](left, right)
            if not holds:
                break
            left = right
        return holds

    def sign(self, node: nodes.UnaryExpr, scope: NameScope) -> Any:
        value = self.value(node.node, scope)
        if not isinstance(value, (int, float)):
            _refuse(value, f"bad operand type for unary {node.operator}: {type(value).__name__!r}")
        return value if node.operator == "+" else -value

    def computed(self, node: nodes.BinExpr, scope: NameScope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        sign = node.operator
        for value in (left, right):
            if isinstance(value, Undefined):
                str(value + 0)  # raises Jinja's own error
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
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, (str, list)) and isinstance(times, int):
                self.budget.make(self.budget.read(sequence) * max(times, 0))
                return sequence * times
        if sign == "%" and isinstance(left, str):
            raise SecurityError("formats text with %; join it with ~")
        if sign == "**":
            raise SecurityError("uses the power operator")
        raise TypeError(
            f"unsupported operand types for {sign}: {type(left).__name__!r} and "
            f"{type(right).__name__!r}"
        )

    def filter(self, node: nodes.Filter, scope: NameScope, given: Any = MISSING) -> Any:
        """Apply a filter. `given`: text of a filter block, for a filter without an expression."""
        first = given
        if node.node is not None:
            first = (
                self.filter(node.node, scope, given)
                if isinstance(node.node, nodes.Filter) and given is not MISSING
                else self.value(node.node, scope)
            )
        args, named = self._arguments(node, scope)
        return FILTERS[node.name](self.budget, first, *args, **named)

    def test(self, node: nodes.Test, scope: NameScope) -> bool:
        value = self.value(node.node, scope)
        args, named = self._arguments(node, scope)
        if node.name in COMPARING:
            self.budget.read(_plain(value), *map(_plain, args))
        if node.name == "in":
            _check_containment(value, args[0])
        return bool(TESTS[node.name](value, *args, **named))

    def _arguments(self, node: Any, scope: NameScope) -> tuple[list[Any], dict[str, Any]]:
        args = [self.value(argument, scope) for argument in node.args]
        if node.dyn_args is not None:
            args += values.items_of(self.value(node.dyn_args, scope), self.budget)
        return args, {pair.key: self.value(pair.value, scope) for pair in node.kwargs}

    def call(self, node: nodes.Call, scope: NameScope, **more: Any) -> Any:
        called = self.value(node.node, scope)
        args, named = self._arguments(node, scope)
        if not isinstance(called, TemplateFunction):
            _refuse(called, f"{type(called).__name__!r} object is not callable")
        return called.call(*args, **named, **more)

    def attribute(self, node: nodes.Getattr, scope: NameScope) -> Any:
        return self._attribute(self.value(node.node, scope), node.attr)

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Undefined):
            _refuse(owner, "")
        if isinstance(owner, LoopVariable):
            return owner.attribute(name)
        if isinstance(owner, TemplateNamespace):
            return owner.names.get(name, Undefined(obj=owner, name=name))
        method = values.method(self.budget, owner, name)
        if method is not None:
            return TemplateFunction(name, method)
        if name.startswith("_") or hasattr(type(owner), name):
            raise SecurityError(f"uses {name!r} of a {type(owner).__name__}")
        if isinstance(owner, Mapping):
            return owner.get(name, Undefined(obj=owner, name=name))
        return Undefined(obj=owner, name=name)

    def item(self, node: nodes.Getitem, scope: NameScope) -> Any:
        owner = self.value(node.node, scope)
        if isinstance(owner, Undefined):
            _refuse(owner, "")
        if isinstance(node.arg, nodes.Slice):
            return self._sliced(owner, node.arg, scope)
        key = self.value(node.arg, scope)
        if isinstance(owner, Mapping):
            found = owner.get(values.key_of(key), MISSING)
        elif isinstance(owner, (str, list, tuple)) and isinstance(key, int):
            found = owner[key] if -len(owner) <= key < len(owner) else MISSING
        else:
            found = MISSING
        if found is not MISSING:
            return found
        if isinstance(key, str):
            return self._attribute(owner, key)
        # an error message would print all of the key
        name = type(key).__name__ if isinstance(key, (Mapping, list, tuple)) else key
        return Undefined(obj=owner, name=name)

    def _sliced(self, owner: Any, node: nodes.Slice, scope: NameScope) -> Any:
        ends = [None if end is None else self.value(end, scope)
                for end in (node.start, node.stop, node.step)]  # fmt: skip
        if not isinstance(owner, (str, list, tuple)):
            return Undefined(obj=owner, name="slice")
        self.budget.make((1 if isinstance(owner, str) else ELEMENT) * len(owner))
        part = owner[slice(*ends)]
        return part if isinstance(part, str) else list(part)


def _plain(value: Any) -> Any:
    """Return the value to measure; None, of the least size, for functions and namespaces."""
    return value if isinstance(value, (str, int, list, tuple, dict)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _refuse(value: Any, message: str) -> NoReturn:
    """Raise Jinja's error for an undefined value, otherwise TypeError."""
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    raise TypeError(message)


def _check_containment(left: Any, right: Any) -> None:
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
EXPRESSIONS: dict[type[nodes.Node], Callable[..., Any]] = {
    nodes.Name: Expressions.name,
    nodes.Const: Expressions.constant,
    nodes.TemplateData: Expressions.data,
    nodes.List: Expressions.listed,
    nodes.Tuple: Expressions.listed,
    nodes.Dict: Expressions.mapped,
    nodes.CondExpr: Expressions.either,
    nodes.And: Expressions.both,
    nodes.Or: Expressions.any,
    nodes.Not: Expressions.negated,
    nodes.Concat: Expressions.joined,
    nodes.Compare: Expressions.compared,
    nodes.Neg: Expressions.sign,
    nodes.Pos: Expressions.sign,
    **dict.fromkeys(
        (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
        Expressions.computed,
    ),
    nodes.Filter: Expressions.filter,
    nodes.Test: Expressions.test,
    nodes.Call: Expressions.call,
    nodes.Getattr: Expressions.attribute,
    nodes.Getitem: Expressions.item,
}
