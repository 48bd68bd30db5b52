"""What ONNX Runtime computes from constants while loading is counted before, and bounded."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from edge.runtime import folding, graph
from edge.runtime.graph_format import read_model
from edge.runtime.model import load, resolve
from tests.malformed import resigned
from tests.quantized_models import built, plan_of
from tests.session_models import bundle
from tests.test_graph_checks import BUNDLES
from tests.test_graph_models import MODELS

WEIGHTS = {"weights.bin": 1 << 30}
GRAPH = "graphs/ort.onnx"
make = helper.make_node


def bounded(data: bytes) -> bool:
    return folding.is_bounded(graph.check(data, WEIGHTS, "graph"))


@pytest.mark.parametrize("name", BUNDLES)
def test_graphs_that_ship_are_folded(name: str) -> None:
    assert bounded((Path(resolve(name)) / GRAPH).read_bytes())


@pytest.mark.parametrize("quant", ["fp32", "fp16", "w8", "w4", "w8a8", "w8a8-hadamard"])
@pytest.mark.parametrize("name", MODELS)
def test_every_recipe_is_folded(name: str, quant: str, tmp_path: Path) -> None:
    made = built(name, plan_of(name, quant)[1], tmp_path)
    assert bounded(made.graph.read_bytes())


# -- hostile graphs -------------------------------------------------------------------------------

# 800 MB of floats together: ONNX Runtime 1.31.1 itself folds no value of more than a gigabyte
ROWS, COLUMNS = 1 << 14, 3 << 12


def _integers(name: str, values: list[int] | int) -> NodeProto:
    tensor = numpy_helper.from_array(np.array(values, np.int64), name)
    return make("Constant", [], [name], value=tensor)


def _by_shape() -> Iterator[NodeProto]:
    """A computed size, from constants."""
    yield from (_integers("high", [ROWS]), _integers("broad", [COLUMNS]))
    yield make("Mul", ["high", "broad"], ["size"])
    yield make("ConstantOfShape", ["size"], ["huge"])


def _by_expand() -> Iterator[NodeProto]:
    yield from (_integers("high", [ROWS]), _integers("broad", [COLUMNS]))
    yield make("Concat", ["high", "broad"], ["size"], axis=0)
    yield make("Constant", [], ["one"], value=numpy_helper.from_array(np.ones(1, np.float32)))
    yield make("Expand", ["one", "size"], ["huge"])


def _by_range() -> Iterator[NodeProto]:
    yield from (_integers("none", 0), _integers("step", 1), _integers("high", ROWS))
    yield _integers("broad", COLUMNS // 2)
    yield make("Mul", ["high", "broad"], ["end"])
    yield make("Range", ["none", "end", "step"], ["numbers"])
    yield make("Cast", ["numbers"], ["huge"], to=TensorProto.FLOAT)


def _by_doubling() -> Iterator[NodeProto]:
    yield make("Constant", [], ["d0"], value=numpy_helper.from_array(np.ones(1, np.float32)))
    for i in range(26):
        yield make("Concat", [f"d{i}", f"d{i}"], [f"d{i + 1}"], axis=0)
    yield make("Concat", ["d26"] * 3, ["huge"], axis=0)


def _vectors() -> Iterator[NodeProto]:
    for name, size, shape in (("tall", ROWS, [-1, 1]), ("wide", COLUMNS, [1, -1])):
        yield from (_integers(f"{name}.size", [size]), _integers(f"{name}.shape", shape))
        yield make("ConstantOfShape", [f"{name}.size"], [f"{name}.flat"])
        yield make("Reshape", [f"{name}.flat", f"{name}.shape"], [name])


def _by_broadcasting() -> Iterator[NodeProto]:
    yield from _vectors()
    yield make("Add", ["tall", "wide"], ["huge"])


def _by_product() -> Iterator[NodeProto]:
    yield from _vectors()
    yield make("MatMul", ["tall", "wide"], ["huge"])


def _by_gathering() -> Iterator[NodeProto]:
    yield from _vectors()
    yield make("Cast", ["tall.flat"], ["at"], to=TensorProto.INT64)
    yield make("Gather", ["wide", "at"], ["huge"], axis=0)


def _by_a_static_shape() -> Iterator[NodeProto]:
    """As large as a value that is never made: ONNX Runtime takes a static Shape for a constant."""
    yield _integers("some", [1 << 20])
    yield make("ReduceMax", ["tokens"], ["top"], keepdims=0)
    yield make("Expand", ["top", "some"], ["s0"])
    for i in range(6):
        yield make("Concat", [f"s{i}", f"s{i}"], [f"s{i + 1}"], axis=0)
    yield make("Concat", ["s6"] * 3, ["s7"], axis=0)
    yield make("Shape", ["s7"], ["size"])
    yield make("ConstantOfShape", ["size"], ["huge"])


def _by_many() -> Iterator[NodeProto]:
    """Each of them within a single node's limit."""
    yield _integers("some", [1 << 24])
    for i in range(12):
        yield make("ConstantOfShape", ["some"], [f"m{i}"])
    yield make("Concat", [f"m{i}" for i in range(12)], ["huge"], axis=0)


def _in_a_branch() -> Iterator[NodeProto]:
    """Of an If with a constant condition, which its branch replaces."""
    yield make("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True)))
    inside = [_integers("high", [ROWS]), _integers("broad", [COLUMNS])]
    inside.append(make("Mul", ["high", "broad"], ["size"]))
    inside.append(make("ConstantOfShape", ["size"], ["inner"]))
    end = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    then = helper.make_graph(inside, "then", [], [end])
    other = helper.make_graph([make("Identity", ["one"], ["inner"])], "other", [], [end])
    yield make("Constant", [], ["one"], value=numpy_helper.from_array(np.ones(1, np.float32)))
    yield make("If", ["yes"], ["huge"], then_branch=then, else_branch=other)


def _in_a_function() -> Iterator[NodeProto]:
    yield from (_integers("high", [ROWS]), _integers("broad", [COLUMNS]))
    yield make("Fills", ["high", "broad"], ["huge"], domain="edge")


# what the walk and ONNX Runtime might read differently, where one of them sees no size


def _chosen(name: str) -> Iterator[NodeProto]:
    """Return a value as large as the single number in `name`, or 1 if that list is empty."""
    yield make("ConstantOfShape", [name], ["huge"])


def _by_numbers_of_32_bits() -> Iterator[NodeProto]:
    """In 32 bits 65,536² is 0."""
    for name, value in (("high", 1 << 16), ("end", 1)):
        tensor = numpy_helper.from_array(np.array([value], np.int32), name)
        yield make("Constant", [], [name], value=tensor)
    yield make("Mul", ["high", "high"], ["start"])
    yield _integers("sizes", [ROWS * COLUMNS])
    yield make("Slice", ["sizes", "start", "end"], ["size"])
    yield from _chosen("size")


def _by_an_input_left_out() -> Iterator[NodeProto]:
    """Negative steps, after omitted axes."""
    yield from (_integers("start", [0]), _integers("end", [-9]), _integers("back", [-1]))
    yield _integers("sizes", [ROWS * COLUMNS])
    yield make("Slice", ["sizes", "start", "end", "", "back"], ["size"])
    yield from _chosen("size")


def _by_a_zero_that_is_meant() -> Iterator[NodeProto]:
    """An empty value whose axis of 1 becomes 0, and then a factor."""
    yield from (_integers("empty.size", [0, 1]), _integers("empty.shape", [0, 0]))
    yield make("ConstantOfShape", ["empty.size"], ["empty"])
    yield make("Reshape", ["empty", "empty.shape"], ["emptier"], allowzero=1)
    yield make("Shape", ["emptier"], ["axis"], start=1)
    yield from (_integers("one", [1]), _integers("most", [ROWS * COLUMNS]))
    yield make("Sub", ["one", "axis"], ["whether"])
    yield make("Mul", ["whether", "most"], ["size"])
    yield from _chosen("size")


ATTACKS: tuple[Callable[[], Iterator[NodeProto]], ...] = (
    _by_shape, _by_expand, _by_range, _by_doubling, _by_broadcasting, _by_product, _by_gathering,
    _by_a_static_shape, _by_many, _in_a_branch, _in_a_function, _by_numbers_of_32_bits,
    _by_an_input_left_out, _by_a_zero_that_is_meant,
)  # fmt: skip


def attacked(how: Callable[[], Iterator[NodeProto]], folder: Path) -> None:
    """Return a bundle, with correct hashes, whose logits depend on a value of 800 MB."""
    shutil.copytree(bundle("chat"), folder)
    model = onnx.load(folder / GRAPH, load_external_data=False)
    logits = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["kept" if name == logits else name for name in node.output]
        node.input[:] = ["kept" if name == logits else name for name in node.input]
    body = [make("Mul", ["a", "b"], ["size"]), make("ConstantOfShape", ["size"], ["filled"])]
    opset = [helper.make_opsetid("", 21)]
    model.functions.append(
        helper.make_function("edge", "Fills", ["a", "b"], ["filled"], body, opset)
    )
    # through an op that uses constants: anything else makes a graph unbounded by itself
    model.graph.node.extend([*how(), make("Size", ["huge"], ["count"])])
    model.graph.node.append(make("Cast", ["count"], ["much"], to=TensorProto.FLOAT))
    model.graph.node.append(make("Add", ["kept", "much"], [logits]))
    (folder / GRAPH).write_bytes(model.SerializeToString())
    resigned(folder)


# Loads bundles one after the other, says how many megabytes each took, and runs them. The most that
# getrusage knows of begins with what the process was forked from.
LOADED = """
import re, sys
from pathlib import Path
import edge
from edge.errors import EngineError
def most(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
models = []
for path in sys.argv[1:]:
    before = most()
    models.append(edge.load(path, engine="ort", threads=1))
    print((most() - before) // 1024)
for model in models:
    try:
        model.session().generate("Hello", max_tokens=1).finish()
        print("run")
    except EngineError:
        print("refused")
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Attack → the megabytes that loading took in a process of all, and what a run did."""
    folders = [tmp_path_factory.mktemp(how.__name__) / "bundle" for how in ATTACKS]
    for how, folder in zip(ATTACKS, folders, strict=True):
        attacked(how, folder)
        assert not bounded((folder / GRAPH).read_bytes())
    command = [sys.executable, "-c", LOADED, *map(str, folders)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    megabytes, runs = map(int, said[: len(ATTACKS)]), said[len(ATTACKS) :]
    names = (how.__name__ for how in ATTACKS)
    return dict(zip(names, zip(megabytes, runs, strict=True), strict=True))


@pytest.mark.parametrize("how", ATTACKS, ids=lambda how: how.__name__)
def test_loading_takes_no_memory_that_nobody_counted(
    how: Callable[[], Iterator[NodeProto]], loaded: dict[str, tuple[int, str]]
) -> None:
    """Nor do all of them together: what one left behind could hide what the next takes."""
    megabytes, run = loaded[how.__name__]
    assert megabytes < 300 and run == "refused"
    assert sum(taken for taken, _ in loaded.values()) < 300


def test_a_run_of_what_is_not_folded_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> list[int]:
        with load(resolve("demo"), engine="ort", threads=1) as model, model.session() as session:
            return list(session.generate("Hello", max_tokens=12, temperature=0).finish().tokens)

    folded = said()
    monkeypatch.setattr("edge.runtime.ort_session.is_bounded", lambda model: False)
    assert said() == folded


# -- constant propagation -------------------------------------------------------------------------


DRAWN = (
    "Add", "Sub", "Mul", "Div", "Equal", "Where", "Cast", "Neg", "Transpose", "Reshape", "Concat",
    "Unsqueeze", "Squeeze", "Shape", "Size", "ConstantOfShape", "Expand", "Range", "Slice",
    "Gather", "Split", "ReduceSum", "Identity", "Max",
)  # fmt: skip


def _drawn(rng: random.Random, known: dict[str, NDArray[Any]]) -> NodeProto:
    """Return a node over existing values, in one of the ways that may fit them."""
    a, b, c = (rng.choice([*known]) for _ in range(3))
    op = rng.choice(DRAWN)
    axis, out = rng.randint(-2, 2), [f"v{len(known)}"]
    if op in ("Cast",):
        return make(op, [a], out, to=rng.choice((1, 6, 7)))
    if op in ("Neg", "Size", "Identity", "ConstantOfShape", "ReduceSum", "Squeeze"):
        return make(op, [a], out)
    if op == "Shape":
        return make(op, [a], out, start=rng.randint(-1, 2), end=rng.randint(-1, 4))
    if op == "Transpose":
        order = rng.sample(range(known[a].ndim), known[a].ndim)
        return make(op, [a], out, **({"perm": order} if order and rng.random() < 0.5 else {}))
    if op in ("Concat", "Gather"):
        return make(op, [a, b], out, axis=axis)
    if op == "Split":
        return make(op, [a], [*out, f"{out[0]}.2"], num_outputs=2, axis=0)
    return make(op, [a, b, c][: 3 if op in ("Where", "Range", "Slice") else 2], out)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_told_of_constants_is_so() -> None:
    """Random nodes over random constants: the inferred sizes, shapes and numbers against ONNX's
    own.
    """
    told = unknown = 0
    for seed in range(400):
        rng = random.Random(seed)
        numbers = np.random.default_rng(seed)
        known: dict[str, NDArray[Any]] = {
            f"v{i}": np.asarray(numbers.integers(-1, 5, [rng.randint(0, 4)] * rng.randint(0, 2)))
            for i in range(5)
        }
        nodes: list[NodeProto] = []
        stored = [numpy_helper.from_array(v.astype(np.int64), n) for n, v in known.items()]
        for _ in range(30):
            node = _drawn(rng, known)
            try:
                made = ReferenceEvaluator(node).run(
                    None, {name: known[name] for name in node.input}
                )
            except Exception:
                continue  # every runtime refuses such a graph
            if all(isinstance(v, np.ndarray) or np.isscalar(v) for v in made):
                known |= {n: np.asarray(v) for n, v in zip(node.output, made, strict=True)}
                nodes.append(node)
        for count in range(1, len(nodes) + 1):
            graph_of = helper.make_graph(nodes[:count], "g", [], [], stored)
            model = read_model(helper.make_model(graph_of).SerializeToString())
            try:
                scope = folding.FoldingWalk(model).known()
            except folding.UNKNOWN:
                unknown += 1
                break
            told += 1
            for name in nodes[count - 1].output:
                _holds(scope[name.encode()], known[name], nodes[count - 1])
    assert told > 1000 and unknown


def _holds(said: folding.KnownConstant, value: NDArray[Any], node: NodeProto) -> None:
    assert said.count >= value.size, node
    if said.shape is not None:
        assert len(said.shape) == value.ndim, node
        assert said.shape == value.shape if said.exact else all(
            most >= size for most, size in zip(said.shape, value.shape, strict=True)
        ), node  # fmt: skip
    if said.numbers is not None:
        assert said.numbers.shape == value.shape and (said.numbers == value).all(), node
