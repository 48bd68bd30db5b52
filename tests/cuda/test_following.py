"""An engine that is right is followed to the end, whatever a model amplifies; a fault is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from edge.export.graph import GRAPH_FILE
from edge.export.graph.run import GraphRunner
from edge.plugins.linear.reference import linear_int4_minimum
from tests import on_device
from tests.cuda.following import Following, Worst
from tests.cuda.models import Engines, both, engines, tokens
from tests.every_family import calibration_text, export
from tests.rounded_products import open_rounding, references, to_half
from tests.transformers_checkpoints import save_zamba2

LENGTHS = (19, 5, 1, 1)


def followed(made: Engines) -> Following:
    following = Following(made, capacity=64)
    for index, count in enumerate(LENGTHS):
        following.run(tokens(count, seed=index), commit=count > 1)
    following.finish()
    return following


@pytest.mark.parametrize("where", on_device.places(), indirect=True)
@pytest.mark.parametrize("case", [("routed", "w4a8"), ("head gate", "w8"), ("mamba1", "w4a16")])
def test_every_value_and_state_is_followed(case: tuple[str, str]) -> None:
    following = followed(engines(*case))
    assert following.worst.over <= 1, following.worst.what
    assert following.worst.values > 4 * 4 * len(following.made.cuda.config.layers)


@pytest.mark.parametrize("name", ["ssm_state", "conv_state", "key_cache"])
def test_a_state_that_is_lost_is_seen(name: str) -> None:
    following = Following(engines("all", "fp32"), capacity=64)
    following.run(tokens(5, seed=1), commit=True)
    kept = following.ours.snapshot(applied=True)
    assert following.worst.over <= 1
    for each, array in {**kept.recurrent, **kept.caches}.items():
        array *= 0.99 if each.endswith(name) else 1
    following.ours.restore(kept)
    following.run(tokens(1, seed=2), commit=False)
    assert following.worst.over > 10 and following.worst.what.startswith("layers.")


def test_a_product_that_is_wrong_is_seen() -> None:
    def wrong(
        x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor, minimums: Tensor
    ) -> Tensor:
        return linear_int4_minimum(x, 1.001 * x_scale, packed, scales, minimums)

    made = engines("routed", "w4a8")
    following = Following(made, capacity=64)
    ops = {"LinearInt4Minimum": wrong}
    following.graph = GraphRunner(open_rounding(made.folder, ops), made.cuda.config)
    following.run(tokens(3, seed=1), commit=True)
    assert following.worst.over > 10, following.worst.what


def test_a_step_too_far_and_steps_too_often_are_seen() -> None:
    worst, zeros = Worst(), np.zeros(10_000, np.int8)
    for steps, places, over in ((1, 2, 1), (1, 3, 1.5), (2, 1, 2)):
        found = zeros.copy()
        found[:places] = steps
        worst.add("x", found, zeros, 1.0)
        assert worst.over == over
    worst.add("y", np.full(3, np.nan), np.zeros(3), 1.0)
    assert np.isnan(worst.over) and worst.what.startswith("y")


def test_products_that_may_round_x_explain_what_a_model_amplifies(tmp_path: Path) -> None:
    """Weights that amplify differences: channels in fp16, which `cuda` multiplies by x in fp16 and
    `ort` by x as it is, move the logits by a tenth.
    """
    source, bundle = save_zamba2(tmp_path / "source", hidden_size=32), tmp_path / "bundle"
    text = calibration_text(tmp_path)
    manifest = export(source, bundle, "w4a8", text).manifest
    made = both(bundle / GRAPH_FILE, manifest.model, manifest.state_dtypes)
    following = Following(made, capacity=64)
    ids = tokens(7, seed=1, vocab=270)
    following.run(ids, commit=True)
    assert following.worst.over <= 1, following.worst.what
    ours, distances = following.logits[0], []
    for ops in ({}, references(to_half, to_half)):
        graph = GraphRunner(open_rounding(bundle, ops), manifest.model)
        expected, _ = graph.run(ids, graph.initial(1, 64))
        distances.append(np.abs(ours - expected).max() / np.abs(expected).max())
    assert distances[0] > 0.05
    # sums in another order may round a value to the next number, which is amplified too
    assert distances[1] < 1e-5 or following.worst.steps[0]
