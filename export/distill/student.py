"""The student: the teacher's own modules, with new mixers in place of some of its attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge.config import AttentionConfig, Mamba2Config
from edge.export.checkpoint.families.mamba_in_llama import hybrid_config, mixer_for
from edge.export.distill.initial import Inputs, from_attention
from edge.export.distill.shared import set_tensor, share_rows
from edge.export.mixers import mixer_of
from edge.export.mixers.base import State
from edge.export.network import Network, empty_state

SMALLEST = 1e-3  # of a mixer's outputs, so that its gradients do not vanish


@dataclass(frozen=True)
class Visit:
    """One attention layer of the teacher on some tokens: u [B, T, D], which it reads, and y."""

    block: int
    u: Tensor
    y: Tensor


def visits(teacher: Network, blocks: Sequence[int], ids: Tensor) -> Iterator[Visit]:
    """The teacher's own hidden states at some blocks, one after the other; nothing of it learns."""
    wanted, x = set(blocks), teacher.embedding(ids)
    states = teacher.initial_state(len(ids)).layers
    for index, layer in enumerate(teacher.layers[: 2 * max(wanted) + 1]):
        assert isinstance(layer, nn.Module)
        u = layer.get_submodule("norm")(x)
        y, _ = layer.get_submodule("mixer")(u, states[index], 0)
        x = x + y
        if index % 2 == 0 and index // 2 in wanted:
            yield Visit(index // 2, u, y)


class Student(nn.Module):
    """A hybrid that shares what it does not learn with its teacher.

    Attributes:
        mixers: the new ones, by block; those that are not in use too.
        network: the hybrid as it is now. `replace` says which blocks have their new mixer.
        replaced: those blocks.
    """

    def __init__(self, teacher: Network, blocks: Sequence[int], *, apart: bool = False) -> None:
        """`blocks`: all that might be replaced. `apart`: nothing is shared with the teacher, and
        everything may learn.
        """
        super().__init__()
        self.teacher_config, self.apart = teacher.config, apart
        self.mixers = nn.ModuleDict()
        for block in blocks:
            attention = self.attention_config(block)
            made = mixer_of(mixer_for(attention)).module(
                teacher.config.d_model, teacher.config.norm.eps
            )
            share_rows(made, mixer_for(attention), attention.n_kv_heads)
            self.mixers[str(block)] = made
        # what deepcopy is told it has copied already, it shares
        memo = {} if apart else {id(p): p for p in teacher.parameters()}
        self.network: Network = copy.deepcopy(teacher, memo)
        self._attention = {
            block: self.network.layers[2 * block].get_submodule("mixer") for block in blocks
        }
        self.replaced: tuple[int, ...] = ()

    def attention_config(self, block: int) -> AttentionConfig:
        found = self.teacher_config.layers[2 * block]
        assert isinstance(found, AttentionConfig)
        return found

    def replace(self, blocks: Sequence[int]) -> None:
        """Give exactly these blocks their new mixer, the others their attention."""
        for block, attention in self._attention.items():
            mixer = self.mixers[str(block)] if block in blocks else attention
            self.network.layers[2 * block].mixer = mixer
        self.replaced = tuple(sorted(blocks))
        self.network.config = hybrid_config(self.teacher_config, self.replaced)

    def kept(self) -> dict[str, Tensor]:
        """The parameters that a run may have changed: what it continues from."""
        named = self.named_parameters()
        return {name: p for name, p in named if self.apart or name.startswith("mixers.")}

    def learned(self, name: str) -> bool:
        """Whether the tensor of this canonical name may differ from the teacher's."""
        parts = name.split(".")
        inside = parts[0] == "layers" and parts[2] != "norm"
        return self.apart or (inside and int(parts[1]) in {2 * b for b in self.replaced})

    def learns(self, parts: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
        """Let these modules learn and nothing else: their matrices, and what is none."""
        self.requires_grad_(False)
        for part in parts:
            part.requires_grad_(True)
        chosen: list[Tensor] = [p for p in self.parameters() if p.requires_grad]
        inside = {id(p) for m in self.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
        ends = {id(p) for p in (self.network.embedding.weight,)}
        if self.network.lm_head is not None:
            ends.add(id(self.network.lm_head.weight))
        matrices = [p for p in chosen if p.dim() == 2 and id(p) in inside - ends]
        picked = {id(p) for p in matrices}
        return matrices, [p for p in chosen if id(p) not in picked]

    def run_mixer(self, visit: Visit) -> Tensor:
        """A new mixer on what its attention reads, from an empty state."""
        config = mixer_for(self.attention_config(visit.block))
        y: Tensor = self.mixers[str(visit.block)](visit.u, _empty(config, visit.u), 0)[0]
        return y

    @torch.no_grad()
    def initialise(self, teacher: Network, rows: Tensor, batch: int) -> None:
        """Make every new mixer of its attention, as it works on `rows` [n, T]."""
        blocks = [int(name) for name in self.mixers]
        seen: dict[int, list[Inputs]] = {block: [] for block in blocks}
        for ids in rows.split(batch):
            for visit in visits(teacher, blocks, ids):
                seen[visit.block].append(Inputs.of(visit.u))
        for block in blocks:
            attention = self.attention_config(block)
            config = mixer_for(attention)
            module = teacher.layers[2 * block].get_submodule("mixer")
            weights = {name: p.detach().cpu() for name, p in module.named_parameters()}
            made = from_attention(attention, config, weights, _mean(seen[block]))
            for name, tensor in made.items():
                set_tensor(self.mixers[str(block)], name, tensor)
        self._fit_sizes(teacher, rows, batch)

    def _fit_sizes(self, teacher: Network, rows: Tensor, batch: int) -> None:
        """Scale every mixer's norm so that its outputs come nearest to the attention's."""
        products = dict.fromkeys((int(name) for name in self.mixers), 0.0)
        squares = dict(products)
        for ids in rows.split(batch):
            for visit in visits(teacher, list(products), ids):
                said, wanted = self.run_mixer(visit).double(), visit.y.double()
                products[visit.block] += float((said * wanted).sum())
                squares[visit.block] += float(said.square().sum())
        for block, product in products.items():
            size = max(product / max(squares[block], 1e-30), SMALLEST)
            self.mixers[str(block)].get_parameter("gated_norm.weight").mul_(size)


def _empty(config: Mamba2Config, u: Tensor) -> State:
    shapes = empty_state(config, len(u))
    return {name: torch.zeros(shape, device=u.device) for name, shape in shapes.items()}


def _mean(parts: Sequence[Inputs]) -> Inputs:
    means = torch.stack([part.mean for part in parts]).mean(0)
    return Inputs(means, torch.stack([part.moments for part in parts]).mean(0))
