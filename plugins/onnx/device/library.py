"""From the statement and the body's text to the `FunctionProto` of a device op."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from onnx import FunctionProto
from onnx.parser import parse_function

from edge.ops import DOMAIN, VERSION
from edge.ops.device import DEVICE_DOMAIN, DEVICE_OPS, DEVICE_VERSION
from edge.plugins.onnx.device import fused, stateless
from edge.plugins.onnx.device.attention import ATTENTION
from edge.plugins.onnx.device.conv import conv
from edge.plugins.onnx.device.scan import selective_scan
from edge.plugins.onnx.device.scan_heads import selective_scan_heads
from edge.plugins.onnx.device.text import CONSTANTS, views
from edge.plugins.onnx.library import OPSETS, function

_X = CONSTANTS + views(["x"])


def _bodies() -> dict[str, str]:
    """Device op → body."""
    bodies = stateless.bodies() | {
        "CausalConv1d": _X + conv("CausalConv1d", "x_own"),
        "CausalConv1dInt8": _X + conv("CausalConv1dInt8", "x_own"),
        "LinearConv": fused.linear_conv("Linear", "CausalConv1d"),
        "LinearInt8QuantizeConv": fused.linear_conv("LinearInt8Quantize", "CausalConv1dInt8"),
        "SelectiveScan": selective_scan(int8=False),
        "SelectiveScanDt": fused.scan_dt("Linear", "SelectiveScan"),
        "Attention": ATTENTION,
        "RotaryAttention": fused.rotary_attention(),
    }
    for suffix, one_group in (("", False), ("_1", True)):
        bodies[f"SelectiveScanHeads{suffix}"] = selective_scan_heads(one_group, int8=False)
        norm = f"GatedRMSNormInt8{suffix}"
        bodies[f"{norm}HadamardQuantize"] = fused.norm_rotation(norm)
        for bits in (32, 16, 8):
            name = f"SelectiveScanHeadsInt8_{bits}{suffix}"
            bodies[name] = selective_scan_heads(one_group, int8=True, state_bits=bits)
    for bits in (32, 16, 8):
        scan = f"SelectiveScanInt8_{bits}"
        bodies[scan] = selective_scan(int8=True, state_bits=bits)
        bodies[f"{scan}Dt"] = fused.scan_dt("LinearInt8Quantize", scan)
    return bodies


_BODIES = _bodies()


@cache
def device_function(name: str) -> FunctionProto:
    """The function `edge.device::{name}`, of ONNX's own ops and of functions that it calls."""
    op = DEVICE_OPS[name]
    attributes = ", ".join(f"{a.name}: {a.kind}" for a in op.attributes)
    header = (
        f'<domain: "{DEVICE_DOMAIN}", opset_import: ["" : {OPSETS[""]}, '
        f'"{DOMAIN}" : {VERSION}, "{DEVICE_DOMAIN}" : {DEVICE_VERSION}]>'
    )
    signature = (
        f"{name} {f'<{attributes}>' if attributes else ''} "
        f"({', '.join(v.name for v in op.inputs)}) => ({', '.join(v.name for v in op.outputs)})"
    )
    parsed = parse_function(f"{header}\n{signature} {{{_BODIES[name]}}}")
    # The parser files attributes without a default under attribute_proto; IR wants names.
    del parsed.attribute_proto[:]
    parsed.attribute.extend(a.name for a in op.attributes)
    parsed.doc_string = f"{op.maths}\n\nSource: {op.source}"
    return parsed


def device_functions(names: Iterable[str]) -> list[FunctionProto]:
    """The functions of these device ops, and all that they call: what a model needs to have."""
    found: dict[tuple[str, str], FunctionProto] = {}
    waiting = [(DEVICE_DOMAIN, name) for name in names]
    while waiting:
        domain, name = one = waiting.pop()
        if one not in found:
            found[one] = device_function(name) if domain == DEVICE_DOMAIN else function(name)
            calls = ((node.domain, node.op_type) for node in found[one].node)
            waiting += [call for call in calls if call[0] in (DOMAIN, DEVICE_DOMAIN)]
    return [found[one] for one in sorted(found)]
