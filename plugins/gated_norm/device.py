"""Device ops of the gated norm: alone, or fused with the rotation after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edge.ops import DEVICE_DOMAIN, Op
from edge.plugins.catalogue import ops_in
from edge.plugins.device.rules import narrow, stateless
from edge.plugins.device.text import call
from edge.plugins.gated_norm.statement import GATED_RMS_NORM_INT8
from edge.plugins.hadamard.statement import HADAMARD_QUANTIZE


def statements() -> Iterator[Op]:
    yield from map(stateless, ops_in("gated_norm"))
    norm, rotation = stateless(GATED_RMS_NORM_INT8), HADAMARD_QUANTIZE
    yield replace(
        norm,
        name=f"{norm.name}{rotation.name}",
        tail=rotation.name,
        inputs=(*norm.inputs, *rotation.without("x")),
        outputs=tuple(map(narrow, rotation.outputs)),
        maths=f"x' = {norm.name}(…)\ny = {rotation.name}(x', slow, fast, scale)",
        source=f"{norm.name}, then {rotation.name}",
    )


def gated_rms_norm_int8_hadamard_quantize(groups: int | None) -> str:
    norm, rotation = stateless(GATED_RMS_NORM_INT8), HADAMARD_QUANTIZE
    name = norm.function({"groups": groups or 0})
    return call(name, norm, {}, {"y": "normed"}, DEVICE_DOMAIN) + call(
        rotation.name, rotation, {"x": "normed"}, {}
    )
