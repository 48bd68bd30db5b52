"""The C library through ctypes, with C's interface; its file also contains Python's kernels."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.plugins.cpu import library

COMMIT, ALL_ROWS = 1, 2
BUNDLE, STATE, INPUT, FULL, ENGINE, MEMORY = range(1, 7)
STOP, LENGTH, CANCELLED, DEADLINE, CONTEXT = range(5)
Handle = c.c_void_p


class Error(c.Structure):
    _fields_ = (
        ("status", c.c_int),
        ("file", c.c_char * 512),
        ("field", c.c_char * 256),
        ("message", c.c_char * 1024),
    )


class Sized(c.Structure):
    """A structure that begins with its size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(c.sizeof(self), **fields)


class Info(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        *((n, c.c_int32) for n in ("vocab_size", "token_count", "layers", "chunk")),
        *((n, c.c_int32) for n in ("max_context", "bos", "add_bos")),
        ("eos_count", c.c_size_t),
        ("eos", c.POINTER(c.c_int32)),
        *((n, c.c_char_p) for n in ("family", "quantization", "tokenizer")),
        *((n, c.c_char_p) for n in ("tokenizer_file", "chat_template", "fingerprint")),
    )


class SessionOptions(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        *((n, c.c_int32) for n in ("window", "capacity", "history", "has_seed")),
        ("seed", c.c_uint64),
    )

    def __init__(self, **fields: int) -> None:
        super().__init__(**{"window": 8, "history": 65536, **fields})


class MemoryPlan(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        *((n, c.c_int64) for n in ("weights", "state", "kv_cache", "logits")),
        *((n, c.c_int64) for n in ("workspace", "total", "snapshot")),
    )


class ModelOptions(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        ("threads", c.c_int32),
        ("instruction_set", c.c_char_p),
        ("pin", c.c_int32),
    )


class Sampling(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        ("temperature", c.c_double),
        ("top_k", c.c_int32),
        *((n, c.c_double) for n in ("top_p", "min_p", "repetition_penalty")),
        ("repetition_window", c.c_int32),
        ("has_seed", c.c_int32),
        ("seed", c.c_uint64),
        ("forbidden_count", c.c_size_t),
        ("forbidden", c.POINTER(c.c_int32)),
        ("allowed_words", c.c_size_t),
        ("allowed", c.POINTER(c.c_uint32)),
    )

    def __init__(self, **fields: Any) -> None:
        usual = {"temperature": 0.7, "top_p": 1, "repetition_penalty": 1, "repetition_window": 64}
        super().__init__(**{**usual, **fields})


class Part(c.Structure):
    _fields_ = (("text", c.c_char_p), ("bytes", c.c_size_t), ("trusted", c.c_int32))


class DecoderOptions(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        ("stop_count", c.c_size_t),
        ("stop", c.POINTER(c.c_char_p)),
        ("continued", c.c_int32),
    )


Allow = c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(c.c_uint32), c.c_size_t)
Accept = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int32)


class Constraint(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        ("allow", Allow),
        ("accept", Accept),
        ("user", c.c_void_p),
    )


class Special(c.Structure):
    _fields_ = (("text", c.c_char_p), ("id", c.c_int32))


EncodeText = c.CFUNCTYPE(
    c.c_int, c.c_void_p, c.POINTER(c.c_char), c.c_size_t, c.c_int32,
    c.POINTER(c.c_int32), c.c_size_t, c.POINTER(c.c_size_t),
)  # fmt: skip
TokenText = c.CFUNCTYPE(
    c.c_int, c.c_void_p, c.c_int32, c.POINTER(c.c_char_p), c.POINTER(c.c_size_t)
)


class OwnTokenizer(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        ("encode", EncodeText),
        ("token", TokenText),
        ("special_count", c.c_size_t),
        ("specials", c.POINTER(Special)),
        ("strips_space", c.c_int32),
        ("user", c.c_void_p),
    )


OnToken = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int32)


class Generation(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        ("sampling", c.POINTER(Sampling)),
        ("max_tokens", c.c_int64),
        ("deadline_s", c.c_double),
        ("stop_count", c.c_size_t),
        ("stop", c.POINTER(c.c_int32)),
        ("ignore_eos", c.c_int32),
        ("on_token", OnToken),
        ("user", c.c_void_p),
        ("constraint", c.POINTER(Constraint)),
    )


class Result(Sized):
    _fields_ = (
        ("size", c.c_size_t),
        ("finish", c.c_int),
        ("tokens", c.c_int64),
        ("prompt_tokens", c.c_int64),
        ("prompt_s", c.c_double),
        ("total_s", c.c_double),
    )


@dataclass
class EdgeFault(Exception):
    """The error of a function."""

    status: int
    file: str
    field: str
    message: str


def file() -> Path:
    """Return the library; tests without it are skipped elsewhere."""
    found = library.path()
    assert found is not None
    return found


def call(name: str, *arguments: Any) -> None:
    """Call a function. Raises EdgeFault unless it returns EDGE_OK."""
    error = Error()
    status = getattr(c.CDLL(str(file())), name)(*arguments, c.byref(error))
    assert status == error.status
    if status:
        raise EdgeFault(
            status,
            error.file.decode(),
            error.field.decode(),
            error.message.decode(),
        )


def asked(name: str, kind: Any, handle: Handle) -> Any:
    """Call a function that cannot fail."""
    function = getattr(c.CDLL(str(file())), name)
    function.restype = kind
    return function(handle)


def ints(values: Sequence[int]) -> Any:
    return (c.c_int32 * len(values))(*values)


class CBundle:
    def __init__(self, folder: Path) -> None:
        self.handle = Handle()
        call("edge_bundle_open", str(folder).encode(), c.byref(self.handle))

    def __del__(self) -> None:
        if self.handle:
            asked("edge_bundle_close", None, self.handle)

    def memory(self, options: SessionOptions | None = None) -> MemoryPlan:
        out = MemoryPlan()
        call("edge_bundle_memory", self.handle, options and c.byref(options), c.byref(out))
        return out

    def verify(self) -> None:
        call("edge_bundle_verify", self.handle)

    def info(self) -> Info:
        out = Info()
        call("edge_bundle_info", self.handle, c.byref(out))
        return out

    def use_tokenizer(self, own: OwnTokenizer) -> None:
        call("edge_bundle_use_tokenizer", self.handle, c.byref(own))
        self._own = own  # and its callbacks

    def read(self, file: str, capacity: int) -> tuple[int, bytes]:
        """Return the size of a file, and what was written to a buffer of zeros."""
        size, out = c.c_size_t(), c.create_string_buffer(capacity)
        call("edge_bundle_read", self.handle, file.encode(), out, c.c_size_t(capacity),
             c.byref(size))  # fmt: skip
        return size.value, out.raw

    def prompt(self, *parts: str | tuple[str, bool]) -> list[int]:
        """Tokenize texts, some of which are marked as trusted."""
        told = [part if isinstance(part, tuple) else (part, False) for part in parts]
        given = [(text.encode(), trusted) for text, trusted in told]
        asked = (Part * len(given))(*(Part(text, len(text), on) for text, on in given))
        count = c.c_size_t(sum(len(text) for text, _ in given))
        while True:
            room = count.value
            out = (c.c_int32 * room)()
            call("edge_bundle_prompt", self.handle, asked, c.c_size_t(len(given)), out,
                 c.c_size_t(room), c.byref(count))  # fmt: skip
            if count.value <= room:
                return list(out[: count.value])

    def decode(self, ids: Sequence[int]) -> bytes:
        count = c.c_size_t()
        for _ in range(2):
            room = count.value
            out = c.create_string_buffer(room + 1)
            call("edge_bundle_decode", self.handle, ints(ids), c.c_size_t(len(ids)), out,
                 c.c_size_t(room), c.byref(count))  # fmt: skip
        return out.raw[: count.value]

    def token(self, text: str) -> int:
        out = c.c_int32()
        call("edge_bundle_token", self.handle, text.encode(), c.byref(out))
        return out.value

    def stream(self, ids: Sequence[int], stops: Sequence[str] = (), **options: int) -> list[str]:
        """Return the pieces of text that a decoder gives for these ids, the rest last."""
        handle, text, count = Handle(), c.c_char_p(), c.c_size_t()
        stopped = c.c_int32()
        given = (c.c_char_p * len(stops))(*(stop.encode() for stop in stops))
        options_ = DecoderOptions(stop=given, stop_count=len(stops), **options)
        call("edge_decoder_new", self.handle, c.byref(options_), c.byref(handle))
        out = []
        for token in ids:
            call("edge_decoder_feed", handle, c.c_int32(token), c.byref(text), c.byref(count),
                 c.byref(stopped))  # fmt: skip
            out.append(c.string_at(text, count.value).decode())
            if stopped.value:
                break
        call("edge_decoder_finish", handle, c.byref(text), c.byref(count))
        out.append(c.string_at(text, count.value).decode())
        asked("edge_decoder_free", None, handle)
        return out


class CChoices:
    """One of several texts."""

    def __init__(self, bundle: CBundle, texts: Sequence[str]) -> None:
        self.handle = Handle()
        given = (c.c_char_p * len(texts))(*(text.encode() for text in texts))
        call("edge_choices_new", bundle.handle, given, c.c_size_t(len(texts)), c.byref(self.handle))

    def __del__(self) -> None:
        asked("edge_choices_free", None, self.handle)

    def begin(self) -> Any:
        constraint = Constraint()
        call("edge_choices_begin", self.handle, c.byref(constraint))
        return c.pointer(constraint)

    @property
    def found(self) -> int:
        index: int = asked("edge_choices_found", c.c_int32, self.handle)
        return index


class CModel:
    def __init__(
        self, folder: Path, threads: int = 1, instruction_set: str | None = None, **more: int
    ) -> None:
        self.handle = Handle()
        self.bundle = CBundle(folder)
        self.vocab = self.bundle.info().vocab_size
        name = None if instruction_set is None else instruction_set.encode()
        options = ModelOptions(threads=threads, instruction_set=name)
        for field, value in more.items():
            setattr(options, field, value)
        call("edge_model_load", self.bundle.handle, c.byref(options), c.byref(self.handle))

    def __del__(self) -> None:
        if self.handle:
            asked("edge_model_close", None, self.handle)

    def session(self, **options: int) -> CSession:
        handle = Handle()
        sizes = SessionOptions(**options)
        call("edge_session_new", self.handle, c.byref(sizes), c.byref(handle))
        return CSession(self, handle)


class CSession:
    def __init__(self, model: CModel, handle: Handle) -> None:
        self.model, self.handle = model, handle

    def __del__(self) -> None:
        asked("edge_session_free", None, self.handle)

    def do(self, verb: str, *arguments: Any) -> None:
        """Call `edge_session_VERB`."""
        call(f"edge_session_{verb}", self.handle, *arguments)

    def run(
        self, tokens: Sequence[int], flags: int = 0, parents: Sequence[int] | None = None
    ) -> np.ndarray:
        """Return a copy of the logits [L, V]."""
        found = c.POINTER(c.c_float)()
        self.do(
            "run", ints(tokens), c.c_size_t(len(tokens)), parents and ints(parents),
            c.c_uint32(flags), c.byref(found),
        )  # fmt: skip
        rows = len(tokens) if flags & ALL_ROWS else 1
        return np.ctypeslib.as_array(found, (rows, self.model.vocab)).copy()

    def rewind(self, count: int) -> None:
        self.do("rewind", c.c_size_t(count))

    def save(self, path: Path) -> None:
        self.do("save", str(path).encode())

    def load(self, path: Path) -> None:
        self.do("load", str(path).encode())

    def fork(self) -> CSession:
        copy = Handle()
        self.do("fork", c.byref(copy))
        return CSession(self.model, copy)

    @property
    def position(self) -> int:
        found: int = asked("edge_session_position", c.c_int64, self.handle)
        return found

    @property
    def reach(self) -> int:
        found: int = asked("edge_session_reach", c.c_int64, self.handle)
        return found

    @property
    def pending(self) -> int:
        found: int = asked("edge_session_pending", c.c_int32, self.handle)
        return found

    @property
    def tokens(self) -> list[int]:
        count = c.c_size_t()
        function = c.CDLL(str(file())).edge_session_tokens
        function.restype = c.POINTER(c.c_int32)
        found = function(self.handle, c.byref(count))
        return [found[i] for i in range(count.value)]

    def generate(
        self, prompt: Sequence[int], on_token: Any = None, sampling: Any = None, **options: Any
    ) -> tuple[list[int], Result]:
        """Return the sampled tokens and the reason for stopping; `on_token(token)` may end it."""
        said: list[int] = []

        def hear(_: Any, token: int) -> int:
            said.append(token)
            return int(on_token is not None and bool(on_token(token)))

        how = Sampling(**(sampling or {"temperature": 0}))
        asks = Generation(
            sampling=c.pointer(how), on_token=OnToken(hear), **{"max_tokens": 256, **options}
        )
        result = Result()
        call(
            "edge_generate", self.handle, ints(prompt), c.c_size_t(len(prompt)), c.byref(asks),
            c.byref(result),
        )  # fmt: skip
        return said, result
