"""The built plugin library in TensorRT's own registry: that of the lean runtime, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge.ops import PLUGIN_PREFIX
from edge.plugins.device.statements import DEVICE_OPS
from edge.plugins.tensorrt.launches import NodeLaunches
from tests.facts import says
from tests.tensorrt.plugin_host import VARIABLE, whole
from tests.tensorrt.stated import demonstrated, packed, stated

ROOT = Path(__file__).parents[2]
Nodes = list[tuple[str, NodeLaunches]]


@pytest.fixture(scope="module")
def nodes() -> Nodes:
    whole()
    if importlib.util.find_spec("tensorrt_lean_bindings") is None:
        pytest.skip("needs TensorRT's lean runtime: pip install tensorrt-lean")
    return [("Linear", stated("Linear")), *demonstrated(), *((op, stated(op)) for op in DEVICE_OPS)]


@pytest.fixture(scope="module")
def found(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of `lean_registry`, which must exit normally."""
    folder = tmp_path_factory.mktemp("registry")
    given, kernels = folder / "nodes", folder / "kernels"
    given.write_text(json.dumps([[op, launches.encode().hex()] for op, launches in nodes]))
    kernels.write_bytes(packed([launches for _, launches in nodes]))
    script = str(Path(__file__).with_name("lean_registry.py"))
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", script, os.environ[VARIABLE], given, kernels],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def test_the_registry_has_a_creator_for_every_device_op(found: dict[str, Any]) -> None:
    assert found["creators"] == {
        PLUGIN_PREFIX + op: ["1", {"launches": "CHAR", "carries": "INT32"}] for op in DEVICE_OPS
    }


def test_creators_make_plugins_of_all_nodes(found: dict[str, Any], nodes: Nodes) -> None:
    for (op, _), plugins in zip(nodes, found["plugins"], strict=True):
        expected = {
            "name": ["edge.device", PLUGIN_PREFIX + op, "1"],
            "interfaces": [
                ["PLUGIN_V3ONE_CORE", 1],
                ["PLUGIN_V3ONE_BUILD", 2],
                ["PLUGIN_V3ONE_RUNTIME", 1],
            ],
            "outputs": len(DEVICE_OPS[op].outputs),
            "formats": 1,
        }
        assert plugins == [expected] * 4, op


def test_wrong_fields_are_refused_with_a_reason(found: dict[str, Any], nodes: Nodes) -> None:
    refusals = found["refusals"]
    assert len(refusals) > 2 * len(nodes[0][1].encode())
    assert all(one and one.startswith("layer: ") for one in refusals)
    for reason in (
        ("field launches", "missing"),
        ("field launches", "bytes", "type 5"),
        ("launches", "EDGEOP02"),
        ("launches", "middle of their numbers"),
        ("field carries", "int32"),
        ("field carries", 2, 0, 1),
        ("field kernels_id", "0 bytes", 32),
        ("field kernels_id", "31 bytes", 32),
        ("field kernels", "missing", "carries"),
        ("kernels", "damaged"),
        ("kernels", "EDGEKRN2"),
        ("field kernels_id", "not match", "field kernels"),
    ):
        assert any(says(one, *reason) for one in refusals), reason
