"""A gated short convolution. Only its products are quantized; the rest runs on floating ops."""

from __future__ import annotations

from torch import Tensor, nn

from edge.export.mixers.base import Conv1d, MixerExport, State
from edge.export.mixers.mamba import convolution
from edge.export.nodes.layer import LayerGraph
from edge.export.nodes.products import ProductInput
from edge.export.quantize.layer_plan import Matrix
from edge.mixers.shortconv import ShortConvConfig
from edge.plugins.causal_conv1d.reference import causal_conv_plain


class ShortConv(nn.Module):
    def __init__(self, config: ShortConvConfig, d_model: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=config.bias)
        self.conv1d = Conv1d(d_model, config.d_conv, config.bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=config.bias)

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        B, C, x = self.in_proj(u).chunk(3, dim=-1)
        y, conv_state = causal_conv_plain(
            B * x, state["conv_state"], self.conv1d.weight, self.conv1d.bias
        )
        return self.out_proj(C * y), {"conv_state": conv_state}


class ShortConvExport(MixerExport[ShortConvConfig]):
    def module(self, d_model: int, eps: float) -> ShortConv:
        return ShortConv(self.config, d_model)

    def matrices(self, d_model: int) -> dict[str, Matrix]:
        return {
            "in_proj": Matrix(3 * d_model, d_model, "normed"),
            "out_proj": Matrix(d_model, d_model, "gated"),
        }

    def nodes(self, at: LayerGraph, u: ProductInput) -> str:
        c, g, width = self.config, at.g, self.config.d_model
        joined = at.linear("in_proj", u, "BCx", c.bias)
        B, C, x = at.split(joined, {"B": width, "C": width, "x": width})
        (x,) = g.call("Multiply", [x, B], [at.named("Bx")])
        y = convolution(at, c, x, bias=c.bias, op="CausalConvPlain")
        (y,) = g.call("Multiply", [y, C], [at.named("gated")])
        return at.linear("out_proj", y, "out", c.bias)


EXPORT = ShortConvExport
