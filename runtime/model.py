"""`edge.load`: a bundle becomes a model, and a model gives out sessions."""

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
    """A loaded bundle. Sessions share it; it may be used by several threads, one per session.

    Attributes:
        path: the bundle.
        fingerprint: of its manifest, which pins every byte.
        engine: what runs its graph.
        tokenizer: text to ids and back.
        template: the chat template, None for a base model.
        defaults: sampling parameters the model ships with.
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
        self._embedding = threading.Lock()
        self._embedders: dict[int | None, Embedder] = {}

    @property
    def config(self) -> ModelConfig:
        return self.manifest.model

    def session(self, **options: Unpack[SessionOptions]) -> Session:
        """A new session; see `SessionOptions`. Its memory is taken here."""
        return Session(self, **options)

    def joined(self) -> Model:
        """The same model for several threads, each with a session of its own: their single tokens
        are run together, which costs little more than one of them where the engine is a
        one that joins steps. What a session says does not depend on the others.
        """
        engine = JoinedEngine(self.engine)
        return Model(
            self.path, self.manifest, self.fingerprint, engine, self.tokenizer, self.template
        )

    def embedder(self, *, capacity: int | None = None) -> Embedder:
        """What makes vectors of tokens; one for each `capacity`, made when first asked for."""
        from edge.runtime.embed import Embedder  # not above: sessions do without

        with self._embedding:
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
        """Vectors of texts or of token ids: [d_model] of one, [N, d_model] of a list of N.

        A vector is the mean of the last hidden states, of what the head would read, over all
        tokens; or with `pooling` "last" that of the last token. `normalize` gives it length 1. A
        text begins with the model's `bos`, where it wants one. Threads may call it.

        Raises InputError: an empty text, ids out of range, pooling; ContextFullError: attention
        layers hold fewer tokens; EngineError: engine `tensorrt`, which gives logits alone.
        """
        return self.embedder().embed_texts(texts, pooling, normalize)

    def __repr__(self) -> str:
        config, quantization = self.config, self.manifest.quantization
        kind = f"{config.family}, {quantization.recipe}, on {title(self.engine)}"
        return f"<Model {self.path.name}: {kind}; session() begins a conversation>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing: memory goes with the last reference."""


def load(
    bundle: str | os.PathLike[str],
    *,
    engine: str = "auto",
    threads: int | None = None,
    spin: bool = False,
    provider: str | None = None,
    on_progress: log.Progress | None = None,
) -> Model:
    """Load a bundle by path, or by the name of an embedded (EMBEDDED) or pulled one.

    A folder with one of these names is meant by `./demo`. `threads` None is one per core this
    process may use, and one alone for a small model; `spin` keeps them awake between products;
    `provider` is ONNX Runtime's, `cpu`, `cuda` or `tensorrt` (see `open_engine`).
    `on_progress("loading", bytes, of)` is called while weights are read, and with "checking" before
    where they have to be hashed; what it raises ends the loading. Models of the same bytes and
    options share their weights, on the engines `cpu` and `ort`, while one of them is in use.

    Raises BundleError, EngineError (also where it has no room in memory: EDGE_MEMORY_CHECK=off
    tries anyway; where the provider does not run here; where ONNX Runtime is not installed),
    TokenizerError.
    """
    check_provider(engine, provider)
    if threads is not None:
        check_number("threads", threads, 1, cpu.MOST_THREADS, whole=True)
    path = resolve(bundle)
    memory.check_address_space(path)
    with _enough_memory(path), open_bundle(path) as opened:
        opened.on_progress = on_progress
        tokenizer = load_tokenizer(opened)
        template = load_template(opened, tokenizer)
        running = _engine(opened, engine, threads, spin, provider)
        store.mark_used(path)
        log.info("edge.load", "loaded %s on %s", path, title(running))
        return Model(path, opened.manifest, opened.fingerprint, running, tokenizer, template)


# engines of this process that are still in use, by all that they depend on
_ENGINES: WeakValueDictionary[tuple[Any, ...], Engine] = WeakValueDictionary()
_CHOOSING = ("EDGE_CPU_LIBRARY", "EDGE_CPU_SET", "EDGE_ORT_PROVIDERS")


def _engine(
    opened: Bundle, name: str, threads: int | None, spin: bool, provider: str | None
) -> Engine:
    """The engine for a bundle: the one that another model of the same bytes runs on, where it is on
    the CPU or ONNX Runtime's. Weights are then in memory once.
    """
    if name in ("cuda", "tensorrt"):  # of which device, or which build, may have changed
        return open_engine(opened, name, threads=threads, spin=spin, provider=provider)
    chosen = [os.environ.get(variable) for variable in _CHOOSING]
    cores = cpu.usable_cores()  # what `threads` None follows from
    key = (os.getpid(), opened.fingerprint, name, threads, spin, provider, cores, *chosen)
    if (found := _ENGINES.get(key)) is not None:
        opened.verify()
        return found
    memory.check_weights(opened.manifest, opened.path)
    made = open_engine(opened, name, threads=threads, spin=spin, provider=provider)
    _ENGINES[key] = made
    return made


@contextmanager
def _enough_memory(path: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise EngineError(
            "not enough memory to load it",
            file=path,
            remedy="use a bundle of fewer bits (edge export --quant w4), or stop other programs",
        ) from None


def resolve(bundle: str | os.PathLike[str], words: Sequence[str] = ()) -> Path:
    """The folder that a path, the name of an embedded bundle, or that of a pulled one means.

    A path that exists goes before a pulled one. `words`: what may stand in a bundle's place, and
    may have been meant. Raises BundleError for what is neither, where it could be pulled.
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
    if bundle == "":  # which a path takes for the folder that one is in
        raise BundleError("the name of the bundle is empty", remedy="give a folder, or demo")
    path = Path(bundle)
    if isinstance(bundle, str) and not os.path.lexists(path):
        if bundle.startswith("~"):  # in a program, where no shell has seen it
            return path.expanduser()
        if (pulled := store.find(bundle)) is not None:
            return pulled
        if store.is_repository(bundle):
            name = store.name_for(bundle)
            here = store.find(name) is not None
            raise BundleError(
                "is not a folder",
                file=bundle,
                remedy=f"the model {name} is here: use that name"
                if here
                else f"fetch it with: edge pull {bundle}",
            )
        if store.is_name(bundle):
            raise BundleError(
                "is neither a folder nor the name of a model that is here",
                file=bundle,
                remedy=_meant(bundle, words)
                or "edge list shows their names, edge pull fetches one",
            )
    return path


def _meant(name: str, words: Sequence[str]) -> str | None:
    """A question for who misspelt the name of a model."""
    with suppress(OSError):  # of a folder that cannot be read
        here = [*words, *EMBEDDED, *store.names()]
        if near := difflib.get_close_matches(name, here, 3):
            return f"do you mean {' or '.join(near)}?"
    return None
