"""`edge info` of models that are not exported: its figures are those of their later bundles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from edge.apps import cli
from edge.apps.info import unexported
from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.errors import CheckpointError, InputError
from edge.export.checkpoint import read_layout
from edge.export.checkpoint.layout import Layout
from edge.export.graph import build_graph
from edge.export.recipes.sizes import weight_bytes
from edge.runtime.cpu import planning
from edge.runtime.model import resolve
from edge.tensors import kv_cache_shapes, parameters, read_parameters, recurrent_state_shapes
from tests.gguf_files import write_gguf
from tests.test_graph_models import network
from tests.transformers_checkpoints import save_llama

PUBLISHED = Path(__file__).parent / "published"


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["info", *map(str, words)])


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "w8", "w4"])
@pytest.mark.parametrize("name", ["mamba1", "attention", "experts"])
def test_weights_are_those_of_a_graph(name: str, recipe: str, tmp_path: Path) -> None:
    net = network(name)
    tensors = dict(net.canonical_tensors())
    built = build_graph(net.config, tensors, tmp_path, recipe)
    found = weight_bytes(Layout(net.config), recipe).stored
    # each tensor starts at a multiple of 256 bytes; heads may be padded with zeros
    assert 0 <= built.weight_bytes - found < 256 * (len(tensors) * 2 + 8) + 0.04 * found


@pytest.mark.parametrize("name", ["demo", "demo-fp16", "demo-draft"])
def test_the_plan_is_that_of_the_bundle(name: str) -> None:
    """Except for channels that calibration left in floating point, and for estimates."""
    with open_bundle(resolve(name)) as bundle:
        manifest, plan = bundle.manifest, open_plan(bundle)
    weights = manifest.files[[each.path for each in manifest.files].index("weights.bin")].size
    found = weight_bytes(Layout(manifest.model), manifest.quantization.recipe)
    assert 0.97 < found.stored / weights <= 1
    chunk = manifest.limits.chunk
    expected = planning.plan_bundle(manifest, plan, capacity=300)
    guessed = planning.plan_config(manifest.model, weights, chunk=chunk, capacity=300)
    assert guessed.keys() == expected.keys()
    assert guessed["kv_cache"] == expected["kv_cache"]
    assert guessed["state_ring"] == expected["state_ring"] or manifest.state_dtypes
    assert abs(guessed["program"] / expected["program"] - 1) < 0.1
    # the uncertain parts make it larger
    assert expected["total"] < guessed["total"] < expected["total"] + 13_000_000


def test_shared_matrices_are_stored_once_and_read_at_every_use() -> None:
    layout, _ = read_layout(PUBLISHED / "zamba2-1.2b.json")
    found = weight_bytes(layout, "fp16")
    assert found.read - found.stored == 5 * 2 * 2048 * 4096  # o_proj of six uses


def test_a_config_alone_says_what_the_model_takes() -> None:
    file = PUBLISHED / "lfm2-8b-a1b.json"
    told = call(file, "--board", "orin-nano-8gb", "--context", 1000, "--json")
    assert told.exit_code == 0
    facts, config = json.loads(told.stdout), read_layout(file)[0].config
    assert facts["parameters"] == parameters(config)
    assert facts["active_parameters"] == read_parameters(config)
    sizes = [4 * _count(shape) for shape in recurrent_state_shapes(config).values()]
    assert facts["state_bytes"] == sum(sizes)
    caches = sum(2 * _count(shape) for shape in kv_cache_shapes(config, 1000).values())
    assert facts["kv_cache_bytes"] == caches == 1000 * facts["kv_cache_token_bytes"]
    assert {name: r["fits"] for name, r in facts["recipes"].items()} == {
        "fp16": False, "w8": False, "w8a8": False, "w4": True, "w4a8": True,
    }  # fmt: skip
    w4 = facts["recipes"]["w4"]
    assert w4["plan"]["weights"] == w4["weight_bytes"]
    assert w4["predicted_tokens_per_s"]["102"] == pytest.approx(102e9 / w4["token_bytes"])
    text = call(file, "--memory", "1GB")
    assert text.exit_code == 1  # with no recipe
    for line in ("lfm2_moe", "of which a token uses", "does not fit", "unproven", "1 GB are free"):
        assert line in text.stdout


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def test_folders_and_gguf_files_without_reading_weights(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "checkpoint")
    file = write_gguf(folder, tmp_path / "model.gguf")
    free = ("--memory", "8GB", "--json")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    told = [json.loads(call(path, *free).stdout) for path in (folder, folder / "config.json")]
    assert told[0] | {"config": ""} == told[1] | {"config": ""}
    of_file = json.loads(call(file, *free).stdout)
    assert of_file["parameters"] == told[0]["parameters"]
    assert of_file["recipes"].keys() == set(unexported.RECIPES)


def test_what_is_refused(tmp_path: Path) -> None:
    problem = call(PUBLISHED / "zamba2-7b.json").exception
    assert isinstance(problem, CheckpointError) and "use_shared_block_lora" in str(problem)
    problem = call(PUBLISHED / "mamba-130m.json", "--launches").exception
    assert isinstance(problem, InputError) and problem.field == "--launches"
    assert not unexported.is_meant("demo") and not unexported.is_meant(str(tmp_path))
