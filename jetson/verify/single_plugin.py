"""Build an engine of one plugin with TensorRT on this GPU and compare it with the op's definition.

    python -m jetson.verify.single_plugin [BUNDLE]             every op, each in its own process
    python -m jetson.verify.single_plugin [BUNDLE] --op NAME   only this op; prints one line of JSON

Exit codes: 0 right, 1 wrong, 3 TensorRT, the plugin library or a GPU is missing.

It shows that the plugin library is found and registered, that the parser finds the plugin, that
builder and runtime call it as they should, and that it loads its kernels and launches them with the
right arguments.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx

from edge import child
from edge.bundle import Bundle, open_bundle
from edge.bundle.kernels import open_plan
from edge.bundle.reader import WEIGHT_FILE
from edge.errors import EdgeError, EngineError
from edge.plugins.tensorrt import OUT
from edge.runtime.cuda.core import CoreDevice
from edge.runtime.cuda.device import Memory
from edge.runtime.model import resolve
from edge.runtime.tensorrt import bindings, build, graphfile, library, machine
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.compile import GraphSource, Order, compile_graph
from edge.runtime.tensorrt.contexts import EngineContexts, GraphRun
from edge.runtime.tensorrt.profiles import EngineSizes, Profile
from jetson.verify import cut
from jetson.verify.cut import Array

LIMIT_S = 300
NOT_RUN = 3
_FILE = "one.onnx"
# a network without symbols has one profile, without ranges
_PROFILE = Profile("one", {})


def opened(bundle: Bundle) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return the bundle's device graph, and all values of a run of it on the CPU."""
    file = machine.graph_file(bundle)
    graph = cut.read(bundle.read(file), f"{bundle.path}/{file}")
    vocab_size = bundle.manifest.model.vocab_size
    return graph, cut.Values(graph, open_plan(bundle), Path(bundle.path), vocab_size).last()


def compiled(trt: TensorRT, model: bytes, weights: int | None, order: Order, **more: Any) -> bytes:
    """Return the engine of a graph without symbols, compiled as by `edge build`."""
    source = GraphSource(graphfile.form_for(trt, model, _FILE), weights, _FILE)
    return bytes(compile_graph(trt, source, order, (_PROFILE,), **more).engine)


class Builder:
    """TensorRT, the plugin library and the bundle's kernels, ready to build engines of one node."""

    def __init__(self, bundle: Bundle, gpu: CoreDevice) -> None:
        """Raises EngineError without TensorRT, the plugin library, or kernels for this GPU."""
        self._trt = bindings.load()
        self._library = library.open_library()
        library.register(self._trt, self._library)
        self._gpu, self._weights = gpu, bundle.fd(WEIGHT_FILE)
        self._kernels = build.kernels_of(bundle, gpu.sm)

    def engine(self, model: bytes) -> bytes:
        """Build an engine. Raises EngineError with the messages of TensorRT and the plugins."""
        self._library.prepare(self._kernels, aliased=False)
        try:
            last_error = self._library.last_error
            return compiled(
                self._trt, model, self._weights, Order(EngineSizes()), more_said=last_error
            )
        finally:
            self._library.prepare(b"", aliased=False)

    def run(
        self, engine: bytes, node: onnx.NodeProto, values: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the engine's outputs for the node's inputs in `values`."""
        contexts = EngineContexts(self._trt, engine, self._gpu, [_PROFILE])
        buffers = {name: self._upload(values[name]) for name in contexts.inputs}
        for name in contexts.outputs:
            # states are written in place: one buffer for both, as in the engine of a model
            source = buffers.get(name.removesuffix(OUT)) if name.endswith(OUT) else None
            buffers[name] = source or self._gpu.allocate(max(1, values[name].nbytes))
        addresses = {name: memory.address for name, memory in buffers.items()}
        shapes = {name: values[name].shape for name in contexts.inputs}
        contexts.bound(GraphRun({}, shapes, addresses), own=False).enqueue()
        outputs = {name: self._download(buffers[name], values[name]) for name in contexts.outputs}
        self._gpu.wait()
        return {name: array.copy() for name, array in outputs.items()}

    def _upload(self, array: Array) -> Memory:
        memory = self._gpu.allocate(max(1, array.nbytes))
        host = self._gpu.host(array.nbytes)
        host[:] = array.reshape(-1).view("u1")
        self._gpu.write(memory, 0, host)
        return memory

    def _download(self, memory: Memory, like: Array) -> Array:
        host = self._gpu.host(like.nbytes)
        self._gpu.read(host, memory, 0)
        return host.view(like.dtype).reshape(like.shape)


def missing() -> None:
    """Raise EngineError when TensorRT, the plugin library or a GPU is missing."""
    bindings.load()
    library.find()
    machine.open_gpu()


def prove(bundle: Bundle, op: str) -> dict[str, Any]:
    """Build and run the first node of `op`. Raises EngineError or BundleError."""
    graph, values = opened(bundle)
    node = cut.first_of_each_op(graph).get(op)
    if node is None:
        raise EngineError(f"the device graph has no {op}", field="--op")
    builder = Builder(bundle, machine.open_gpu())
    began = time.monotonic()
    engine = builder.engine(cut.alone(graph, node, values))
    spent = time.monotonic() - began
    differences = cut.compare(builder.run(engine, node, values), values)
    return {
        "op": op,
        "node": node.name,
        "right": all(difference.right for difference in differences),
        "build_s": round(spent, 2),
        "engine_bytes": len(engine),
        "outputs": [asdict(difference) for difference in differences],
    }


def each(bundle: str) -> int:
    """Prove every op in its own process, where a crash is a result too. Return the exit code."""
    try:
        missing()
    except EngineError as problem:
        print(f"not run: {problem}")
        return NOT_RUN
    with open_bundle(resolve(bundle)) as opened_bundle:
        file = machine.graph_file(opened_bundle)
        ops = list(cut.first_of_each_op(cut.read(opened_bundle.read(file), file)))
    wrong = 0
    for op in ops:
        command = child.command(__spec__.name, bundle, "--op", op)
        try:
            completed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"WRONG  {op}: did not finish within {LIMIT_S} s", flush=True)
            wrong += 1
            continue
        wrong += completed.returncode != 0
        print(line(op, completed.returncode, completed.stdout, completed.stderr), flush=True)
    print(f"{len(ops) - wrong} of {len(ops)} plugins are right")
    return 1 if wrong else 0


def line(op: str, code: int, out: str, errors: str) -> str:
    """Return a line about the result of one process."""
    last = (out.strip().splitlines() or [""])[-1]
    if not last.startswith("{"):
        message = (errors.strip().splitlines() or ["no output"])[-1]
        return f"WRONG  {op}: exit code {code}: {message}"
    result = json.loads(last)
    worst = max((output["worst"] for output in result["outputs"]), default=0.0)
    mark = "right" if result["right"] else "WRONG"
    return f"{mark}  {op}: built in {result['build_s']} s, worst difference {worst:.1e}"


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", nargs="?", default="demo")
    parser.add_argument("--op")
    options = parser.parse_args()
    try:
        if options.op is None:
            return each(options.bundle)
        with open_bundle(resolve(options.bundle)) as bundle:
            result = prove(bundle, options.op)
    except EdgeError as problem:
        print(problem, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0 if result["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
