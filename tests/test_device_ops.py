"""The bodies of the device ops match the references and a plain model of their memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import inliner

from edge.ops import DEVICE_DOMAIN
from edge.plugins.device.library import device_function, device_functions
from edge.plugins.device.statements import DEVICE_OPS, device_name, in_place, viewable
from edge.runtime.ledger import ADVANCED, KEEP, LAST
from tests.device_ops import Array, Case, cases
from tests.device_reference import Steps, expected
from tests.int8_recurrent import TOLERANCE, Compared

# (run, batch): every length, each way to store a state, none to five pending tokens
CHAINS = [
    (Steps((), 0, 0, KEEP, 0, (3,)), 1),
    (Steps((7,), 0, 1, LAST, 9, (0,)), 2),
    (Steps((4, 0, 8), 0, 0, KEEP, 3, (9, 2)), 2),
    (Steps((9, 1, 3, 6, 2), 2, 1, ADVANCED, 5, (4, 0)), 1),
    (Steps((2, 3, 5, 1), 4, 0, ADVANCED, 24, (8, 0, 9, 4, 6)), 1),
    (Steps((), 0, 1, LAST, 0, (-1,) * 5), 2),
    (Steps((6, 5), 0, 1, LAST, 12, (-1,) * 17), 2),
]
TREES = [
    (Steps((), 0, 0, KEEP, 7, (3, 4), (-1, -1)), 2),
    (Steps((1, 5), 0, 1, KEEP, 4, (2, 8, 0, 3, 9), (-1, 0, 0, 2, -1)), 1),
]
HAS_STATE = [name for name, op in DEVICE_OPS.items() if any(op.states())]
HAS_NONE = [name for name in DEVICE_OPS if name not in HAS_STATE]
ATTENTIONS = [name for name in HAS_STATE if "Attention" in name]


def compare(case: Case, steps: Steps, batch: int, counted: Compared) -> None:
    given = case.given(steps, batch)
    before = {name: array.copy() for name, array in given.items()}
    found = case.run(given)
    wanted = expected(case.name, given, case.attributes, steps)
    assert set(found) == set(wanted)
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])
    kept = in_place(case.op)
    for name in found:
        assert found[name].dtype == case.dtype(next(v for v in case.op.outputs if v.name == name))
        if name in kept:
            memory(found[name], wanted[name], given[kept[name]], counted)
        else:
            close(case, found[name], wanted[name], counted)


def memory(found: Array, wanted: Array, before: Array, counted: Compared) -> None:
    """Memory that is not written keeps every bit."""
    same = (wanted == before) | (wanted != wanted)
    np.testing.assert_array_equal(found[same], before[same])
    if not same.all():
        counted.state(found[~same], wanted[~same])


def close(case: Case, found: Array, wanted: Array, counted: Compared) -> None:
    if found.dtype == np.int8:
        counted.int8(found, wanted)
    elif found.dtype == np.int32:
        np.testing.assert_array_equal(found, wanted)
    else:
        counted.floats(found, wanted, TOLERANCE[int(case.attributes.get("state_bits", 32))])


@pytest.mark.parametrize("case", cases(HAS_NONE), ids=lambda case: case.id)
def test_an_op_without_state_is_its_reference(case: Case) -> None:
    counted = Compared()
    for steps, batch in CHAINS:
        compare(case, steps, batch, counted)
    counted.check()


@pytest.mark.parametrize("case", cases(HAS_STATE), ids=lambda case: case.id)
def test_an_op_in_place_is_its_reference_over_slots_logs_and_replays(case: Case) -> None:
    counted = Compared()
    for steps, batch in CHAINS:
        compare(case, steps, batch, counted)
    counted.check()


@pytest.mark.parametrize("case", cases(ATTENTIONS), ids=lambda case: case.id)
def test_attention_looks_along_the_paths_of_a_tree(case: Case) -> None:
    counted = Compared()
    for steps, batch in TREES:
        compare(case, steps, batch, counted)
    counted.check()


def test_greedy_takes_the_lowest_of_the_largest_and_none_of_a_nan() -> None:
    case = Case("Greedy")
    logits = np.zeros((3, 2, 31), np.float32)
    logits[0, 0, [4, 9]] = 2
    logits[0, 1] = -np.inf
    logits[1, 0, 30] = np.inf
    logits[1, 1, 7] = np.nan
    logits[2, 0, [3, 30]] = -np.nan, 5
    picked = case.run({"logits": logits})["picked"]
    assert picked.tolist() == [[4, 0], [30, -1], [-1, 0]]


# -- the statements --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICE_OPS)
def test_a_body_has_the_signature_of_its_statement(name: str) -> None:
    proto, op = device_function(name), DEVICE_OPS[name]
    assert proto.domain == DEVICE_DOMAIN and proto.name == name == op.name
    assert list(proto.input) == [v.name for v in op.inputs]
    assert list(proto.output) == [v.name for v in op.outputs]
    assert list(proto.attribute) == [a.name for a in op.attributes]
    assert len({*proto.input, *proto.output}) == len(op.inputs) + len(op.outputs)
    assert op.maths in proto.doc_string and op.source in proto.doc_string


@pytest.mark.parametrize("name", DEVICE_OPS)
def test_a_body_is_of_standard_ops_without_branches_and_sequences(name: str) -> None:
    whole = inliner.inline_local_functions(Case(name).model())
    onnx.checker.check_model(whole)
    assert not whole.functions
    for node in whole.graph.node:
        assert node.domain == "" and onnx.defs.has(node.op_type)
        assert node.op_type not in ("If", "Loop") and "Sequence" not in node.op_type


def test_functions_come_with_all_that_they_call() -> None:
    found = {(f.domain, f.name) for f in device_functions(["RotaryAttention"])}
    device = {(DEVICE_DOMAIN, "RotaryAttention"), (DEVICE_DOMAIN, "Attention")}
    assert found == device | {("edge", "Rope")}


def test_a_planned_node_has_a_device_op() -> None:
    assert device_name("EmbedBits", {"bits": 4}) == "EmbedBits_4"
    assert device_name("SelectiveScanInt8Dt", {"state_bits": 8}) == "SelectiveScanInt8_8Dt"
    assert device_name("AddRMSNormQuantize", {"rows": 1}) == "AddRMSNormQuantizeRows"
    norm = "GatedRMSNormInt8HadamardQuantize"
    assert device_name(norm, {"groups": 1}) == "GatedRMSNormInt8_1HadamardQuantize"
    assert device_name(norm, {"groups": 8}) == norm
    assert device_name("HadamardQuantize", {}) == "HadamardQuantize"


def test_what_may_be_columns_and_what_is_in_place() -> None:
    scan = DEVICE_OPS["SelectiveScanInt8_8Dt"]
    assert viewable(scan) == ("x", "B", "C", "z", "low_dt")
    assert in_place(scan)["ssm_state_out"] == "ssm_state" and len(in_place(scan)) == 4
    assert viewable(DEVICE_OPS["LinearInt8Rows"]) == ("x",)
    assert not viewable(DEVICE_OPS["AddRMSNorm"]) and not in_place(DEVICE_OPS["AddRMSNorm"])
    for name in HAS_STATE:
        op = DEVICE_OPS[name]
        assert [*in_place(op)] == [v.name for v in op.outputs if v.role == "state"]


def test_device_statements_import_without_onnx_and_torch() -> None:
    modules = "{'onnx', 'torch', 'numpy'} & set(sys.modules)"
    code = f"import edge.plugins.device.statements, sys\nprint({modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
