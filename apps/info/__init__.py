"""`edge info BUNDLE`: the contents of a bundle, and the memory that running it takes.

For a model that is not exported yet: the memory it would take.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from edge.apps import options
from edge.apps.exits import REFUSED
from edge.apps.info import launches as launch_table
from edge.apps.info import memory as memory_plan
from edge.apps.info import unexported
from edge.apps.info.boards import BOARDS, sized
from edge.apps.info.boards import board as named
from edge.apps.terminal import say
from edge.apps.units import kernel_line, megabytes, tensorrt_line
from edge.bundle import Bundle, open_bundle
from edge.bundle.kernels import DEVICE_GRAPH, PLAN, open_kernels, open_plan
from edge.bundle.kernels import sizes as kernel_sizes
from edge.errors import InputError
from edge.plugins.cpu import library
from edge.tensors import parameters, read_bytes, read_parameters


def info(
    bundle: Annotated[
        str,
        typer.Argument(
            help="Pulled model, bundle folder, or demo, demo-fp16, demo-draft or demo-bytes. "
            "Before exporting: a config.json, checkpoint folder, .gguf file, or OWNER/NAME on the "
            "hub."
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 24,
            help="Tokens of context to size the KV cache for. [default: 2048, or what the model "
            "was trained for]",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Sequences at once.")] = 1,
    snapshots: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="Copies of the state, such as those of /undo.")
    ] = 4,
    board: Annotated[
        str | None, typer.Option(help=f"Plan for a board: {', '.join(BOARDS)}.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Plan for this much free memory, such as 4GB or 512MiB.")
    ] = None,
    launches: Annotated[
        bool, typer.Option(help="Show the GPU launches of each kind of run.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show sizes, quantization, provenance and the memory plan; check every file.

    The plan is for this machine unless --board or --memory names another. With either, the exit
    code is 1 if the model does not fit. A model that is not exported yet is planned from its config
    alone, for every recipe. The exit code is then 1 if none fits.
    """
    from edge.runtime.model import resolve

    if board is not None and memory is not None:
        raise InputError(
            "cannot be given together with --board", field="--memory", remedy="choose one"
        )
    requested = named(board) if board is not None else sized(memory) if memory is not None else None
    if unexported.is_meant(bundle):
        if launches:
            raise InputError(
                "there is no launch plan before exporting",
                field="--launches",
                remedy="leave it out",
            )
        budget = requested or memory_plan.this_machine()
        with options.named_as_options():
            facts = unexported.collect(
                bundle, budget, context=context, batch=batch, snapshots=snapshots
            )
        say(json.dumps(facts, indent=1) if as_json else unexported.describe(facts))
        if requested and not any(recipe["fits"] for recipe in facts["recipes"].values()):
            raise typer.Exit(REFUSED)
        return
    with open_bundle(resolve(bundle)) as opened:
        check(opened)
        with options.named_as_options():
            context = memory_plan.sized_context(opened.manifest.model, context)
        # the engine that `auto` chooses there; installing on a board compiles the CPU kernels
        on_cpu = PLAN in opened.manifest.graphs and (requested or library.path())
        plan = open_plan(opened) if on_cpu else None
        sizes = memory_plan.PlanSizes(context, batch, snapshots, plan)
        facts = collect(opened, context)
        budget = requested or memory_plan.this_machine()
        facts["memory"] = memory_plan.facts(opened.manifest, sizes, budget)
        if launches:
            facts["launches"] = launch_table.facts(opened, context)
    say(json.dumps(facts, indent=1) if as_json else describe(facts))
    if requested and not facts["memory"]["fits"]:
        raise typer.Exit(REFUSED)


def check(bundle: Bundle) -> None:
    """Check every hash; read the launch plan and the kernel indices. Raises BundleError."""
    bundle.verify()
    if PLAN in bundle.manifest.graphs:
        open_plan(bundle)
    for name in bundle.manifest.kernels:
        open_kernels(bundle, int(name.removeprefix("sm_")))


def collect(bundle: Bundle, context: int) -> dict[str, Any]:
    """Return the facts that `--json` prints.

    `layers parameters weight_bytes state_bytes quantization files` are a stable interface.
    """
    from edge.runtime.engine import DEFAULT_WINDOW
    from edge.runtime.layout import StateLayout

    manifest = bundle.manifest
    state = StateLayout.of(manifest.model, capacity=context, dtypes=manifest.state_dtypes)
    sliding = state.sliding(window=DEFAULT_WINDOW, chunk=manifest.limits.chunk)
    weights = manifest.entry("weights.bin")
    size = weights.size if weights else 0
    return {
        "bundle": str(bundle.path),
        "family": manifest.model.family,
        "layers": manifest.model.kinds,
        "d_model": manifest.model.d_model,
        "vocab_size": manifest.model.vocab_size,
        "parameters": parameters(manifest.model),
        "active_parameters": read_parameters(manifest.model),
        "weight_bytes": size,
        "token_bytes": read_bytes(manifest.model, size),
        "state_bytes": state.slot_bytes,
        "state_dtypes": sorted(
            {kind for name, kind in manifest.state_dtypes.items() if name in state.recurrent}
        ),
        "kv_cache_dtype": next((str(state.dtype(name)) for name in state.caches), None),
        "kv_cache_bytes": state.cache_bytes,
        "kv_cache_sliding_bytes": sliding.cache_bytes,
        "context": context if manifest.model.has_attention else None,
        "max_context": manifest.model.max_context,
        "quantization": manifest.quantization.model_dump(mode="json"),
        "tokenizer": manifest.tokenizer.model_dump(mode="json"),
        "chat_template": manifest.chat_template is not None,
        "graphs": manifest.graphs,
        "kernels": {
            name: {"kernels": count, "bytes": size}
            for name, (count, size) in kernel_sizes(manifest).items()
        },
        "accuracy": manifest.accuracy,
        "provenance": manifest.provenance.model_dump(mode="json"),
        "fingerprint": bundle.fingerprint,
        "files": {entry.path: entry.size for entry in manifest.files},
    }


def describe(facts: dict[str, Any]) -> str:
    """Format the facts as aligned lines."""
    layers = ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items())
    types = f" (partly {' and '.join(facts['state_dtypes'])})" if facts["state_dtypes"] else ""
    state = f"{megabytes(facts['state_bytes'])}{types} a sequence, whatever its length"
    if facts["kv_cache_bytes"]:
        state += (
            f"; plus KV cache {megabytes(facts['kv_cache_bytes'])} at {facts['context']} tokens"
            f", {facts['kv_cache_dtype']}"
        )
        if facts["max_context"]:
            state += f"; trained for {facts['max_context']}"
    if facts["kv_cache_sliding_bytes"] < facts["kv_cache_bytes"]:
        state += f", {megabytes(facts['kv_cache_sliding_bytes'])} on the engines cpu and cuda"
    sparse = facts["active_parameters"] < facts["parameters"]
    active = f", of which a token uses {facts['active_parameters'] / 1e6:.1f} M" if sparse else ""
    rows = {
        "family": facts["family"],
        "layers": f"{layers}; d_model {facts['d_model']}, vocabulary {facts['vocab_size']}",
        "parameters": f"{facts['parameters'] / 1e6:.1f} M{active}",
        "weights": f"{megabytes(facts['weight_bytes'])}, {facts['quantization']['recipe']}; "
        f"a token reads about {megabytes(facts['token_bytes'])}",
        "state": state,
        "tokenizer": f"{facts['tokenizer']['kind']}, {facts['tokenizer']['vocab_size']} tokens"
        + (", with a chat template" if facts["chat_template"] else ", no chat template"),
        "kernels": kernel_line(
            {name: (entry["kernels"], entry["bytes"]) for name, entry in facts["kernels"].items()},
            None if PLAN in facts["graphs"] else "made by an older version, or none is possible",
        ),
        "tensorrt": tensorrt_line(
            facts["files"].get(facts["graphs"].get(DEVICE_GRAPH)),
            "made by an older version, or none is possible",
        ),
        "accuracy": accuracy_line(facts["accuracy"]),
        "source": facts["provenance"]["source"],
        "licence": facts["provenance"]["licence"] or "not stated",
        "fingerprint": facts["fingerprint"],
    }
    lines = [facts["bundle"], *(f"  {name:<12}{value}" for name, value in rows.items())]
    lines += memory_plan.lines(facts["memory"]) if "memory" in facts else []
    lines += launch_table.lines(facts["launches"]) if "launches" in facts else []
    lines.append("  files")
    lines += [
        f"    {size:>12,}  {path}"
        for path, size in facts["files"].items()
        if not path.endswith(".cubin")  # hundreds, counted above
    ]
    return "\n".join(lines)


# keys of a manifest's `accuracy` (edge.export.graph.verify) → their names here
_ACCURACY = {
    "kl_nats_per_token": "KL in nats a token",
    "top1_agreement": "top-1 agreement",
    "perplexity_before": "perplexity before",
    "perplexity": "after",
    "tokens": "tokens",
    "on": "on",
}


def accuracy_line(accuracy: dict[str, Any]) -> str:
    """Format the figures that export measured against the fp32 network; --json has all of them."""
    if "skipped" in accuracy:
        return f"not measured: {accuracy['skipped']}"
    figures = [f"{name} {accuracy[key]}" for key, name in _ACCURACY.items() if key in accuracy]
    return ", ".join(figures) or "not recorded"
