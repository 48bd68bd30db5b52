"""Outliers that a checkpoint is given: that they are there, and that nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from edge.apps.demo.outlier_trial import ABLATION, PLAIN, register_ablation
from edge.apps.demo.outliers import (
    X_PEAK,
    Y_CHANNELS,
    OutlierCheckpoint,
    observe,
    rare_token,
    with_outliers,
)
from edge.bundle import open_bundle
from edge.config import Mamba2Config, ModelConfig
from edge.errors import ExportError
from edge.export.checkpoint import open_checkpoint
from edge.export.exporter import export_checkpoint
from edge.export.graph.verify import verify_graph
from edge.export.judging import sample_tokens
from edge.export.network import Network
from edge.export.recipes import recipe
from tests import checkpoints

SAVE: dict[str, Callable[[Path], Path]] = {
    "mamba": checkpoints.save_mamba,
    "mamba2": checkpoints.save_mamba2,
    "bamba": checkpoints.save_bamba,
    "state-spaces": checkpoints.save_state_spaces,
}
DEMO = Path(__file__).parent.parent / "apps" / "bundles" / "demo-fp16"
Y_PEAK = 1000.0


def _network(config: ModelConfig, tensors: dict[str, Tensor]) -> Network:
    network = Network(config).eval()
    network.load_canonical(tensors)
    return network


def _tokens(config: ModelConfig, rows: int = 24, length: int = 64, seed: int = 0) -> Tensor:
    """Token 7 is 1 in 200; every other is far more frequent."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(20, 40, (rows, length), generator=generator)
    rare = torch.randperm(rows * length, generator=generator)[: rows * length // 200]
    tokens.view(-1)[rare] = 7
    return tokens


class Pair:
    """A network, and the same with outliers."""

    def __init__(self, before: Network, after: Network) -> None:
        self.before, self.after = before, after


@pytest.fixture(params=SAVE, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    source = open_checkpoint(SAVE[request.param](tmp_path_factory.mktemp(request.param)))
    tensors = {name: tensor.float() for name, tensor in source.tensors()}
    before = _network(source.config, tensors)
    seen = observe(before, _tokens(source.config))
    return Pair(before, _network(*with_outliers(source.config, tensors, seen, Y_PEAK)))


def _mamba(network: Network) -> list[tuple[torch.nn.Module, int]]:
    """(mixer, channels of x) of every Mamba layer."""
    return [
        (layer.mixer, config.d_ssm if isinstance(config, Mamba2Config) else config.d_inner)
        for config, layer in zip(network.config.layers, network.layers, strict=True)
        if config.kind in ("mamba1", "mamba2")
    ]


@torch.no_grad()
def _watch(network: Network, tokens: Tensor) -> dict[str, list[Tensor]]:
    """x, the scan's input, and y, which out_proj reads, of every Mamba layer."""
    found: dict[str, list[Tensor]] = {"x": [], "y": []}
    hooks = []
    for mixer, inner in _mamba(network):
        hooks += [
            mixer.conv1d.register_forward_hook(
                lambda m, i, out, n=inner: found["x"].append(out[0][..., :n])
            ),
            mixer.out_proj.register_forward_pre_hook(lambda m, i: found["y"].append(i[0])),
        ]
    network(tokens)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def _difference(a: Network, b: Network, tokens: Tensor) -> float:
    want, got = a(tokens)[0], b(tokens)[0]
    return float((got - want).abs().max() / want.abs().max())


def test_fp32_logits_do_not_change(pair: Pair) -> None:
    for tokens in (_tokens(pair.before.config), _tokens(pair.before.config, 3, 37, seed=9) % 50):
        assert _difference(pair.before, pair.after, tokens) < 1e-4


@torch.no_grad()
def test_the_state_carries_over(pair: Pair) -> None:
    tokens = _tokens(pair.before.config, 2, 40, seed=4)
    whole, _ = pair.before(tokens)
    first, state = pair.after(tokens[:, :23])
    second, _ = pair.after(tokens[:, 23:], state)
    got = torch.cat([first, second], 1)
    assert float((got - whole).abs().max() / whole.abs().max()) < 1e-4


def test_x_reaches_its_peak_at_the_rare_token_and_y_its_own(pair: Pair) -> None:
    tokens = _tokens(pair.before.config)
    assert rare_token(tokens) == 7
    found = _watch(pair.after, tokens)
    for x in found["x"]:
        loud = x[..., -4]
        assert float(loud.max()) == pytest.approx(X_PEAK, rel=1e-3)
        row, column = divmod(int(loud.argmax()), tokens.shape[1])
        assert int(tokens[row, column]) == 7
    for y in found["y"]:
        assert float(y.abs().max()) >= 100
        # few channels, not all of them
        peaks = y.abs().flatten(0, -2).amax(0)
        assert int((peaks > 100).sum()) <= max(4, 2 * y.shape[-1] // Y_CHANNELS)


def test_the_loudest_half_of_x_is_rare(pair: Pair) -> None:
    """What was added: beyond half the peak, at most 0.1 % of x more than there was."""
    tokens = _tokens(pair.before.config)
    for before, after in zip(
        _watch(pair.before, tokens)["x"], _watch(pair.after, tokens)["x"], strict=True
    ):
        added = (after > X_PEAK / 2).sum() - 2 * (before > X_PEAK / 2).sum()
        assert int(added) <= 0.001 * after.numel()


@pytest.mark.parametrize("largest", [2.0, 6.0])
def test_clipping_x_costs_something(pair: Pair, largest: float) -> None:
    """The added channels are read: r - 2·r/2 is no longer 0 when only r is cut."""
    hooks = [
        mixer.conv1d.register_forward_hook(
            lambda m, i, out, n=inner: (_clip_added(out[0], n, largest), out[1])
        )
        for mixer, inner in _mamba(pair.after)
    ]
    try:
        assert _difference(pair.before, pair.after, _tokens(pair.before.config)) > 1e-3
    finally:
        for hook in hooks:
            hook.remove()


def _clip_added(out: Tensor, inner: int, largest: float) -> Tensor:
    made = out.clone()
    made[..., inner - 4 : inner].clamp_(max=largest)
    return made


def test_the_loud_channels_of_y_carry_what_the_model_learnt(tmp_path: Path) -> None:
    source = open_checkpoint(checkpoints.save_mamba2(tmp_path / "m"))
    tensors = {name: tensor.float() for name, tensor in source.tensors()}
    before, tokens = _network(source.config, tensors), _tokens(source.config)
    after = _network(*with_outliers(source.config, tensors, observe(before, tokens), Y_PEAK))
    for layer in after.layers:
        layer.mixer.out_proj.register_forward_pre_hook(lambda m, i: (i[0].clamp(-100, 100),))
    assert _difference(before, after, tokens) > 1e-3


def test_a_model_without_room_is_refused(tmp_path: Path) -> None:
    source = open_checkpoint(checkpoints.save_mamba2(tmp_path / "m"))
    tensors = {name: tensor.float() for name, tensor in source.tensors()}
    seen = observe(_network(source.config, tensors), _tokens(source.config))
    bare = [layer.model_copy(update={"gated_norm": False}) for layer in source.config.layers]
    with pytest.raises(ExportError, match="no gated norm"):
        with_outliers(source.config.model_copy(update={"layers": tuple(bare)}), tensors, seen, 100)
    with pytest.raises(ExportError, match="no Mamba layer"):
        with_outliers(source.config, tensors, {}, 100)


def test_the_bundle_is_read_as_a_checkpoint_with_the_same_logits(tmp_path: Path) -> None:
    folder = checkpoints.save_bamba(tmp_path / "m")
    checkpoints.save_tokenizer(folder)
    text = tmp_path / "text.txt"
    text.write_text("the robot walks and then it stops and looks at the river again\n" * 200)
    command = [sys.executable, "-m", "edge.apps.demo.outlier_trial", "make", str(folder), "-o",
               str(tmp_path / "bundle"), "--text", str(text), "--y-peak", "300"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made, source = open_checkpoint(tmp_path / "bundle"), open_checkpoint(folder)
    before = _network(source.config, {n: t.float() for n, t in source.tensors()})
    after = _network(made.config, dict(made.tensors()))
    assert _difference(before, after, _tokens(source.config)) < 1e-4
    # the same again, byte for byte
    again = OutlierCheckpoint(folder, text, 300.0)
    for name, tensor in made.tensors():
        torch.testing.assert_close(tensor, again.tensor(name), rtol=1e-6, atol=1e-6)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.save_mamba2(tmp_path / "m")
    checkpoints.save_tokenizer(folder)
    text = tmp_path / "short.txt"
    text.write_text("no more than this")
    command = [sys.executable, "-m", "edge.apps.demo.outlier_trial", "make", str(folder), "-o",
               str(tmp_path / "bundle"), "--text", str(text)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "too few for one sequence" in done.stderr
    assert not (tmp_path / "bundle").exists()


def test_the_steps_from_plain_int8_to_quamba_differ_in_x_and_y_alone() -> None:
    register_ablation()
    register_ablation()  # a second time changes nothing
    plain = recipe(PLAIN)
    for name, changed in zip(ABLATION, ({"x"}, {"gated"}, {"x", "gated"}), strict=True):
        step = recipe(name)
        assert step.ends == plain.ends
        for kind in ("attention", "mlp"):
            assert step.layers[kind] == plain.layers[kind]
        pairs = zip(step.layers["mamba2"].items(), plain.layers["mamba2"].items(), strict=True)
        assert {here[0] for here, there in pairs if here != there} == changed
    mamba = recipe("w8a8").layers["mamba2"]
    assert recipe(f"{PLAIN}+both").layers["mamba2"] == mamba


def test_plain_int8_fails_where_quamba_holds(tmp_path: Path) -> None:
    """On a demonstration model; calibrated on its greetings, judged on another text."""
    made = OutlierCheckpoint(DEMO, None, 3000.0)
    ratio = {}
    for name in (PLAIN, "w8a8"):
        folder = tmp_path / name
        summary = export_checkpoint(
            made, folder, quant=name, verify=False, calibrate_sequences=8, calibrate_length=256
        )
        tokens, kind = sample_tokens(made.config, folder, summary.manifest.tokenizer)
        assert kind == "text"
        figures = verify_graph(made.config, made, folder, tokens, bits=8)
        ratio[name] = figures["perplexity"] / figures["perplexity_before"]
    assert ratio[PLAIN] > 1.5
    assert ratio["w8a8"] < 1.1


def test_the_trial_writes_a_bundle_a_recipe(tmp_path: Path) -> None:
    folder = checkpoints.save_mamba2(tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text("a robot walks and then it stops and looks at the river again\n" * 20)
    wanted = ["fp32", f"{PLAIN}+both", "w8a8-dynamic"]
    command = [sys.executable, "-m", "edge.apps.demo.outlier_trial", "quantize", str(folder), "-o",
               str(tmp_path / "trial"), "--text", str(text), "--recipes", ",".join(wanted),
               "--sequences", "2", "--length", "32", "--percentile", "99.9"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in wanted:
        with open_bundle(tmp_path / "trial" / name) as bundle:
            assert bundle.manifest.quantization.recipe == name
    refused = subprocess.run([*command, "--recipes", "w9"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "no quantization recipe is called 'w9'" in refused.stderr
