"""Remedies of errors: EdgeError puts them in parentheses, so their prose has none."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.test_docs import ROOT, SOURCES
from tests.test_docs import strings as written

# a call, such as close(), and a value, such as (3, 2, 1), are code
PROSE = re.compile(r"(?:^|\s)\((?!\d)")
# constants, and variables and functions that are named for it; COMMANDS are only suggested from
NAMED = re.compile(r"(?!COMMANDS)_?[A-Z_]+|\w*(?:remedy|hint|install|requirement|suggestion)\w*")
Values = dict[str, list[ast.expr]]


def test_no_remedy_has_parentheses_in_its_prose() -> None:
    count, wrong = 0, []
    every = {file: read(file) for file in SOURCES}
    everywhere: Values = defaultdict(list)
    for here, _ in every.values():
        for name, values in here.items():
            everywhere[name] += values
    for file, (here, given) in every.items():
        for value in given:
            texts = list(said(value, here, everywhere, set()))
            count += bool(texts)
            wrong += [f"{file.relative_to(ROOT)}: {t}" for t in texts if PROSE.search(t)]
    assert count > 400 and not sorted({*wrong})


def read(file: Path) -> tuple[Values, list[ast.expr]]:
    """Return the named values and the remedies of a file. The rest of its tree is dropped: garbage
    collection takes longer over many trees than their parsing.
    """
    nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    return named_values(nodes), list(remedies(nodes))


def remedies(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Return what errors, and faults to be raised together, are given as their remedy."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        yield from (each.value for each in node.keywords if each.arg == "remedy")
        match node.func:
            case ast.Attribute(owner, "add") if ast.unparse(owner).endswith("faults"):
                yield from node.args[2:3]


def said(value: ast.AST, here: Values, everywhere: Values, seen: set[str]) -> Iterator[str]:
    """Return the strings of an expression, and of the names and functions it uses."""
    yield from written(value)
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and node.id not in seen and NAMED.fullmatch(node.id):
            seen.add(node.id)
            for found in here.get(node.id) or everywhere.get(node.id, ()):
                yield from said(found, here, everywhere, seen)


def named_values(nodes: list[ast.AST]) -> Values:
    """Return what each name is assigned, and what each function that `said` follows returns."""
    found: Values = defaultdict(list)
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id].append(node.value)
        elif isinstance(node, ast.FunctionDef) and NAMED.fullmatch(node.name):
            returns = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            found[node.name] += [each.value for each in returns if each.value is not None]
    return found
