"""What the built library's plugins report while building, and what an engine stores of them.

`host` calls them through the interfaces of TensorRT's headers, as a builder would.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.plugins.device.statements import DEVICE_OPS, in_place
from edge.plugins.tensorrt import blob
from edge.plugins.tensorrt.launches import NodeLaunches
from tests.facts import facts
from tests.tensorrt.plugin_host import BUILD, RUN, Field, Library, PluginError, Tensor, whole
from tests.tensorrt.stated import RUN as SIZES
from tests.tensorrt.stated import demonstrated, packed, run_of, stated, tensors

ABI_HEADER = Path(__file__).resolve().parents[2] / "plugins" / "tensorrt" / "src" / "abi.h"
VARIABLE = "EDGE_TENSORRT_KERNELS"
KERNELS_ID, KERNELS = "kernels_id", "kernels"


@pytest.fixture(scope="module")
def every() -> list[tuple[str, NodeLaunches]]:
    """Return launches of real nodes, and of all ops from their statements."""
    return [
        *demonstrated(),
        *((op, stated(op)) for op in DEVICE_OPS),
    ]


@pytest.fixture
def library(every: list[tuple[str, NodeLaunches]]) -> Iterator[Library]:
    """Return the library with the kernels of all of them; they are removed afterwards."""
    found = whole()
    assert _set_kernels(found, packed([launches for _, launches in every])) == 0
    yield found
    assert _set_kernels(found, b"") == 0


def _set_kernels(library: Library, data: bytes) -> int:
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    return int(call(library.symbol("edge_tensorrt_set_kernels"))(data, len(data)))


def _set_aliased(library: Library, on: int) -> None:
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    assert call(library.symbol("edge_tensorrt_set_aliased"))(on) == 0


def _last_error(library: Library) -> str:
    call = ctypes.CFUNCTYPE(ctypes.c_char_p)
    text: bytes = call(library.symbol("edge_tensorrt_last_error"))()
    return text.decode()


def _check_outputs(
    name: str, launches: NodeLaunches, given: list[Tensor], made: list[Tensor]
) -> None:
    """Compare types and shapes with the op's statement; equal symbols must have equal widths."""
    run, widths = run_of(name), dict[str, int]()
    op = DEVICE_OPS[name]
    assert len(made) == len(op.outputs)
    for value, tensor in zip(op.outputs, made, strict=True):
        assert tensor.dtype in value.dtypes, value.name
        shape = value.shape
        if shape[0] == "...":
            # the first input determines the number of rows
            lead = len(tensor.shape) - len(shape) + 1
            assert tensor.shape[:lead] == given[0].shape[:lead], value.name
            shape = (*map(str, given[0].shape[:lead]), *shape[1:])
        for dim, length in zip(shape, tensor.shape, strict=True):
            known = run.get(dim) or (int(dim) if dim.isdigit() else None)
            assert length == (known or widths.setdefault(dim, length)), (value.name, dim)
    names = [value.name for value in op.inputs]
    for output, where in enumerate(launches.outputs):
        source = in_place(op).get(op.outputs[output].name)
        assert where.alias == (names.index(source) if source else -1)


def test_outputs_are_those_of_the_op_statements(
    library: Library, every: list[tuple[str, NodeLaunches]]
) -> None:
    for name, launches in every:
        given = tensors(launches)
        plugin = library.create(name, {"launches": launches.encode()})
        made = plugin.outputs(given)
        _check_outputs(name, launches, given, made)
        for position in range(len(given) + len(made)):
            assert plugin.takes(position, given, made)
        plugin.shape_change(given, made)


def test_other_types_ranks_and_lengths_are_refused(library: Library) -> None:
    launches = stated("RotaryAttention")
    plugin = library.create("RotaryAttention", {"launches": launches.encode()})
    given = tensors(launches)
    made = plugin.outputs(given)
    for position, tensor in enumerate((*given, *made)):
        other = Tensor("i64", tensor.shape)
        changed = [*given, *made]
        changed[position] = other
        inputs, outputs = changed[: len(given)], changed[len(given) :]
        assert not plugin.takes(position, inputs, outputs)
        with pytest.raises(PluginError, match="has type 8 and rank"):
            plugin.shape_change(inputs, outputs)
    flat = [Tensor(given[0].dtype, given[0].shape[1:]), *given[1:]]
    with pytest.raises(PluginError, match=r"input 0 has rank 2, not 3"):
        plugin.outputs(flat)
    with pytest.raises(PluginError, match=facts("11 inputs", "3 outputs", 9, 3)):
        plugin.outputs([*given, *flat[:2]])
    longer = [Tensor(made[0].dtype, (SIZES["T"] + 1, *made[0].shape[1:])), *made[1:]]
    with pytest.raises(PluginError, match=facts("output 0", 6, "axis 0", 5)):
        plugin.shape_change(given, longer)


def test_what_is_written_in_place_is_told_when_asked_for(
    library: Library, every: list[tuple[str, NodeLaunches]]
) -> None:
    for on in (1, 0):
        _set_aliased(library, on)
        for name, launches in every:
            plugin = library.create(name, {"launches": launches.encode()})
            expected = [one.alias if on else -1 for one in launches.outputs]
            assert [plugin.alias(i) for i in range(len(expected))] == expected


def test_an_engine_has_the_kernels_once_and_restores_the_same_plugins(
    library: Library, every: list[tuple[str, NodeLaunches]]
) -> None:
    kernels = packed([launches for _, launches in every])
    identity = bytes.fromhex(blob.identity(kernels))
    for number, (name, launches) in enumerate(every):
        carries = int(number == 0)
        # as onnx-tensorrt passes strings
        attributes = {"launches": launches.encode() + b"\0", "carries": carries}
        built = library.create(name, attributes)
        fields = built.serialized()
        assert fields["launches"].data == launches.encode()
        assert fields["carries"].data == carries.to_bytes(4, "little")
        assert fields[KERNELS_ID].data == identity
        assert fields.keys() - {"launches", "carries", KERNELS_ID} == (
            {KERNELS} if carries else set()
        )
        assert not carries or fields[KERNELS].data == kernels
        restored = library.made(name, fields, RUN)
        assert restored.name == f"edge.device Edge{name} 1"
        for each in (built.clone(), restored, restored.clone()):
            assert each.serialized() == fields


def test_kernels_of_another_engine_are_not_used(library: Library) -> None:
    """A plugin without kernels finds none, unless someone else has them."""
    launches = stated("Linear")
    built = library.create("Linear", {"launches": launches.encode(), "carries": 1})
    fields = {**built.serialized(), "carries": Field(5, bytes(4))}
    fields.pop(KERNELS)
    other = {**fields, KERNELS_ID: Field(8, b"\1" * 32)}
    with pytest.raises(PluginError, match=f"its kernels {'01' * 32} are missing: the engine"):
        library.made("Linear", other, RUN).attached()


def test_a_graph_of_other_kernels_is_not_built(library: Library) -> None:
    assert _set_kernels(library, packed([stated("Quantize")])) == 0
    with pytest.raises(PluginError, match=r"kernels for sm_87 have no Linear\.stated-0"):
        library.create("Linear", {"launches": stated("Linear").encode()})
    assert _set_kernels(library, b"") == 0
    with pytest.raises(PluginError, match=f"edge_tensorrt_set_kernels.*{VARIABLE}"):
        library.create("Linear", {"launches": stated("Linear").encode()})
    assert _set_kernels(library, b"no kernels") == -1
    assert _last_error(library).startswith("edge_tensorrt_set_kernels: kernels do not begin with")


def test_trtexec_is_told_of_kernels_by_the_environment(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = stated("Linear")
    attributes = {"launches": launches.encode(), "carries": 1}
    assert _set_kernels(library, b"") == 0
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    with pytest.raises(PluginError, match=f"{VARIABLE}: cannot read"):
        library.create("Linear", attributes)
    (tmp_path / "kernels").write_bytes(packed([launches]))
    plugin = library.create("Linear", attributes)
    assert plugin.serialized()[KERNELS].data == packed([launches])


def test_a_builder_that_times_a_plugin_launches_nothing(library: Library) -> None:
    """There is no driver here and no memory: any action would fail."""
    launches = stated("Attention")
    plugin = library.create("Attention", {"launches": launches.encode()})
    given = tensors(launches)
    for each in (plugin, plugin.clone(), plugin.attached()):
        each.enqueue(given, plugin.outputs(given), 0, 0)


def test_the_library_says_what_it_is(library: Library) -> None:
    number = ctypes.CFUNCTYPE(ctypes.c_int)(library.symbol("edge_tensorrt_abi"))()
    text = ctypes.CFUNCTYPE(ctypes.c_char_p)(library.symbol("edge_tensorrt_built_for"))()
    header = ABI_HEADER.read_text()
    assert f"#define EDGE_TENSORRT_ABI {number}\n" in header
    assert text.decode() == ".".join(map(str, library.version))


def test_a_phase_is_the_creators_to_tell(library: Library) -> None:
    """What a parser passes is not enough for an engine, which has the kernels' identity."""
    fields = {"launches": Field(6, stated("Linear").encode())}
    assert library.made("Linear", fields, BUILD)
    with pytest.raises(PluginError, match="field kernels_id has 0 bytes"):
        library.made("Linear", fields, RUN)
