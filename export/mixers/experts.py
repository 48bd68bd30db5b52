"""A mixture of experts: a router in fp32, and products with the chosen experts of each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edge.export.mixers.base import Fetch, MixerExport, State, Stored
from edge.export.nodes.builder import F32
from edge.export.nodes.layer import LayerGraph
from edge.export.nodes.products import ProductInput
from edge.export.quantize.layer_plan import Matrix
from edge.mixers.experts import ExpertsConfig
from edge.plugins.experts.reference import expert_linear, expert_sum, route

_JOINED = ("gate_proj", "up_proj")


class Stack(nn.Module):
    """The corresponding matrices of all experts, [E, N, K]."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        bound = columns**-0.5
        self.weight = nn.Parameter(torch.empty(experts, rows, columns).uniform_(-bound, bound))


class Experts(nn.Module):
    def __init__(self, config: ExpertsConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        wide, narrow = config.d_intermediate, config.d_latent or d_model
        self.router = nn.Linear(d_model, config.n_experts, bias=config.router.correction)
        if config.d_latent is not None:
            self.latent_in = nn.Linear(d_model, narrow, bias=False)
            self.latent_out = nn.Linear(narrow, d_model, bias=False)
        if config.gated:
            self.gate_proj = Stack(config.n_experts, wide, narrow)
        self.up_proj = Stack(config.n_experts, wide, narrow)
        self.down_proj = Stack(config.n_experts, narrow, wide)

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        c, logits = self.config, u @ self.router.weight.T
        bias = self.router.bias if c.router.correction else torch.zeros_like(logits[0, 0])
        chosen, gates = route(logits, bias, **_route(c))
        x = u if c.d_latent is None else self.latent_in(u)
        up = expert_linear(x, chosen, self.up_proj.weight, 1)
        if c.gated:
            y = nn.functional.silu(expert_linear(x, chosen, self.gate_proj.weight, 1)) * up
        else:
            y = nn.functional.relu(up).square()
        y = expert_sum(expert_linear(y, chosen, self.down_proj.weight, 1), gates)
        return (y if c.d_latent is None else self.latent_out(y)), {}


def _route(config: ExpertsConfig) -> dict[str, Any]:
    """Return the attributes of the op `Route`."""
    router = config.router
    return {
        "k": router.top_k,
        "sigmoid": int(router.score == "sigmoid"),
        "normalise": int(router.normalise),
        "scale": router.scale,
        "groups": router.groups,
        "top_groups": router.top_groups,
    }


class ExpertsExport(MixerExport[ExpertsConfig]):
    def module(self, d_model: int, eps: float) -> Experts:
        return Experts(self.config, d_model)

    def matrices(self, d_model: int) -> dict[str, Matrix]:
        c = self.config
        wide, narrow = c.d_intermediate, c.d_latent or d_model
        # recipes treat the narrow input of the experts as the wide one
        reads = {"reads": "normed"}
        if c.d_latent is not None:
            reads = {"reads": "latent", "reads_listed": "normed"}
        matrices = {"router": Matrix(c.n_experts, d_model, "normed")}
        if c.d_latent is not None:
            matrices["latent_in"] = Matrix(narrow, d_model, "normed")
        if c.gated:
            matrices["gate_up_proj"] = Matrix(2 * wide, narrow, experts=c.n_experts, **reads)
            matrices["down_proj"] = Matrix(
                narrow, wide, "gated", experts=c.n_experts, routed="chosen"
            )
        else:
            matrices["up_proj"] = Matrix(
                wide, narrow, listed="gate_up_proj", experts=c.n_experts, **reads
            )
            matrices["down_proj"] = Matrix(
                narrow,
                wide,
                "activated",
                reads_listed="gated",
                experts=c.n_experts,
                routed="chosen",
            )
        if c.d_latent is not None:
            matrices["latent_out"] = Matrix(d_model, narrow, "summed")
        return matrices

    def weight(self, name: str, fetch: Fetch) -> F32:
        if name == "gate_up_proj.weight":
            return np.concatenate([fetch(f"{part}.weight") for part in _JOINED], axis=1)
        return fetch(name)

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        module = name.partition(".")[0]
        if not self.config.gated or module not in _JOINED:
            return None
        experts, wide, columns = shape
        start = wide * _JOINED.index(module)
        joined = (experts, 2 * wide, columns)
        return Stored("gate_up_proj.weight", joined, lambda w: w[:, start : start + wide])

    def nodes(self, at: LayerGraph, u: ProductInput) -> str:
        c, g = self.config, at.g
        logits = at.linear("router", u, "router_logits")
        bias = at.named("router.bias")
        if c.router.correction:
            g.weight(bias)
        else:
            g.floats(bias, np.zeros(c.n_experts, np.float32))
        names = [at.named("chosen"), at.named("gates")]
        chosen, gates = g.call("Route", [logits, bias], names, **_route(c))
        (order,) = g.call("ExpertOrder", [chosen], [at.named("order")], experts=c.n_experts)
        routed = (chosen, order)
        x = u.value if c.d_latent is None else at.linear("latent_in", u.value, "latent")
        wide = c.router.top_k * c.d_intermediate
        if c.gated:
            both = at.experts("gate_up_proj", x, routed, "gate_up", parts=2)
            gate, up = at.split(both, {"gate": wide, "up": wide})
            y = g.call("SiluGate", [up, gate], [at.named("gated")])[0]
        else:
            up = at.experts("up_proj", x, routed, "up")
            y = g.call("SquaredRelu", [up], [at.named("activated")])[0]
        expert_outputs = at.experts("down_proj", y, routed, "each")
        if c.d_latent is None:
            return g.call("ExpertSum", [expert_outputs, gates], [at.named("out")])[0]
        (summed,) = g.call("ExpertSum", [expert_outputs, gates], [at.named("summed")])
        return at.linear("latent_out", summed, "out")


EXPORT = ExpertsExport
