"""From op statement and body text to `FunctionProto`: the signature is the statement's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal

from onnx import FunctionProto, GraphProto, ModelProto, helper
from onnx.parser import parse_function

from edge.ops import DOMAIN, OPS, Op
from edge.plugins.onnx import attention, dense, quantized, quantized_recurrent, recurrent

Flavour = Literal["standard", "ort"]
FLAVOURS: tuple[Flavour, ...] = ("standard", "ort")
# 21 is the newest opset of ONNX Runtime 1.20 and still current in 1.23.2, the last for Python 3.10.
OPSETS = {"": 21, "com.microsoft": 1}
# IR 10 is the newest that ONNX Runtime 1.23 reads.
IR_VERSION = 10

# Function name → body. A function is an op, or an op's variant for some attribute values
# (`edge.ops.variants`): ONNX Runtime 1.23 does not tell FunctionProto.overload apart.
_STANDARD = {
    "Embed": dense.EMBED,
    "EmbedBits_8": dense.EMBED_BITS_8,
    "EmbedBits_4": dense.EMBED_BITS_4,
    "Linear": dense.LINEAR,
    "LinearBits_8": dense.LINEAR_BITS_8,
    "LinearBits_4": dense.LINEAR_BITS_4,
    "RMSNorm": dense.RMS_NORM,
    "AddRMSNorm": dense.ADD_RMS_NORM,
    "LayerNorm": dense.LAYER_NORM,
    "AddLayerNorm": dense.ADD_LAYER_NORM,
    "GatedRMSNorm": dense.GATED_RMS_NORM,
    "GatedRMSNorm_1": dense.GATED_RMS_NORM_1,
    "SiluGate": dense.SILU_GATE,
    "Gelu": dense.GELU,
    "GeluTanh": dense.GELU_TANH,
    "CausalConv1d": recurrent.CAUSAL_CONV1D,
    "SelectiveScan": recurrent.SELECTIVE_SCAN,
    "SelectiveScanHeads": recurrent.SELECTIVE_SCAN_HEADS,
    "SelectiveScanHeads_1": recurrent.SELECTIVE_SCAN_HEADS_1,
    "Rope": attention.ROPE,
    "Attention": attention.ATTENTION,
    **quantized.BODIES,
    **quantized_recurrent.BODIES,
}
_ORT = _STANDARD | {
    "LinearBits_8": dense.ORT_LINEAR_BITS,
    "LinearBits_4": dense.ORT_LINEAR_BITS,
    "AddRMSNorm": dense.ORT_ADD_RMS_NORM,
    "AddLayerNorm": dense.ORT_ADD_LAYER_NORM,
    "Rope": attention.ORT_ROPE,
    "Attention": attention.ORT_ATTENTION,
    **quantized.ORT_BODIES,
    **quantized_recurrent.ORT_BODIES,
}
_BODIES: dict[Flavour, dict[str, str]] = {"standard": _STANDARD, "ort": _ORT}


def names() -> tuple[str, ...]:
    """Every function there is."""
    return tuple(_STANDARD)


def op_of(name: str) -> Op:
    """The op a function implements: `EmbedBits_4` → `EmbedBits`."""
    return OPS[name.partition("_")[0]]


@cache
def function(name: str, flavour: Flavour = "standard") -> FunctionProto:
    """The function `edge::name`. `standard` is made of ONNX's own ops; `ort` may use com.microsoft.

    The flavours agree on everything the statement says; `ort` is what ONNX Runtime does fastest.
    """
    op = op_of(name)
    body = _BODIES[flavour][name]
    domains = OPSETS if "com.microsoft." in body else {"": OPSETS[""]}
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in domains.items())
    attributes = ", ".join(f"{a.name}: {a.kind}" for a in op.attributes)
    signature = (
        f"{name} {f'<{attributes}>' if attributes else ''} "
        f"({', '.join(v.name for v in op.inputs)}) => ({', '.join(v.name for v in op.outputs)})"
    )
    header = f'<domain: "{DOMAIN}", opset_import: [{imports}]>'
    parsed = parse_function(f"{header}\n{signature} {{{body}}}")
    # The parser files attributes without a default under attribute_proto; IR wants names.
    del parsed.attribute_proto[:]
    parsed.attribute.extend(a.name for a in op.attributes)
    parsed.doc_string = f"{op.maths}\n\nSource: {op.source}"
    return parsed


def model_of(
    graph: GraphProto, functions: Iterable[FunctionProto], own: Mapping[str, int]
) -> ModelProto:
    """A model of ONNX's ops, those of the domains `own` (→ version), and what `functions` use."""
    found = list(functions)
    imports = {"": OPSETS[""], **own}
    for each in found:
        imports |= {entry.domain: entry.version for entry in each.opset_import}
    return helper.make_model(
        graph,
        functions=found,
        producer_name="edge",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid(domain, at) for domain, at in imports.items()],
    )
