"""The model of `toy_kernels`: its plan, an engine for it, and its expected answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.config import AttentionConfig, Mamba1Config, ModelConfig
from edge.launch import LaunchPlan, Program, Size, Weight
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.plugins.lowering.context import Constant, Lowering, Regime, Tables
from edge.runtime.cuda.device import Exclusive
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.weights import DeviceWeights
from edge.runtime.layout import Identity

C = V = 8
K = 4
CONFIG = ModelConfig(
    family="toy", vocab_size=V, d_model=C, max_context=64,
    layers=(
        Mamba1Config(d_inner=C, d_state=1, d_conv=K, dt_rank=1),
        AttentionConfig(n_heads=1, n_kv_heads=1, head_dim=C),
    ),
)  # fmt: skip
TABLE = np.random.default_rng(0).integers(0, 9, (V, C)).astype(np.float32)
PACKAGE = "tests.cuda"
REGIMES = (Regime("chain", 1), Regime("chain", 16), Regime("tree", 16), Regime("chain", None))


def plan() -> LaunchPlan:
    tables = Tables()
    tables.weights["table"] = Weight(dtype="f32", offset=64, elements=V * C)
    programs = [
        Program(kind=regime.kind, max_rows=regime.max_rows, launches=tuple(_lower(regime, tables)))
        for regime in REGIMES
    ]
    launches = tuple(launch for _, launch in tables.launches.values())
    settling = tuple(i for i in programs[-1].launches if launches[i].settles)
    programs.append(Program(kind="settle", max_rows=None, launches=settling))
    return LaunchPlan(
        variants=tuple(variant for _, variant in tables.variants.values()),
        launches=launches,
        programs=tuple(programs),
        values=tables.values,
        inputs=tables.inputs,
        weights=tables.weights,
        logs=tables.logs,
        taps=(K,),
    )


def _lower(regime: Regime, tables: Tables) -> list[int]:
    table = Constant("table", "weight", "f32", (V, C), lambda: TABLE)
    at = Lowering(regime, tables, {"table": table})
    tokens = at.input("tokens", "i32", Size(of="TB"))
    tree = {"TREE": regime.kind == "tree"}
    x, y, s, a = (at.new(name, "f32", "TB", C) for name in ("x", "y", "s", "a"))
    logits = at.new("logits", "f32", "LB", V)
    rows, T, B = at.size("TB"), at.size("T"), at.size("B")
    p = at.pointer
    at.launch("toy_kernels.embed", {
        "tokens": tokens, "table": p(table), "x": p(x), "rows": rows,
    }, {"C": C}, (Size(),))  # fmt: skip
    at.launch("toy_kernels.conv", {
        "run": at.run(), "taps": at.input(f"taps{K}", "i32", Size(times=K, of="T")),
        "state_taps": at.input(f"state_taps{K}", "i32", Size(times=K - 1)),
        "slots": at.slots(), "x": p(x), "state": at.state("layers.0.conv_state", "f32"),
        "log": at.log("layers.0.conv_state", "conv_in", "f32", C),
        "y": p(y), "T": T, "B": B, "S": at.size("S"),
    }, {"C": C, "K": K}, (Size(),), settles=True)  # fmt: skip
    at.launch("toy_kernels.scan", {
        "run": at.run(), "replay": at.replay(), "slots": at.slots(), "ancestors": at.ancestors(),
        "x": p(y), "state": at.state("layers.0.ssm_state", "f32"),
        "log": at.log("layers.0.ssm_state", "scan_x", "f32", C), "y": p(s), "T": T, "B": B,
    }, {"C": C, **tree}, (Size(),), settles=True)  # fmt: skip
    at.launch("toy_kernels.attend", {
        "run": at.run(), "ancestors": at.ancestors(), "x": p(s),
        "keys": at.cache("layers.1.key_cache", "f32"),
        "values": at.cache("layers.1.value_cache", "f32"),
        "y": p(a), "T": T, "B": B, "P": at.size("C"),
    }, {"C": C, **tree}, (Size(),))  # fmt: skip
    at.launch("toy_kernels.head", {
        "rows": at.input("rows", "i32", Size(of="L")),
        "positions": at.input("positions", "i32", Size(of="T")),
        "scanned": p(s), "attended": p(a), "logits": p(logits), "L": at.size("L"), "B": B,
    }, {"C": C}, (Size(),))  # fmt: skip
    return at.order


def engine(device: InterpretDevice | None = None, chunk: int = 20) -> CudaEngine:
    device = device or InterpretDevice(PACKAGE)
    exclusive, made = Exclusive(device), plan()
    weights = DeviceWeights(made, exclusive)
    weights.read([b"\0" * 64, TABLE.tobytes()])
    kernels = {i: device.load(variant, None, b"") for i, variant in enumerate(made.variants)}
    return CudaEngine(
        CONFIG,
        exclusive,
        PlanExecutor(made, kernels, weights, device),
        chunk=chunk,
        identity=Identity("toy"),
    )


def expected(tokens: Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the logits [T, V] of one sequence, and the state after it."""
    x = np.concatenate([np.zeros((K - 1, C)), TABLE[list(tokens)]])
    h, values, logits = np.zeros(C), [], []
    for t in range(len(tokens)):
        z = 3 * h + sum((k + 1) * x[t + k] for k in range(K))
        h = z - 251 * np.round((z - 125) / 251)
        values.append(h)
        logits.append(h + 7 * np.sum(values, 0) + t)
    rows = np.array(values).reshape(1, len(tokens), C)
    state = {
        "layers.0.conv_state": x[len(x) - K + 1 :],
        "layers.0.ssm_state": h[None],
        "layers.1.key_cache": 2 * rows,
        "layers.1.value_cache": rows,
    }
    return np.array(logits), state
