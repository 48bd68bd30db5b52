"""Checking a graph takes time and memory in proportion to its file."""

from __future__ import annotations

import contextlib
import time
import tracemalloc

import pytest

from edge.errors import BundleError
from edge.protobuf import BYTES, VARINT, put
from edge.runtime import folding, graph, graph_format
from tests.test_graph_checks import WEIGHTS, refused


def wire(*parts: tuple[int, int | str | bytes]) -> bytes:
    """Encode a message quickly: 16,000 functions take the library seconds."""
    return b"".join(
        put(number, VARINT if isinstance(value, int) else BYTES,
            value.encode() if isinstance(value, str) else value)
        for number, value in parts
    )  # fmt: skip


def wired_node(op: str, inputs: list[str], outputs: list[str], *more: tuple[int, bytes]) -> bytes:
    names = [*((1, name) for name in inputs), *((2, name) for name in outputs)]
    return wire(*names, (4, op), *more)


def wired_function(name: str, *nodes: bytes) -> bytes:
    body = ((7, node) for node in nodes)
    return wire((1, name), (4, "x"), (5, "y"), (6, "q"), *body, (10, "edge"))


def wired_model(nodes: list[bytes], functions: list[bytes]) -> bytes:
    body = wire(*((1, node) for node in nodes), (11, wire((1, "x"))))
    parts = ((25, function) for function in functions)
    return wire((1, 10), (7, body), (8, wire((2, 20))), *parts)


EDGE = (7, b"edge")


def taken(model: bytes) -> float:
    """Return the CPU seconds of all checks of a graph before it is loaded."""
    began = time.process_time()
    with contextlib.suppress(BundleError):
        folding.is_bounded(graph.check(model, WEIGHTS, "graph"))
    return time.process_time() - began


def test_checking_takes_time_in_proportion_to_a_graph() -> None:
    """Each took minutes, and takes less than a second."""
    count, neg = 16_000, wired_node("Neg", ["x"], ["y"])
    leaves = [wired_function(f"g{i}", neg) for i in range(count)]
    calls = [wired_node(f"g{i}", ["x"], [f"y{i}"], EDGE) for i in range(count)]
    fan = wired_model([neg], [wired_function("F", *calls), *leaves])
    chain = [wired_function(f"g{i}", wired_node(f"g{i + 1}", ["x"], ["y"], EDGE))
             for i in range(count)]  # fmt: skip
    deep = wired_model([neg], [*chain, wired_function(f"g{count}", neg)])
    names = [wired_node("Neg", ["x"], [f"o{i}"]) for i in range(40_000)]
    branches = ((5, wire((1, f"{name}_branch"), (6, b""), (20, 5))) for name in ("then", "else"))
    chosen = tuple(branches)
    ifs = [wired_node("If", ["x"], [f"z{i}"], *chosen) for i in range(8_000)]
    assert taken(fan) < 10 and taken(deep) < 10 and taken(wired_model([*names, *ifs], [])) < 10


def test_what_a_call_hands_on_is_not_kept_for_each_call() -> None:
    handed_on = (5, wire((1, "q"), (21, "q"), (20, 3)))
    calls = [wired_node(f"g{i}", ["x"], [f"y{i}"], handed_on, EDGE) for i in range(200)]
    leaves = [wired_function(f"g{i}", wired_node("Neg", ["x"], ["y"])) for i in range(200)]
    said = (5, wire((1, "q"), (4, b"\0" * (1 << 20)), (20, 3)))
    call = wired_node("F", ["x"], ["y"], said, EDGE)
    parsed = graph.check(
        wired_model([call], [*leaves, wired_function("F", *calls)]), WEIGHTS, "graph"
    )
    tracemalloc.start()
    try:
        assert folding.is_bounded(parsed)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_what_is_parsed_is_counted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = bytes([0x0A, 4, 0x2A, 2, 0x2A, 0])  # a node with an attribute that has a tensor
    refused(wire((7, tiny * 600_000), (8, wire((2, 20)))), "more than 500000 messages")
    many = wire(*((1, "") for _ in range(5000)))
    monkeypatch.setattr(graph_format, "MAX_FIELDS", 4000)
    refused(wire((7, wire((1, many))), (8, wire((2, 20)))), "or 4000 fields")
