"""A feed-forward layer, which has no state."""

from __future__ import annotations

from typing import ClassVar, Literal

from edge.mixers.base import MixerConfig, Positive, Shapes, linear_shapes


class MlpConfig(MixerConfig):
    """`swiglu` is down(silu(gate(x)) · up(x)), `geglu` down(gelu(gate(x)) · up(x)), `gelu`
    down(gelu(up(x))), and `geglu_tanh` and `gelu_tanh` the same with the tanh approximation of
    GELU; `squared_relu` is down(max(up(x), 0)²).

    Attributes:
        parallel: it reads the stream as the layer before it did, not what that made of it:
            x + before(norm(x)) + mlp(norm'(x)).
        aside: it reads what the layer before it gave aside of the stream, and gives so itself.
    """

    later: ClassVar[frozenset[str]] = frozenset({"form", "parallel", "aside"})

    kind: Literal["mlp"] = "mlp"
    d_intermediate: Positive
    bias: bool = False
    form: Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "squared_relu"] = "swiglu"
    parallel: bool = False
    aside: bool = False

    @property
    def gated(self) -> bool:
        return self.form in ("swiglu", "geglu", "geglu_tanh")

    @property
    def is_parallel(self) -> bool:
        return self.parallel

    @property
    def is_aside(self) -> bool:
        return self.aside

    @property
    def first_matrix(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"

    def tensor_shapes(self, d_model: int) -> Shapes:
        wide = self.d_intermediate
        gate = linear_shapes("gate_proj", wide, d_model, self.bias) if self.gated else {}
        return (
            gate
            | linear_shapes("up_proj", wide, d_model, self.bias)
            | linear_shapes("down_proj", d_model, wide, self.bias)
        )

    def workspace(self, tokens: int, capacity: int) -> int:
        return 3 * self.d_intermediate
