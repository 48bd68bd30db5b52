"""`edge info BUNDLE`: what is in a bundle and what running it will take."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from edge.apps.units import megabytes
from edge.bundle import Bundle, open_bundle
from edge.tensors import parameters


def info(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of a demonstration.")],
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of context to size the KV cache for.")
    ] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show sizes, state bytes, quantization and provenance; checks every file."""
    from edge.runtime.model import resolve

    with open_bundle(resolve(bundle)) as opened:
        opened.verify()
        facts = collect(opened, context)
    print(json.dumps(facts, indent=1) if as_json else describe(facts))


def collect(bundle: Bundle, context: int) -> dict[str, Any]:
    """The facts `--json` prints; `layers parameters weight_bytes state_bytes quantization files`
    are an interface.
    """
    from edge.runtime.layout import StateLayout

    manifest = bundle.manifest
    kinds = [layer.kind for layer in manifest.model.layers]
    state = StateLayout.of(manifest.model, capacity=context, dtypes=manifest.state_dtypes)
    weights = manifest.entry("weights.bin")
    return {
        "bundle": str(bundle.path),
        "family": manifest.model.family,
        "layers": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "d_model": manifest.model.d_model,
        "vocab_size": manifest.model.vocab_size,
        "parameters": parameters(manifest.model),
        "weight_bytes": weights.size if weights else 0,
        "state_bytes": state.slot_bytes,
        "state_dtypes": sorted(set(manifest.state_dtypes.values())),
        "kv_cache_bytes": state.cache_bytes,
        "context": context if manifest.model.has_attention else None,
        "quantization": manifest.quantization.model_dump(mode="json"),
        "tokenizer": manifest.tokenizer.model_dump(mode="json"),
        "chat_template": manifest.chat_template is not None,
        "graphs": manifest.graphs,
        "accuracy": manifest.accuracy,
        "provenance": manifest.provenance.model_dump(mode="json"),
        "fingerprint": bundle.fingerprint,
        "files": {entry.path: entry.size for entry in manifest.files},
    }


def describe(facts: dict[str, Any]) -> str:
    """The facts as aligned lines."""
    layers = ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items())
    types = f" (partly {' and '.join(facts['state_dtypes'])})" if facts["state_dtypes"] else ""
    state = f"{megabytes(facts['state_bytes'])}{types} a sequence, whatever its length"
    if facts["kv_cache_bytes"]:
        state += (
            f"; plus KV cache {megabytes(facts['kv_cache_bytes'])} at {facts['context']} tokens"
        )
    rows = {
        "family": facts["family"],
        "layers": f"{layers}; d_model {facts['d_model']}, vocabulary {facts['vocab_size']}",
        "parameters": f"{facts['parameters'] / 1e6:.1f} M",
        "weights": f"{megabytes(facts['weight_bytes'])}, {facts['quantization']['recipe']}",
        "state": state,
        "tokenizer": f"{facts['tokenizer']['kind']}, {facts['tokenizer']['vocab_size']} tokens"
        + (", with a chat template" if facts["chat_template"] else ", no chat template"),
        "accuracy": _figures(facts["accuracy"]) or "not recorded",
        "source": facts["provenance"]["source"],
        "licence": facts["provenance"]["licence"] or "not stated",
        "fingerprint": facts["fingerprint"],
    }
    lines = [facts["bundle"], *(f"  {name:<12}{value}" for name, value in rows.items()), "  files"]
    lines += [f"    {size:>12,}  {path}" for path, size in facts["files"].items()]
    return "\n".join(lines)


def _figures(accuracy: dict[str, Any]) -> str:
    """The figures of a run, with those of one inside it in brackets."""
    return ", ".join(
        f"{name} ({_figures(value)})" if isinstance(value, dict) else f"{name} {value}"
        for name, value in accuracy.items()
    )
