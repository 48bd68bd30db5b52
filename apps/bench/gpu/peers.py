"""Peers on the GPU: a plain torch network in fp16 under CUDA graphs, transformers, and the matrix
products of a prompt alone, through the vendor's library.
"""

from __future__ import annotations

from typing import Any

import torch

from edge.apps.bench.models import RandomTensors
from edge.apps.measure.stopwatch import median_ms
from edge.config import ModelConfig
from edge.export.network import Network
from edge.tensors import recurrent_state_shapes, tensor_shapes


def available() -> bool:
    """Return whether torch sees a GPU."""
    return torch.cuda.is_available()


def _timed_ms(work: Any, repeats: int) -> float:
    def run_and_wait() -> None:
        work()
        torch.cuda.synchronize()

    return median_ms(run_and_wait, repeats)


@torch.no_grad()
def network_step_ms(config: ModelConfig, repeats: int) -> float:
    """Time a step of the exporter's network in fp16, recorded as one CUDA graph."""
    network = Network(config)
    tensors = RandomTensors(config)
    network.load_canonical({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    network = network.half().cuda().eval()
    tokens = torch.zeros((1, 1), dtype=torch.long, device="cuda")
    _, state = network(tokens, network.initial_state(1))
    for _ in range(3):
        network(tokens, state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        network(tokens, state)
    return _timed_ms(graph.replay, repeats)


@torch.no_grad()
def transformers_step_ms(config: ModelConfig, repeats: int) -> float:
    """Time a step of transformers' MambaForCausalLM in fp16, unmodified. Mamba-1 only."""
    from transformers import MambaConfig, MambaForCausalLM

    _, d_state, _ = recurrent_state_shapes(config)["layers.0.ssm_state"]
    with torch.device("cuda"):
        model: Any = MambaForCausalLM(
            MambaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.d_model,
                num_hidden_layers=len(config.layers),
                state_size=d_state,
            )
        )
    model = model.half().eval()
    tokens = torch.zeros((1, 1), dtype=torch.long, device="cuda")
    first = model(tokens, use_cache=True)
    cache = first.cache_params
    position = torch.tensor([1], device="cuda")
    return _timed_ms(
        lambda: model(tokens, cache_params=cache, use_cache=True, cache_position=position), repeats
    )


@torch.no_grad()
def products_ms(config: ModelConfig, rows: int, repeats: int) -> float:
    """Time every linear layer's int8 product for `rows` tokens, through torch's cuBLASLt."""
    shapes = [
        shape
        for name, shape in tensor_shapes(config).items()
        if name.endswith("proj.weight") and len(shape) == 2
    ]
    pairs = {
        shape: (
            torch.randint(-127, 127, (rows, shape[1]), dtype=torch.int8, device="cuda"),
            torch.randint(-127, 127, shape, dtype=torch.int8, device="cuda").t(),
        )
        for shape in set(shapes)
    }

    def work() -> None:
        for shape in shapes:
            torch._int_mm(*pairs[shape])

    return _timed_ms(work, repeats)
