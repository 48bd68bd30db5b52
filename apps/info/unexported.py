"""Memory that a model would take, from its config alone, before download or export."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.apps.exporter import packages_of
from edge.apps.info.boards import MemoryBudget
from edge.apps.info.memory import sized_context
from edge.apps.units import megabytes
from edge.bundle import store
from edge.errors import InputError, PullError
from edge.runtime.cpu import planning
from edge.runtime.engine import DEFAULT_WINDOW
from edge.runtime.layout import StateLayout
from edge.tensors import kv_cache_shapes, parameters, read_parameters

if TYPE_CHECKING:
    from edge.export.checkpoint.layout import Layout

RECIPES = ("fp16", "w8", "w8a8", "w4", "w4a8")
# GB/s of the memory of an 8 GB Orin Nano, without and with its Super modes
BANDWIDTHS = (68, 102)
_CONFIGS = ("config.json", "params.json")


def is_meant(name: str) -> bool:
    """Return whether a name means a model that is not exported.

    That is a config, a checkpoint folder, a GGUF file, or a hub repository that was not pulled.
    """
    path = Path(name)
    if path.is_dir():
        has_config = any((path / config).is_file() for config in _CONFIGS)
        return not (path / "manifest.json").exists() and (has_config or any(path.glob("*.gguf")))
    if path.is_file():
        return path.suffix in (".json", ".gguf")
    return store.is_repository(name) and not any(map(store.find, (name, store.name_for(name))))


def read(name: str) -> tuple[Layout, list[str]]:
    """Return the layout of the model that a name means, and the unknown fields of its config.

    Raises CheckpointError, PullError when the hub does not have it, or InputError without the extra
    `export`.
    """
    with packages_of("export", "reading a config", InputError):
        from edge.export.checkpoint import read_layout
    path = Path(name)
    if path.exists():
        return read_layout(path)
    from edge.apps.models import hub

    with tempfile.TemporaryDirectory() as folder:
        try:
            config = hub.look_up_config(name).fetch(Path(folder))
        except PullError as problem:  # the name may have meant a folder
            raise PullError(
                f"is not a folder here, and {problem.message}", file=name, remedy=problem.remedy
            ) from None
        return read_layout(config)


def collect(
    name: str, place: MemoryBudget, *, context: int | None, batch: int = 1, snapshots: int = 4
) -> dict[str, Any]:
    """Return the facts that `--json` prints, with the state of the first of RECIPES.

    Raises as `read` and `sized_context` do.
    """
    from edge.export.exporter import CHUNK

    layout, unknown = read(name)
    config = layout.config
    context = sized_context(config, context)
    state = StateLayout.of(config, capacity=context, dtypes=state_dtypes(layout, RECIPES[0]))
    state = state.sliding(window=DEFAULT_WINDOW, chunk=CHUNK)
    return {
        "config": name,
        "family": config.family,
        "unknown_fields": unknown,
        "layers": config.kinds,
        "d_model": config.d_model,
        "vocab_size": config.vocab_size,
        "max_context": config.max_context,
        "parameters": parameters(config),
        "active_parameters": read_parameters(config),
        "state_bytes": state.slot_bytes,
        "kv_cache_token_bytes": state.growing_bytes // context,
        "kv_cache_constant_bytes": state.cache_bytes - state.growing_bytes,
        "kv_cache_bytes": state.cache_bytes,
        "context": context if config.has_attention else None,
        "place": place.name,
        "available_bytes": place.available,
        "available_basis": place.basis,
        "recipes": {
            recipe: by_recipe(
                layout, recipe, place, context=context, batch=batch, snapshots=snapshots
            )
            for recipe in RECIPES
        },
    }


def by_recipe(
    layout: Layout,
    recipe: str,
    place: MemoryBudget,
    *,
    context: int,
    batch: int = 1,
    snapshots: int = 4,
) -> dict[str, Any]:
    """Return the sizes under one recipe, and whether the model fits.

    `token_bytes` counts the weights that a token reads, the state that it reads and writes, and a
    full KV cache as far as layers look back. These bound its time; all other traffic is small.
    """
    from edge.export.exporter import CHUNK
    from edge.export.recipes.sizes import weight_bytes

    config, weights = layout.config, weight_bytes(layout, recipe)
    dtypes = state_dtypes(layout, recipe)
    plan = planning.plan_config(
        config, weights.stored, chunk=CHUNK, capacity=context, batch=batch, snapshots=snapshots,
        program=planning.PROGRAM, dtypes=dtypes,
    )  # fmt: skip
    state = StateLayout.of(config, capacity=context, dtypes=dtypes)
    token_bytes = weights.read + 2 * state.slot_bytes + state.looked_at_bytes
    return {
        "weight_bytes": weights.stored,
        "token_bytes": token_bytes,
        "predicted_tokens_per_s": {str(speed): speed * 1e9 / token_bytes for speed in BANDWIDTHS},
        "plan": plan,
        "fits": None if place.available is None else plan["total"] <= place.available,
    }


def state_dtypes(layout: Layout, recipe: str) -> dict[str, str]:
    """Return the `state_dtypes` that a manifest would have."""
    from edge.export.recipes import mixture

    half = mixture(layout.config, recipe).cache == "fp16"
    return dict.fromkeys(kv_cache_shapes(layout.config, 1), "float16") if half else {}


def describe(facts: dict[str, Any]) -> str:
    """Format the facts as aligned lines."""
    layers = ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items())
    sparse = facts["active_parameters"] < facts["parameters"]
    active = f", of which a token uses {facts['active_parameters'] / 1e6:.1f} M" if sparse else ""
    state = f"{megabytes(facts['state_bytes'])} a sequence, whatever its length"
    if facts["kv_cache_bytes"]:
        constant = facts["kv_cache_constant_bytes"]
        windows = f"{megabytes(constant)} of layers with a window and " if constant else ""
        state += (
            f"; plus KV cache {windows}{megabytes(facts['kv_cache_token_bytes'])} a token, "
            f"{megabytes(facts['kv_cache_bytes'])} at {facts['context']} tokens"
        )
    rows = {
        "family": facts["family"],
        "layers": f"{layers}; d_model {facts['d_model']}, vocabulary {facts['vocab_size']}",
        "parameters": f"{facts['parameters'] / 1e6:.1f} M{active}",
        "state": state,
    }
    lines = [facts["config"], *(f"  {name:<12}{value}" for name, value in rows.items())]
    if facts["unknown_fields"]:
        lines.append(f"  unknown fields, ignored: {', '.join(facts['unknown_fields'])}")
    lines.append(f"  planned for {facts['place']}, engine cpu, before exporting")
    speeds = " and ".join(map(str, BANDWIDTHS))
    lines.append(
        f"    {'recipe':<8}{'weights':>9}{'a token':>10}{'total':>9}  tokens/s at {speeds}"
    )
    for recipe, planned in facts["recipes"].items():
        fits = {True: "fits", False: "does not fit", None: ""}[planned["fits"]]
        rate = " / ".join(
            f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"
            for speed in planned["predicted_tokens_per_s"].values()
        )
        sizes = [planned["weight_bytes"], planned["token_bytes"], planned["plan"]["total"]]
        shown = "".join(
            f"{megabytes(size):>{w}}" for size, w in zip(sizes, (9, 10, 9), strict=True)
        )
        lines.append(f"    {recipe:<8}{shown}  {rate:<16}{fits}".rstrip())
    lines.append(f"  tokens/s at {speeds} GB/s: predicted from bytes per token, unproven")
    free = facts["available_bytes"]
    if free is not None:
        lines.append(f"  {megabytes(free)} are free ({facts['available_basis']})")
    return "\n".join(lines)
