"""The student: the teacher's own modules, with new mixers in place of some of its attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge.config import AttentionConfig, Mamba1Config
from edge.export.checkpoint.families.mamba_in_llama import Make, Mixer, hybrid_config, mixer_for
from edge.export.distill.initial import Inputs, from_attention
from edge.export.distill.shared import set_tensor, share_rows
from edge.export.mixers import mixer_of
from edge.export.mixers.base import State
from edge.export.network import Network, empty_state

SMALLEST = 1e-3  # lower bound on a mixer's scale, so that its gradients do not vanish


@dataclass(frozen=True)
class Visit:
    """Input u and output y [B, T, D] of one attention layer of the teacher on some tokens."""

    block: int
    u: Tensor
    y: Tensor


def visits(teacher: Network, blocks: Sequence[int], ids: Tensor) -> Iterator[Visit]:
    """Yield the inputs and outputs of the teacher's attention at some blocks, in order."""
    selected, x = set(blocks), teacher.embedding(ids)
    states = teacher.initial_state(len(ids)).layers
    for index, layer in enumerate(teacher.layers[: 2 * max(selected) + 1]):
        assert isinstance(layer, nn.Module)
        u = layer.get_submodule("norm")(x)
        y, _ = layer.get_submodule("mixer")(u, states[index], 0)
        x = x + y
        if index % 2 == 0 and index // 2 in selected:
            yield Visit(index // 2, u, y)


class Student(nn.Module):
    """A hybrid that shares with its teacher the parameters that it does not learn.

    Attributes:
        mixers: block → new mixer, including those not in use.
        network: the hybrid in its current form; `replace` changes it.
        replaced: blocks that use their new mixer.
    """

    def __init__(
        self, teacher: Network, blocks: Sequence[int], *, apart: bool = False,
        make: Make = mixer_for,
    ) -> None:  # fmt: skip
        """Make new mixers for `blocks`, those that may be replaced.

        With `apart` nothing is shared with the teacher, and everything may learn. `make` returns
        the config of the mixer that replaces an attention layer.
        """
        super().__init__()
        self.teacher_config, self.apart, self.make = teacher.config, apart, make
        self.mixers = nn.ModuleDict()
        for block in blocks:
            attention = self.attention_config(block)
            config = make(attention)
            mixer = mixer_of(config).module(teacher.config.d_model, teacher.config.norm.eps)
            share_rows(mixer, config, attention.n_kv_heads)
            self.mixers[str(block)] = mixer
        # deepcopy shares what the memo says it has already copied
        memo = {} if apart else {id(p): p for p in teacher.parameters()}
        self.network: Network = copy.deepcopy(teacher, memo)
        self._attention = {
            block: self.network.layers[2 * block].get_submodule("mixer") for block in blocks
        }
        self.replaced: tuple[int, ...] = ()

    @property
    def makes_mamba1(self) -> bool:
        return isinstance(self.make(self.attention_config(0)), Mamba1Config)

    def attention_config(self, block: int) -> AttentionConfig:
        return self.teacher_config.layers_of(AttentionConfig)[2 * block]

    def replace(self, blocks: Sequence[int]) -> None:
        """Use the new mixers in exactly these blocks, and attention in the others."""
        for block, attention in self._attention.items():
            mixer = self.mixers[str(block)] if block in blocks else attention
            self.network.layers[2 * block].mixer = mixer
        self.replaced = tuple(sorted(blocks))
        self.network.config = hybrid_config(self.teacher_config, self.replaced, self.make)

    def kept(self) -> dict[str, Tensor]:
        """Return the parameters that a run may change, which a checkpoint must store."""
        named = self.named_parameters()
        return {name: p for name, p in named if self.apart or name.startswith("mixers.")}

    def learned(self, name: str) -> bool:
        """Return whether the tensor of this canonical name may differ from the teacher's."""
        parts = name.split(".")
        in_mixer = parts[0] == "layers" and parts[2] != "norm"
        return self.apart or (in_mixer and int(parts[1]) in {2 * b for b in self.replaced})

    def learns(self, parts: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
        """Let only these modules learn; return their matrices and their other parameters."""
        self.requires_grad_(False)
        for part in parts:
            part.requires_grad_(True)
        trainable: list[Tensor] = [p for p in self.parameters() if p.requires_grad]
        linear_ids = {
            id(p) for m in self.modules() if isinstance(m, nn.Linear) for p in m.parameters()
        }
        ends = {id(p) for p in (self.network.embedding.weight,)}
        if self.network.lm_head is not None:
            ends.add(id(self.network.lm_head.weight))
        matrices = [p for p in trainable if p.dim() == 2 and id(p) in linear_ids - ends]
        matrix_ids = {id(p) for p in matrices}
        return matrices, [p for p in trainable if id(p) not in matrix_ids]

    def run_mixer(self, visit: Visit) -> Tensor:
        """Run a block's new mixer on its attention's input, from an empty state."""
        config = self.make(self.attention_config(visit.block))
        y: Tensor = self.mixers[str(visit.block)](visit.u, _empty_state(config, visit.u), 0)[0]
        return y

    @torch.no_grad()
    def initialise(self, teacher: Network, rows: Tensor, batch: int) -> None:
        """Initialise every new mixer from its attention and the attention's inputs on `rows`
        [n, T]."""
        blocks = [int(name) for name in self.mixers]
        inputs: dict[int, list[Inputs]] = {block: [] for block in blocks}
        for ids in rows.split(batch):
            for visit in visits(teacher, blocks, ids):
                inputs[visit.block].append(Inputs.of(visit.u))
        for block in blocks:
            attention = self.attention_config(block)
            config = self.make(attention)
            module = teacher.layers[2 * block].get_submodule("mixer")
            weights = {name: p.detach().cpu() for name, p in module.named_parameters()}
            tensors = from_attention(attention, config, weights, _mean_inputs(inputs[block]))
            for name, tensor in tensors.items():
                set_tensor(self.mixers[str(block)], name, tensor)
        self._fit_sizes(teacher, rows, batch)

    def _fit_sizes(self, teacher: Network, rows: Tensor, batch: int) -> None:
        """Scale every mixer so that its outputs are nearest to the attention's: Mamba-2 by its
        norm, Mamba-1 by a factor per head.
        """
        blocks = [int(name) for name in self.mixers]
        fits = {block: _Fit(self._out_proj(block)) for block in blocks}
        for ids in rows.split(batch):
            for visit in visits(teacher, blocks, ids):
                with fits[visit.block].reading(visit.y):
                    self.run_mixer(visit)
        for block, fit in fits.items():
            if self.makes_mamba1:
                fit.layer.weight.mul_(fit.sizes(self.attention_config(block).n_heads))
            else:
                norm = self.mixers[str(block)].get_parameter("gated_norm.weight")
                norm.mul_(fit.sizes(1))

    def _out_proj(self, block: int) -> nn.Linear:
        layer = self.mixers[str(block)].get_submodule("out_proj")
        assert isinstance(layer, nn.Linear)
        return layer


class _Fit:
    """Least-squares fit of a linear layer's scales to wanted outputs, over all observed inputs."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.squares = self.products = torch.zeros(())

    @contextmanager
    def reading(self, wanted: Tensor) -> Iterator[None]:
        """Observe the layer's inputs [..., K] inside the context; `wanted` [..., N] is the output
        that it should have."""
        y = wanted.flatten(0, -2).double()

        def read(_: nn.Module, args: tuple[Tensor]) -> None:
            x = args[0].flatten(0, -2).double()
            self.squares, self.products = x.T @ x + self.squares, x.T @ y + self.products

        hook = self.layer.register_forward_pre_hook(read)
        yield
        hook.remove()

    def sizes(self, groups: int) -> Tensor:
        """Return factors [K] of the layer's columns: one per contiguous group, of `groups`."""
        w = self.layer.weight.double()
        width = w.shape[1] // groups
        gram = (self.squares * (w.T @ w)).reshape(groups, width, groups, width).sum((1, 3))
        moment = (self.products * w.T).reshape(groups, -1).sum(1)
        unit = gram.diagonal().clamp_min(1e-30).sqrt()
        ridge = 1e-9 * torch.eye(groups).to(gram)
        factors = torch.linalg.solve(gram / unit / unit[:, None] + ridge, moment / unit) / unit
        return factors.clamp_min(SMALLEST).repeat_interleave(width).float()


def _empty_state(config: Mixer, u: Tensor) -> State:
    shapes = empty_state(config, len(u))
    return {name: torch.zeros(shape, device=u.device) for name, shape in shapes.items()}


def _mean_inputs(parts: Sequence[Inputs]) -> Inputs:
    means = torch.stack([part.mean for part in parts]).mean(0)
    return Inputs(means, torch.stack([part.moments for part in parts]).mean(0))
