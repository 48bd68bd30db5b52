"""A feed-forward layer, without state."""

from __future__ import annotations

from typing import ClassVar, Literal

from edge.mixers.base import MixerConfig, Positive, Shapes, linear_shapes


class MlpConfig(MixerConfig):
    """An MLP of one of several forms.

    `swiglu` is down(silu(gate(x)) · up(x)), `geglu` is down(gelu(gate(x)) · up(x)), `gelu` is
    down(gelu(up(x))), and `squared_relu` is down(max(up(x), 0)²). `geglu_tanh` and `gelu_tanh` use
    the tanh approximation of GELU.

    Attributes:
        parallel: whether it reads the same residual stream as the layer before it:
            x + before(norm(x)) + mlp(norm'(x)).
        aside: whether it reads the output of the layer before it instead of the residual stream,
            and its output goes to the next layer and not to the stream.
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
        hidden = self.d_intermediate
        gate = linear_shapes("gate_proj", hidden, d_model, self.bias) if self.gated else {}
        return (
            gate
            | linear_shapes("up_proj", hidden, d_model, self.bias)
            | linear_shapes("down_proj", d_model, hidden, self.bias)
        )

    def workspace(self, tokens: int, capacity: int) -> int:
        return 3 * self.d_intermediate
