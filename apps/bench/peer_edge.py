"""This runtime: the same checkpoint exported to a bundle, run by the engine a session would use."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from edge.apps.bench.peers import Logits, Rounding, Tokens, Workspace, installed
from edge.bundle import open_bundle
from edge.runtime.engine import Rows
from edge.runtime.engines import open_engine


class EdgePeer:
    """One state; prompts are committed in chunks, everything else can be rewound."""

    note: str = ""

    def __init__(self, workspace: Workspace, recipe: Rounding, threads: int, *, spin: bool) -> None:
        self.name = f"edge-{recipe}-spin" if spin else f"edge-{recipe}"
        self.rounding = recipe
        if spin:
            self.note = "threads wait awake (edge.load(…, spin=True)), as llama.cpp's do"
        with open_bundle(export_bundle(workspace, f"edge-{recipe}", recipe)) as bundle:
            self.weight_bytes = sum(entry.size for entry in bundle.manifest.files)
            self._engine = open_engine(bundle, "ort", threads=threads, spin=spin, provider="cpu")
        self.version = f"{installed('mamba-edge')}, onnxruntime {installed('onnxruntime')}"
        self._state = self._engine.new_state()
        self._token = np.zeros((1, 1), np.int64)

    def prefill(self, tokens: Tokens, *, every_row: bool = False) -> Logits:
        self._state.clear()
        chunk, found = self._engine.chunk, []
        for start in range(0, len(tokens), chunk):
            piece = tokens[None, start : start + chunk]
            rows: Rows = "all" if every_row else "last"
            logits: Logits = self._engine.run(piece, self._state, rows=rows, commit=True)[0]
            found.append(logits.copy() if every_row else logits)
        return np.concatenate(found) if every_row else found[-1]

    def run(self, tokens: Tokens) -> Logits:
        logits: Logits = self._engine.run(tokens[None], self._state, rows="all")[0]
        return logits

    def step(self, token: int) -> Logits:
        self._token[0, 0] = token
        logits: Logits = self._engine.run(self._token, self._state)[0]
        return logits

    def close(self) -> None:
        del self._state, self._engine


def bundle_path(workspace: Workspace, name: str) -> Path:
    """Where the bundle of the peer called `name` lies."""
    return workspace.path / f"{workspace.shape.name}-{name}"


def export_bundle(workspace: Workspace, name: str, recipe: str) -> Path:
    """Always exported anew: a kept bundle may come from an older exporter."""
    from edge.export.exporter import export_checkpoint

    path = bundle_path(workspace, name)
    if path.exists():
        shutil.rmtree(path)
    export_checkpoint(workspace.checkpoint, path, quant=recipe, verify=False)
    return path
