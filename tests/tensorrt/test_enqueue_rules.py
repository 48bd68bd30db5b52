"""What a plugin does with its launches, on launches written by hand: sizes, places, programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge.launch import Size, Variant
from edge.plugins.tensorrt.launches import (
    Call,
    Input,
    Kernel,
    NodeLaunches,
    NodeProgram,
    Output,
    Place,
    WorkBuffer,
)
from tests.on_device import ON_GPU
from tests.tensorrt.machine import UNKNOWN, machine
from tests.tensorrt.plugin_host import PluginError, Tensor
from tests.tensorrt.running import Running, empty, put, with_kernels

NAME = "Embed"  # any creator: they are all alike
ONE = Size()
WIDTH = 40


def _rows(kernel: str, arguments: tuple[str, ...], types: tuple[str, ...], **n: int) -> Variant:
    return Variant(kernel=f"rows.{kernel}", arguments=arguments, types=types, constants=n)


ADD = _rows("add", ("a", "b", "y"), ("*fp32",) * 3,
            WIDTH=WIDTH, A_STRIDE=WIDTH, B_STRIDE=WIDTH, BLOCK=64)  # fmt: skip
PICK = _rows("gather_rows", ("x", "rows", "y", "B"), ("*fp32", "*i32", "*fp32", "i32"),
             WIDTH=WIDTH, X_STRIDE=WIDTH, BLOCK=64)  # fmt: skip
JOIN = _rows("concat", ("a", "b", "y"), ("*fp32",) * 3,
             A_WIDTH=WIDTH, B_WIDTH=WIDTH, A_STRIDE=WIDTH, B_STRIDE=WIDTH, BLOCK=128)  # fmt: skip


def _kernel(variant: Variant) -> Kernel:
    return Kernel(variant.key, 32 * variant.warps)


def _plugin(
    launches: NodeLaunches,
    variants: list[Variant],
    largest: list[Tensor],
    aliases: dict[int, int] | None = None,
) -> Running:
    library = with_kernels(variants)
    attributes = {"launches": launches.encode(), "carries": 1}
    return Running(library, NAME, attributes, largest, aliases or {})


def _values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_outputs_grids_and_integers_follow_the_inputs() -> None:
    """y[l,b] = x[rows[l],b]: three symbols from two inputs."""
    launches = NodeLaunches(
        inputs=(Input("f32", 3), Input("i32", 1)),
        outputs=(Output("f32", ("L", "B", WIDTH)),),
        symbols={"B": (0, 1), "L": (1, 0)},
        rows="LB",
        workspace=(),
        kernels=(_kernel(PICK),),
        calls=(
            Call(0, (Size(of="LB"), ONE, ONE),
                 (Place("input", 0), Place("input", 1), Place("output", 0), Size(of="B"))),
        ),
        programs=(NodeProgram(False, None, (0,)),),
    )  # fmt: skip
    plugin = _plugin(launches, [PICK], [Tensor("f32", (9, 3, WIDTH)), Tensor("i32", (9,))])
    assert plugin.workspace_bytes == 0
    for tokens, batch, rows in ((1, 1, [0]), (7, 3, [6, 0, 0]), (2, 2, [1])):
        x = _values(tokens, batch, WIDTH)
        given = [put(x), put(np.array(rows, np.int32))]
        (y,) = plugin.run(given)
        assert y.tensor.shape == (len(rows), batch, WIDTH)
        assert np.array_equal(y.array(), x[rows])


def _two_stages(first_most: int | None, row_bytes: int = 4 * WIDTH) -> NodeLaunches:
    """y[0] = (a + b)[0] + a[0], by way of two buffers of the workspace.

    Runs of more than `first_most` rows have only the second buffer, and compute y[0] = a[0] + b[0].
    """
    total, joined = Place("workspace", 0), Place("workspace", 1)
    rows = Size(of="TB")
    a, b, y = Place("input", 0), Place("input", 1), Place("output", 0)
    return NodeLaunches(
        inputs=(Input("f32", 3), Input("f32", 3)),
        outputs=(Output("f32", ("T", "B", WIDTH)),),
        symbols={"T": (0, 0), "B": (0, 1)},
        rows="TB",
        workspace=(WorkBuffer(row_bytes, first_most), WorkBuffer(8 * WIDTH, None)),
        kernels=(_kernel(ADD), _kernel(JOIN)),
        calls=(
            Call(0, (rows, ONE, ONE), (a, b, total)),
            Call(1, (rows, ONE, ONE), (total, a, joined)),
            # a row of `joined` is 2·WIDTH wide: the halves of the first
            Call(0, (ONE, ONE, ONE), (joined, Place("workspace", 1, 4 * WIDTH), y)),
            Call(1, (rows, ONE, ONE), (a, b, joined)),
        ),
        programs=(NodeProgram(False, first_most, (0, 1, 2)), NodeProgram(False, None, (3, 2))),
    )


def test_a_workspace_is_as_large_as_the_run_that_needs_most() -> None:
    launches = _two_stages(4)
    most = 2
    small = _plugin(launches, [ADD, JOIN], [Tensor("f32", (most, 1, WIDTH))] * 2)
    large = _plugin(launches, [ADD, JOIN], [Tensor("f32", (50, 1, WIDTH))] * 2)
    # 2 rows of 160 bytes, each aligned to 256, then 2 of 320
    assert 512 + 640 <= small.workspace_bytes <= 512 + 640 + 512
    assert 50 * 320 <= large.workspace_bytes <= 50 * 320 + 1024, "the first has no rows there"
    for tokens in (1, 2, 4, 5, 50):
        plugin = small if tokens <= most else large
        a, b = _values(tokens, 1, WIDTH), _values(tokens, 1, WIDTH, seed=1)
        (y,) = plugin.run([put(a), put(b)])
        expected = (a + b + a if tokens <= 4 else a + b)[0]
        assert np.array_equal(y.array()[0], expected), tokens
        # array() checks the guards behind every buffer


def test_a_workspace_has_room_for_the_small_runs_that_need_more() -> None:
    wide = 256 * WIDTH
    plugin = _plugin(_two_stages(4, wide), [ADD, JOIN], [Tensor("f32", (50, 1, WIDTH))] * 2)
    assert 4 * wide + 4 * 320 <= plugin.workspace_bytes <= 4 * wide + 4 * 320 + 1024
    assert 4 * wide > 50 * 320, "the largest run needs less"


def _recorded(name: str, *types: str, warps: int = 4) -> Variant:
    names = tuple(f"a{i}" for i in range(len(types)))
    return Variant(
        kernel=f"{UNKNOWN}{name}", arguments=names, types=types, constants={}, warps=warps
    )


@pytest.mark.skipif(ON_GPU, reason="what is launched is only seen on a CPU")
def test_a_program_is_chosen_by_rows_and_by_whether_it_is_a_tree() -> None:
    names = ("step", "few", "tree", "many")
    variants = [_recorded(name, "*fp32", "i32", "fp32", warps=2) for name in names]
    x, seven = Place("input", 0, 8), Size(times=7, of="TT", per=2)
    launches = NodeLaunches(
        inputs=(Input("f32", 3), Input("i32", 2)),
        outputs=(Output("f32", ("T", "B", 5)),),
        symbols={"T": (0, 0), "B": (0, 1), "A": (1, 0)},
        rows="TB",
        workspace=(),
        kernels=tuple(map(_kernel, variants)),
        calls=tuple(
            Call(i, (Size(of="TB"), seven, Size(times=0)), (x, seven, 0.1 + i)) for i in range(4)
        ),
        programs=(
            NodeProgram(True, 16, (2,)),
            NodeProgram(False, 1, (0,)),
            NodeProgram(False, 16, (1, 0)),
            NodeProgram(False, None, (3,)),
        ),
    )
    plugin = _plugin(launches, variants, [Tensor("f32", (40, 2, 4)), Tensor("i32", (40, 40))])
    on = machine()
    chosen = {
        (1, 1, 1): ["step"],
        (1, 2, 1): ["few", "step"],
        (16, 1, 1): ["few", "step"],
        (17, 1, 1): ["many"],
        (9, 2, 1): ["many"],
        (2, 1, 2): ["tree"],
        (8, 2, 8): ["tree"],
    }
    for (tokens, batch, ancestors), expected in chosen.items():
        given = [put(_values(tokens, batch, 4)), put(np.ones((ancestors, ancestors), np.int32))]
        on.launched.clear()
        plugin.run(given)
        on.wait()
        assert [each.kernel.removeprefix(UNKNOWN) for each in on.launched] == expected
        size = -(-7 * tokens * tokens // 2)
        for each in on.launched:
            assert each.grid == (tokens * batch, size, 1)
            constant = np.float32(0.1 + names.index(each.kernel.removeprefix(UNKNOWN)))
            assert each.arguments == (given[0].tensor.address + 8, size, constant)
    too_many = [put(_values(9, 2, 4)), put(np.ones((9, 9), np.int32))]
    with pytest.raises(PluginError, match="tree"):
        plugin.run(too_many)


def _in_place() -> NodeLaunches:
    """y = a + b, and a becomes b + b in place."""
    a, b = Place("output", 1), Place("input", 1)
    rows = (Size(of="TB"), ONE, ONE)
    return NodeLaunches(
        inputs=(Input("f32", 3), Input("f32", 3)),
        outputs=(Output("f32", ("T", "B", WIDTH)), Output("f32", ("T", "B", WIDTH), alias=0)),
        symbols={"T": (0, 0), "B": (0, 1)},
        rows="TB",
        workspace=(),
        kernels=(_kernel(ADD),),
        calls=(Call(0, rows, (a, b, Place("output", 0))), Call(0, rows, (b, b, a))),
        programs=(NodeProgram(False, None, (0, 1)),),
    )


def test_what_is_written_in_place_must_be_in_place() -> None:
    largest = [Tensor("f32", (5, 1, WIDTH))] * 2
    plugin = _plugin(_in_place(), [ADD], largest, {1: 0})
    a, b = _values(5, 1, WIDTH), _values(5, 1, WIDTH, seed=1)
    given = [put(a), put(b)]
    y, after = plugin.run(given)
    assert after.tensor.address == given[0].tensor.address
    assert np.array_equal(y.array(), a + b)
    assert np.array_equal(after.array(), b + b)
    moved = [y.tensor, empty(after.tensor).tensor]
    machine().launched.clear()
    with pytest.raises(PluginError, match="in place"):
        plugin.issue([each.tensor for each in given], moved)
    machine().wait()
    assert not machine().launched, "it was refused before anything was launched"


def test_other_shapes_than_were_promised_are_refused() -> None:
    plugin = _plugin(_in_place(), [ADD], [Tensor("f32", (5, 1, WIDTH))] * 2, {1: 0})
    address = empty(Tensor("f32", (5, 1, WIDTH))).tensor.address
    right = Tensor("f32", (5, 1, WIDTH), address)
    for wrong in (
        [right],
        [right] * 3,
        [Tensor("f32", (5, WIDTH), address), right],
        [Tensor("i32", (5, 1, WIDTH), address), right],
        [Tensor("f16", (5, 1, WIDTH), address), right],
    ):
        with pytest.raises(PluginError):
            plugin.issue(wrong, [right, right])


def test_a_launch_behind_its_input_is_refused() -> None:
    """The length of an input is known only at run time."""
    launches = _in_place()
    first, second = launches.calls
    bytes_of_row = 4 * WIDTH
    places = (Place("input", 0, bytes_of_row), *first.arguments[1:])
    behind = replace(launches, calls=(replace(first, arguments=places), second))
    plugin = _plugin(behind, [ADD], [Tensor("f32", (5, 1, WIDTH))] * 2, {1: 0})
    address = empty(Tensor("f32", (5, 1, WIDTH))).tensor.address
    tensors = [[Tensor("f32", (rows, 1, WIDTH), address)] * 2 for rows in (2, 1)]
    plugin.plugin.shape_change(tensors[0], tensors[0])
    with pytest.raises(PluginError, match=f"{bytes_of_row} bytes into input 0"):
        plugin.plugin.shape_change(tensors[1], tensors[1])


@pytest.mark.skipif(ON_GPU, reason="what is launched is only seen on a CPU")
def test_a_run_that_needs_a_workspace_is_refused_without_one() -> None:
    plugin = _plugin(_two_stages(4), [ADD, JOIN], [Tensor("f32", (4, 1, WIDTH))] * 2)
    x = put(_values(2, 1, WIDTH))
    y = empty(Tensor("f32", (2, 1, WIDTH)))
    with machine().stream() as stream, pytest.raises(PluginError, match="workspace"):
        plugin.plugin.enqueue([x.tensor, x.tensor], [y.tensor], 0, stream)


@pytest.mark.skipif(ON_GPU, reason="what is launched is only seen on a CPU")
def test_a_workspace_may_begin_anywhere() -> None:
    """TensorRT promises alignment to 256 bytes; the kernels' own guarantees hold without it."""
    aligned = [variant.model_copy(update={"types": ("*fp32:16",) * 3}) for variant in (ADD, JOIN)]
    launches = replace(_two_stages(4), kernels=tuple(map(_kernel, aligned)))
    plugin = _plugin(launches, aligned, [Tensor("f32", (4, 1, WIDTH))] * 2)
    room = empty(Tensor("u8", (plugin.workspace_bytes + 8,)))
    a = _values(3, 1, WIDTH)
    x, y = put(a), empty(Tensor("f32", (3, 1, WIDTH)))
    with machine().stream() as stream:
        plugin.plugin.enqueue([x.tensor] * 2, [y.tensor], room.tensor.address + 8, stream)
    assert np.array_equal(y.array()[0], (a + a + a)[0])


def test_a_run_can_be_recorded_and_replayed() -> None:
    """While recording, the driver refuses everything but launches and copies."""
    plugin = _plugin(_in_place(), [ADD], [Tensor("f32", (5, 1, WIDTH))] * 2, {1: 0})
    a, b = _values(5, 1, WIDTH), _values(5, 1, WIDTH, seed=1)
    given = [put(a), put(b)]
    y = empty(Tensor("f32", (5, 1, WIDTH)))
    tensors = [each.tensor for each in given]
    plugin.issue(tensors, [y.tensor, tensors[0]])  # TensorRT requires one run before
    graph = machine().recorded(
        lambda stream: plugin.plugin.enqueue(tensors, [y.tensor, tensors[0]], 0, stream)
    )
    assert np.array_equal(given[0].array(), b + b), "recording runs nothing"
    graph()
    assert np.array_equal(y.array(), b + b + b)
    graph()
    assert np.array_equal(given[0].array(), b + b)
