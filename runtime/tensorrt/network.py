"""The device graph parsed into TensorRT's network, its profiles and its limits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge.bundle.kernels import WEIGHT_FILE
from edge.errors import BundleError, EngineError
from edge.ops.device import DEVICE_DOMAIN
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.onnxfile import Graph, Port
from edge.runtime.tensorrt.profiles import Profile

_DTYPES = {
    "FLOAT": "f32",
    "HALF": "f16",
    "INT8": "i8",
    "UINT8": "u8",
    "INT32": "i32",
    "INT64": "i64",
}


class Network:
    """A parsed network with all that must outlive it. Strongly typed: no precision is chosen."""

    def __init__(self, trt: TensorRT, log: Any) -> None:
        self._trt = trt
        self._log = log
        self.builder = trt.module.Builder(log)
        flags = 0
        # since 11 there is nothing else
        if trt.version < (11,):
            flags = 1 << int(trt.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.definition = self.builder.create_network(flags)
        # it owns the weights that it reads
        self._parser = trt.module.OnnxParser(self.definition, log)

    def parse(self, model: bytes, folder: Path, file: str) -> None:
        """Parse a graph whose weights lie in `folder`; `file` is for messages.

        Raises EngineError naming node and op.
        """
        if self._parser.parse(model, str(folder / "model.onnx")):
            return
        errors = [self._parser.get_error(i) for i in range(self._parser.num_errors)]
        if not errors:
            raise EngineError(f"is not understood: {self._log.said()}", file=file)
        raise _parser_error(self._trt, errors[0], file)

    def ports(self) -> tuple[dict[str, Port], dict[str, Port]]:
        """Inputs and outputs as TensorRT sees them; a dimension it does not know is -1."""
        net = self.definition
        return (
            _ports([net.get_input(i) for i in range(net.num_inputs)]),
            _ports([net.get_output(i) for i in range(net.num_outputs)]),
        )

    def config(self, inputs: Mapping[str, Port], profiles: Sequence[Profile]) -> Any:
        """A builder's configuration with the profiles."""
        config = self.builder.create_builder_config()
        for profile in profiles:
            made = self.builder.create_optimization_profile()
            for name, port in inputs.items():
                made.set_shape(name, *profile.shapes(port.dims))
            if config.add_optimization_profile(made) < 0:
                raise EngineError(
                    f"TensorRT refuses the sizes of {profile.name!r}: {self._log.said()}",
                    remedy="smaller --window, --batch, --capacity or --chunk",
                )
        return config


def check_ports(network: Network, graph: Graph) -> tuple[dict[str, Port], dict[str, Port]]:
    """TensorRT's inputs and outputs. Raises EngineError when they are not the graph's."""
    inputs, outputs = network.ports()
    for what, read, parsed in (
        ("input", graph.inputs, inputs),
        ("output", graph.outputs, outputs),
    ):
        if list(read) != list(parsed):
            missing = sorted(set(read) ^ set(parsed))
            raise EngineError(f"TensorRT has other {what}s than the graph: {', '.join(missing)}")
        for name, port in read.items():
            found = parsed[name]
            same = len(port.dims) == len(found.dims) and all(
                theirs in (ours, -1) for ours, theirs in zip(port.dims, found.dims, strict=True)
            )
            if port.dtype != found.dtype or not same:
                raise EngineError(
                    f"TensorRT makes {what} {name} {found.dtype} {list(found.dims)}, "
                    f"the graph says {port.dtype} {list(port.dims)}"
                )
    return inputs, outputs


def _ports(tensors: list[Any]) -> dict[str, Port]:
    return {t.name: Port(_DTYPES.get(t.dtype.name, t.dtype.name), tuple(t.shape)) for t in tensors}


def _parser_error(trt: TensorRT, error: Any, file: str) -> EngineError:
    node, op = error.node_name(), error.node_operator()
    said = error.desc().strip()
    remedy = f"report it, with {trt.title}"
    if "lugin not found" in said or "importer" in said.lower():
        said += f"; there is no plugin {op!r} ({DEVICE_DOMAIN})"
        remedy = "the plugin library is of another version than the bundle: make plugins"
    where = " of ".join(filter(None, (node and f"node {node}", op and f"op {op}"))) or "the graph"
    return EngineError(
        f"{trt.title} cannot parse {where}: {said}",
        file=file,
        field=node or None,
        remedy=remedy,
    )


@contextmanager
def weights_beside(weights: int | None) -> Iterator[Path]:
    """A folder in which a parser finds weights.bin: the very file behind the checked descriptor."""
    with tempfile.TemporaryDirectory(prefix="mamba-edge-") as name:
        folder = Path(name)
        if weights is not None:
            link = f"/proc/{os.getpid()}/fd/{weights}"
            if not os.path.exists(link):
                raise BundleError("cannot be handed to a parser: there is no /proc", file=link)
            (folder / WEIGHT_FILE).symlink_to(link)
        yield folder
