"""A feed-forward layer: down(f(gate) · up), with gate and up as one product, or down(f(up))."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from edge.export.mixers.base import Fetch, MixerExport, State, Stored
from edge.export.nodes.builder import F32
from edge.export.nodes.layer import LayerGraph
from edge.export.nodes.products import ProductInput
from edge.export.quantize.layer_plan import Matrix
from edge.mixers.mlp import MlpConfig

_OPS = {"gelu": "Gelu", "gelu_tanh": "GeluTanh", "squared_relu": "SquaredRelu"}
# activations of gates; SwiGLU's is part of the op that multiplies
_GATES = {"geglu": "Gelu", "geglu_tanh": "GeluTanh"}
_JOINED = ("gate_proj", "up_proj")


class Mlp(nn.Module):
    def __init__(self, config: MlpConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        if config.gated:
            self.gate_proj = nn.Linear(d_model, config.d_intermediate, bias=config.bias)
        self.up_proj = nn.Linear(d_model, config.d_intermediate, bias=config.bias)
        self.down_proj = nn.Linear(config.d_intermediate, d_model, bias=config.bias)

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        up, form = self.up_proj(u), self.config.form
        activated = self.gate_proj(u) if self.config.gated else up
        if form == "swiglu":
            activated = F.silu(activated)
        elif form == "squared_relu":
            activated = F.relu(activated).square()
        else:
            tanh = form.endswith("_tanh")
            activated = F.gelu(activated, approximate="tanh" if tanh else "none")
        return self.down_proj(activated * up if self.config.gated else activated), {}


class MlpExport(MixerExport[MlpConfig]):
    def module(self, d_model: int, eps: float) -> Mlp:
        return Mlp(self.config, d_model)

    def matrices(self, d_model: int) -> dict[str, Matrix]:
        wide = self.config.d_intermediate
        if self.config.gated:
            return {
                "gate_up_proj": Matrix(2 * wide, d_model, "normed"),
                "down_proj": Matrix(d_model, wide, "gated"),
            }
        return {
            "up_proj": Matrix(wide, d_model, "normed", listed="gate_up_proj"),
            "down_proj": Matrix(d_model, wide, "activated", reads_listed="gated"),
        }

    def weight(self, name: str, fetch: Fetch) -> F32:
        module, _, kind = name.partition(".")
        if module == "gate_up_proj":
            return np.concatenate([fetch(f"{part}.{kind}") for part in _JOINED])
        return fetch(name)

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        module, _, kind = name.partition(".")
        if not self.config.gated or module not in _JOINED:
            return None
        wide = shape[0]
        start = wide * _JOINED.index(module)
        joined = (2 * wide, *shape[1:])
        return Stored(f"gate_up_proj.{kind}", joined, lambda w: w[start : start + wide])

    def nodes(self, at: LayerGraph, u: ProductInput) -> str:
        wide, bias = self.config.d_intermediate, self.config.bias
        if self.config.gated:
            both = at.linear("gate_up_proj", u, "gate_up", bias)
            gate, up = at.split(both, {"gate": wide, "up": wide})
            activation = _GATES.get(self.config.form)
            if activation:
                gate = at.g.call(activation, [gate], [at.named("activated")])[0]
            gate_op = "Multiply" if activation else "SiluGate"
            y = at.g.call(gate_op, [up, gate], [at.named("gated")])[0]
        else:
            up = at.linear("up_proj", u, "up", bias)
            y = at.g.call(_OPS[self.config.form], [up], [at.named("activated")])[0]
        return at.linear("down_proj", y, "out", bias)


EXPORT = MlpExport
