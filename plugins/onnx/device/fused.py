"""Bodies of two ops in one: they call the functions of both."""

from __future__ import annotations

from edge.ops import OPS
from edge.ops.device import DEVICE_DOMAIN, DEVICE_OPS
from edge.plugins.onnx.device.conv import conv
from edge.plugins.onnx.device.text import CONSTANTS, call, views


def device_call(name: str, inputs: dict[str, str], outputs: dict[str, str], **given: str) -> str:
    """A node of the device op `name`."""
    return call(name, DEVICE_OPS[name], inputs, outputs, DEVICE_DOMAIN, **given)


# The convolution has as many channels as its weight.
_CONVOLVED = """
    first_0 = Constant<value_int: int = @conv_start>()
    first = Reshape(first_0, end)
    channels = Shape<start=-1>(conv_weight)
    behind = Add(first, channels)
    convolved = Slice(y, first, behind, end)
"""


def linear_conv(product: str, function: str) -> str:
    return (
        CONSTANTS
        + device_call(product, {}, {})
        + _CONVOLVED
        + conv(function, "convolved", prefix="conv_")
    )


def scan_dt(product: str, scan: str) -> str:
    """dt is as wide as x."""
    of_product = {"x": "low_dt", "x_scale": "low_dt_scale", "weight": "dt_weight"}
    of_product |= {"weight_scale": "dt_weight_scale", "y_scale": "dt_scale"}
    columns = {"x_start": "@low_dt_start", "x_width": "@low_dt_width"}
    made = device_call(product, of_product, {"y": "dt"}, **columns)
    return made + device_call(scan, {}, {}, dt_start="0", dt_width="@x_width")


def norm_rotation(norm: str) -> str:
    rotation = OPS["HadamardQuantize"]
    return device_call(norm, {}, {"y": "normed"}) + call(
        "HadamardQuantize", rotation, {"x": "normed"}, {}
    )


# q and k are rotated as the functional op has them, batch first.
_ROTATED = """
    {x}_b = Transpose<perm=[1, 0, 2]>({x}_own)
    {x}_turned = edge.Rope<heads: int = @{heads}, head_dim: int = @head_dim, dim: int = @dim>
        ({x}_b, cos, sin)
    {x}_t = Transpose<perm=[1, 0, 2]>({x}_turned)
"""


def rotary_attention() -> str:
    return (
        CONSTANTS
        + views(["q", "k"])
        + _ROTATED.format(x="q", heads="heads")
        + _ROTATED.format(x="k", heads="kv_heads")
        + device_call("Attention", {"q": "q_t", "k": "k_t"}, {}, q_start="0", k_start="0")
    )
