"""`edge.load` loads a bundle as a `Model`, which creates sessions."""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import edge
from edge import cpu, log
from edge.bundle import Bundle, Manifest, open_bundle, store
from edge.config import ModelConfig
from edge.errors import BundleError, EngineError
from edge.runtime import memory
from edge.runtime.engine import Engine
from edge.runtime.engines import check_provider, open_engine, title
from edge.runtime.joined import JoinedEngine
from edge.runtime.parameters import check_number
from edge.runtime.session import Session
from edge.runtime.session_options import SessionOptions
from edge.text import ChatTemplate, Tokenizer, load_template, load_tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edge.runtime.embed import Embedder, Pooling, Text, Vectors

EMBEDDED = ("demo", "demo-fp16", "demo-draft", "demo-bytes")


class Model:
    """A loaded bundle. Sessions share it; several threads may use it, one per session.

    Attributes:
        path: path of the bundle.
        fingerprint: fingerprint of the manifest, which pins every byte of the bundle.
        engine: the engine that runs the graph.
        tokenizer: converts text to ids and back.
        template: the chat template; None for a base model.
        defaults: the model's default sampling parameters.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        fingerprint: str,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.fingerprint = fingerprint
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.defaults: Mapping[str, Any] = manifest.generation.model_dump()
        self._embedder_lock = threading.Lock()
        self._embedders: dict[int | None, Embedder] = {}

    @property
    def config(self) -> ModelConfig:
        return self.manifest.model

    def session(self, **options: Unpack[SessionOptions]) -> Session:
        """Return a new session with its memory allocated; see `SessionOptions`."""
        return Session(self, **options)

    def joined(self) -> Model:
        """Return this model for several threads, each with its own session, with batched steps.

        If the engine can join steps, a joint step costs little more than a single one. A session's
        output does not depend on the others.
        """
        engine = JoinedEngine(self.engine)
        return Model(
            self.path, self.manifest, self.fingerprint, engine, self.tokenizer, self.template
        )

    def embedder(self, *, capacity: int | None = None) -> Embedder:
        """Return the embedder for this `capacity`, created on first use."""
        from edge.runtime.embed import Embedder  # imported late: sessions do not need it

        with self._embedder_lock:
            if capacity not in self._embedders:
                self._embedders[capacity] = Embedder(self, capacity=capacity)
            return self._embedders[capacity]

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
    ) -> Vectors:
        """Return embeddings of texts or token ids: [d_model] for one, [N, d_model] for a list of N.

        A vector is the mean of the last hidden states (the head's input) over all tokens, or the
        one of the last token with `pooling` "last". `normalize` scales it to length 1. A text
        starts with the model's `bos` if it uses one. Thread-safe.

        Raises InputError for an empty text, ids out of range or an unknown pooling;
        ContextFullError if the KV caches hold fewer tokens; EngineError with engine `tensorrt`,
        which gives only logits.
        """
        return self.embedder().embed_texts(texts, pooling, normalize)

    def __repr__(self) -> str:
        config, quantization = self.config, self.manifest.quantization
        kind = f"{config.family}, {quantization.recipe}, on {title(self.engine)}"
        return f"<Model {self.path.name}: {kind}; session() begins a conversation>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: memory is freed with the last reference."""


def load(
    bundle: str | os.PathLike[str],
    *,
    engine: str = "auto",
    threads: int | None = None,
    spin: bool = False,
    pin: bool = False,
    provider: str | None = None,
    on_progress: log.Progress | None = None,
) -> Model:
    """Load a bundle by path, or by the name of an embedded (EMBEDDED) or pulled one.

    Models with the same bytes and options share their weights on the engines `cpu` and `ort`, while
    one of them is in use.

    Args:
        bundle: path or name; write `./demo` for a folder with the name of an embedded bundle.
        engine: one of `edge.runtime.engines.ENGINES`.
        threads: CPU threads; None is one per core this process may use, or one for a small model.
        spin: whether threads busy-wait between products; see `open_engine`.
        pin: keep each thread of `cpu` but the caller on a CPU of its own; see `open_engine`.
        provider: ONNX Runtime's provider, `cpu`, `cuda` or `tensorrt`; see `open_engine`.
        on_progress: called as `on_progress("loading", bytes, of)` while weights are read, and with
            "checking" before that if they must be hashed. An exception from it aborts loading.

    Raises BundleError, TokenizerError and EngineError, the latter also if memory is too small
    (EDGE_MEMORY_CHECK=off tries anyway), the provider does not run here, threads cannot be pinned
    or ONNX Runtime is not installed. Raises InputError for more pinned threads than CPUs.
    """
    check_provider(engine, provider)
    if threads is not None:
        check_number("threads", threads, 1, cpu.MOST_THREADS, whole=True)
    path = resolve(bundle)
    memory.check_address_space(path)
    with _translated_memory_errors(path), open_bundle(path) as opened:
        opened.on_progress = on_progress
        tokenizer = load_tokenizer(opened)
        template = load_template(opened, tokenizer)
        loaded_engine = _shared_engine(opened, engine, threads, spin, pin, provider)
        store.mark_used(path)
        log.info("edge.load", "loaded %s on %s", path, title(loaded_engine))
        return Model(path, opened.manifest, opened.fingerprint, loaded_engine, tokenizer, template)


# engines of this process still in use, keyed by everything they depend on
ENGINES_IN_USE: WeakValueDictionary[tuple[Any, ...], Engine] = WeakValueDictionary()
_ENGINE_VARIABLES = ("EDGE_CPU_LIBRARY", "EDGE_CPU_SET", "EDGE_ORT_PROVIDERS")


def _shared_engine(
    bundle: Bundle, name: str, threads: int | None, spin: bool, pin: bool, provider: str | None
) -> Engine:
    """Return the engine for a bundle, shared with other models of the same bytes and options.

    Only `cpu` and `ort` are shared, so that their weights are in memory once.
    """

    def opened() -> Engine:
        return open_engine(bundle, name, threads=threads, spin=spin, pin=pin, provider=provider)

    if name in ("cuda", "tensorrt"):  # their device or build may have changed since
        return opened()
    environment = [os.environ.get(variable) for variable in _ENGINE_VARIABLES]
    # they determine `threads` None, and where threads are pinned
    cores = cpu.usable_cores(), *(os.sched_getaffinity(0) if pin else ())
    key = (os.getpid(), bundle.fingerprint, name, threads, spin, provider, pin, cores, *environment)
    if (cached := ENGINES_IN_USE.get(key)) is not None:
        bundle.verify()
        return cached
    memory.check_weights(bundle.manifest, bundle.path)
    engine = opened()
    ENGINES_IN_USE[key] = engine
    return engine


@contextmanager
def _translated_memory_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise EngineError("not enough memory to load it", file=path, remedy=memory.REMEDY) from None


def resolve(bundle: str | os.PathLike[str], words: Sequence[str] = ()) -> Path:
    """Return the folder for a path, or for the name of an embedded or pulled bundle.

    An existing path takes precedence over a pulled bundle. `words`: words valid in place of a
    bundle, to suggest for a misspelt name. Raises BundleError for a name or repository that is not
    downloaded.
    """
    if isinstance(bundle, str) and bundle in EMBEDDED:
        path = Path(edge.__file__).parent / "apps" / "bundles" / bundle
        if not path.is_dir():
            raise BundleError(
                f"the embedded model {bundle!r} is not in this installation",
                file=path,
                remedy="give the folder of a bundle, or make one: edge export CHECKPOINT -o BUNDLE",
            )
        return path
    if bundle == "":  # Path("") is the current folder
        raise BundleError("the name of the bundle is empty", remedy="give a folder, or demo")
    path = Path(bundle)
    if isinstance(bundle, str) and not os.path.lexists(path):
        if bundle.startswith("~"):  # given in a program, so no shell has expanded it
            return path.expanduser()
        if (pulled := store.find(bundle)) is not None:
            return pulled
        if store.is_source(bundle):
            name = store.name_for(bundle.removeprefix(store.PYPI).partition("@")[0])
            available = store.find(name) is not None
            raise BundleError(
                "is not a folder",
                file=bundle,
                remedy=f"the model {name} is already downloaded: use that name"
                if available
                else f"fetch it with: edge pull {bundle}",
            )
        if store.is_name(bundle):
            raise BundleError(
                "is neither a folder nor the name of a model on this machine",
                file=bundle,
                remedy=_pull_remedy(bundle)
                or _suggestion(bundle, words)
                or "edge list shows their names, edge pull fetches one",
            )
    return path


def _pull_remedy(name: str) -> str | None:
    """Return a remedy for the name of a model that the package describes but does not contain."""
    described = (Path(edge.__file__).parent / "apps" / "deltas" / name / "delta.json").is_file()
    return f"fetch it with: edge pull {name}" if described else None


def _suggestion(name: str, words: Sequence[str]) -> str | None:
    """Return a remedy that suggests similar names, or None if there are none."""
    with suppress(OSError):  # the folder of pulled models may be unreadable
        known_names = [*words, *EMBEDDED, *store.names()]
        if matches := difflib.get_close_matches(name, known_names, 3):
            return f"do you mean {' or '.join(matches)}?"
    return None
