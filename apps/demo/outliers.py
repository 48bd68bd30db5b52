"""Give a small trained model the outliers of a large one, without changing what it computes.

Quamba (arXiv 2410.13229) finds two kinds in Mamba models, in its figures 10 and 13: the scan's
input x has few and moderate ones (up to 10, at most 0.1 % of the values: sections 4.2 and J), its
output y massive ones (beyond 100: sections I and J). Both are made here, from what a model leaves
free.

**y.** What out_proj reads comes, in Mamba-2, out of a norm with a weight a channel. A channel whose
norm weight is multiplied by α and whose column of out_proj is divided by α says the same, α times
as loud. These channels carry what the model has learnt: clipping them costs it that.

**x.** x = silu(v), and silu is not homogeneous: no channel of x can be rescaled. But
silu(v) - silu(-v) = v, so two channels can hold any linear quantity r exactly, and two more can
hold r/2. Four channels that out_proj (and Mamba-1's x_proj) reads with weights 1, -1, -2 and 2
then come to r - 2·r/2 = 0, whatever r is: they may be added to any layer. r is chosen large at one
rare token and small elsewhere. As they are read with the weights of an ordinary channel, a clip
that cuts r more than it cuts r/2 no longer gives 0: it costs something. What it costs is only an
error, though, not anything that the model has learnt.

Where the four channels go must be free too. Mamba-2's gated norm divides by the size of a whole SSD
group, so that every channel of a group is heard in all others: every layer gets a second copy of
its SSD groups, which has norms of its own and which, the four channels apart, out_proj does not
read. Mamba-1 has no such norm: its channels are doubled, each of the two read by half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from edge.config import Mamba1Config, Mamba2Config, Mixer, ModelConfig
from edge.errors import ExportError
from edge.export.calibration.texts import checkpoint_reader, read_text
from edge.export.checkpoint import Checkpoint, open_checkpoint
from edge.export.network import Network
from edge.tensors import tensor_shapes

Tensors = dict[str, Tensor]

# "numerically small (≤ 10)", section 4.2 and figure 13
X_PEAK = 10.0
# One token in 200: two loud channels then are 0.001 % of x at 1024 channels, where "≤ 0.1 %" is
# allowed, and 99.999, the paper's percentile for small models, is the rarest it considers.
EVENT_SHARE = 0.005
# "extreme values (≥ 100)", section J: what the figures leave open above it is gone through by half
# decades.
Y_PEAKS = (100.0, 300.0, 1000.0, 3000.0)
# One in 128 channels: figure 13 shows a few towering over the rest.
Y_CHANNELS = 128

# A second moment of D inputs needs a few times D rows; 64 × 512 are plenty for what is tried here.
SEQUENCES, LENGTH = 64, 512

# r, -r, r/2, -r/2 and how they are read: silu(r) - silu(-r) - 2·(silu(r/2) - silu(-r/2)) = 0
_HELD = torch.tensor([1.0, -1.0, 0.5, -0.5])
_READ = torch.tensor([1.0, -1.0, -2.0, 2.0])
_FOUR = len(_HELD)


@dataclass(frozen=True)
class LayerSeen:
    """What a Mamba layer did on the calibration text.

    Attributes:
        rare: f32 [D], a direction r = rare · u of its input whose largest value is X_PEAK, at a
            rare token.
        read: f32 [d_inner], the largest magnitude of each channel that out_proj reads.
    """

    rare: Tensor
    read: Tensor


def rare_token(tokens: Tensor) -> int:
    """The token whose share of `tokens` [S, L] is closest to EVENT_SHARE."""
    shares = torch.bincount(tokens.flatten()).float() / tokens.numel()
    distance = (shares.clamp(min=1e-9).log() - torch.tensor(EVENT_SHARE).log()).abs()
    return int(distance.argmin())


@torch.no_grad()
def observe(network: Network, tokens: Tensor) -> dict[int, LayerSeen]:
    """Run the network over tokens [S, L] and look at its Mamba layers.

    The rare direction is the one that tells the rare token from all others best: the inverse second
    moment of the inputs times their mean at that token (linear discriminant analysis).
    """
    event = (tokens == rare_token(tokens)).flatten()
    inputs: dict[int, list[Tensor]] = {}
    peaks: dict[int, Tensor] = {}
    hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(index: int) -> None:
        mixer = network.get_submodule(f"layers.{index}.mixer")

        def came_in(module: object, given: tuple[Tensor, ...]) -> None:
            inputs.setdefault(index, []).append(given[0].flatten(0, -2))

        def was_read(module: object, given: tuple[Tensor, ...]) -> None:
            peak = given[0].abs().flatten(0, -2).amax(0)
            peaks[index] = torch.maximum(peaks.get(index, peak), peak)

        hooks.append(mixer.get_submodule("in_proj").register_forward_pre_hook(came_in))
        hooks.append(mixer.get_submodule("out_proj").register_forward_pre_hook(was_read))

    mamba = [i for i, layer in enumerate(network.config.layers) if layer.kind in _CHANGES]
    for index in mamba:
        watch(index)
    try:
        for row in tokens.split(4):
            network.hidden(row)
    finally:
        for hook in hooks:
            hook.remove()
    return {i: LayerSeen(_rare_direction(torch.cat(inputs[i]), event), peaks[i]) for i in mamba}


def _rare_direction(u: Tensor, event: Tensor) -> Tensor:
    """u [tokens, D], event [tokens] → f32 [D]."""
    wide = u.double()
    moment = wide.T @ wide / len(wide)
    moment.diagonal().add_(1e-3 * moment.diagonal().mean())
    direction = torch.linalg.solve(moment, wide[event].mean(0))
    r = wide @ direction
    return (direction * (X_PEAK / r[r.abs().argmax()])).float()


def with_outliers(
    config: ModelConfig, tensors: Tensors, seen: dict[int, LayerSeen], y_peak: float
) -> tuple[ModelConfig, Tensors]:
    """A model with the same logits whose x reaches X_PEAK and whose y reaches `y_peak`.

    Canonical names and shapes (`edge.tensors`); fp32. Raises ExportError when the model has no
    Mamba layer, or one that leaves nothing free: Mamba-2 without its gated norm, or fewer than 4
    channels a head.
    """
    if not seen:
        raise ExportError("has no Mamba layer to give outliers to", field="layers")
    made = {name: tensor.float() for name, tensor in tensors.items()}
    layers: list[Mixer] = list(config.layers)
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}."
        own = {n.removeprefix(prefix): t for n, t in made.items() if n.startswith(prefix)}
        if change := _CHANGES.get(layer.kind):
            try:
                layers[index], own = change(layer, own, seen[index], y_peak)
            except ExportError as problem:
                raise ExportError(problem.message, field=f"layers.{index}") from None
        made |= {prefix + name: tensor for name, tensor in own.items()}
    return config.model_copy(update={"layers": tuple(layers)}), made


def _loud_outputs(layer: Mamba2Config, own: Tensors, read: Tensor, y_peak: float) -> None:
    """Bring the loudest channels of y to `y_peak`."""
    gated = read[layer.d_mlp :]
    chosen = gated.topk(max(1, layer.d_ssm // Y_CHANNELS)).indices
    alpha = torch.ones_like(gated)
    alpha[chosen] = y_peak / gated[chosen]
    own["gated_norm.weight"] = own["gated_norm.weight"] * alpha
    own["out_proj.weight"] = own["out_proj.weight"].clone()
    own["out_proj.weight"][:, layer.d_mlp :] /= alpha


def _with_second_groups(
    layer: Mamba2Config, own: Tensors, seen: LayerSeen, y_peak: float
) -> tuple[Mamba2Config, Tensors]:
    """Every SSD group a second time, the last four channels of the copy holding r."""
    if not layer.gated_norm or layer.head_dim < _FOUR:
        what = f"heads of {layer.head_dim}" if layer.gated_norm else "no gated norm"
        raise ExportError(f"a Mamba-2 layer with {what} leaves no room")
    _loud_outputs(layer, own, seen.read, y_peak)
    rare = seen.rare
    states, inner = layer.n_groups * layer.d_state, layer.d_ssm
    rows = [layer.d_mlp, layer.d_mlp, inner, inner, states, states, layer.n_heads]
    made = dict(own)
    for name in ("in_proj.weight", "in_proj.bias"):
        if name in own:
            z0, x0, z, x, B, C, dt = own[name].split(rows)
            gate, held = z.clone(), x.clone()
            gate[-_FOUR:] = z[-_FOUR]
            held[-_FOUR:] = _HELD[:, None] * rare if x.dim() == 2 else 0
            made[name] = torch.cat([z0, x0, z, gate, x, held, B, B, C, C, dt, dt])
    for name in ("conv1d.weight", "conv1d.bias"):
        if name in own:
            x, B, C = own[name].split([inner, states, states])
            made[name] = torch.cat([x, _passed_on(x), B, B, C, C])
    for name in ("A_log", "D", "dt_bias"):
        made[name] = torch.cat([own[name], own[name]])
    norm = own["gated_norm.weight"].clone()
    norm[-_FOUR:] = norm[-_FOUR]
    made["gated_norm.weight"] = torch.cat([own["gated_norm.weight"], norm])
    out = own["out_proj.weight"]
    unread = torch.zeros(len(out), inner)
    unread[:, -_FOUR:] = out[:, -_FOUR, None] * _READ
    made["out_proj.weight"] = torch.cat([out, unread], 1)
    grown = {"d_inner": layer.d_inner + inner, "d_ssm": 2 * inner, "n_groups": 2 * layer.n_groups}
    return layer.model_copy(update=grown), made


def _passed_on(conv: Tensor) -> Tensor:
    """Conv weights [E, K] or biases [E] that leave the last four channels as they come in."""
    made = conv.clone()
    made[-_FOUR:] = 0
    if conv.dim() == 2:
        made[-_FOUR:, -1] = 1
    return made


def _with_twins(
    layer: Mamba1Config, own: Tensors, seen: LayerSeen, y_peak: float
) -> tuple[Mamba1Config, Tensors]:
    """Every channel a second time, the last four of the copy holding r.

    y = (C·h + D·x)·silu(z) has no weight of its own. Gated by r itself and with D = y_peak/X_PEAK²,
    the four channels reach y_peak as often as x reaches X_PEAK.
    """
    made, rare = dict(own), seen.rare
    for name in ("in_proj.weight", "in_proj.bias"):
        if name in own:
            x, z = own[name].chunk(2)
            held, gate = x.clone(), z.clone()
            held[-_FOUR:] = _HELD[:, None] * rare if x.dim() == 2 else 0
            gate[-_FOUR:] = rare if x.dim() == 2 else 0
            made[name] = torch.cat([x, held, z, gate])
    for name in ("conv1d.weight", "conv1d.bias"):
        if name in own:
            made[name] = torch.cat([own[name], _passed_on(own[name])])
    for name in ("dt_proj.weight", "dt_proj.bias", "A_log"):
        twin = own[name].clone()
        twin[-_FOUR:] = twin[-_FOUR]
        made[name] = torch.cat([own[name], twin])
    loud = own["D"].clone()
    loud[-_FOUR:] = y_peak / X_PEAK**2
    made["D"] = torch.cat([own["D"], loud])
    for name in ("x_proj.weight", "out_proj.weight"):
        first, second = own[name] / 2, own[name] / 2
        first[:, -_FOUR:] = own[name][:, -_FOUR:]
        second[:, -_FOUR:] = own[name][:, -_FOUR, None] * _READ
        made[name] = torch.cat([first, second], 1)
    return layer.model_copy(update={"d_inner": 2 * layer.d_inner}), made


# kind of mixer → (layer, its tensors, what was seen, the peak of y) → both changed
_CHANGES: dict[str, Callable[..., tuple[Mixer, Tensors]]] = {
    "mamba1": _with_twins,
    "mamba2": _with_second_groups,
}


class OutlierCheckpoint(Checkpoint):
    """Reads as `Checkpoint` does; its tensors are in memory, in fp32."""

    def __init__(self, path: str | Path, text: Path | None, y_peak: float) -> None:
        """Reads `path`, a checkpoint or a floating bundle, and looks at it on `text`.

        Raises CheckpointError for the one, ExportError for the other and for a model that has no
        room for outliers.
        """
        source = open_checkpoint(path)
        read = read_text(text, checkpoint_reader(source, source.config), SEQUENCES, LENGTH)
        network = Network(source.config).eval()
        tensors = {name: tensor.float() for name, tensor in source.tensors()}
        network.load_canonical(tensors)
        seen = observe(network, torch.from_numpy(read.sequences))
        self.config, self._tensors = with_outliers(source.config, tensors, seen, y_peak)
        self.path, self.family = source.path, source.family
        self.source_config, self.manifest = source.source_config, source.manifest
        self.tokenizer_files, self.generation = source.tokenizer_files, source.generation
        said = f"{source.fingerprint()}\n{read.sha256}\noutliers {y_peak}\n"
        self._fingerprint = hashlib.sha256(said.encode()).hexdigest()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in tensor_shapes(self.config):
            yield name, self._tensors[name]

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def fingerprint(self) -> str:
        """A hash of the checkpoint, the text and the size of the outliers."""
        return self._fingerprint
