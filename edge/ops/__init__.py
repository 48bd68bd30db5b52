"""The ops that ONNX lacks, each stated once: what goes in, what comes out, what it means.

References, ONNX function bodies, GPU kernels and plugins are all held to these statements. Symbols
are those of `edge.config`; activations are time-major ([T, B, …]); R is the number of kept rows.
"""

from edge.ops import attention, dense, quantized, quantized_recurrent, recurrent
from edge.ops.spec import DOMAIN, VERSION, Attribute, Op, Value

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        *dense.ALL,
        *recurrent.ALL,
        *attention.ALL,
        *quantized.ALL,
        *quantized_recurrent.ALL,
    )
}

__all__ = ["DOMAIN", "OPS", "VERSION", "Attribute", "Op", "Value"]
