"""A mixture of experts: a router sends each token to a few of many MLPs."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from edge.mixers.base import Frozen, MixerConfig, Positive, Shapes, refuse_all

# Matrices that stack all experts' weights; graphs join the first two.
STACKED = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
MAX_EXPERTS = 4096  # per layer; checkpoints have separate tensors for each


class RouterConfig(Frozen):
    """How a token's experts are chosen and weighted (`Route` of `edge.plugins.experts`).

    Attributes:
        top_k: number of experts per token.
        score: function from the router's logits to scores.
        normalise: whether the chosen experts' weights sum to one before `scale`. With softmax this
            equals the softmax of the chosen logits alone.
        correction: whether a bias is added to scores, for the choice only.
        groups, top_groups: number of groups of experts, and of the best ones a token chooses from.
    """

    top_k: Positive
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    correction: bool = False
    scale: float = Field(default=1.0, gt=0, le=1e6)
    groups: Positive = 1
    top_groups: Positive = 1


class ExpertsConfig(MixerConfig):
    """The weighted sum of the chosen experts' MLPs; the weights of all experts are stacked.

    A shared expert is an MLP layer `parallel` to this one. If a gate scales it for each token, the
    shared expert is a layer of one expert, which every token chooses.

    Attributes:
        form: form of the MLPs (`edge.mixers.mlp`).
        d_latent: number of values that experts read and write, projected from and to d_model. None
            means d_model itself.
        parallel: whether it reads the same residual stream as the layer before it.
    """

    later: ClassVar[frozenset[str]] = frozenset({"parallel"})
    first_matrix: ClassVar[str] = "router"

    kind: Literal["experts"] = "experts"
    n_experts: int = Field(gt=0, le=MAX_EXPERTS)
    d_intermediate: Positive
    router: RouterConfig
    form: Literal["swiglu", "squared_relu"] = "swiglu"
    d_latent: Positive | None = None
    parallel: bool = False

    @model_validator(mode="after")
    def _chooses(self) -> ExpertsConfig:
        router, count = self.router, self.n_experts
        members, remainder = divmod(count, router.groups)
        refuse_all(
            (
                f"top_k {router.top_k} exceeds {count} experts" if router.top_k > count else None,
                f"{count} experts do not divide into {router.groups} groups" if remainder else None,
                f"top_groups {router.top_groups} exceeds {router.groups} groups"
                if router.top_groups > router.groups
                else f"top_k {router.top_k} exceeds {router.top_groups} groups of {members}"
                if router.top_k > router.top_groups * members
                else None,
            )
        )
        return self

    @property
    def is_parallel(self) -> bool:
        return self.parallel

    @property
    def gated(self) -> bool:
        return self.form == "swiglu"

    def read_share(self, module: str) -> float:
        return self.router.top_k / self.n_experts if module in STACKED else 1.0

    def tensor_shapes(self, d_model: int) -> Shapes:
        experts, hidden, width = self.n_experts, self.d_intermediate, self.d_latent or d_model
        latent: Shapes = (
            {}
            if self.d_latent is None
            else {"latent_in.weight": (width, d_model), "latent_out.weight": (d_model, width)}
        )
        return (
            {"router.weight": (experts, d_model)}
            | ({"router.bias": (experts,)} if self.router.correction else {})
            | latent
            | ({"gate_proj.weight": (experts, hidden, width)} if self.gated else {})
            | {"up_proj.weight": (experts, hidden, width)}
            | {"down_proj.weight": (experts, width, hidden)}
        )

    def workspace(self, tokens: int, capacity: int) -> int:
        return self.n_experts + self.router.top_k * 5 * self.d_intermediate
