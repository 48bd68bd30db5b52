"""The two stages: mixers learn their attention's outputs, then the network its teacher's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from edge.export.distill.loss import Shares, taught_loss
from edge.export.distill.student import Student, visits
from edge.export.mixers.base import State
from edge.export.network import Network, through


def match(teacher: Network, student: Student, ids: Tensor, bf16: bool) -> dict[int, float]:
    """Train each new mixer to map its attention's input to its output, on the teacher's hidden
    states. Leaves gradients in the mixers, and nowhere else.

    ids [B, T]. Returns the loss of each block: the squared error over the squared output.
    """
    losses: dict[int, Tensor] = {}
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        for visit in visits(teacher, [int(name) for name in student.mixers], ids):
            target = visit.y.float()
            output = student.run_mixer(visit).float()
            loss = (output - target).square().mean() / target.square().mean().clamp_min(1e-12)
            torch.autograd.backward(loss)
            losses[visit.block] = loss.detach()
    # read together: reading a value waits for the GPU
    return dict(zip(losses, torch.stack([*losses.values()]).tolist(), strict=True))


@torch.no_grad()
def taught_hidden(teacher: Network, ids: Tensor, bf16: bool) -> Tensor:
    """Return the teacher's last hidden [B, T - 1, D] for predicting ids [B, T] but the first."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        return teacher.hidden(ids[:, :-1])[0]


def learn(
    teacher: Network, network: Network, ids: Tensor, taught: Tensor, shares: Shares,
    bf16: bool, recompute: bool,
) -> float:  # fmt: skip
    """Train the network on the teacher's distribution, and with `shares.label` on the text itself
    (equation 2). Leaves gradients in the parameters that learn.

    A network whose head has few ids learns the teacher's distribution over these.

    ids [B, T]; `taught` is from `taught_hidden`; `recompute` stores only the inputs of layers and
    runs each again in the backward pass. Returns the mean loss in nats a token.
    """
    targets, taught = ids[:, 1:].flatten(), taught.flatten(0, 1)
    heads = (network.head_weight, teacher.head_weight)
    if (listed := network.config.head_ids) is not None:
        rows = torch.tensor(listed, device=ids.device)
        heads = (heads[0][rows], heads[1][rows])
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        hidden = hidden_of(network, ids[:, :-1], recompute).flatten(0, 1)
    dtype = torch.bfloat16 if bf16 else torch.float32
    loss = taught_loss(
        hidden, heads[0], taught, heads[1], shares, dtype, targets=targets,
        softcaps=(network.config.logits_softcap, teacher.config.logits_softcap),
    ) / len(targets)  # fmt: skip
    torch.autograd.backward(loss)
    return float(loss.detach())


def hidden_of(network: Network, ids: Tensor, recompute: bool) -> Tensor:
    """Return the last hidden [B, T, D]; `recompute` as for `learn`."""
    if not recompute:
        return network.hidden(ids)[0]
    layers: Sequence[nn.Module] = [_Recomputed(layer) for layer in network.layers]
    states = network.initial_state(len(ids)).layers
    x, _ = through(network.config, zip(layers, states, strict=True), network.embedding(ids), 0)
    normed: Tensor = network.norm_f(x)
    return normed


class _Recomputed(nn.Module):
    """A layer that runs again in the backward pass instead of storing its activations."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: State, position: int, read: Tensor) -> tuple[Tensor, State]:
        y: tuple[Tensor, State] = checkpoint(
            self.layer, x, state, position, read, use_reentrant=False
        )
        return y
