"""From graphs to launch plans: the walk over nodes, with lowerings made for the test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from edge.config import ModelConfig, RopeConfig, RopeScaling
from edge.errors import BundleError, ExportError
from edge.export.graph import build_graph
from edge.launch import Argument, LaunchPlan, Pointer, Program
from edge.launch_checks import check_plan
from edge.plugins.lowering.context import Lower, Lowering, Node, Rows
from edge.plugins.lowering.graph import read_graph
from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.lowering.plan import LoweringError, lower
from edge.rope import inverse_frequencies
from edge.tensors import tensor_shapes
from tests import engine_models, int8_models
from tests.quantized_models import built, plan_of

_PRODUCTS = ("Linear", "LinearInt8", "LinearInt8Quantize")
_BOTH = ("LinearConv", "LinearInt8QuantizeConv")


def fake(at: Lowering, node: Node) -> None:
    """Return a launch that reads all values and constants of a node and writes its outputs."""
    inputs = list(node.inputs.values())
    read = [name for name in inputs if name in at.views or name in at.constants]
    arguments: dict[str, tuple[Argument, str]] = {
        f"in{i}": at.pointer(at.view(n) if n in at.views else at.constant(n))
        for i, n in enumerate(read)
    }
    base = node.op.removesuffix("Conv")
    rows: Rows = "TB"
    if node.op in ("Embed", "EmbedInt8"):
        width = at.constant(node.inputs["table"]).shape[1]
    else:
        x = at.view(node.inputs.get("x", inputs[0]))
        rows = "LB" if node.attributes.get("rows") or x.rows == "LB" else "TB"
        product = base in _PRODUCTS
        width = at.constant(node.inputs["weight"]).shape[0] if product else x.width
    rounds = base.endswith("Quantize") or node.op == "CausalConv1dInt8"
    states = "Scan" in node.op or "Conv" in node.op
    for i, name in enumerate(node.outputs.values()):
        if name and not name.endswith("_out") and "_states" not in name:
            if i == 1 and node.op in _BOTH:
                width = at.constant(node.inputs["conv_weight"]).shape[-1]
            rounded = rounds and (i == 0 or node.op in _BOTH)
            made = at.new(name, "i8" if rounded else "f32", rows, width)
            arguments[f"out{i}"] = at.pointer(made)
    at.launch(f"fake.{node.op.lower()}", arguments, {}, (at.size(rows)[0],), settles=states)


_OPS = [
    "Embed", "EmbedInt8", "Linear", "LinearInt8", "LinearInt8Quantize", "Add", "Concat", "Quantize",
    "SiluGate", "Gelu", "GeluTanh", "RMSNorm", "AddRMSNorm", "LayerNorm", "AddLayerNorm",
    "RMSNormQuantize",
    "AddRMSNormQuantize", "GatedRMSNorm", "GatedRMSNormInt8", "HadamardQuantize", "CausalConv1d",
    "CausalConv1dInt8", "SelectiveScan", "SelectiveScanInt8", "SelectiveScanHeads",
    "SelectiveScanHeadsInt8", "Rope", "Attention", "AttentionF16", "GroupRMSNorm", "PartsRMSNorm",
    "SquaredRelu", "SoftCap", "Multiply", "CausalConvPlain",
]  # fmt: skip
FAKES: dict[str, Lower] = {
    **{op: LOWER[op] for op in ("Split", "Transpose", "QuantizeRows", "LinearInt8Rows")},
    **dict.fromkeys(_OPS, fake),
}
FUSED = {
    **FAKES,
    **dict.fromkeys(
        ("LinearConv", "LinearInt8QuantizeConv", "SelectiveScanDt", "SelectiveScanInt8Dt",
         "GatedRMSNormInt8HadamardQuantize"),
        fake,
    ),
}  # fmt: skip


def graph_of(kind: str) -> tuple[bytes, Path]:
    folder = engine_models.folder(kind)
    return (folder / "graphs/ort.onnx").read_bytes(), folder


def program(plan: LaunchPlan, kind: str, rows: int | None) -> Program:
    return next(p for p in plan.programs if (p.kind, p.max_rows) == (kind, rows))


def kernels(plan: LaunchPlan, which: Program) -> list[str]:
    names = [plan.variants[plan.launches[i].variant].kernel for i in which.launches]
    return [name.removeprefix("fake.") for name in names]


def pointers(plan: LaunchPlan, launch: int) -> dict[str, Pointer]:
    entry = plan.launches[launch]
    names = plan.variants[entry.variant].arguments
    return {n: a for n, a in zip(names, entry.arguments, strict=True) if isinstance(a, Pointer)}


def test_programs_of_a_mamba_layer_are_its_nodes_in_order() -> None:
    plan = lower(*graph_of("mamba1"), ops=FAKES)
    assert [(p.kind, p.max_rows) for p in plan.programs] == [
        ("chain", 1), ("chain", 16), ("tree", 16), ("chain", None), ("settle", None),
    ]  # fmt: skip
    layer = ["linear", "causalconv1d", "linear", "linear", "selectivescan", "linear"]
    expected = ["embed", "rmsnorm", *layer, "addrmsnorm", *layer, "addrmsnorm", "linear"]
    for each in plan.programs[:-1]:
        assert kernels(plan, each) == expected
    assert kernels(plan, plan.programs[-1]) == ["causalconv1d", "selectivescan"] * 2
    assert plan.taps == (3, 4)


def test_parts_of_a_product_are_columns_of_its_rows() -> None:
    plan = lower(*graph_of("mamba1"), ops=FAKES)
    step = program(plan, "chain", 1)
    scan = next(i for i in step.launches if "scan" in kernels(plan, step)[step.launches.index(i)])
    read = pointers(plan, scan)
    assert read["in0"].name == "layers.0.conv"
    # d_inner 24, dt_rank 3, d_state 4
    assert (read["in2"].name, read["in2"].at) == ("layers.0.dbc", 3)
    assert (read["in3"].name, read["in3"].at) == ("layers.0.dbc", 7)
    assert (read["in4"].name, read["in4"].at) == ("layers.0.xz", 24)
    assert plan.values["layers.0.dbc"].elements.value({"T": 3, "B": 2}) == 6 * 11


def test_the_last_norm_picks_the_wanted_rows() -> None:
    plan = lower(*graph_of("mamba1"), ops=FAKES)
    step = program(plan, "chain", None)
    *_, norm, head = step.launches
    assert pointers(plan, norm)["in0"].name == "layers.1.residual"
    # nobody reads its sum, so it has one output
    assert "out1" not in pointers(plan, norm)
    assert plan.values["final"].elements.of == "LB"
    assert plan.values["logits"].elements.value({"L": 2, "B": 1}) == 80
    assert pointers(plan, head)["out0"].name == "logits"


def test_attention_reads_rows_whatever_the_order_of_axes_in_the_graph() -> None:
    plan = lower(*graph_of("attention"), ops=FAKES)
    step = program(plan, "tree", 16)
    names = kernels(plan, step)
    # q, k and v are columns of the sum with the bias, transposed only in the graph
    ropes = [pointers(plan, i) for i, n in zip(step.launches, names, strict=True) if n == "rope"]
    assert [(r["in0"].name, r["in0"].at) for r in ropes[:2]] == [
        ("layers.0.qkv", 0), ("layers.0.qkv", 32),
    ]  # fmt: skip
    assert "transpose" not in names and "cos" not in names and "range" not in names
    assert plan.rotations == ((10000.0, 4),)
    assert kernels(plan, plan.programs[-1]) == []


def test_frequencies_that_are_no_powers_come_along(tmp_path: Path) -> None:
    scalings = [
        RopeScaling(kind="llama3", factor=8.0, original_context=64),
        RopeScaling(kind="linear", factor=2.5),
        RopeScaling(kind="yarn", factor=4.0, original_context=64),
        None,
    ]
    ropes = [RopeConfig(dim=6, theta=100.0, scaling=scaling) for scaling in scalings]
    layers = [engine_models.ATTENTION.model_copy(update={"rope": rope}) for rope in ropes]
    config = engine_models.CONFIGS["attention"].model_copy(update={"layers": tuple(layers)})
    tensors = {name: np.ones(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    build_graph(config, tensors, tmp_path)
    plan = lower((tmp_path / "graphs/ort.onnx").read_bytes(), tmp_path, ops=FAKES)
    assert plan.rotations == ((0.0, 6), (0.0, 6), (0.0, 6), (100.0, 6))
    for index, rope in enumerate(ropes[:3]):
        found = np.array(plan.inverses[f"rope{index}"], np.float32)
        assert np.array_equal(found, inverse_frequencies(rope))
    size = (tmp_path / "weights.bin").stat().st_size
    check_plan(plan, config, weight_bytes=size)
    assert LaunchPlan.model_validate_json(plan.to_json()) == plan
    for spoiled in ({}, plan.inverses | {"rope1": (1.0, 0.2, 0.1)}, plan.inverses | {"rope2": ()}):
        with pytest.raises(BundleError, match=r"rotations|inverses"):
            check_plan(plan.model_copy(update={"inverses": spoiled}), config, weight_bytes=size)


@pytest.mark.parametrize("theta, dim", [(500000.0, 64), (1e4, 2), (12345.678, 8), (1.5e6, 128)])
def test_theta_is_found_again(tmp_path: Path, theta: float, dim: int) -> None:
    config = engine_models.CONFIGS["attention"]
    layer = engine_models.ATTENTION.model_copy(
        update={"head_dim": dim, "rope": engine_models.RopeConfig(theta=theta, dim=dim)}
    )
    config = config.model_copy(update={"layers": (layer,)})
    build_graph(config, int8_models.random_tensors(config), tmp_path)
    graph = read_graph((tmp_path / "graphs/ort.onnx").read_bytes(), tmp_path)
    ((found, width),) = graph.rotations
    assert width == dim
    assert dim == 2 or found == pytest.approx(theta, rel=1e-6)


def test_few_rows_run_fused_and_many_do_not(tmp_path: Path) -> None:
    int8_models.build_int8(tmp_path, ("int8", "fp16"))
    plan = lower((tmp_path / "graphs/ort.onnx").read_bytes(), tmp_path, ops=FUSED)
    mamba1 = ["linearint8quantizeconv", "linearint8quantize", "selectivescanint8dt",
              "hadamardquantize", "linearint8"]  # fmt: skip
    assert kernels(plan, program(plan, "chain", 1))[2:7] == mamba1
    mamba2 = ["linearint8quantizeconv", "selectivescanheadsint8",
              "gatedrmsnormint8hadamardquantize", "linearint8"]  # fmt: skip
    for each in plan.programs[:3]:
        names = kernels(plan, each)
        at = names.index("linearint8quantizeconv", 5)
        assert names[at : at + 4] == mamba2
    many = kernels(plan, program(plan, "chain", None))
    assert many[2:9] == [
        "linearint8quantize", "causalconv1dint8", "linearint8quantize", "linearint8quantize",
        "selectivescanint8", "hadamardquantize", "linearint8",
    ]  # fmt: skip


def recorded(model: bytes, folder: Path, ops: Mapping[str, Lower]) -> dict[str, Node]:
    """Return the nodes of the first program, by op: the first of each."""
    seen: dict[str, Node] = {}

    def note(at: Lowering, node: Node) -> None:
        seen.setdefault(node.op, node)
        ops[node.op](at, node)

    lower(model, folder, ops=dict.fromkeys(ops, note))
    return seen


def test_what_fused_nodes_read(tmp_path: Path) -> None:
    int8_models.build_int8(tmp_path, ("int8", "fp16"))
    model = (tmp_path / "graphs/ort.onnx").read_bytes()
    apart, joined = recorded(model, tmp_path, FAKES), recorded(model, tmp_path, FUSED)
    product, conv = apart["LinearInt8Quantize"], apart["CausalConv1dInt8"]
    both = joined["LinearInt8QuantizeConv"]
    read, made = set(both.inputs.values()), list(both.outputs.values())
    assert read == {*product.inputs.values(), *conv.inputs.values()} - {conv.inputs["x"]}
    assert made == [*product.outputs.values(), *conv.outputs.values()]
    assert both.attributes["start"] == 0
    scan = joined["SelectiveScanInt8Dt"]
    alone = {name: v for name, v in apart["SelectiveScanInt8"].inputs.items() if name != "dt"}
    assert scan.inputs == alone | {
        "low_dt": "layers.0.low_rank_dt.q", "low_dt_scale": "layers.0.low_rank_dt.q.x_scale",
        "dt_weight": "layers.0.dt_proj.weight", "dt_weight_scale": "layers.0.dt_proj.weight.scale",
    }  # fmt: skip
    norm = joined["GatedRMSNormInt8HadamardQuantize"]
    rotation = apart["HadamardQuantize"]
    assert norm.inputs.items() >= apart["GatedRMSNormInt8"].inputs.items()
    assert norm.inputs["fast"].startswith("hadamard.64") and len(norm.inputs) == 7
    assert norm.outputs["y"].endswith(".q") and rotation.op not in norm.attributes
    assert norm.attributes["groups"] == 1


def test_the_convolution_of_mamba2_starts_behind_the_gate(tmp_path: Path) -> None:
    model, folder = graph_of("mamba2")
    assert recorded(model, folder, FUSED)["LinearConv"].attributes == {"start": 24}


def test_a_value_with_two_readers_stays(tmp_path: Path) -> None:
    model, folder = graph_of("mamba1")
    proto = onnx.load_from_string(model)
    dt = next(node for node in proto.graph.node if "layers.0.dt" in node.output)
    proto.graph.output.append(helper.make_tensor_value_info(dt.output[0], 1, ["T", "B", 24]))
    plan = lower(proto, folder, ops=FUSED)
    step = kernels(plan, program(plan, "chain", 1))
    assert step.count("selectivescandt") == 1 and step.count("selectivescan") == 1


def test_what_nothing_reads_is_not_computed() -> None:
    model, folder = graph_of("mamba1")
    proto = onnx.load_from_string(model)
    dead = helper.make_node("Linear", ["layers.0.xz", "lm"], ["dead"], domain="edge", name="dead")
    proto.graph.node.append(dead)
    assert lower(proto, folder, ops=FAKES) == lower(model, folder, ops=FAKES)


def test_an_op_without_a_kernel_is_named() -> None:
    without = {op: lower_it for op, lower_it in FAKES.items() if op != "SelectiveScan"}
    with pytest.raises(LoweringError, match="no kernel runs SelectiveScan") as refused:
        lower(*graph_of("mamba1"), ops=without)
    assert refused.value.field == "layers.0.scan.SelectiveScan"


def test_the_node_of_a_refusal_is_named() -> None:
    def refuse(at: Lowering, node: Node) -> None:
        raise ExportError("is too wide", field="weight")

    with pytest.raises(LoweringError, match="weight: is too wide") as refused:
        lower(*graph_of("mamba1"), ops={**FAKES, "SelectiveScan": refuse})
    assert refused.value.field == "layers.0.scan.SelectiveScan"


def _changed(change: Any) -> tuple[onnx.ModelProto, Path]:
    model, folder = graph_of("mamba1")
    proto = onnx.load_from_string(model)
    change(proto.graph)
    return proto, folder


def _rename(graph: onnx.GraphProto) -> None:
    next(n for n in graph.node if n.op_type == "SelectiveScan").op_type = "Unknown"


def _foreign(graph: onnx.GraphProto) -> None:
    next(n for n in graph.node if n.op_type == "SelectiveScan").domain = "com.example"


def _elsewhere(graph: onnx.GraphProto) -> None:
    held = next(t for t in graph.initializer if t.external_data)
    held.external_data[0].value = "../weights.bin"


def _time(graph: onnx.GraphProto) -> None:
    split = next(n for n in graph.node if n.op_type == "Split")
    split.attribute[0].i = 0


@pytest.mark.parametrize(
    "change, message",
    [
        (_rename, "unknown op 'Unknown'"),
        (_foreign, "no kernel runs com.example::SelectiveScan"),
        (_elsewhere, "is not in weights.bin"),
        (_time, "does not split channels"),
    ],
)
def test_graphs_that_are_not_ours_are_refused(change: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        lower(*_changed(change), ops=FAKES)


def test_weights_that_end_too_early_are_refused(tmp_path: Path) -> None:
    model, folder = graph_of("mamba1")
    (tmp_path / "weights.bin").write_bytes((folder / "weights.bin").read_bytes()[:100])

    def reads(at: Lowering, node: Node) -> None:
        np.sum(at.constant(node.inputs["weight"]).array())
        fake(at, node)

    with pytest.raises(LoweringError, match="ends before"):
        lower(model, tmp_path, ops={**FAKES, "Linear": reads})


@pytest.mark.parametrize("quant", ["fp32", "w8a8"])
def test_the_same_graph_gives_the_same_bytes(tmp_path: Path, quant: str) -> None:
    _, plan = plan_of("mamba2", quant)
    model = built("mamba2", plan, tmp_path).graph.read_bytes()
    first = lower(model, tmp_path, ops=FUSED).to_json()
    assert first == lower(onnx.load_from_string(model), tmp_path, ops=FUSED).to_json()
    assert LaunchPlan.model_validate_json(first).to_json() == first


def test_weights_are_named_where_they_lie(tmp_path: Path) -> None:
    config = ModelConfig(
        family="test", vocab_size=40, d_model=12, layers=engine_models.CONFIGS["mamba1"].layers
    )
    tensors = int8_models.random_tensors(config)
    build_graph(config, tensors, tmp_path)
    plan = lower((tmp_path / "graphs/ort.onnx").read_bytes(), tmp_path, ops=FAKES)
    data = (tmp_path / "weights.bin").read_bytes()
    entry = plan.weights["layers.1.x_proj.weight"]
    held = np.frombuffer(data, np.float32, entry.elements, entry.offset)
    assert np.array_equal(held, tensors["layers.1.x_proj.weight"].ravel())
    assert "layers.1.conv1d.weight" in plan.weights
    assert not plan.inline  # nothing in this graph needs a constant that is not in weights.bin
