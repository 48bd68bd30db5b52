"""Built graphs in ONNX Runtime against the torch network: every mixer, order and option."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from edge.config import (
    AttentionConfig,
    ExpertsConfig,
    GatedDeltaNetConfig,
    Mamba1Config,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    RopeScaling,
    RouterConfig,
    ShortConvConfig,
)
from edge.errors import ExportError
from edge.export.graph import GRAPH_FILE, WEIGHT_FILE, build_graph
from edge.export.graph.run import GraphRunner, open_reference, open_session, session_options
from edge.export.network import Network
from edge.export.nodes.builder import WeightWriter
from edge.export.quantize.weights import (
    dequantize_blocks,
    quantize_blocks,
    quantize_minimum,
)
from edge.export.recipes import Choices, mixture, plan_model, recipe
from edge.tensors import tensor_shapes
from tests.onnx_ops import all_nodes, path_to, random_parents

V = 96
MAMBA1 = Mamba1Config(d_inner=128, d_state=8, dt_rank=4)
MAMBA1_ODD = Mamba1Config(
    d_inner=72, d_state=5, d_conv=3, dt_rank=3, conv_bias=False, proj_bias=True
)
# of MambaInLlama, which has many groups; and of Zamba
MAMBA1_GROUPS = Mamba1Config(
    d_inner=96, d_state=8, dt_rank=4, B_groups=2, C_groups=6, reads_input=True
)
MAMBA1_HEADS = Mamba1Config(d_inner=80, d_state=8, dt_rank=6, B_groups=2, C_groups=2)
MAMBA2 = Mamba2Config(d_inner=128, d_ssm=128, d_state=16, head_dim=32)
MAMBA2_GROUPS = Mamba2Config(
    d_inner=128, d_ssm=128, d_state=8, head_dim=16, n_groups=4, d_conv=2, conv_bias=False
)
MAMBA2_MLP = Mamba2Config(
    d_inner=160, d_ssm=128, d_state=16, head_dim=16, n_groups=2,
    gated_norm=False, proj_bias=True, dt_limit=(0.02, 0.3),
)  # fmt: skip
ATTENTION = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16, rope=RopeConfig(dim=16))
# 18 is not a multiple of 8, and is rotated only in part; the window is five tokens, and the scores
# are bounded.
ATTENTION_ODD = AttentionConfig(
    n_heads=4, n_kv_heads=1, head_dim=18, rope=RopeConfig(dim=6, theta=500.0), qkv_bias=True,
    out_bias=True, window=5, softcap=1.5,
)  # fmt: skip
NO_ROPE = AttentionConfig(n_heads=2, n_kv_heads=2, head_dim=8)
MLP = MlpConfig(d_intermediate=48, bias=True)
# of GPT-NeoX: both read the same stream, unlike two in sequence
PARALLEL = MlpConfig(d_intermediate=40, bias=True, form="gelu", parallel=True)
GELU = MlpConfig(d_intermediate=48, form="gelu_tanh")
# frequencies that stay, that are divided, and between
STRETCHED = AttentionConfig(
    n_heads=4, n_kv_heads=2, head_dim=12,
    rope=RopeConfig(
        dim=12, theta=100.0, scaling=RopeScaling(kind="llama3", factor=8.0, original_context=64)
    ),
)  # fmt: skip
# heads normed before the rotation; 12 values are padded to 16
NORMED = AttentionConfig(
    n_heads=4, n_kv_heads=2, head_dim=12, rope=RopeConfig(dim=12), qk_norm=True, qkv_bias=True
)
# of Falcon-H1: attention beside a scan
BESIDE = AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=16, qk_norm=True, parallel=True)
# of Falcon-Mamba and Jamba, and of Falcon-H1 with its norm before the gate
MAMBA1_NORMED = Mamba1Config(d_inner=72, d_state=6, dt_rank=4, inner_eps=1e-3)
MAMBA2_BEFORE = Mamba2Config(
    d_inner=128, d_ssm=128, d_state=8, head_dim=16, n_groups=2, norm_before_gate=True
)
RELU2 = MlpConfig(d_intermediate=40, form="squared_relu")
SHORT = ShortConvConfig(d_model=64)
CONVOLVED = AttentionConfig(
    n_heads=4, n_kv_heads=2, head_dim=8, rope=RopeConfig(dim=4), d_conv=4, window=5
)
# of Granite, whose MLP is beside its experts; and of Nemotron-H
EXPERTS = ExpertsConfig(n_experts=6, d_intermediate=32, router=RouterConfig(top_k=2))
SHARED = MlpConfig(d_intermediate=32, parallel=True)
LATENT = ExpertsConfig(
    n_experts=8, d_intermediate=24, form="squared_relu", d_latent=32,
    router=RouterConfig(
        top_k=3, score="sigmoid", correction=True, scale=2.5, groups=4, top_groups=2
    ),
)  # fmt: skip
# of Qwen3.5: heads share keys; attention is normed, partly rotated, and gated
DELTANET = GatedDeltaNetConfig(n_heads=4, head_dim=12, n_groups=2, d_state=10, d_conv=3)
DELTANET_WIDE = GatedDeltaNetConfig(n_heads=3, head_dim=16, n_groups=3, d_state=24, beta_max=2.0)
GATED = AttentionConfig(
    n_heads=4, n_kv_heads=2, head_dim=12, rope=RopeConfig(dim=4), qk_norm=True, qkv_bias=True,
    output_gate=True,
)  # fmt: skip
# of LFM3: a convolution over seven tokens, attention with a window and one gate per head
SHORT_WIDE = ShortConvConfig(d_model=64, d_conv=7)
HEAD_GATED = AttentionConfig(
    n_heads=6, n_kv_heads=2, head_dim=12, rope=RopeConfig(dim=6), qk_norm=True, window=5,
    head_gate=True,
)  # fmt: skip
MODELS: dict[str, tuple[Any, ...]] = {
    "mamba1": (MAMBA1, MAMBA1_GROUPS),
    "mamba1 odd": (MAMBA1_ODD, MAMBA1_HEADS),
    "mamba2": (MAMBA2, MAMBA2),
    "mamba2 groups": (MAMBA2_GROUPS, MAMBA2),
    "mamba2 with mlp": (MAMBA2_MLP,),
    "attention": (ATTENTION,),
    "attention odd": (ATTENTION_ODD, NO_ROPE, ATTENTION),
    "mlp": (MLP, MlpConfig(d_intermediate=40)),
    "parallel": (ATTENTION_ODD, PARALLEL, GELU, STRETCHED, PARALLEL),
    "normed": (MAMBA2_BEFORE, BESIDE, MAMBA1_NORMED, NORMED),
    "short": (SHORT, RELU2, CONVOLVED),
    "head gate": (SHORT_WIDE, HEAD_GATED, MLP),
    "deltanet": (DELTANET, GATED, DELTANET_WIDE, MLP),
    "experts": (EXPERTS, SHARED, LATENT),
    "routed": (MAMBA2_GROUPS, EXPERTS, NO_ROPE, LATENT),
    "all": (MAMBA1, ATTENTION_ODD, MLP, MAMBA2_MLP, MAMBA1_ODD, MAMBA2_GROUPS),
}
LAYERNORM = {"mamba1", "all", "parallel"}
UNTIED = {"mamba2", "attention"}
# of tests/tensorrt/plugin_models.py
CAPPED, LISTED = {"capped"}, {"listed"}


def network(name: str, d_model: int = 64, seed: int = 0) -> Network:
    """Return a network whose every tensor is random, so that no constant hides a mistake."""
    torch.manual_seed(seed)
    config = ModelConfig(
        family="test",
        vocab_size=V,
        d_model=d_model,
        layers=MODELS[name],
        norm=NormConfig(kind="layernorm" if name in LAYERNORM else "rmsnorm"),
        tie_embeddings=name not in UNTIED,
        logits_softcap=1.5 if name in CAPPED else None,
        head_ids=tuple(range(0, V, 3)) if name in LISTED else None,
    )
    net = Network(config).eval()
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            if not key.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


def logits(net: Network, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    with torch.no_grad():
        found: NDArray[np.float32] = net(torch.from_numpy(tokens))[0].numpy()
    return found


def runner(net: Network, folder: Path, quant: str = "fp32") -> GraphRunner:
    # fp16 caches would hide the error of the weights
    mixed = mixture(
        net.config, quant, Choices(kv_cache="fp32" if net.config.has_attention else None)
    )
    build_graph(net.config, net.canonical_tensors(), folder, plan_model(net.config, mixed))
    return GraphRunner(open_session(folder, options=session_options(1)), net.config)


def in_runs(
    graph: GraphRunner, tokens: NDArray[np.int64], runs: Sequence[int]
) -> NDArray[np.float32]:
    state = graph.initial(tokens.shape[0], sum(runs), fill=np.nan)
    pieces, start = [], 0
    for steps in runs:
        found, (state,) = graph.run(tokens[:, start : start + steps], state)
        pieces.append(found)
        start += steps
    return np.concatenate(pieces, 1)


def close(found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float) -> None:
    assert found.shape == expected.shape
    assert float(np.abs(found - expected).max()) <= tolerance * float(np.abs(expected).max())


def tokens_of(batch: int, steps: int) -> NDArray[np.int64]:
    return np.random.default_rng(3).integers(0, V, (batch, steps))


@pytest.mark.parametrize("name", MODELS)
def test_any_split_into_runs_gives_the_networks_logits(name: str, tmp_path: Path) -> None:
    net = network(name)
    graph = runner(net, tmp_path)
    batch = 1 if net.config.has_attention else 3
    tokens = tokens_of(batch, 70)
    expected = logits(net, tokens)
    for runs in ((65, 1, 1, 3), (1,) * 9, (7, 1, 5, 2)):
        close(in_runs(graph, tokens, runs), expected[:, : sum(runs)], 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_node_of_a_tree_is_its_path_run_alone(name: str, tmp_path: Path) -> None:
    net = network(name)
    graph = runner(net, tmp_path)
    rng = np.random.default_rng(5)
    tokens = tokens_of(1, 16)
    _, (before,) = graph.run(tokens[:, :6], graph.initial(1, 32, fill=np.nan))
    for _ in range(3):
        parents = random_parents(8, rng)
        found, states = graph.run(tokens[:, 6:14], before, parents=parents, kept=range(8))
        for t in range(8):
            path = [6 + i for i in path_to(parents, t)]
            alone = np.concatenate([tokens[:, :6], tokens[:, path]], 1)
            expected = logits(net, np.concatenate([alone, tokens[:, 14:]], 1))
            close(found[:, t], expected[:, len(path) + 5], 2e-5)
            if not net.config.has_attention:  # a tree's KV rows wait to be compacted
                on, _ = graph.run(tokens[:, 14:], states[t])
                close(on, expected[:, -2:], 2e-5)


def test_only_the_asked_rows_are_computed_in_the_asked_order(tmp_path: Path) -> None:
    net = network("all")
    graph = runner(net, tmp_path)
    tokens = tokens_of(1, 9)
    found, _ = graph.run(tokens, graph.initial(1, 9), rows=[8, 2])
    close(found, logits(net, tokens)[:, [8, 2]], 2e-5)


def test_inputs_exist_only_where_needed(tmp_path: Path) -> None:
    recurrent = {"tokens", "rows", "taps4", "kept_taps4"}
    expected = {
        "mamba1": recurrent | {"kept", "parents", "tree", "last_only"},
        "mamba2": recurrent | {"stored", "paths"},
        "attention": {"tokens", "rows", "ancestors", "positions", "past", "total", "last"},
        "mlp": {"tokens", "rows"},
    }
    for name, wanted in expected.items():
        graph = runner(network(name), tmp_path)
        assert {n for n in graph.names if not n.startswith("layers.")} == wanted
    shapes = {i.name: i.shape for i in runner(network("all"), tmp_path).session.get_inputs()}
    assert shapes["taps4"] == ["T", 4] and shapes["kept_taps3"] == ["R", 2]
    assert shapes["layers.4.conv_state"] == [2, "B", 72]
    assert shapes["layers.0.ssm_state"] == ["B", 8, 128]
    assert shapes["layers.3.ssm_state"] == ["B", 8, 16, 16]
    assert shapes["layers.1.key_cache"] == ["B", 1, "capacity", 24]


@pytest.mark.parametrize("quant", ["fp32", "w4"])
def test_the_same_weights_give_the_same_bytes(quant: str, tmp_path: Path) -> None:
    net = network("all")
    contents = []
    for turn in ("one", "two"):
        (tmp_path / turn).mkdir()
        build_graph(net.config, net.canonical_tensors(), tmp_path / turn, quant)
        files = [GRAPH_FILE, WEIGHT_FILE]
        contents.append([(tmp_path / turn / name).read_bytes() for name in files])
    assert contents[0] == contents[1]
    assert str(tmp_path).encode() not in contents[0][0]


def test_weights_are_aligned_and_stored_once(tmp_path: Path) -> None:
    net = network("mamba1")
    built = build_graph(net.config, net.canonical_tensors(), tmp_path, "w8")
    model = onnx.load(built.graph, load_external_data=False)
    external = [t for t in model.graph.initializer if t.external_data]
    names = [t.name for t in external]
    assert "embedding.weight.packed" in names and len(set(names)) == len(names)
    assert "embedding.weight" not in names
    for tensor in external:
        entry = {e.key: e.value for e in tensor.external_data}
        assert entry["location"] == WEIGHT_FILE and int(entry["offset"]) % 64 == 0
    assert built.weight_bytes == built.weights.stat().st_size
    # The head is the largest tensor; tied and with 8 bits, the file stays near one byte per number.
    assert built.weight_bytes < 2 * sum(p.numel() for p in net.parameters())


def test_nodes_are_edge_ops_over_standard_ones(tmp_path: Path) -> None:
    built = build_graph(network("all").config, network("all").canonical_tensors(), tmp_path, "fp32")
    model = onnx.load(built.graph, load_external_data=False)
    assert model.ir_version == 10 and built.opsets[""] == 21
    calls = {node.op_type for node in model.graph.node if node.domain == "edge"}
    assert calls == {f.name for f in model.functions}
    assert {"SelectiveScan", "SelectiveScanHeads", "CausalConv1d", "Attention"} <= calls


def rounded(net: Network, quant: str) -> Network:
    """Return the network with every weight replaced by what the recipe stores."""
    plan = plan_model(net.config, recipe(quant))
    joined = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
              "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip
    with torch.no_grad():
        for name, parameter in net.canonical_tensors().items():
            if not name.endswith("weight") or "norm" in name or "conv1d" in name:
                continue
            place, _, matrix = name.removesuffix(".weight").rpartition(".")
            kept = plan.embedding if matrix == "embedding" else plan.head.weight
            if place:
                products = plan.layers[int(place.removeprefix("layers."))].products
                kept = products[joined.get(matrix, matrix)].weight
            if kept.block is not None:
                if kept.minimum:
                    packed, scales, minimums = quantize_minimum(parameter.numpy(), kept.block)
                    wide = dequantize_blocks(packed, scales, 4, minimums)
                else:
                    packed, scales = quantize_blocks(parameter.numpy(), kept.bits, kept.block)
                    wide = dequantize_blocks(packed, scales, kept.bits)
                parameter.copy_(torch.from_numpy(wide))
            elif kept.bits == 16:
                parameter.copy_(parameter.half().float())
    return net


@pytest.mark.parametrize("quant", ["fp16", "w8", "w4"])
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "attention", "mlp"])
def test_a_quantized_graph_is_the_network_with_rounded_weights(
    name: str, quant: str, tmp_path: Path
) -> None:
    tokens, runs = tokens_of(1, 12), (7, 1, 4)
    expected = logits(rounded(network(name), quant), tokens)
    plain = logits(network(name), tokens)
    assert np.abs(expected - plain).max() > 1e-4 * np.abs(plain).max()
    # ONNX Runtime's own product also rounds activations to 8 bits.
    fast = runner(network(name), tmp_path, quant)
    exact = GraphRunner(open_reference(tmp_path), network(name).config)
    close(in_runs(exact, tokens, runs), expected, 2e-5)
    close(in_runs(fast, tokens, runs), expected, 2e-5 if quant == "fp16" else 4e-2)


@pytest.mark.parametrize(("name", "expected"), [
    ("mamba1", {"MatMulNBits": 7, "QuickGelu": 4, "SkipSimplifiedLayerNormalization": 2,
                "SimplifiedLayerNormalization": 1}),
    ("mamba2", {"MatMulNBits": 5, "QuickGelu": 4, "SkipSimplifiedLayerNormalization": 2,
                "SimplifiedLayerNormalization": 3, "FusedMatMul": 8}),
])  # fmt: skip
def test_onnx_runtime_fuses_what_the_bodies_are_written_for(
    name: str, expected: dict[str, int], tmp_path: Path
) -> None:
    """Speed depends on these fusions; a body that misses one still gives the right numbers."""
    net = network(name)
    if name == "mamba1":
        net.config = net.config.model_copy(update={"norm": NormConfig()})
    build_graph(net.config, net.canonical_tensors(), tmp_path, "w8")
    options = session_options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    open_session(tmp_path, options=options)
    graph = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph
    nodes = list(all_nodes(graph.node))
    counts = Counter(node.op_type for node in nodes)
    assert {op: counts[op] for op in expected} == expected
    for unfused in ("Sigmoid", "Pow", "ReduceMean", "Sqrt"):
        assert counts[unfused] == 0
    # for few numbers, one per head, Softplus is faster
    assert bool(counts["Softplus"]) == (name == "mamba2")
    assert {n.domain for n in nodes} <= {"", "com.microsoft"}


class OneAtATime:
    """A source that notices when an earlier tensor is still held while the next is fetched."""

    def __init__(self, net: Network) -> None:
        self.shapes = tensor_shapes(net.config)
        self.tensors = net.canonical_tensors()
        self.alive: list[weakref.ref[Any]] = []
        self.most = 0

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        array = self.tensors[name].detach().numpy().copy()
        self.most = max(self.most, sum(ref() is not None for ref in self.alive))
        self.alive.append(weakref.ref(array))
        return array


def test_weights_are_streamed(tmp_path: Path) -> None:
    source = OneAtATime(network("mamba2"))
    build_graph(network("mamba2").config, source, tmp_path, "w4")
    assert len(source.alive) == len(source.shapes)
    assert source.most <= 1


def test_wrong_or_broken_weights_are_refused(tmp_path: Path) -> None:
    net = network("mamba1")
    tensors = dict(net.canonical_tensors())
    short = tensors | {"norm_f.weight": torch.ones(63)}
    with pytest.raises(ExportError, match=r"norm_f\.weight: has shape \[63\]"):
        build_graph(net.config, short, tmp_path)
    broken = tensors | {"layers.0.D": torch.full((128,), float("nan"))}
    with pytest.raises(ExportError, match=r"layers\.0\.D: has a NaN"):
        build_graph(net.config, broken, tmp_path)
    big = tensors | {"layers.0.in_proj.weight": torch.full((256, 64), 1e5)}
    with pytest.raises(ExportError, match="does not fit fp16"):
        build_graph(net.config, big, tmp_path, "fp16")
    with pytest.raises(ExportError, match="w3"):
        build_graph(net.config, tensors, tmp_path, "w3")


def test_large_weights_that_are_the_same_are_stored_once(tmp_path: Path) -> None:
    made = np.random.default_rng(0).random((3, 512, 512), np.float32)
    with (tmp_path / "weights.bin").open("wb") as file:
        weights = WeightWriter(file)
        found = [weights.add(name, made[of]) for name, of in (("a", 0), ("b", 1), ("c", 0))]
    assert weights.size == 2 * made[0].nbytes == (tmp_path / "weights.bin").stat().st_size
    for tensor, of in zip(found, (0, 1, 0), strict=True):
        loaded = numpy_helper.to_array(tensor, str(tmp_path))
        np.testing.assert_array_equal(loaded, made[of])
