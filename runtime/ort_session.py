"""ONNX Runtime sessions: options, loading, and checks of a graph's signature."""

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
from edge.errors import BundleError, EngineError, Faults, some
from edge.launch import DType, Log
from edge.onnx_runtime import onnxruntime
from edge.runtime import ort_providers
from edge.runtime.folding import is_bounded
from edge.runtime.graph import check, integers
from edge.runtime.graph_format import Message
from edge.runtime.layout import StateLayout, batch_axis

if TYPE_CHECKING:
    from edge.bundle import Bundle

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_DISABLED_OPTIMIZERS = "optimization.disable_specified_optimizers"
_OPTIMIZED_WEIGHTS = "session.optimized_model_external_initializers_"
OPTIMIZED_GRAPH = "optimized.onnx"
_RUN_INPUTS = (
    "tokens", "rows", "kept", "parents", "tree", "last_only", "stored", "paths",
    "ancestors", "positions", "past", "total", "last",
)  # fmt: skip
_INTEGER_PRODUCT, _INT8 = b"MatMulIntegerToFloat", 3  # an op, a TensorProto.DataType
_TAPS = re.compile(r"(kept_)?taps\d+")
_LOG_TYPES: dict[str, DType] = {
    "tensor(float)": "f32", "tensor(int8)": "i8", "tensor(uint8)": "u8",
}  # fmt: skip
_ONNX_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int8": "tensor(int8)"}


def session_options(threads: int, *, spin: bool = False) -> onnxruntime.SessionOptions:
    """Return options for the lowest latency of one run at a time.

    `spin`: busy-wait for work. A Mamba-130M-shaped model with 8-bit weights takes, with two threads
    on two cores, per token: 10.8 ms spinning and 12.0 ms sleeping on a nearly idle machine (best of
    90); 44 ms spinning and 24 ms sleeping beside other work (median). Spinning threads also take
    cores from a second session, such as a drafter's.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # The same model's private memory after a run of 256 tokens, on 1.31: 1663 MB with ONNX
    # Runtime's defaults, 330 MB with these two options. The default order computes all layers'
    # output states last, which keeps every scan alive until then; a memory pattern adds a second
    # arena.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    # graphs of int8 models contain integer products explicitly; none should be inferred from
    # QuantizeLinear and DequantizeLinear around float products
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not cpu.has_vnni():
        # without VNNI the u8×s8 product saturates in 16 bits; this option makes it exact
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def record_profile(options: onnxruntime.SessionOptions, folder: Path) -> None:
    """Write events of every node to `folder`, and the optimized graph to OPTIMIZED_GRAPH there.

    Events identify nodes inlined from a function only by number. In the default execution order,
    the graph file lists nodes in the order they run, so events can be matched to nodes.
    """
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.execution_order = onnxruntime.ExecutionOrder.DEFAULT
    options.optimized_model_filepath = str(folder / OPTIMIZED_GRAPH)
    # discard the weights, which would all be written beside the graph
    (folder / "weights").symlink_to(os.devnull)
    options.add_session_config_entry(f"{_OPTIMIZED_WEIGHTS}file_name", "weights")
    options.add_session_config_entry(f"{_OPTIMIZED_WEIGHTS}min_size_in_bytes", "0")


def read(path: Path) -> bytes:
    """Return a graph file's content. Raises EngineError."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise EngineError(f"cannot be read: {problem.strerror}", file=path) from problem


def load(
    graph: bytes, path: Path, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    """Return a session on the CPU for a graph read from `path`. Raises EngineError."""
    return load_on(ort_providers.choose(ort_providers.CPU), graph, path, options)[0]


def load_on(
    choice: ort_providers.Choice,
    graph: bytes,
    path: Path,
    options: onnxruntime.SessionOptions,
    folder: Path | None = None,
    most: int | None = None,
) -> tuple[onnxruntime.InferenceSession, str]:
    """Return a session for a graph, and the name of the provider it runs on.

    Args:
        choice: providers to try in turn; the first that runs here is used.
        graph: content of the graph file.
        path: path of the graph file.
        options: session options.
        folder: folder with the weights; None is the one above the graph's.
        most: maximum bytes of CPU memory for loading and all concurrent runs; a run that needs more
            fails.

    Raises BundleError if the exporter cannot have written the graph or its weights lie elsewhere,
    and EngineError.
    """
    if folder is None:
        folder = path.parent.parent.absolute()
    parsed = check(graph, weight_files(folder), path)
    _refuse_wrong_products(graph, parsed, path)
    if not is_bounded(parsed):
        options.add_session_config_entry(_DISABLED_OPTIMIZERS, "ConstantFolding")
    # the graph refers to "weights.bin", which lies beside the folder of graphs
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))

    def make(providers: ort_providers.Providers) -> onnxruntime.InferenceSession:
        # onnxruntime's own fallback is reported only on standard output
        return onnxruntime.InferenceSession(graph, options, providers=providers, enable_fallback=0)

    try:
        with _START_LOCK:
            if most is not None:
                _limit_memory(options, most)
            session, provider = ort_providers.start(choice, make)
    except EngineError:
        raise
    except Exception as problem:
        raise EngineError(f"ONNX Runtime cannot load it: {problem}", file=path) from problem
    _LIVE_SESSIONS.add(session)
    return session, provider


def _refuse_wrong_products(graph: bytes, parsed: Message, path: Path) -> None:
    """Raise EngineError for int8 products that ONNX Runtime computes wrongly on this CPU.

    Before version 1.25, its kernels for AMX spoil products of 32 and more rows with N outputs where
    N mod 32 is 17 to 31 (tried with 1.23.2, 1.24.1 and 1.25.0 on a Xeon).
    """
    version = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if version >= (1, 25) or not cpu.has_amx() or _INTEGER_PRODUCT not in graph:
        return
    shapes = (
        integers(tensor.get("dims", ()))
        for tensor in parsed["graph"].get("initializer", ())
        if tensor.get("data_type") == _INT8
    )
    widths = {shape[-2] for shape in shapes if len(shape) > 1 and shape[-2] % 32 > 16}
    if widths:
        raise EngineError(
            f"ONNX Runtime {onnxruntime.__version__} computes int8 products of "
            f"{some([str(width) for width in sorted(widths)])} outputs wrongly on CPUs with AMX",
            file=path, remedy="install onnxruntime 1.25 or later, or use --engine cpu",
        )  # fmt: skip


_START_LOCK = threading.Lock()  # the registered allocator is global until a session takes it


def _limit_memory(options: onnxruntime.SessionOptions, maximum: int) -> None:
    """Give the session that is created next an arena of its own with at most `maximum` bytes.

    Session options have no limit; only registered arenas do. A session keeps its arena when the
    next one is registered (tried with ONNX Runtime 1.23.2 and 1.31.1).
    """
    allocator = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    memory_info = onnxruntime.OrtMemoryInfo("Cpu", allocator, 0, onnxruntime.OrtMemType.DEFAULT)
    # -1 is ONNX Runtime's own choice
    onnxruntime.create_and_register_allocator(
        memory_info, onnxruntime.OrtArenaCfg(maximum, -1, -1, -1)
    )
    options.add_session_config_entry("session.use_env_allocators", "1")


def weight_files(folder: Path) -> dict[str, int]:
    """Return name → size of the regular files in a bundle's folder that may hold weights."""
    try:
        with os.scandir(folder) as entries:
            files = [entry for entry in entries if entry.name.endswith(".bin")]
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in files
                if entry.is_file(follow_symlinks=False)
            }
    except OSError as problem:
        raise EngineError(f"cannot be read: {problem.strerror}", file=folder) from problem


_LIVE_SESSIONS: weakref.WeakSet[onnxruntime.InferenceSession] = weakref.WeakSet()


def _end_quietly_in_child() -> None:
    """Never destroy sessions or the library in a forked child.

    ONNX Runtime's threads do not exist there, so destruction would wait for them forever or abort.
    """
    for session in _LIVE_SESSIONS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session._sess))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc: runs handlers in reverse order and passes the exit code
        libc.on_exit(libc._exit, None)


os.register_at_fork(after_in_child=_end_quietly_in_child)


@contextmanager
def unchanged(bundle: Bundle) -> Iterator[None]:
    """Verify a bundle, and check afterwards that its file names still lead to the verified files.

    ONNX Runtime opens the weights by name; passing it the verified bytes instead would make it copy
    them, which doubles the memory of loading. So when it is done, the names must lead to the same
    files, not moved or written meanwhile, which would show in their change time. Raises
    BundleError.
    """
    bundle.verify()
    files = [entry.path for entry in bundle.manifest.files]
    before = {file: _file_identity(os.fstat(bundle.fd(file))) for file in files}
    yield
    for file in files:
        try:
            current = _file_identity(os.stat(bundle.folder / file, follow_symlinks=False))
        except OSError as problem:
            raise BundleError(f"{problem.strerror}", file=bundle.path / file) from None
        if current != before[file]:
            raise BundleError("changed while it was loaded", file=bundle.path / file)


def _file_identity(info: os.stat_result) -> tuple[int, ...]:
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def logs_of(session: onnxruntime.InferenceSession, path: Path) -> dict[str, Log]:
    """Return a graph's log inputs, which take back rows of its outputs of scan inputs.

    The output has the name of the input without `_log`. Raises BundleError if there is no matching
    output.
    """
    outputs = {meta.name: meta for meta in session.get_outputs()}
    logs: dict[str, Log] = {}
    faults = Faults()
    for meta in session.get_inputs():
        if not meta.name.endswith("_log"):
            continue
        output = outputs.get(meta.name.removesuffix("_log"))
        width = meta.shape[-1] if len(meta.shape) == 3 else None
        matches = output is not None and (output.type, output.shape[-1:]) == (meta.type, [width])
        if matches and meta.type in _LOG_TYPES and isinstance(width, int):
            logs[meta.name] = Log(dtype=_LOG_TYPES[meta.type], width=width)
        else:
            faults.add(meta.name, "does not match the output that it logs")
    faults.refuse(BundleError, file=path)
    return logs


def check_signature(session: onnxruntime.InferenceSession, layout: StateLayout, path: Path) -> None:
    """Check that the graph's inputs match the layout and that it keeps states in its dtypes.

    Raises BundleError for names and shapes, EngineError for dtypes. Each lists all faults of its
    kind.
    """
    expected = layout.recurrent | layout.caches
    shapes = {meta.name: meta.shape for meta in session.get_inputs()}
    faults = Faults()
    for name, shape in expected.items():
        actual = shapes.get(name)
        free = (0, 2) if name in layout.caches else (batch_axis(name),)
        if actual is None:
            faults.add(name, "the graph lacks this input")
        elif len(actual) != len(shape) or any(
            axis not in free and isinstance(size, int) and size != shape[axis]
            for axis, size in enumerate(actual)
        ):
            faults.add(name, f"the graph has shape {actual}, the model {list(shape)}")
    faults.refuse(BundleError, file=path)
    names = shapes.keys() - expected.keys() - layout.logs.keys() - set(_RUN_INPUTS)
    if unknown := sorted(name for name in names if not _TAPS.fullmatch(name)):
        raise BundleError(
            f"the graph has unknown inputs: {some(unknown)}",
            file=path,
            remedy="another version wrote it: export the model again",
        )
    _check_types(session, layout, path)


def _check_types(session: onnxruntime.InferenceSession, layout: StateLayout, path: Path) -> None:
    if unknown := sorted(layout.dtypes.keys() - layout.recurrent.keys() - layout.caches.keys()):
        raise BundleError(
            f"these are not states of the model: {some(unknown)}",
            field="state_dtypes",
        )
    # a state's input and output have different names but the same dtype
    types = {meta.name: meta.type for meta in (*session.get_inputs(), *session.get_outputs())}
    names = {name: (name, f"{name}s") for name in layout.recurrent}
    names |= {name: (name, f"{name}_out") for name in layout.caches}
    faults = Faults()
    for name, tensors in names.items():
        for tensor in tensors:
            expected = _ONNX_TYPES[layout.dtype(name).name]
            if types.get(tensor) != expected:
                actual = types.get(tensor, "no such tensor")
                faults.add(tensor, f"the graph has {actual}, the manifest {expected}")
    faults.refuse(EngineError, file=path)
