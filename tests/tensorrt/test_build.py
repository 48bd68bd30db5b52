"""`edge build`: the whole path with TensorRT for RTX, on a CPU, and what it refuses beforehand.

Building with TensorRT itself needs its library and a GPU: `jetson/verify.sh`.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from onnx import ModelProto
from typer.testing import CliRunner

from edge.apps import build as build_command
from edge.apps.build import describe
from edge.apps.cli import app
from edge.bundle import Bundle, open_bundle
from edge.errors import BundleError, EdgeError, EngineError
from edge.ops import DEVICE_DOMAIN, PLUGIN_PREFIX
from edge.runtime import memory
from edge.runtime.cuda import install
from edge.runtime.model import EMBEDDED, resolve
from edge.runtime.tensorrt import bindings, build, cache, graphfile, machine, sealed
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.compile import Order
from edge.runtime.tensorrt.profiles import EngineSizes, sizes
from tests.facts import says
from tests.malformed import resigned
from tests.tensorrt.graphs import made

MODEL = "demo-draft"
FLAGS = ("--rtx", "--sm", "86,89", "--window", "1", "--chunk", "16")


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    try:
        return bindings.load("rtx")
    except EngineError as absent:
        pytest.skip(f"{absent.message}; `make test` tries to: {absent.remedy}")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "engines"


@pytest.fixture
def bundle() -> Iterator[Bundle]:
    with open_bundle(resolve(MODEL)) as opened:
        yield opened


def edge(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edge.apps.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def order(bundle: Bundle, **how: Any) -> Order:
    asked = sizes(bundle.manifest.model, 16, window=1)
    return Order(asked, architectures=(86, 89), **how)


def test_an_engine_is_built_kept_and_found_again(
    rtx: TensorRT, place: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.engine"
    first = edge("build", MODEL, *FLAGS, "--json", "-o", bare)
    assert first.returncode == 0, first.stderr
    facts = json.loads(first.stdout)
    assert first.stderr == "" and facts["built"] and facts["seconds"] > 0
    path = Path(facts["engine"])
    assert {each.name for each in place.iterdir()} == {"key", path.name}
    with sealed.read(path) as found:
        assert bare.read_bytes() == found.body and facts["bare"] == str(bare)
        assert found.header["key"] == facts["key"] and len(found.body) == facts["bytes"]
        assert found.header["components"] == facts["components"]
    with open_bundle(resolve(MODEL)) as bundle:
        entry = {e.path: e.sha256 for e in bundle.manifest.files}
        assert facts["components"] | {"flags": "", "edge": ""} == {
            "bundle": bundle.fingerprint, "graph": entry["graphs/tensorrt.onnx"],
            "weights": entry["weights.bin"], "kind": "rtx", "plugins": "", "kernels": "",
            "tensorrt": ".".join(map(str, rtx.version)), "sm": "86,89", "gpu": "", "driver": "",
            "flags": "", "edge": "",
        }  # fmt: skip
        # a bundle lists every file it has: nothing was added to it
        bundle.verify()
    assert facts["sizes"] == EngineSizes(window=1, batch=1, capacity=0, chunk=16).model_dump()
    assert list(facts["profiles"]) == ["step", "prefill"]
    assert facts["profiles"]["prefill"]["T"] == [1, 16, 16]
    written = path.stat().st_mtime_ns

    again = edge("build", MODEL, *FLAGS, "-o", bare)
    assert f"bare        {bare}" in again.stdout
    assert again.returncode == 0 and path.stat().st_mtime_ns == written
    assert "existed already" in again.stdout and "sm_86, sm_89" in again.stdout

    here = {name: facts["components"][name] for name in ("bundle", "kind", "sm")}
    with cache.find(MODEL, here, EngineSizes(window=1, chunk=8)) as found:
        assert found.path == path


def test_an_altered_engine_is_built_again(
    rtx: TensorRT, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is one whose build is forced; no engine is made here, since its build is refused."""
    job = build.EngineBuild(bundle, order(bundle), rtx, None, None, lambda *_: None)
    path = cache.store(job.components, order(bundle).sizes, b"engine", {})
    built = build.build(bundle, order(bundle), rtx, None, None)
    assert (built.path, built.seconds, built.engine_bytes) == (path, 0.0, 6)
    assert "existed already" in describe(built)
    for how, damage in (({"force": True}, b""), ({}, b"!")):
        path.write_bytes(path.read_bytes() + damage)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "available_bytes", lambda: 1)
            with pytest.raises(EngineError, match=r"needs .* of memory"):
                build.build(bundle, order(bundle, **how), rtx, None, None)


def test_too_little_memory_says_how_much_and_what_to_lower(
    rtx: TensorRT, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = order(bundle, workspace=4096)
    needed = build.EngineBuild(bundle, asked, rtx, None, None, lambda *_: None).needed_bytes
    assert needed > (4096 + 700) << 20
    monkeypatch.setattr(memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(EngineError) as caught:
        build.build(bundle, asked, rtx, None, None)
    assert f"needs {needed / (1 << 20):.0f} MiB of memory" in caught.value.message
    assert caught.value.remedy is not None and "--workspace" in caught.value.remedy
    assert not list(sealed.folder().glob("*.engine"))


def building(place: Path) -> subprocess.Popen[str]:
    """`edge build`, once it has begun to build."""
    program = [sys.executable, "-m", "edge.apps.cli", "build", "demo", "--rtx", "--sm", "86"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # the cache's key is made right before
    deadline = time.monotonic() + 120
    while not (place / "key").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(
    rtx: TensorRT, place: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(place.parent.parent))
    process = building(place)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert out == "" and err in ("interrupted\n", "")
    assert [each.name for each in place.iterdir()] == ["key"]
    assert [each.name for each in place.parent.parent.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGSEGV, "is at fault"), (signal.SIGKILL, "memory ran out")]
)
def test_a_crash_of_the_builder_is_an_error(
    rtx: TensorRT, place: Path, number: signal.Signals, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code parses the graph, in its own process."""
    monkeypatch.setenv("TMPDIR", str(place.parent.parent))
    process = building(place)
    (child,) = psutil.Process(process.pid).children()
    child.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and out == ""
    assert f"ended with {number.name} during the build" in err and why in err
    assert [each.name for each in place.iterdir()] == ["key"]
    assert [each.name for each in place.parent.parent.iterdir()] == ["cache"]


def test_progress_comes_from_the_builder(rtx: TensorRT, bundle: Bundle) -> None:
    """And a build that is told to stop ends at the next step."""
    seen: list[tuple[str, float]] = []
    stop = threading.Event()

    def report(what: str, done: int, of: int) -> None:
        seen.append((what, done / of))
        if len(seen) > 30:
            stop.set()

    job = build.EngineBuild(bundle, order(bundle), rtx, None, None, report)
    with pytest.raises(KeyboardInterrupt):
        job.compiled(stop)
    done = [share for _, share in seen]
    assert seen[0] == ("parsing", 0.0) and len({what for what, _ in seen}) > 2
    assert done == sorted(done) and 0 <= done[-1] < 1
    assert len(seen) < 200, "it went on for long"


# -- refused beforehand ----------------------------------------------------------------------------


def refused(*arguments: object) -> str:
    """Return what the program would print before it exits with 1."""
    done = CliRunner().invoke(app, ["build", *map(str, arguments)])
    assert isinstance(done.exception, EdgeError), done.output
    assert done.stdout == ""
    return str(done.exception)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--sm", "86"), "--sm: needs --rtx"),
        (("--rtx", "--sm", "86", "--aliased"), "--aliased: is for plugins"),
        (("--rtx", "--sm", "x"), "--sm: unknown architecture 'x'"),
        (("--rtx", "--sm", ","), "--sm: names no architecture"),
        (("--rtx", "--sm", "86", "--window", "0"), "window: must be from 1 to 256"),
        (("--rtx", "--sm", "86", "--batch", "1025"), "batch: must be from 1 to 1,024"),
        (("--rtx", "--sm", "86", "--chunk", "0"), "chunk: must be from 1 to 65,536"),
    ],
)
def test_flags_that_make_no_sense(
    flags: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build_command.VARIABLE, "1")
    assert said in refused(MODEL, *flags)


def test_an_architecture_that_rtx_does_not_know(
    rtx: TensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build_command.VARIABLE, "1")
    assert "does not build for sm_87" in refused(MODEL, "--rtx", "--sm", "87")


@pytest.mark.skipif(install.driver_version() is not None, reason="there is a GPU")
def test_without_a_gpu_one_has_to_be_named(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build_command.VARIABLE, "1")
    assert says(refused(MODEL, "--rtx"), "--sm: ", "no GPU", "name some: ")


def test_a_cache_that_cannot_be_written(rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", "/proc/self/fdinfo")
    monkeypatch.setenv(build_command.VARIABLE, "1")
    said = refused(MODEL, *FLAGS)
    assert "engines cannot be stored here" in said and "EDGE_CACHE=FOLDER" in said


@pytest.mark.parametrize("where", ["the bundle", "a folder", "nowhere"])
def test_outputs_that_cannot_be(where: str, tmp_path: Path) -> None:
    shutil.copytree(resolve(MODEL), tmp_path / "bundle")
    output, said = {
        "the bundle": (tmp_path / "bundle" / "graphs" / "my.engine", "lies inside the bundle"),
        "a folder": (tmp_path, "is a folder"),
        "nowhere": (tmp_path / "nowhere" / "my.engine", "cannot be written"),
    }[where]
    assert said in refused(tmp_path / "bundle", *FLAGS, "-o", output)


def test_a_bundle_of_an_older_version_has_no_graph(tmp_path: Path, rtx: TensorRT) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(resolve(MODEL), folder)
    (folder / "graphs" / "tensorrt.onnx").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["graphs"]["tensorrt"]
    manifest["files"] = [e for e in manifest["files"] if e["path"] != "graphs/tensorrt.onnx"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with open_bundle(folder) as opened, pytest.raises(BundleError) as caught:
        build.build(opened, order(opened), rtx, None, None)
    assert caught.value.field == "graphs.tensorrt"
    assert caught.value.remedy is not None and "edge export" in caught.value.remedy


def test_an_altered_graph_is_refused_before_it_is_parsed(tmp_path: Path, rtx: TensorRT) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(resolve(MODEL), folder)
    graph = folder / "graphs" / "tensorrt.onnx"
    data = bytearray(graph.read_bytes())
    data[len(data) // 2] ^= 1
    graph.write_bytes(data)
    with open_bundle(folder) as opened, pytest.raises(BundleError, match="does not match its SHA"):
        build.build(opened, order(opened), rtx, None, None)


@pytest.mark.parametrize("data", [b"", b"\x3a\x02\x0a\x00", b"text", b"\x3a\x00\x42\x00"])
def test_a_graph_that_is_none_is_refused_by_name(
    tmp_path: Path, rtx: TensorRT, data: bytes
) -> None:
    """With a matching hash, as in a malicious bundle."""
    folder = tmp_path / "bundle"
    shutil.copytree(resolve(MODEL), folder)
    (folder / "graphs" / "tensorrt.onnx").write_bytes(data)
    resigned(folder)
    with open_bundle(folder) as opened, pytest.raises(BundleError, match=r"tensorrt\.onnx"):
        build.build(opened, order(opened), rtx, None, None)
    assert not list(sealed.folder().glob("*.engine"))


# -- the machine -----------------------------------------------------------------------------------


def test_a_driver_is_all_that_the_machine_says_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.install, "driver_version", lambda: 12060)
    module, l4t = tmp_path / "version", tmp_path / "nv_tegra_release"
    assert machine.driver(module, l4t) == "12.6"
    module.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release")
    l4t.write_text("# R36 (release), REVISION: 4.4, GCID: 1, BOARD: generic")
    assert machine.driver(module, l4t) == "12.6, 540.4.0, R36 (release), REVISION: 4.4"


def test_gpus_of_one_model_share_engines() -> None:
    class Gpu:
        sm = 86

        def __init__(self, name: str) -> None:
            self.name = name

    assert machine.model(Gpu("GPU 1 (NVIDIA RTX A2000)")) == "NVIDIA RTX A2000"
    assert machine.model(Gpu("something else")) == "something else"


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_graph_of_plugins_has_their_names_and_no_functions(name: str) -> None:
    data = (resolve(name) / "graphs" / "tensorrt.onnx").read_bytes()
    whole = ModelProto.FromString(data)
    named = ModelProto.FromString(graphfile.of_plugins(data, {}))
    assert len(whole.functions) > 5 and not named.functions
    del whole.functions[:]
    for node in whole.graph.node:
        if node.domain == DEVICE_DOMAIN:
            node.op_type = PLUGIN_PREFIX + node.op_type
    assert named == whole


def test_large_weights_of_plugins_are_inputs_where_they_are_the_plans() -> None:
    """Except those that another op reads, that lie in another file, or that cannot be addressed."""
    model = made("mamba1", "w8a8")
    data, weights = model.device.SerializeToString(deterministic=True), dict(model.plan.weights)
    constants = {each.name: each for each in model.device.graph.initializer}
    before = [each.name for each in model.device.graph.input]
    names = graphfile.bound(data, weights, least=4096)
    assert "embedding.weight" in names and names < constants.keys()

    graph = ModelProto.FromString(graphfile.with_inputs(data, weights, least=4096)).graph
    assert {each.name for each in graph.initializer} == constants.keys() - names
    added = {each.name: each.type.tensor_type for each in graph.input if each.name not in before}
    assert added.keys() == names and len(graph.input) == len(before) + len(names)
    for name, kind in added.items():
        assert kind.elem_type == constants[name].data_type
        assert [dim.dim_value for dim in kind.shape.dim] == list(constants[name].dims)
    for node in model.device.graph.node:
        assert node.domain == DEVICE_DOMAIN or names.isdisjoint(node.input)

    name, found = "embedding.weight", weights["embedding.weight"]
    for changed in (
        {"offset": found.offset + 256},
        {"offset": found.offset + 64},
        {"elements": found.elements - 1},
        {"dtype": "f32"},
    ):
        others = weights | {name: found.model_copy(update=changed)}
        assert graphfile.bound(data, others, least=4096) == names - {name}


def test_a_graph_that_is_cut_anywhere_is_refused_or_whole() -> None:
    """TensorRT's parser crashes on some of them."""
    data = (resolve("demo-draft") / "graphs" / "tensorrt.onnx").read_bytes()
    graphfile.check(data, "graph")
    refused = 0
    for end in range(0, len(data), 997):
        try:
            graphfile.check(data[:end], "graph")
        except BundleError as problem:
            refused += problem.file == "graph"
        else:
            whole = ModelProto.FromString(data[:end])
            assert whole.graph == ModelProto.FromString(data).graph, "only functions are cut"
    assert refused > 10
