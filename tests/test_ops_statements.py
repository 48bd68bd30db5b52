"""The op statements are complete, light to import, and implemented by the ONNX functions."""

from __future__ import annotations

import subprocess
import sys

import onnx
import pytest

from edge.ops import DOMAIN, value
from edge.plugins.catalogue import OPS
from edge.plugins.onnx import FLAVOURS, Flavour, function, names, op_of


@pytest.mark.parametrize(
    ("name", "flavour"), [(name, flavour) for flavour in FLAVOURS for name in names(flavour)]
)
def test_a_function_has_the_signature_of_its_statement(name: str, flavour: Flavour) -> None:
    proto, op = function(name, flavour), op_of(name)
    assert proto.domain == DOMAIN and proto.name == name
    assert list(proto.input) == [v.name for v in op.inputs]
    assert list(proto.output) == [v.name for v in op.outputs]
    assert list(proto.attribute) == [a.name for a in op.attributes]
    assert op.maths in proto.doc_string and op.source in proto.doc_string


@pytest.mark.parametrize("name", names("standard"))
def test_the_standard_flavour_uses_onnx_alone(name: str) -> None:
    proto = function(name, "standard")
    assert {entry.domain for entry in proto.opset_import} == {""}
    assert {node.domain for node in proto.node} == {""}
    for node in proto.node:
        assert onnx.defs.has(node.op_type)


def test_every_op_has_a_function() -> None:
    assert {op_of(name).name for name in names()} == set(OPS)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_a_statement_is_whole(op: object) -> None:
    statement = OPS[getattr(op, "name", "")]
    values = [v.name for v in (*statement.inputs, *statement.outputs)]
    assert len(set(values)) == len(values)
    assert statement.maths and statement.source
    into, out = statement.states()
    assert len(into) == len(out)
    for output in statement.outputs:
        assert output.name in statement.maths or output.role == "state"


def test_variants_are_chosen_by_attributes() -> None:
    assert OPS["LinearBits"].function({"bits": 4}) == "LinearBits_4"
    assert OPS["SelectiveScanHeads"].function({"groups": 1}) == "SelectiveScanHeads_1"
    assert OPS["SelectiveScanHeads"].function({"groups": 8}) == "SelectiveScanHeads"
    assert OPS["RMSNorm"].function({"eps": 1e-5}) == "RMSNorm"


def test_statements_import_without_onnx_and_torch() -> None:
    modules = "sorted({'onnx', 'torch', 'numpy'} & set(sys.modules))"
    code = f"import edge.plugins.catalogue, sys\nprint({modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_type_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a type"):
        value("x", "f64[T]", "")


def test_every_form_has_a_function() -> None:
    assert set(names()) == {name for op in OPS.values() for name in op.forms()}
