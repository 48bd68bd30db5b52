"""The plugin library's decoders on aarch64, where for example `char` is unsigned."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

from edge.launch import CompiledKernel
from edge.plugins.lowering.plan import walked
from edge.plugins.tensorrt import blob
from edge.plugins.tensorrt.nodes import DeviceNode, device_nodes
from tests.tensorrt.decoding import compiled_by, decoded, text_of

DEMO = Path(__file__).parents[2] / "apps" / "bundles" / "demo"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the decoders under qemu."""
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("needs apt install g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user")
    made = compiled_by("aarch64-linux-gnu-g++", "-static")
    script = tmp_path_factory.mktemp("aarch64") / "emulated"
    script.write_text(f'#!/bin/sh\nexec "{emulator}" "{made}" "$@"\n')
    script.chmod(0o755)
    return script


def test_launches_are_read_as_they_were_written(program: Path) -> None:
    model = onnx.load(DEMO / "graphs/ort.onnx", load_external_data=False)
    nodes = device_nodes(walked(model, DEMO))
    every = [node.launches for node in nodes if isinstance(node, DeviceNode)]
    assert len(every) > 20
    assert decoded(program, "L", [one.encode() for one in every]) == [text_of(one) for one in every]
    data = every[0].encode()
    cut = decoded(program, "L", [data[:length] for length in range(len(data))])
    assert all(line.startswith("refused: launches") for line in cut)


def test_kernels_are_read_as_they_were_packed(program: Path) -> None:
    known = CompiledKernel(file="f", symbol="a", shared_bytes=7, scratch=2)
    packed = blob.pack(87, {"k-1": (known, bytes(range(256)) * 9)})
    (line,) = decoded(program, "B", [packed])
    assert line.startswith(f"sm 87 id {blob.identity(packed)} kernel k-1 a 7 2 ")
    damaged = [packed[:at] + bytes([packed[at] ^ 0x80]) + packed[at + 1 :] for at in range(64)]
    assert all(line.startswith("refused: kernels") for line in decoded(program, "B", damaged))
