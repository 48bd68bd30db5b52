"""The cost of rounding: the parts add up to the bundle, and each is what it claims to be."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import edge
from edge.apps import cli
from edge.apps.bench import low_bits
from edge.apps.evaluate.parts import Encoder
from edge.apps.evaluate.report import draw
from edge.apps.evaluate.roundings import Initializers, ValueRounding, find, with_weights
from edge.apps.evaluate.score import Comparison
from edge.apps.evaluate.sensitivity import (
    ACTIVATIONS,
    ALL,
    NOTHING,
    WEIGHTS,
    Site,
    graph_of,
    logits_at,
    measure_layers,
    measure_sites,
    reference,
    sites,
)
from edge.apps.evaluate.windows import TextRun, Windows, plan
from edge.errors import InputError
from edge.export.exporter import export_checkpoint
from edge.export.graph.run import GraphRunner
from edge.plugins.hadamard.matrices import factors
from edge.plugins.hadamard.reference import hadamard
from edge.plugins.quantize.reference import fake_quantize
from edge.runtime.model import Model
from tests.programs import called
from tests.session_models import ROOT, bundle, model
from tests.test_eval_command import PROSE, here, run, write

SLOW = [
    ("base", "w8a8", {}), ("base", "w8a8-hadamard", {}), ("base", "w8a8-smoothquant", {}),
    ("base", "w8a8-dynamic", {}), ("base", "w4a8", {}), ("demo", "w4", {}),
    ("hybrid", "w8a8", {}), ("hybrid", "w4a8", {}), ("hybrid", "w8a8-smoothquant", {}),
]  # fmt: skip


@cache
def quantized(kind: str, quant: str, **choices: Any) -> Model:
    out = Path(ROOT.name) / "-".join([kind, quant, *map(str, choices.values())])
    source = floating_of(kind).path if kind == "demo" else bundle(kind).parent / f"{kind}-source"
    text = {} if quant in ("w4", "w8a8-dynamic") else {"calibrate": PROSE}
    size = {"calibrate_sequences": 4, "calibrate_length": 48} if text else {}
    export_checkpoint(
        source, out, quant=quant, verify=False, chunk=16,
        **text, **size, **choices,
    )  # fmt: skip
    return edge.load(out, threads=1)


@cache
def floating_of(kind: str) -> Model:
    return edge.load("demo-fp16", threads=1) if kind == "demo" else model(kind)


def runs(of: Model, count: int = 120, window: int = 40) -> list[TextRun]:
    part = Encoder(of.tokenizer, None).text(PROSE.read_text("utf-8")[: 3 * count], first=True)
    return list(plan([part], Windows(window, window)))


def reader(of: Model, site: Site = NOTHING) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from tokens to the logits of a model with a site rounded."""
    graph = reference(of, with_weights(graph_of(of), site.weights))
    runner = GraphRunner(graph, of.config)
    return lambda ids: logits_at(graph, runner, ids, site)


@pytest.mark.parametrize(("kind", "quant", "choices"), SLOW)
def test_everything_rounded_is_the_quantized_bundle(
    kind: str, quant: str, choices: dict[str, Any]
) -> None:
    """The floating graph with every site rounded gives what the bundle's graph gives: nothing is
    missing, and every scale, rotation and weight is the bundle's.
    """
    this, floating = quantized(kind, quant, **choices), floating_of(kind)
    together = next(site for site in sites(this, floating) if site.name == ALL)
    read, rounded, plain = reader(this), reader(floating, together), reader(floating)
    found, truth = Comparison(), Comparison()
    for one in runs(floating):
        bundles = read(one.ids)
        found.add(one.ids[1:], rounded(one.ids), bundles)
        truth.add(one.ids[1:], plain(one.ids), bundles)
    apart, all_of_it = (c.to_dict()["kl_nats_per_token"] for c in (found, truth))
    assert apart is not None and all_of_it is not None
    assert apart < 0.05 * all_of_it and all_of_it > 1e-7


def test_each_site_is_there_once_and_alone() -> None:
    this, floating = quantized("base", "w8a8"), model("base")
    names = {site.name: site for site in sites(this, floating)}
    assert set(names) == {
        ALL, WEIGHTS, ACTIVATIONS, "embedding and head weights", "input of the head",
        *(f"mamba1: {what}" for what in (
            "input of in_proj", "x before the convolution", "x of the scan", "gate z", "B", "C",
            "Δ of low rank, B, C", "Δ", "y", "in_proj weight", "x_proj weight", "dt_proj weight",
            "out_proj weight", "conv1d weight", "conv1d bias", "A_log", "D", "dt_bias",
        )),
    }  # fmt: skip
    layers = len(floating.config.layers)
    assert all(names[n].places == layers for n in names if n.startswith("mamba1: "))
    each = {site.name for site in sites(this, floating, each_layer=True)}
    assert {f"layers.{i}.conv" for i in range(layers)} <= each
    assert {"layers.0.in_proj.weight", "final"} <= each
    measured = dict(
        (site.name, found.to_dict()["kl_nats_per_token"] or 0.0)
        for site, found in measure_sites(floating, names.values(), runs(floating))
    )
    assert all(value > 0 for value in measured.values())
    # no part costs more than all together
    parts = [v for n, v in measured.items() if n not in (ALL, WEIGHTS, ACTIVATIONS)]
    assert max(parts) < measured[ALL] < 3 * sum(parts)


def test_scales_and_weights_are_those_of_the_bundle() -> None:
    this, floating = quantized("base", "w8a8"), model("base")
    record = json.loads((this.path / "calibration.json").read_text())["sites"]
    constants = Initializers(graph_of(floating), floating.path)
    found = find(graph_of(this), this.path, constants)
    for name, value in (("normed", "normed"), ("x", "xz"), ("z", "xz"), ("conv", "conv"),
                        ("dt", "dt"), ("B", "dbc"), ("C", "dbc"), ("scan", "scan")):  # fmt: skip
        scale = found.values[f"layers.0.{name}"].scale
        assert scale is not None
        assert float(scale.max()) == pytest.approx(record[f"layers.0.{value}"]["scale"], rel=1e-5)
    # y alone is rounded after a rotation, and its matrix is rounded in the same basis
    turned = {name for name, how in found.values.items() if how.turn is not None}
    assert turned == {f"layers.{i}.scan" for i in range(len(floating.config.layers))}
    slow, fast = (torch.from_numpy(part.copy()) for part in factors(48))
    weight = torch.from_numpy(constants["layers.0.out_proj.weight"].copy())
    rotated = hadamard(weight, slow, fast)
    kept = fake_quantize(rotated, rotated.abs().max() / 127)
    expected = hadamard(kept, slow.T, fast.T)
    torch.testing.assert_close(
        torch.from_numpy(found.weights["layers.0.out_proj.weight"]), expected, rtol=0, atol=1e-6
    )
    plain = torch.from_numpy(constants["layers.0.in_proj.weight"].copy())
    torch.testing.assert_close(
        torch.from_numpy(found.weights["layers.0.in_proj.weight"]),
        fake_quantize(plain, plain.abs().max() / 127), rtol=0, atol=1e-7,
    )  # fmt: skip


def test_rounding_leaves_floating_columns_and_undoes_its_rotation() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    scale = torch.full((8,), 0.1)
    scale[3] = 1e30
    found = ValueRounding(scale)(x)
    assert torch.equal(found[:, 3], x[:, 3])
    assert torch.equal(found[:, :3], fake_quantize(x[:, :3], scale[:3]))
    slow, fast = (torch.from_numpy(part.copy()) for part in factors(8))
    turned = ValueRounding(torch.tensor([0.05]), (slow, fast))(x)
    grid = hadamard(turned, slow, fast) / 0.05
    torch.testing.assert_close(grid, grid.round(), rtol=0, atol=1e-4)
    torch.testing.assert_close(turned, x, rtol=0, atol=0.025 * 8**0.5)


@pytest.mark.parametrize("state", ["fp16", "int8"])
def test_a_state_is_rounded_after_every_token(state: str) -> None:
    """As in the bundle's scan: with the state rounded too, the result equals the bundle's graph
    again.
    """
    this, floating = quantized("base", "w8a8", ssm_state=state), model("base")
    chosen = sites(this, floating)
    (alone,) = (site for site in chosen if site.kind == "state")
    assert alone.name == "mamba1: state h"
    together = next(site for site in chosen if site.name == ALL)
    both = Site("both", "all", together.values, together.weights, alone.states)
    (one, *_) = runs(floating)
    bundles, plain = reader(this)(one.ids), reader(floating)(one.ids)
    found, truth, only = Comparison(), Comparison(), Comparison()
    found.add(one.ids[1:], reader(floating, both)(one.ids), bundles)
    truth.add(one.ids[1:], plain, bundles)
    only.add(one.ids[1:], reader(floating, alone)(one.ids), plain)
    assert found.to_dict()["kl_nats_per_token"] < 0.05 * truth.to_dict()["kl_nats_per_token"]  # type: ignore[operator]
    assert 0 < only.to_dict()["kl_nats_per_token"] < 1  # type: ignore[operator]


def test_noise_of_layers_is_that_of_their_values() -> None:
    this, floating = quantized("hybrid", "w8a8"), model("hybrid")
    chosen = runs(floating)
    found = measure_layers(this, floating, chosen)
    assert [layer.kind for layer in found] == [layer.kind for layer in this.config.layers]
    signal = noise = 0.0
    for one in chosen:
        values = []
        for of in (floating, this):
            graph = reference(of, graph_of(of))
            runner = GraphRunner(graph, of.config)
            feeds = runner.feeds(one.ids[None], runner.initial(1, len(one.ids)))
            values.append(graph.run(["layers.1.out"], feeds)[0].astype(np.float64))
        signal += float((values[0] ** 2).sum())
        noise += float(((values[0] - values[1]) ** 2).sum())
    assert found[1].output.decibels == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)
    assert all(5 < layer.residual.decibels < 100 for layer in found)
    for layer in measure_layers(floating, floating, chosen[:1]):
        assert layer.output.decibels == layer.residual.decibels == math.inf


def test_the_picture_has_a_bar_a_row() -> None:
    rows = [
        {"name": f"a <{i}> & b", "kind": kind, "kl_nats_per_token": value}
        for i, (kind, value) in enumerate(
            [("all", 0.5), ("weight", 1e-3), ("activation", 1e-5), ("state", 0.0)]
        )
    ]
    facts = {"quantization": "w8a8", "sensitivity": rows}
    drawn = draw(facts)
    assert drawn == draw(json.loads(json.dumps(facts)))
    root = ET.fromstring(drawn)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(row["name"] in texts for row in rows)
    # every decade has the same width: the ends of the bars, by the place of their figures
    figures = [f"{max(row['kl_nats_per_token'], 1e-9):.1e}" for row in rows]  # type: ignore[type-var]
    ends = [
        float(element.get("x") or 0)
        for figure in figures
        for element in root.iter("{http://www.w3.org/2000/svg}text")
        if element.text == figure
    ]
    assert len(ends) == 4 and sorted(ends, reverse=True) == ends
    assert (ends[0] - ends[1]) / math.log10(500) == pytest.approx((ends[1] - ends[2]) / 2, rel=0.01)


def test_a_picture_needs_matplotlib_and_says_so_at_once(tmp_path: Path) -> None:
    text, wanted = write(tmp_path, "word " * 50), tmp_path / "x.svg"
    code, _, err = run(bundle("base"), text, "--against", bundle("base"), "--sensitivity",
                       "--svg", wanted)  # fmt: skip
    assert code == 2 and "pip install 'mamba-edge[plots]'" in err and not wanted.exists()


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match="different model"):
        sites(quantized("hybrid", "w8a8"), model("base"))
    with pytest.raises(InputError, match="quantized weights"):
        sites(model("base"), quantized("base", "w8a8"))
    with pytest.raises(InputError, match="rounds nothing"):
        sites(model("base"), model("base"))
    with pytest.raises(InputError, match="different model"):
        measure_layers(model("hybrid"), model("base"), [])


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    text = write(tmp_path, PROSE.read_text("utf-8")[:600])
    this = quantized("base", "w8a8").path
    svg = tmp_path / "picture.svg"
    command = ["eval", this, text, "--against", bundle("base"), "--window", 40, "--max-tokens", 90]
    code, out, err = called(cli.main, *command, "--sensitivity", "--svg", svg, "--json")
    assert code == 0, err
    facts = json.loads(out)
    costs = [row["kl_nats_per_token"] for row in facts["sensitivity"]]
    assert costs == sorted(costs, reverse=True) and facts["max_tokens"] == 90
    assert svg.read_text("utf-8") == draw(facts)
    for option, said in (("--layers", "signal to noise"), ("--sensitivity", "x of the scan")):
        code, out, _ = called(cli.main, *command, option)
        assert code == 0 and said in out


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    text = write(tmp_path, "word " * 50)
    for option in ("--layers", "--sensitivity"):
        code, _, err = run(bundle("base"), text, "--against", bundle("base"), option)
        assert code == 1 and "pip install 'mamba-edge[export]'" in err and option in err
    for options in (("--layers",), ("--svg", "x.svg"), ("--sensitivity",)):
        code, _, err = here(bundle("base"), text, *options)
        assert code == 2 and f"{options[0]}: needs --" in err


def test_all_options_that_do_not_fit_are_told_at_once(tmp_path: Path) -> None:
    text = write(tmp_path, "word " * 50)
    code, _, err = here(
        bundle("base"), text, "--noise", "all", "--tasks", "a", "--seed", "1", "--layers", "--chat",
        "--each-layer",
    )  # fmt: skip
    assert code == 2 and err.count("\n") == 1
    for said in ("--noise: cannot be given together with --tasks", "--layers: needs --against",
                 "--each-layer: needs --sensitivity"):  # fmt: skip
        assert said in err
    assert "--seed" not in err and "--chat" not in err


def test_other_roundings_beside_a_bundles_own() -> None:
    """The same grid with 8 bits, a coarser one with fewer, and the papers' ways of rounding x."""
    x = torch.tensor([[0.3, -5.0, 7.9, 0.0]])
    turn = tuple(torch.from_numpy(factor.copy()) for factor in factors(4))
    assert len(turn) == 2
    forms: tuple[tuple[Any, ...], ...] = (
        (torch.tensor([0.05]),), (torch.tensor([0.05, 1e30, 0.1, 0.1]),), (None,),
        (None, None, 6.0), (torch.tensor([0.05]), turn),
    )  # fmt: skip
    for form in forms:
        same = low_bits.FewerBits(*form, bits=8)
        torch.testing.assert_close(same(x), ValueRounding(*form)(x))
    coarse = low_bits.FewerBits(torch.tensor([7 / 127]), bits=4)
    torch.testing.assert_close(coarse(x), torch.tensor([[0.0, -5.0, 7.0, 0.0]]))
    seen = torch.arange(-10.0, 246.0)
    known = low_bits.ways([100.0])
    powers = known["static, powers of two"](seen)
    asymmetric = known["static, 100 %, asymmetric"](seen)
    assert powers(torch.tensor([245.0, -100.0, 0.0, 30.0])).tolist() == [
        245, -122.5, 0, 30.625,
    ]  # fmt: skip
    assert asymmetric(torch.tensor([-20.0, -3.4, 300.0])).tolist() == [-10, -3, 245]

    paths = [str(of.path) for of in (quantized("base", "w8a8"), floating_of("base"))]
    asked = [*paths, str(PROSE), str(PROSE), "--tokens", "60", "--bits", "8,4",
             "--percentiles", "99"]  # fmt: skip
    done = CliRunner().invoke(low_bits.app, asked)
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.output.splitlines()]
    found = {row[0]: row[1:] for row in rows if len(row) == 4}
    own = found["as the bundle does"]
    assert found["8 bits"] == own == found["8 bits, but 8 of y"] and len(found) == 2 + 1 + 5 + 6
    assert float(found["4 bits"][1]) > float(found["4 bits, but 8 of x of the scan"][1])
    assert float(found["4 bits"][1]) > 4 * float(own[1]) > 0
