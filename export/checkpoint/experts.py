"""What configs with experts have in common, and where published files keep the experts."""

from __future__ import annotations

from typing import Any

from edge.config import ExpertsConfig, RouterConfig
from edge.export.checkpoint.fields import Fields

# how many a token goes to
PER_TOKEN = "num_experts_per_tok"


def experts(
    fields: Fields,
    count: int,
    width: int,
    *,
    per_token: int = 2,
    form: str = "swiglu",
    d_latent: int | None = None,
    **router: Any,
) -> ExpertsConfig:
    """`count` experts of `width`; `per_token` by default. `router` are fields of `RouterConfig`."""
    top_k = fields.integer(PER_TOKEN, per_token)
    reachable = count // router.get("groups", 1) * router.get("top_groups", 1)
    if top_k > min(count, reachable):
        fields.inconsistent(PER_TOKEN, f"is {top_k}, of {min(count, reachable)} experts")
    return fields.build(
        ExpertsConfig,
        n_experts=count,
        d_intermediate=width,
        router=fields.build(RouterConfig, top_k=top_k, **router),
        form=form,
        d_latent=d_latent,
    )
