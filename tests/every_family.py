"""Every family in the recipes that ship, on every engine: `make families`, a quarter of an hour.

    make families ARGS="--family zamba2 --family jamba --recipe w4a8"

A cell of the table is a tiny random checkpoint with all that its family may have, exported by a
recipe. `ort`, `cpu` and the interpreted `cuda` engine read the same text, in a chunk for many rows,
a chunk for few, and steps. TensorRT for RTX builds the device graph where it is installed.

The columns, differences of logits and states as shares of the largest number:

- kl: nats a token between the bundle and the fp32 network, from its manifest.
- spread: between the reference ops, and those that round x of products as their statements allow.
- ort: between `ort`, and the reference ops that round x as it does.
- cpu, cuda: between the engine and `ort`. Then the largest share, of what is allowed, that a value
  or state takes beside reference ops that follow the engine's values (`tests/cuda/following.py`).
- rtx: the engine's size, MB.

Random models amplify what a rounding moves, so each value is judged on its own. Over the whole text
the limits are those of `tests/cuda/test_engine_models.py`, or twice the spread. Where an engine has
rounded a value to the neighbouring step, which one in 10,000 may, only the mean is judged.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge.bundle import open_bundle
from edge.errors import EdgeError, EngineError
from edge.export.exporter import ExportSummary, export_checkpoint
from edge.export.graph import GRAPH_FILE
from edge.export.graph.run import GraphRunner
from edge.plugins.cpu import library
from edge.runtime.tensorrt import bindings, machine
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.compile import GraphSource, Order, compile_graph
from edge.runtime.tensorrt.graphfile import form_for
from edge.runtime.tensorrt.profiles import profiles, sizes
from tests import on_device, quick_interpreter
from tests.checkpoints import CORPUS
from tests.cuda.following import Following, state_array
from tests.cuda.models import Engines, both
from tests.family_checkpoints import SAVE
from tests.rounded_products import open_rounding, references, to_half, to_int8

RECIPES = ("fp16", "w8", "w8a8", "w4a16", "w4a8")
CALIBRATED = ("w8a8", "w4a16", "w4a8")
# more than 16 rows, few, and one: kernels differ
LENGTHS = (19, 5, 1, 1)
CAPACITY = 64
# largest and root mean square difference, of the largest number
LIMITS = (0.08, 0.03)
GPU = 86
Arrays = Mapping[str, np.ndarray]


@dataclass
class Cell:
    """What was found about a family in a recipe; see the columns.

    Attributes:
        steps: int8 numbers that an engine and the references which follow it rounded otherwise.
        problems: empty if all is right.
    """

    family: str
    recipe: str
    kl: float = 0.0
    spread: tuple[float, float] = (0.0, 0.0)
    ort: tuple[float, float] = (0.0, 0.0)
    apart: dict[str, tuple[float, float]] = field(default_factory=dict)
    followed: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    rtx: str = "-"
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def row(self) -> str:
        engines = (
            f"{self.apart[name][0]:8.1e} {self.followed[name]:5.2f}" if name in self.apart else "-"
            for name in ("cpu", "cuda")
        )
        cpu, cuda = (f"{text:>14}" for text in engines)
        return (
            f"{self.family:17}{self.recipe:6}{self.kl:9.1e}{self.spread[0]:9.1e}{self.ort[0]:9.1e}"
            f"  {cpu}  {cuda}{self.rtx:>7}{self.seconds:6.0f}  "
            f"{'ok' if not self.problems else '; '.join(self.problems)}"
        )


HEADER = (
    f"{'family':17}{'recipe':6}{'kl':>9}{'spread':>9}{'ort':>9}  {'cpu':>14}  {'cuda':>14}"
    f"{'rtx':>7}{'s':>6}"
)


def calibration_text(folder: Path) -> Path:
    words = " ".join(CORPUS).split()
    path = folder / "calibration.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(words, 1000)))
    return path


def export(source: Path, out: Path, recipe: str, text: Path) -> ExportSummary:
    """Export as `edge export` does, on a short text; the export itself compares `ort`."""
    if recipe not in CALIBRATED:
        return export_checkpoint(source, out, quant=recipe)
    return export_checkpoint(
        source, out, quant=recipe, calibrate=text, calibrate_sequences=4, calibrate_length=32
    )


def examine(source: Path, folder: Path, cell: Cell, text: Path, rtx: TensorRT | None) -> Cell:
    """Fill a cell."""
    start = time.monotonic()
    try:
        summary = export(source, folder, cell.recipe, text)
        accuracy = summary.manifest.accuracy
        cell.kl = float(accuracy["kl_nats_per_token"])  # type: ignore[arg-type]
        cell.steps = int(accuracy.get("engine", {}).get("flips", 0) > 0)  # type: ignore[union-attr]
        reasons = filter(None, (summary.unplanned, summary.unbuildable))
        cell.problems += [f"not lowered: {reason}" for reason in reasons]
        if not cell.problems:
            compare(folder, cell)
            cell.rtx = "-" if rtx is None else f"{built(rtx, folder) / 1e6:.0f}"
    except EdgeError as problem:
        cell.problems.append(str(problem))
    cell.seconds = time.monotonic() - start
    return cell


def compare(folder: Path, cell: Cell) -> None:
    """Run every engine over the text."""
    tokens = np.random.default_rng(1).integers(0, 250, (1, sum(LENGTHS)))
    plain = read_reference(folder, tokens, {})
    as_ort = read_reference(folder, tokens, references(to_int8))
    as_cuda = read_reference(folder, tokens, references(to_half, to_half))
    cell.spread = worst(apart(as_ort, plain), apart(as_cuda, plain))
    found = read_ort(open_engines(folder), tokens)
    cell.ort = apart(found, as_ort)
    places = {"cuda": on_device.INTERPRETED}
    if library.path() is not None:
        places["cpu"] = library.instruction_sets()[-1]
    for engine, where in places.items():
        with on_device.running(where):
            following = follow(open_engines(folder), tokens)
        cell.followed[engine] = following.worst.over
        cell.steps += following.worst.steps[0]
        if not following.worst.over <= 1:
            cell.problems.append(f"{engine}: {following.worst.what}")
        ours = following.ours.arrays() | {"logits": np.concatenate(following.logits, 1)}
        cell.apart[engine] = apart(ours, found)
    for engine, difference in {"ort": cell.ort, **cell.apart}.items():
        judge(cell, engine, difference)


def judge(cell: Cell, engine: str, found: tuple[float, float]) -> None:
    """Note a difference over the whole text that is too large."""
    limits = [max(limit, 2 * spread) for limit, spread in zip(LIMITS, cell.spread, strict=True)]
    if cell.steps:
        limits[0] = np.inf
    if not all(one <= limit for one, limit in zip(found, limits, strict=True)):
        cell.problems.append(
            f"{engine}: {found[0]:.1e} apart ({limits[0]:.1e} allowed), "
            f"{found[1]:.1e} in the mean ({limits[1]:.1e})"
        )


def open_engines(folder: Path) -> Engines:
    with open_bundle(folder) as bundle:
        manifest = bundle.manifest
    return both(folder / GRAPH_FILE, manifest.model, manifest.state_dtypes)


def runs(tokens: np.ndarray) -> list[np.ndarray]:
    return np.split(tokens, np.cumsum(LENGTHS)[:-1], axis=1)


def read_reference(
    folder: Path, tokens: np.ndarray, ops: Mapping[str, Callable[..., object]]
) -> Arrays:
    """Return the logits and the states of the reference ops, some of them replaced."""
    with open_bundle(folder) as bundle:
        graph = GraphRunner(open_rounding(folder, ops), bundle.manifest.model)
    state, logits = graph.initial(1, CAPACITY), []
    for ids in runs(tokens):
        found, (state,) = graph.run(ids, state)
        logits.append(found)
    states = {name: state_array(state, name) for name in state.arrays}
    return states | {"logits": np.concatenate(logits, 1)}


def read_ort(made: Engines, tokens: np.ndarray) -> Arrays:
    state, logits = made.ort.new_state(window=4, capacity=CAPACITY), []
    for ids in runs(tokens):
        commit = ids.shape[1] > 1
        logits.append(made.ort.run(ids, state, rows="all", commit=commit).copy())
    return state.arrays() | {"logits": np.concatenate(logits, 1)}


def follow(made: Engines, tokens: np.ndarray) -> Following:
    following = Following(made, CAPACITY)
    for ids in runs(tokens):
        following.run(ids, commit=ids.shape[1] > 1)
    following.finish()
    return following


def apart(found: Arrays, expected: Arrays) -> tuple[float, float]:
    """Return the largest and the root mean square difference, of the largest number of an array."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    pairs = [(0.0, 0.0)]
    for name, array in found.items():
        other = expected[name].astype(np.float64)
        if name.endswith("_cache"):  # layers with a window may keep fewer rows
            kept = min(array.shape[2], other.shape[2])
            array, other = array[:, :, -kept:], other[:, :, -kept:]
        error, largest = array - other, max(1e-30, float(np.abs(other).max(initial=0)))
        if error.size:
            pairs.append((np.abs(error).max() / largest, np.sqrt(np.mean(error**2)) / largest))
    return worst(*pairs)


def worst(*pairs: tuple[float, float]) -> tuple[float, float]:
    largest, mean = np.max(np.array(pairs), axis=0)  # NaN stays
    return float(largest), float(mean)


def built(rtx: TensorRT, folder: Path) -> int:
    """Return the bytes of the engine that TensorRT for RTX builds, as `edge build --rtx` does."""
    with open_bundle(folder) as bundle:
        file, asked = machine.graph_file(bundle), sizes(bundle.manifest.model, 16, window=2)
        graph = form_for(rtx, bundle.read(file), file)
        source = GraphSource(graph, bundle.fd("weights.bin"), file)
        order = Order(asked, architectures=(GPU,))
        return len(
            bytes(compile_graph(rtx, source, order, profiles(asked, trees=False)[-1:]).engine)
        )


def open_rtx() -> TensorRT | None:
    try:
        return bindings.load("rtx")
    except EngineError as absent:
        print(f"not built: {absent.message}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description="every family × recipe × engine")
    parser.add_argument("--family", action="append", choices=SAVE, help="these only")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="these only")
    parser.add_argument("--no-rtx", action="store_true", help="build nothing")
    given = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("needs TRITON_INTERPRET=1 in the environment: run `make families`")
    quick_interpreter.install()
    rtx = None if given.no_rtx else open_rtx()
    wrong = count = 0
    print(HEADER, flush=True)
    for family in given.family or SAVE:
        with tempfile.TemporaryDirectory(prefix="edge-families-") as place:
            folder = Path(place)
            source, text = SAVE[family](folder / "checkpoint"), calibration_text(folder)
            for recipe in given.recipe or RECIPES:
                cell = examine(source, folder / recipe, Cell(family, recipe), text, rtx)
                print(cell.row(), flush=True)
                count, wrong = count + 1, wrong + bool(cell.problems)
    print(f"{count - wrong} of {count} cells agree")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
