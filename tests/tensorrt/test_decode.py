"""The plugin library reads what Python encodes; anything else is refused, never a crash."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from edge.launch import CompiledKernel, Size
from edge.ops import PLUGIN_PREFIX
from edge.plugins.device.statements import DEVICE_OPS
from edge.plugins.lowering.plan import walked
from edge.plugins.tensorrt import blob
from edge.plugins.tensorrt.creators import OPS_INC, ops_inc
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
from edge.plugins.tensorrt.nodes import DeviceNode, device_nodes
from tests.tensorrt.decoding import decoded, sanitized, text_of

BUNDLES = Path(__file__).parents[2] / "apps" / "bundles"
ROWS = Size(of="TB")
SMALL = NodeLaunches(
    inputs=(Input("f16", 3), Input("u8", 2), Input("i32", 2)),
    outputs=(Output("f16", ("T", "B", 300)), Output("u8", (4, "S"), alias=1)),
    symbols={"T": (0, 0), "B": (0, 1), "S": (1, 1), "A": (2, 0)},
    rows="TB",
    workspace=(WorkBuffer(640, 16), WorkBuffer(1 << 33, None)),
    kernels=(Kernel("linear.step-0123456789abcdef", 128), Kernel("é", 1024)),
    calls=(
        Call(0, (ROWS, Size(times=3, of="S", per=7), Size()), (Place("input", 1, 1 << 40), -0.5)),
        Call(1, (Size(times=0), ROWS, ROWS), (Place("workspace", 1), Place("output", 0), ROWS)),
    ),
    programs=(NodeProgram(True, 16, (1, 0)), NodeProgram(False, None, ())),
)
HEADER = 8


def _calls(place: Place) -> tuple[Call, ...]:
    return (replace(SMALL.calls[0], arguments=(place,)), SMALL.calls[1])


NUMBERS = (0, 1, 2, 3, 8, 127, 128, 1 << 31, (1 << 48) + 1, (1 << 62) + 5, (1 << 63) - 1)


@pytest.fixture(scope="module")
def program() -> Path:
    return sanitized()


def test_every_device_op_has_its_creator() -> None:
    assert OPS_INC.read_text(encoding="utf-8") == ops_inc()


def test_no_plugin_is_called_as_an_op_of_onnx() -> None:
    """TensorRT's parser would use its own importer, whatever the domain."""
    theirs = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert "Gelu" in theirs
    assert not theirs & {PLUGIN_PREFIX + op for op in DEVICE_OPS}


def test_launches_are_read_as_they_were_written(program: Path) -> None:
    every = [SMALL]
    for bundle in ("demo", "demo-bytes"):
        model = onnx.load(BUNDLES / bundle / "graphs/ort.onnx", load_external_data=False)
        nodes = device_nodes(walked(model, BUNDLES / bundle))
        every += [node.launches for node in nodes if isinstance(node, DeviceNode)]
    assert len(every) > 50
    expected = [text_of(launches) for launches in every]
    assert decoded(program, "L", [launches.encode() for launches in every]) == expected
    # onnx-tensorrt passes strings with a trailing zero
    assert decoded(program, "L", [SMALL.encode() + b"\0"]) == expected[:1]


def _leb128(data: bytes) -> list[int]:
    numbers, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            numbers.append(value)
            value, shift = 0, 0
    return numbers


def _written(numbers: list[int]) -> bytes:
    out = bytearray()
    for value in numbers:
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


def _parts() -> tuple[list[int], bytes]:
    """Return the numbers of SMALL, how many come first, and its text."""
    data = SMALL.encode()[HEADER:]
    text = b"".join(kernel.key.encode() for kernel in SMALL.kernels)
    numbers = _leb128(data[: -len(text)])
    assert data.endswith(text) and numbers[0] == len(numbers) - 1
    return numbers, text


def test_launches_cut_short_are_refused(program: Path) -> None:
    data = SMALL.encode()
    cut = [data[:length] for length in range(len(data))]
    for length, line in enumerate(decoded(program, "L", cut)):
        assert line.startswith("refused: launches"), (length, line)
    for more in (b"\1", b"\0\0", b"text"):
        (line,) = decoded(program, "L", [data + more])
        assert line == f"refused: launches: {len(more)} bytes too many"


def test_changed_launches_are_refused_or_read_as_what_they_say(program: Path) -> None:
    numbers, text = _parts()
    changed = []
    for at, value in itertools.product(range(len(numbers)), NUMBERS):
        one = [*numbers]
        one[at] = value
        changed.append(SMALL.encode()[:HEADER] + _written(one) + text)
    data = SMALL.encode()
    for at, byte in itertools.product(range(len(data)), (0, 1, 0x7F, 0x80, 0xFF)):
        changed.append(data[:at] + bytes([byte]) + data[at + 1 :])
    lines = decoded(program, "L", changed)
    assert len(lines) == len(changed)
    same = text_of(SMALL)
    differ = [line for one, line in zip(changed, lines, strict=True) if one != data]
    assert same not in differ, "a change went unseen"
    refused = sum(line.startswith("refused: ") for line in lines)
    assert 0 < refused < len(lines)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"symbols": {"T": (0, 0), "B": (0, 1), "S": (1, 1)}}, ""),
        ({"rows": "TX"}, "symbol X is not an axis"),
        ({"symbols": {**SMALL.symbols, "A": (2, 2)}}, "not an axis of input 2"),
        ({"symbols": {**SMALL.symbols, "A": (3, 0)}}, "there is no input 3, only 3"),
        ({"outputs": (Output("f16", (4, "S"), alias=1),)}, "in place of input 1, which"),
        ({"outputs": (SMALL.outputs[1],) * 2}, "input 1, as another is"),
        ({"outputs": ()}, "there is no output 0, only 0"),
        ({"programs": ()}, "a node without programs"),
        ({"programs": (NodeProgram(False, None, (2,)),)}, "there is no launch 2, only 2"),
        ({"kernels": SMALL.kernels[:1]}, "there is no kernel 1, only 1"),
        ({"kernels": (Kernel("", 32), *SMALL.kernels)}, "a kernel has no key"),
        ({"kernels": (Kernel("a", 1025),) * 2}, "threads is 1025, not in 1 to 1024"),
        ({"workspace": SMALL.workspace[:1]}, "no workspace buffer 1, only 1"),
        ({"calls": _calls(Place("output", 0, 599))}, ""),
        ({"calls": _calls(Place("output", 0, 600))}, "600 bytes into an operand of 600"),
        ({"calls": _calls(Place("output", 1, 1 << 48))}, "bytes into an operand of 4"),
        ({"calls": _calls(Place("workspace", 0, 639))}, ""),
        ({"calls": _calls(Place("workspace", 0, 640))}, "bytes into an operand of 640"),
        ({"outputs": (Output("f16", ("T", 1 << 40, 1 << 40)),) * 2}, "output 0 is too large"),
        ({"inputs": (Input("f16", 9), *SMALL.inputs[1:])}, "an input's rank is 9"),
    ],
)
def test_launches_of_what_is_not_there_are_refused(
    program: Path, change: dict[str, object], reason: str
) -> None:
    fields = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    (line,) = decoded(program, "L", [NodeLaunches(**{**fields, **change}).encode()])
    assert reason in line
    assert line.startswith("refused: launches: ") == bool(reason)


def _kernels() -> dict[str, tuple[CompiledKernel, bytes]]:
    def one(symbol: str, shared: int, scratch: int, cubin: bytes) -> tuple[CompiledKernel, bytes]:
        known = CompiledKernel(file="f", symbol=symbol, shared_bytes=shared, scratch=scratch)
        return known, cubin

    return {
        "b.b-1": one("second", 1 << 17, 2, b"\x7fELF of b" * 5),
        "a.a-0": one("first", 0, 0, b"\x7fELF"),
        "c.c-2": one("third", 7, 8, b"\x7fELF of b" * 5),
    }


def test_kernels_are_read_as_they_were_packed(program: Path) -> None:
    packed = blob.pack(87, _kernels())
    parts = ["sm 87 id", blob.identity(packed)]
    for key, (known, cubin) in sorted(_kernels().items()):
        parts += ["kernel", key, known.symbol, known.shared_bytes, known.scratch]
        parts += [len(cubin), cubin.hex()]
    assert decoded(program, "B", [packed]) == [" ".join(map(str, parts))]


def test_damaged_kernels_are_refused(program: Path) -> None:
    packed = blob.pack(87, _kernels())
    cut = [packed[:length] for length in range(len(packed))]
    flipped = [
        packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :] for at in range(len(packed))
    ]
    for line in decoded(program, "B", [*cut, *flipped, packed + b"\0"]):
        assert line.startswith("refused: kernels "), line


def test_kernels_whose_numbers_are_wrong_are_refused_or_read(program: Path) -> None:
    """An attacker can make the checksum match; still, no number leads outside the bytes."""
    body = blob.pack(87, _kernels())[blob.HEADER :]
    count = 1 + struct.unpack_from("<q", body)[0]
    changed = []
    for at, value in itertools.product(range(count), (*NUMBERS, -1, -(1 << 63), len(body))):
        one = bytearray(body)
        struct.pack_into("<q", one, 8 * at, value)
        changed.append(blob.sealed(bytes(one)))
    changed += [blob.sealed(body[: 8 * length]) for length in range(count)]
    lines = decoded(program, "B", changed)
    assert len(lines) == len(changed)
    assert sum(line.startswith("refused: kernels") for line in lines) > len(lines) // 2
