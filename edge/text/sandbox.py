"""A Jinja sandbox for untrusted templates: no attribute leaks, bounded time, bounded memory.

The language is what chat templates use: loops, conditions, macros, namespaces, and the filters and
methods named below. Before compiling, a tick is put into every loop and macro body, and every `~`
becomes a checked call; `+`, `*`, `%` and all calls are checked through the sandbox's own hooks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeVisitor

MAX_SIZE = 4 << 20  # of any one value, and characters of the whole output
ELEMENT = 16  # what one value adds to a size, whatever it is
MAX_TICKS = 200_000  # loop rounds, calls and filters of one rendering
MAX_SECONDS = 5.0


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FILTERS = _names(
    "abs capitalize count d default dictsort first float indent int items join last "
    "length list lower map max min reject rejectattr replace reverse round safe select "
    "selectattr sort string title tojson trim unique upper"
)
TESTS = _names(
    "boolean defined divisibleby eq equalto even false float in integer iterable mapping "
    "ne none number odd sequence string true undefined"
)
METHODS = {
    str: _names(
        "capitalize count endswith find index isalpha isdigit islower isspace isupper join "
        "lower lstrip removeprefix removesuffix replace rfind rindex rpartition partition "
        "rsplit rstrip split splitlines startswith strip title upper"
    ),
    dict: _names("get items keys values"),
    list: _names("count index"),
    tuple: _names("count index"),
}


class TemplateRaised(TemplateError):
    """The template called `raise_exception`."""


class Budget:
    """What is left of the time and steps of one rendering."""

    def __init__(self) -> None:
        self.ticks = MAX_TICKS
        self.deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> str:
        self.ticks -= 1
        if self.ticks < 0:
            raise SecurityError(f"takes more than {MAX_TICKS} steps")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"takes more than {MAX_SECONDS:g} seconds")
        return ""


def measure(*values: Any, limit: int = MAX_SIZE) -> int:
    """Characters in values and ELEMENT for each value, shared ones each time they are reached.

    Raises SecurityError beyond the limit, so that nothing is built from values that are too large.
    """
    size, waiting = 0, list(values)
    while waiting:
        value = waiting.pop()
        size += ELEMENT
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, int):
            if value.bit_length() > 4096:
                raise SecurityError("computes a number of more than 4096 bits")
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
        if size > limit:
            raise SecurityError(f"builds a value of more than {limit} characters")
    return size


class _Limits(NodeVisitor):
    """Rewrites a template's syntax tree so that nothing in it runs unchecked.

    Loops and macros tick. `~` and comparisons become checked calls: shared lists can stand for
    more elements than fit the memory. Tuples become lists, so that they are never hashed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> None:
        self.depth += 1
        if self.depth > 100:
            raise SecurityError("nests more than 100 deep")
        if isinstance(node, nodes.Name) and node.name.startswith("__"):
            raise SecurityError(f"line {node.lineno}: uses the name {node.name}")
        super().generic_visit(node, *args, **kwargs)
        self.depth -= 1
        for name, value in node.iter_fields():
            if isinstance(value, list):
                value[:] = [_tamed(item) for item in value]
            else:
                setattr(node, name, _tamed(value))
        if isinstance(node, nodes.Compare):
            node.expr = _call("__sized", [node.expr], node.lineno)
        if isinstance(node, nodes.Operand):
            node.expr = _call("__sized", [node.expr], node.lineno)
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Output([_call("__tick", [], node.lineno)], lineno=node.lineno)
            node.body.insert(0, tick)


def _tamed(value: Any) -> Any:
    if isinstance(value, nodes.Concat):
        return _call("__join", value.nodes, value.lineno)
    if isinstance(value, nodes.Tuple) and value.ctx == "load":
        return nodes.List(value.items, lineno=value.lineno)
    return value


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Expr:
    called = nodes.Name(name, "load", lineno=line)
    return nodes.Call(called, args, [], None, None, lineno=line)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which only marks text in training."""

    tags = {"generation"}  # noqa: RUF012 - the base class's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. Not for use by two threads at once."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # before the first rendering: Jinja evaluates constant expressions when it compiles
        self.budget = Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_printable,
            autoescape=False,
            cache_size=0,
        )
        own: dict[str, Callable[..., Any]] = {
            "tojson": _to_json,
            "replace": _replace,
            "join": _join,
            "indent": _indent,
            "map": _named_map,
            "string": _string,
        }
        self.filters = {
            name: self._checked(own.get(name, made), name)
            for name, made in self.filters.items()
            if name in FILTERS
        }
        self.tests = {
            name: self._checked(cast(Callable[..., Any], made), name)
            for name, made in self.tests.items()
            if name in TESTS
        }
        self.globals = {
            "namespace": self.globals["namespace"],
            "dict": dict,
            "range": self.globals["range"],
            "raise_exception": _raise,
            "strftime_now": _now,
            "__tick": lambda: self.budget.tick(),
            "__join": _concatenate,
            "__sized": _sized,
        }

    def compile_limited(self, source: str) -> Any:
        """A template with its limits built in. Raises TemplateError, RecursionError."""
        tree = self.parse(source)
        for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise SecurityError(f"line {node.lineno}: reads another template")
        _Limits().visit(tree)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def _checked(self, made: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A filter or test that ticks and measures; Jinja's marks on the function are kept."""

        def limited(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            measure(*args, *kwargs.values())
            return made(*args, **kwargs)

        limited.__dict__.update(getattr(made, "__dict__", {}))  # built-in functions have none
        limited.__name__ = name
        return limited

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("uses the power operator")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formats text with %; join it with ~")
        size = measure(left, right)
        if operator == "*" and not (_is_number(left) and _is_number(right)):
            # text or a list times a number
            count = right if isinstance(right, int) else left
            if isinstance(count, int) and size * max(count, 0) > MAX_SIZE:
                raise SecurityError(f"builds a value of more than {MAX_SIZE} characters")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """No wrapper for `format`, so that it is refused: its arguments do not bound its result."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"uses {attribute!r} of a {type(obj).__name__}")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value) and not attr.startswith("_")

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        measure(owner, *args, *kwargs.values())
        if isinstance(owner, str) and name == "replace":
            return _replace(owner, *args)
        if isinstance(owner, str) and name == "join":
            return _join(args[0] if args else [], owner)
        return super().call(context, obj, *args, **kwargs)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _sized(value: Any) -> Any:
    measure(value)
    return value


def _concatenate(*parts: Any) -> str:
    measure(*parts)
    return "".join(_text(part) for part in parts)


def _text(value: Any) -> str:
    """Text of a plain value. Containers are refused: their length is not bounded by their size."""
    if isinstance(value, (str, int, float, Undefined)) or value is None:
        return str(value)
    raise SecurityError(f"prints a {type(value).__name__}; use tojson")


def _printable(value: Any) -> Any:
    """Jinja's hook on everything printed."""
    return value if isinstance(value, str) else _text(value)


def _replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    text, old, new = _text(text), _text(old), _text(new)
    if len(text) + text.count(old) * len(new) > MAX_SIZE:
        raise SecurityError(f"builds a value of more than {MAX_SIZE} characters")
    return str(text.replace(old, new, count))


def _join(values: Iterable[Any], between: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise SecurityError("joins an attribute; use map first")
    items, between = list(values), _text(between)
    if measure(*items) + len(items) * len(between) > MAX_SIZE:
        raise SecurityError(f"builds a value of more than {MAX_SIZE} characters")
    return str(between.join(_text(item) for item in items))


def _indent(text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    text, pad = _text(text), width if isinstance(width, str) else " " * min(int(width), 1000)
    if len(text) + (text.count("\n") + 1) * len(pad) > MAX_SIZE:
        raise SecurityError(f"builds a value of more than {MAX_SIZE} characters")
    first_line, *others = text.split("\n")
    others = [pad + line if line or blank else line for line in others]
    return "\n".join([pad + first_line if first else first_line, *others])


def _string(value: Any) -> str:
    return _text(value)


def _named_map(values: Iterable[Any], name: str | None = None, **kwargs: Any) -> list[Any]:
    """`map(attribute=…)` over mappings, and `map('trim' | 'upper' | 'lower' | 'string')`."""
    if set(kwargs) <= {"attribute", "default"} and "attribute" in kwargs and name is None:
        key, default = kwargs["attribute"], kwargs.get("default")
        return [v.get(key, default) if isinstance(v, Mapping) else default for v in values]
    simple: dict[str | None, Callable[[str], str]] = {
        "trim": str.strip,
        "upper": str.upper,
        "lower": str.lower,
        "string": _text,
    }
    if name in simple and not kwargs:
        return [simple[name](_text(value)) for value in values]
    raise SecurityError(f"maps {name or sorted(kwargs)}, which is not supported")


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as Hugging Face's templates expect it: not ASCII only, nothing escaped for HTML."""
    kept = {"ensure_ascii": False, "sort_keys": False} | {
        key: options[key] for key in ("ensure_ascii", "separators", "sort_keys") if key in options
    }
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError("indents JSON by more than 16")
    measure(value)
    if isinstance(value, Undefined):
        raise SecurityError("writes an undefined value as JSON")
    try:
        text = json.dumps(value, indent=indent, allow_nan=False, **kept)
    except (TypeError, ValueError) as problem:
        raise SecurityError(f"cannot write a value as JSON: {problem}") from None
    measure(text)
    return text


def _raise(message: Any) -> str:
    raise TemplateRaised(_text(message))


def _now(form: str) -> str:
    if len(form) > 64:
        raise SecurityError("formats the time with more than 64 characters")
    return datetime.now().strftime(form)
