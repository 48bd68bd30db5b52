"""Write down the kernels to compile for a GPU: a file for each `Variant`, by its key.

    python -m tests.gpu.variants OUT [--models A,B] [--recipes w8a8,fp16] [--blocks w4,…]
        [--bundles demo,…]

These are the first kernel, the embedded bundles' kernels, and those of the models that
`tests/gpu/run.sh B` measures. Tests write theirs themselves: `tests.on_device`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.launch import Variant

WATCHED = ("tiny-deltanet", "w8a8")  # by compute-sanitizer: `watched` in tests/gpu/run.sh


def write(folder: Path, variants: Iterable[Variant]) -> None:
    """Write each variant that is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in variants:
        file = folder / f"{each.key}.json"
        if not file.exists():
            file.write_text(each.model_dump_json())


def read(folder: Path) -> list[Variant]:
    """Read the variants of a folder."""
    return [
        Variant.model_validate_json(file.read_bytes()) for file in sorted(folder.glob("*.json"))
    ]


def of_bundle(path: Path) -> tuple[Variant, ...]:
    """Return the kernels of a bundle's plan."""
    with open_bundle(path) as bundle:
        return open_plan(bundle).variants


def of_model(name: str, quant: str) -> tuple[Variant, ...]:
    """Return the kernels of a measured model: one period of its layers has them all."""
    from edge.apps.bench.models import MODELS, model_named, period, write_bundle

    config = model_named(name, MODELS, "models")
    short = config.model_copy(update={"layers": config.layers[: period(config)]})
    with tempfile.TemporaryDirectory(prefix="edge-variants-") as folder:
        return of_bundle(write_bundle(short, quant, Path(folder) / "bundle", chunk=32))


def main() -> None:
    from edge.apps.bench.gpu.__main__ import RECIPES, WIDTHS
    from edge.apps.bench.models import DEFAULT
    from edge.runtime.model import EMBEDDED, resolve
    from tests.gpu.first_cubin import lowered

    parser = argparse.ArgumentParser(prog="python -m tests.gpu.variants")
    parser.add_argument("out", type=Path)
    options = {"models": DEFAULT, "recipes": RECIPES, "blocks": WIDTHS, "bundles": EMBEDDED}
    for name, every in options.items():
        parser.add_argument(f"--{name}", default=",".join(every), help="separated by commas")
    given = parser.parse_args()
    write(given.out, [lowered()[0]])
    for bundle in filter(None, given.bundles.split(",")):
        write(given.out, of_bundle(resolve(bundle)))
    models = given.models.split(",") if given.models else []
    cases = [(model, quant) for model in models for quant in given.recipes.split(",")]
    if models:
        cases += [(models[0], quant) for quant in given.blocks.split(",") if quant]
        cases.append(WATCHED)
    for model, quant in cases:
        found = of_model(model, quant)
        print(f"{model} {quant}: {len(found)} kernels", file=sys.stderr, flush=True)
        write(given.out, found)


if __name__ == "__main__":
    main()
