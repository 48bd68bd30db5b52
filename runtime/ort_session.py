"""An ONNX Runtime session for a graph: options, loading, and whether it is the graph expected."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edge import cpu
from edge.errors import BundleError, EngineError, Faults
from edge.launch import DType, Log
from edge.onnx_runtime import onnxruntime
from edge.runtime import ort_providers
from edge.runtime.folding import is_bounded
from edge.runtime.graph import check
from edge.runtime.layout import StateLayout, batch_axis

if TYPE_CHECKING:
    from edge.bundle import Bundle

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_WITHOUT = "optimization.disable_specified_optimizers"
_OPTIMIZED_WEIGHTS = "session.optimized_model_external_initializers_"
OPTIMIZED_GRAPH = "optimized.onnx"
_RUN_INPUTS = (
    "tokens", "rows", "kept", "parents", "tree", "last_only", "stored", "paths",
    "ancestors", "positions", "past", "total", "last",
)  # fmt: skip
_TAPS = re.compile(r"(kept_)?taps\d+")
_LOG_TYPES: dict[str, DType] = {
    "tensor(float)": "f32", "tensor(int8)": "i8", "tensor(uint8)": "u8",
}  # fmt: skip
_ONNX_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int8": "tensor(int8)"}


def session_options(threads: int, *, spin: bool = False) -> onnxruntime.SessionOptions:
    """Options for the lowest latency of one run at a time.

    `spin`: a Mamba-130M-shaped model, 8-bit weights, two threads on two cores, ms a token: on a
    nearly idle machine 10.8 spinning, 12.0 sleeping (best of 90); beside other work 44 spinning,
    24 sleeping (median). Spinning threads also take the cores from a second session, a drafter's.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # The same model's private memory after a run of 256 tokens, on 1.31: 1663 MB with ONNX
    # Runtime's defaults, 330 MB with these two. The default order computes every layer's emitted
    # states last, keeping all layers' scans alive until then; a memory pattern is a second arena.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    # graphs of int8 models spell out their integer products; none is to be guessed from
    # QuantizeLinear and DequantizeLinear around floating ones
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not cpu.has_vnni():
        # without VNNI the u8×s8 product saturates in 16 bits; this makes it exact
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def record_profile(options: onnxruntime.SessionOptions, folder: Path) -> None:
    """Write events of every node to `folder`, and the optimized graph to OPTIMIZED_GRAPH there.

    Events name nodes that came out of a function by number only. In the default order of execution
    the graph's file has its nodes in the order they run in, so the two can be laid side by side.
    """
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.execution_order = onnxruntime.ExecutionOrder.DEFAULT
    options.optimized_model_filepath = str(folder / OPTIMIZED_GRAPH)
    # the weights would be written beside the graph, all of them
    (folder / "weights").symlink_to(os.devnull)
    options.add_session_config_entry(f"{_OPTIMIZED_WEIGHTS}file_name", "weights")
    options.add_session_config_entry(f"{_OPTIMIZED_WEIGHTS}min_size_in_bytes", "0")


def read(path: Path) -> bytes:
    """A graph file's content. Raises EngineError."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise EngineError(f"cannot be read: {problem.strerror}", file=path) from problem


def load(
    graph: bytes, path: Path, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    """A session on the CPU for a graph read from `path`. Raises EngineError."""
    return load_on(ort_providers.choose(ort_providers.CPU), graph, path, options)[0]


def load_on(
    choice: ort_providers.Choice,
    graph: bytes,
    path: Path,
    options: onnxruntime.SessionOptions,
    folder: Path | None = None,
    most: int | None = None,
) -> tuple[onnxruntime.InferenceSession, str]:
    """A session for a graph read from `path`, and the name of the provider it runs on: the first of
    `choice` that can. `folder` has the weights; None is the one above the graph's. `most`: bytes
    that it may take on the CPU, in loading and in all runs at a time; a run that wants more fails.

    Raises BundleError: the graph is not one that the exporter writes, or its weights lie elsewhere;
    EngineError.
    """
    if folder is None:
        folder = path.parent.parent.absolute()
    if not is_bounded(check(graph, weight_files(folder), path)):
        options.add_session_config_entry(_WITHOUT, "ConstantFolding")
    # the graph names "weights.bin", which lies beside the folder of graphs
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))

    def make(providers: ort_providers.Providers) -> onnxruntime.InferenceSession:
        # its own way to fall back prints on standard output, and tells no one else
        return onnxruntime.InferenceSession(graph, options, providers=providers, enable_fallback=0)

    try:
        with _STARTING:
            if most is not None:
                _limit(options, most)
            session, provider = ort_providers.start(choice, make)
    except EngineError:
        raise
    except Exception as problem:
        raise EngineError(f"ONNX Runtime cannot load it: {problem}", file=path) from problem
    _LIVE.add(session)
    return session, provider


_STARTING = threading.Lock()  # the allocator is the process's while a session takes it


def _limit(options: onnxruntime.SessionOptions, most: int) -> None:
    """The session that is made next takes its memory from an arena of its own, of `most` bytes.

    Options know no limit, only arenas that are registered do. A session keeps the one that it was
    made with when the next is registered (tried with ONNX Runtime 1.23.2 and 1.31.1).
    """
    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    where = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    # -1 is ONNX Runtime's own choice
    onnxruntime.create_and_register_allocator(where, onnxruntime.OrtArenaCfg(most, -1, -1, -1))
    options.add_session_config_entry("session.use_env_allocators", "1")


def weight_files(folder: Path) -> dict[str, int]:
    """Sizes of the regular files in a bundle's folder that weights may lie in, by name."""
    try:
        with os.scandir(folder) as found:
            files = [one for one in found if one.name.endswith(".bin")]
            return {
                one.name: one.stat(follow_symlinks=False).st_size
                for one in files
                if one.is_file(follow_symlinks=False)
            }
    except OSError as problem:
        raise EngineError(f"cannot be read: {problem.strerror}", file=folder) from problem


_LIVE: weakref.WeakSet[onnxruntime.InferenceSession] = weakref.WeakSet()


def _end_quietly_in_child() -> None:
    """ONNX Runtime's threads are not in a forked child, and ending a session, or the library, there
    waits for them forever or aborts: sessions are kept, and the library is not ended.
    """
    for session in _LIVE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session._sess))
    c = ctypes.CDLL(None)
    if hasattr(c, "on_exit"):  # glibc; what is registered last is called first, with the exit code
        c.on_exit(c._exit, None)


os.register_at_fork(after_in_child=_end_quietly_in_child)


@contextmanager
def unchanged(bundle: Bundle) -> Iterator[None]:
    """The bundle's files, checked, are the ones under their names in its folder, before and after.

    ONNX Runtime opens the weights by name: handing it the checked bytes instead makes it copy
    them, which doubles what loading takes. So the names must still lead to the checked files when
    it is done, and those must not have been moved or written meanwhile, which would show in their
    change time. Raises BundleError.
    """
    bundle.verify()
    files = [entry.path for entry in bundle.manifest.files]
    before = {file: _identity(os.fstat(bundle.fd(file))) for file in files}
    yield
    for file in files:
        try:
            now = _identity(os.stat(bundle.folder / file, follow_symlinks=False))
        except OSError as problem:
            raise BundleError(f"{problem.strerror}", file=bundle.path / file) from None
        if now != before[file]:
            raise BundleError("changed while it was loaded", file=bundle.path / file)


def _identity(info: os.stat_result) -> tuple[int, ...]:
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def logs_of(session: onnxruntime.InferenceSession, path: Path) -> dict[str, Log]:
    """The inputs of a graph that give back rows of what its scans read; the outputs they are rows
    of have their names without `_log`. Raises BundleError: such inputs with no such output.
    """
    outputs = {meta.name: meta for meta in session.get_outputs()}
    logs: dict[str, Log] = {}
    faults = Faults()
    for meta in session.get_inputs():
        if not meta.name.endswith("_log"):
            continue
        of = outputs.get(meta.name.removesuffix("_log"))
        width = meta.shape[-1] if len(meta.shape) == 3 else None
        same = of is not None and (of.type, of.shape[-1:]) == (meta.type, [width])
        if same and meta.type in _LOG_TYPES and isinstance(width, int):
            logs[meta.name] = Log(dtype=_LOG_TYPES[meta.type], width=width)
        else:
            faults.add(meta.name, "is not what an output logs")
    faults.refuse(BundleError, file=path)
    return logs


def check_signature(session: onnxruntime.InferenceSession, layout: StateLayout, path: Path) -> None:
    """The graph's inputs are those of the layout, and it keeps states in the layout's types.

    Raises BundleError: names, shapes; EngineError: types. Each with every fault of its kind.
    """
    wanted = layout.recurrent | layout.caches
    found = {meta.name: meta.shape for meta in session.get_inputs()}
    faults = Faults()
    for name, shape in wanted.items():
        have = found.get(name)
        free = (0, 2) if name in layout.caches else (batch_axis(name),)
        if have is None:
            faults.add(name, "the graph lacks this input")
        elif len(have) != len(shape) or any(
            axis not in free and isinstance(size, int) and size != shape[axis]
            for axis, size in enumerate(have)
        ):
            faults.add(name, f"the graph has shape {have}, the model {list(shape)}")
    faults.refuse(BundleError, file=path)
    names = found.keys() - wanted.keys() - layout.logs.keys() - set(_RUN_INPUTS)
    if unknown := sorted(name for name in names if not _TAPS.fullmatch(name)):
        raise BundleError(
            f"the graph has unknown inputs: {', '.join(unknown)}",
            file=path,
            remedy="another version wrote it: export the model again",
        )
    _check_types(session, layout, path)


def _check_types(session: onnxruntime.InferenceSession, layout: StateLayout, path: Path) -> None:
    if unknown := sorted(layout.dtypes.keys() - layout.recurrent.keys() - layout.caches.keys()):
        raise BundleError(
            f"these are not states of the model: {', '.join(unknown)}",
            field="state_dtypes",
        )
    # a state comes in under its name and goes out under another; both are the same memory's type
    types = {meta.name: meta.type for meta in (*session.get_inputs(), *session.get_outputs())}
    names = {name: (name, f"{name}s") for name in layout.recurrent}
    names |= {name: (name, f"{name}_out") for name in layout.caches}
    faults = Faults()
    for name, ends in names.items():
        for end in ends:
            wanted = _ONNX_TYPES[layout.dtype(name).name]
            if types.get(end) != wanted:
                have = types.get(end, "no such tensor")
                faults.add(end, f"the graph has {have}, the manifest {wanted}")
    faults.refuse(EngineError, file=path)
