"""Model configs that fit together or not: libedge refuses exactly those that Python refuses."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.config import ModelConfig, RopeConfig, RopeScaling
from edge.errors import BundleError
from edge.rope import inverse_frequencies
from tests import libedge_bundles
from tests.libedge import CBundle, EdgeFault
from tests.malformed import resigned
from tests.test_libedge import compiled, folder

pytestmark = compiled
PLAN = "graphs/cuda.json"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    shutil.copytree(folder("demo-draft"), tmp_path / "bundle")
    return tmp_path / "bundle"


def verdicts(target: Path, model: dict[str, Any]) -> tuple[bool, str | None]:
    """Return whether Python takes a config, and the field that C refuses of it, or None."""
    manifest = json.loads((folder("demo-draft") / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps(manifest | {"model": model}))
    field = None
    try:
        CBundle(target)
    except EdgeFault as fault:  # a refused plan does not belong to this config, which was taken
        field = fault.field if fault.file.endswith("manifest.json") else None
    try:
        ModelConfig.model_validate_json(json.dumps(model))
    except ValidationError:
        return False, field
    return True, field


def model_of(*layers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"family": "t", "vocab_size": 12, "d_model": 8, "layers": list(layers), **fields}


def attention(**fields: Any) -> dict[str, Any]:
    return {"kind": "attention", "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, **fields}


def scaled(kind: str, theta: float = 100.0, **fields: Any) -> dict[str, Any]:
    scaling = {"kind": kind, "factor": 2.0, **fields}
    return attention(rope={"theta": theta, "dim": 4, "scaling": scaling})


def experts(n_experts: int = 4, **router: Any) -> dict[str, Any]:
    router = {"top_k": 2, **router}
    return {"kind": "experts", "n_experts": n_experts, "d_intermediate": 4, "router": router}


MAMBA1 = {"kind": "mamba1", "d_inner": 8, "d_state": 4, "d_conv": 4, "dt_rank": 2}
CASES = {
    "plain": model_of(MAMBA1, attention(), experts()),
    "norms of groups": model_of(MAMBA1 | {"inner_eps": 1e-5, "B_groups": 2, "C_groups": 2}),
    "norms of one group": model_of(MAMBA1 | {"inner_eps": 1e-5}),
    "convolved and gated": model_of(attention(d_conv=4, output_gate=True)),
    "two gates": model_of(attention(head_gate=True, output_gate=True)),
    "a gate": model_of(attention(head_gate=True)),
    "each": model_of(scaled("each", factors=[1.0, 2.0])),
    "each without factors": model_of(scaled("each")),
    "linear with factors": model_of(scaled("linear", factors=[1.0, 2.0])),
    "llama3 descends": model_of(scaled("llama3", low_freq_factor=4.0)),
    "yarn descends": model_of(scaled("yarn", beta_slow=32.0)),
    "yarn": model_of(scaled("yarn")),
    "yarn of theta 1": model_of(scaled("yarn", theta=1.0)),
    "more chosen than there are": model_of(experts(n_experts=1)),
    "groups": model_of(experts(groups=2, top_groups=1)),
    "groups that do not divide": model_of(experts(groups=3)),
    "more groups than there are": model_of(experts(groups=2, top_groups=3)),
    "more chosen than in groups": model_of(experts(top_k=3, groups=2)),
    "rows of the head": model_of(MAMBA1, head_ids=[0, 11]),
    "no rows": model_of(MAMBA1, head_ids=[]),
    "rows that descend": model_of(MAMBA1, head_ids=[3, 2]),
    "rows beyond the vocabulary": model_of(MAMBA1, head_ids=[3, 12]),
    "rows of a head of its own": model_of(MAMBA1, head_ids=[3], tie_embeddings=False),
}


def test_fields_that_exclude_each_other(target: Path) -> None:
    found = Counter[bool]()
    for name, model in CASES.items():
        taken, refused = verdicts(target, model)
        assert taken == (refused is None), (name, refused)
        assert refused is None or refused.startswith("model."), (name, refused)
        found[taken] += 1
    assert found[True] == 7 and found[False] == len(CASES) - 7


def test_which_layer_reads_which(target: Path) -> None:
    rng, found = random.Random(0), Counter[bool]()
    mlp = {"kind": "mlp", "d_intermediate": 4}
    for _ in range(150):
        layers = []
        for _ in range(rng.randint(1, 4)):
            layer, flags = rng.choice(
                [(attention(), ("parallel", "recalls")), (mlp, ("parallel", "aside")),
                 (experts(), ("parallel",)), (MAMBA1, ())]
            )  # fmt: skip
            layers.append(layer | {flag: rng.random() < 0.3 for flag in flags})
        model = model_of(*layers)
        taken, refused = verdicts(target, model)
        assert taken == (refused is None), (model, refused)
        found[taken] += 1
    assert found[True] > 30 and found[False] > 30


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="linear", factor=2.5),
        RopeScaling(kind="each", factor=1.0, factors=(1.0, 2.0, 4.5)),
        RopeScaling(kind="llama3", factor=8.0, original_context=64),
        RopeScaling(kind="yarn", factor=4.0, original_context=64),
        RopeScaling(kind="yarn", factor=4.0, original_context=64, truncate=False, beta_fast=9.0),
    ],
)
def test_frequencies_that_the_config_scales(scaling: RopeScaling | None, tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    shutil.copytree(libedge_bundles.bundle("attention odd"), target)
    manifest = json.loads((target / "manifest.json").read_text())
    plan = json.loads((target / PLAN).read_text())
    rope, number = RopeConfig(theta=100.0, dim=6, scaling=scaling), len(plan["rotations"])
    layer = next(each for each in manifest["model"]["layers"] if each.get("window"))
    assert layer["rope"]["dim"] == rope.dim
    layer["rope"] = rope.model_dump(mode="json")
    (target / "manifest.json").write_text(json.dumps(manifest))
    right = inverse_frequencies(rope).tolist()
    wrong = [right[0], right[1] * (1 + 1e-5), *right[2:]]
    for frequencies, refused in ((right, False), (wrong, True), (right[1:], True)):
        changed = copy.deepcopy(plan)
        index = next(i for i in range(number) if changed["rotations"][i][1] == rope.dim)
        changed["rotations"][index][0] = 0.0
        changed["inverses"] = {f"rope{index}": frequencies}
        (target / PLAN).write_text(json.dumps(changed))
        resigned(target)
        if not refused:
            CBundle(target)
            with open_bundle(target) as opened:
                open_plan(opened)
            continue
        with pytest.raises(EdgeFault, match="no such rotation"):
            CBundle(target)
        with open_bundle(target) as opened, pytest.raises(BundleError, match="rotation"):
            open_plan(opened)
