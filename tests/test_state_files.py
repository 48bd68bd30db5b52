"""State files: all damage is refused with the live state untouched, and no save is torn."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edge
from edge.errors import StateError
from edge.plugins.cpu import library
from edge.runtime import statefile
from edge.runtime.buffers import StateBuffers
from edge.runtime.cpu.device import CpuDevice
from edge.runtime.cuda.device import Exclusive
from edge.runtime.cuda.state import DeviceState
from edge.runtime.layout import Identity, StateLayout
from edge.runtime.state import State
from tests.engine_models import CONFIGS, ROUNDED, RUN_KINDS, engine_of, plain, tokens

PREFIX = 8 + 4 + 4 + 8 + 8
IDENTITY = Identity(model="a" * 64, quantization="w8", tokenizer="b" * 64)


# a test with `on` looks at the states of both engines
on_both = pytest.mark.parametrize("on", ["ort", "cpu"] if library.path() else ["ort"])


def buffers(kind: str = "hybrid", *, identity: Identity = IDENTITY, batch: int = 1,
            capacity: int = 32) -> StateBuffers:  # fmt: skip
    """Return a state without an engine, filled with numbers."""
    dtypes = ROUNDED[kind][1] if kind in ROUNDED else None
    layout = StateLayout.of(CONFIGS[plain(kind)], batch=batch, capacity=capacity, dtypes=dtypes)
    state = StateBuffers(layout, identity, window=2)
    rng = np.random.default_rng(5)
    for array in (*state.rings.values(), *state.caches.values()):
        array[:] = 9 * rng.standard_normal(array.shape)
    state.ledger = state.ledger.anchored(2, min(9, capacity), 0)
    return state


def state_on(on: str, kind: str = "hybrid", **how: Any) -> State:
    """Return the same in the memory of an engine."""
    state = buffers(kind, **how)
    if on == "ort":
        return state
    device = Exclusive(CpuDevice(1, library.instruction_set()))
    other = DeviceState(state.layout, state.identity, device, window=2, slots=3)
    other.restore(state.snapshot())
    return other


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    buffers().save(tmp_path / "state", {"transcript": ["hello", {"n": 1.5}]})
    return tmp_path / "state"


def refused(path: Path, state: State | None = None, match: str = ".") -> StateError:
    """Check that loading fails with a StateError naming the file, and the live state does not
    change.
    """
    state = state or buffers()
    before, ledger = state.snapshot(), state.ledger
    with pytest.raises(StateError, match=match) as caught:
        state.load(path)
    assert caught.value.file == str(path)
    assert state.ledger == ledger
    after = state.snapshot()
    for name, array in {**before.recurrent, **before.caches}.items():
        assert np.array_equal(array, {**after.recurrent, **after.caches}[name])
    return caught.value


# -- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), RUN_KINDS)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_loaded_state_continues_bit_for_bit(
    kind: str, name: str, batch: int, tmp_path: Path
) -> None:
    engine = engine_of(kind, name)
    state = engine.new_state(batch=batch, window=3)
    engine.run(tokens(7, batch=batch), state, commit=True)
    engine.run(tokens(2, batch=batch), state)
    state.save(tmp_path / "state", {"a": [None, "ü"]})
    # other windows and capacities hold the same state
    other = engine.new_state(batch=batch, window=1, capacity=24)
    assert other.load(tmp_path / "state") == {"a": [None, "ü"]}
    assert (other.position, other.reach) == (9, 0)
    for seed in range(3):
        step = tokens(1, batch=batch, seed=seed)
        assert np.array_equal(engine.run(step, state).copy(), engine.run(step, other))


@on_both
def test_a_state_before_any_token(on: str, tmp_path: Path) -> None:
    state = state_on(on)
    state.clear()
    state.save(tmp_path / "state")
    other = state_on(on)
    assert other.load(tmp_path / "state") == {}
    assert other.position == 0
    assert not any(array.any() for array in other.arrays().values())


def test_only_the_owner_may_read_it(saved: Path) -> None:
    assert saved.stat().st_mode & 0o777 == 0o600


# -- mismatches ----------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("field", ["model", "quantization", "tokenizer"])
def test_of_another_bundle(on: str, saved: Path, field: str) -> None:
    other = Identity(**{**vars(IDENTITY), field: "other"})
    assert refused(saved, state_on(on, identity=other), f"another {field}").field == field


@on_both
def test_of_another_shape(on: str, saved: Path) -> None:
    refused(saved, state_on(on, "mamba1"), "expected|describe")
    refused(saved, state_on(on, batch=2), "1 sequences")
    refused(saved, state_on(on, capacity=8), "room for 8")


@pytest.mark.parametrize(
    ("theirs", "ours", "field"),
    [
        ("hybrid", "hybrid-mixed", "layers.0.conv_state"),
        ("hybrid-mixed", "hybrid", "layers.0.conv_state"),
        ("mamba1", "mamba1-float16", "layers.1.ssm_state"),
        ("mamba2-int8", "mamba2", "layers.0.conv_state"),
    ],
)
def test_of_another_type(theirs: str, ours: str, field: str, tmp_path: Path) -> None:
    """The identity matches here, unlike between bundles; types are still checked."""
    buffers(theirs).save(tmp_path / "state")
    assert refused(tmp_path / "state", buffers(ours), "this model's is").field == field


def test_a_file_of_an_fp32_model_is_as_it_always_was(saved: Path) -> None:
    """Version 1 has no types in its header, so older files of such models still load."""

    def check(header: dict[str, object], payload: bytes, extra: bytes) -> tuple[bytes, ...]:
        assert header.keys() == {"identity", "position", "batch", "layout"}
        tensors = statefile.parse_tensors(payload)
        assert {tensor.dtype.name for tensor in tensors.values()} == {"float32"}
        return json.dumps(header).encode(), payload, extra

    forge(saved, check)
    buffers().load(saved)


def test_no_state_at_all(tmp_path: Path) -> None:
    refused(tmp_path / "missing", match="No such file")
    refused(tmp_path, match="cannot be read|not a file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", match="not a file")
    (tmp_path / "text").write_text("hello")
    refused(tmp_path / "text", match="not a saved state")


# -- damage --------------------------------------------------------------------------------------


@on_both
def test_cut_short_anywhere(on: str, tmp_path: Path) -> None:
    state = state_on(on, "mamba2")
    state.save(tmp_path / "whole", {"x": 1})
    data = (tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(data)
    for length in range(len(data) - 1, -1, -1):
        os.truncate(cut, length)
        with pytest.raises(StateError):
            state.load(cut)
    refused(cut, state)


@on_both
def test_bytes_after_the_end(on: str, saved: Path) -> None:
    with saved.open("ab") as stream:
        stream.write(b"\0")
    refused(saved, state_on(on), "after its end")
    os.truncate(saved, 1 << 40)  # sparse: a terabyte that does not exist
    refused(saved, state_on(on), "after its end")


def test_a_flipped_bit_anywhere(saved: Path) -> None:
    data = saved.read_bytes()
    state = buffers()
    header = PREFIX + 32 + struct.unpack_from("<I", data, 12)[0]
    places = [*range(header), *range(header, len(data), 97), len(data) - 1]
    for place in places:
        for bit in (0, 7):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            saved.write_bytes(flipped)
            with pytest.raises(StateError):
                state.load(saved)
    refused(saved)


def forge(
    path: Path, change: Callable[[dict[str, object], bytes, bytes], tuple[bytes, ...]]
) -> None:
    """Rewrite a state file with a matching digest, as a hostile or buggy writer would."""
    data = path.read_bytes()
    magic, version, header, payload, _ = struct.unpack_from("<8sIIQQ", data)
    at = PREFIX + 32
    parts = (
        json.loads(data[at : at + header]),
        data[at + header : at + header + payload],
        data[at + header + payload :],
    )
    new = change(*parts)
    prefix = struct.pack("<8sIIQQ", magic, version, *(len(part) for part in new))
    path.write_bytes(prefix + statefile.digest(prefix, *new) + b"".join(new))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: {**h, "position": -1}, "number of tokens"),
        (lambda h: {**h, "position": 2**70}, "number of tokens"),
        (lambda h: {**h, "position": 9.0}, "number of tokens"),
        (lambda h: {**h, "position": True}, "number of tokens"),
        (lambda h: {**h, "position": 8}, "describe"),
        (lambda h: {**h, "batch": "1"}, "sequences"),
        (lambda h: {**h, "more": 1}, "describe"),
        (lambda h: {**h, "layout": {}}, "describe"),
        (lambda h: {**h, "identity": 3}, "understood"),
        (lambda h: {**h, "identity": {}}, "another model"),
        (lambda h: [h], "understood"),
    ],
)
def test_a_header_that_lies(saved: Path, change, match: str) -> None:  # type: ignore[no-untyped-def]
    forge(saved, lambda h, p, e: (json.dumps(change(h)).encode(), p, e))
    refused(saved, match=match)


@pytest.mark.parametrize(
    "header", [b"", b"\xff", b"[" * 100_000, b'{"a":1,"a":2}', b'{"position":NaN}']
)
def test_a_header_that_is_no_json(saved: Path, header: bytes) -> None:
    forge(saved, lambda h, p, e: (header, p, e))
    refused(saved, match="JSON")


def test_extra_that_is_no_object(saved: Path) -> None:
    for extra, match in ((b"[" * 100_000, "nested"), (b"[]", "object"), (b"{", "JSON")):
        forge(saved, lambda h, p, e, extra=extra: (json.dumps(h).encode(), p, extra))
        assert refused(saved, match=match).field == "extra"


@on_both
def test_a_payload_of_other_tensors(on: str, saved: Path) -> None:
    def with_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> None:
        def rewrite(h: dict[str, object], p: bytes, e: bytes) -> tuple[bytes, ...]:
            tensors = dict(statefile.parse_tensors(p))
            change(tensors)
            return json.dumps(h).encode(), statefile.format_tensors(tensors), e

        forge(saved, rewrite)

    name = "layers.0.ssm_state"
    whole = saved.read_bytes()
    for change, match in (
        (lambda t: t.pop(name), "this model's tensors"),
        (lambda t: t.update({name: t[name][..., :-1].copy()}), "this model's tensors"),
        (lambda t: t.update({name: t[name].astype(np.float64)}), "is float64, this model's is"),
        (lambda t: t.update({name: np.full_like(t[name], np.nan)}), "not finite"),
        (lambda t: t.update({name: np.full_like(t[name], -np.inf)}), "not finite"),
    ):
        saved.write_bytes(whole)
        with_tensors(change)
        refused(saved, state_on(on), match)
    saved.write_bytes(whole)
    forge(saved, lambda h, p, e: (json.dumps(h).encode(), b"\xff" * len(p), e))
    refused(saved, state_on(on), "safetensors")


def test_half_floats_that_are_not_finite(tmp_path: Path) -> None:
    """An fp16 state overflows to infinity where an fp32 one would not."""
    state, path = buffers("hybrid-mixed"), tmp_path / "state"
    state.save(path)
    name = "layers.0.ssm_state"
    infinite = state.snapshot().recurrent[name]
    infinite.flat[-1] = np.inf

    def rewrite(h: dict[str, object], p: bytes, e: bytes) -> tuple[bytes, ...]:
        tensors = {**statefile.parse_tensors(p), name: infinite}
        return json.dumps(h).encode(), statefile.format_tensors(tensors), e

    forge(path, rewrite)
    assert refused(path, buffers("hybrid-mixed"), "not finite").field == name
    state.rings[name][2].flat[-1] = np.inf
    with pytest.raises(StateError, match="not finite"):
        state.save(path)


def test_types_numpy_does_not_have(saved: Path) -> None:
    def rewrite(h: dict[str, object], p: bytes, e: bytes, new: str) -> tuple[bytes, ...]:
        length = struct.unpack_from("<Q", p)[0]
        header = p[8 : 8 + length].replace(b'"F32"', b'"%s"' % new.encode(), 1)
        return json.dumps(h).encode(), struct.pack("<Q", len(header)) + header + p[8 + length :], e

    whole = saved.read_bytes()
    for new in ("BF16", "F8_E4M3", "I8", "F64", "X"):
        saved.write_bytes(whole)
        forge(saved, lambda h, p, e, new=new: rewrite(h, p, e, new))
        refused(saved, match="safetensors|this model's")


@pytest.mark.parametrize(("offset", "form"), [(12, "<I"), (16, "<Q"), (24, "<Q")])
@pytest.mark.parametrize("length", [0, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_absurd_lengths(saved: Path, offset: int, form: str, length: int) -> None:
    data = bytearray(saved.read_bytes())
    struct.pack_into(form, data, offset, length % (1 << 8 * struct.calcsize(form)))
    saved.write_bytes(data)
    refused(saved, match="expected")


def test_versions_of_the_future_and_the_past(saved: Path) -> None:
    for version in (0, 2, 2**32 - 1):
        data = bytearray(saved.read_bytes())
        struct.pack_into("<I", data, 8, version)
        saved.write_bytes(data)
        assert refused(saved, match=f"version {version}").field == "version"


@given(data=st.binary(max_size=300))
@settings(max_examples=200)
def test_any_bytes_are_refused(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(statefile.MAGIC + data)
    with pytest.raises(StateError):
        statefile.read(path, IDENTITY, StateLayout.of(CONFIGS["hybrid"], capacity=8))


# -- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [{"a": float("nan")}, {"a": object()}, {"a": b"x"}, {1: "not a string"}, {"a": (1, 2)},
     {"a": "\ud800"}],
)  # fmt: skip
def test_extra_must_be_json(saved: Path, extra: dict[str, object]) -> None:
    before = saved.read_bytes()
    with pytest.raises(StateError, match="extra"):
        buffers().save(saved, extra)
    assert saved.read_bytes() == before


def test_extra_is_bounded(saved: Path) -> None:
    deep: dict[str, object] = {}
    for _ in range(100):
        deep = {"a": deep}
    for extra in (deep, {"a": "x" * (statefile.MAX_EXTRA + 1)}):
        with pytest.raises(StateError, match="extra"):
            buffers().save(saved, extra)


@on_both
def test_a_damaged_state_is_not_saved(on: str, saved: Path) -> None:
    before = saved.read_bytes()
    state = state_on(on)
    damaged = state.snapshot()
    damaged.recurrent["layers.0.ssm_state"].flat[0] = np.nan
    state.restore(damaged)
    with pytest.raises(StateError, match="not finite"):
        state.save(saved)
    assert saved.read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == ["state"]


@on_both
def test_a_full_disk_leaves_the_old_file(on: str, saved: Path) -> None:
    """Every size at which writing may stop, by the kernel's own limit on files."""
    before, length = saved.read_bytes(), saved.stat().st_size
    state = state_on(on)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for size in [0, 1, PREFIX, *range(100, length, 601), length - 1]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            with pytest.raises(StateError, match="cannot be written: File too large"):
                state.save(saved, {"transcript": ["hello", {"n": 1.5}]})
            assert [entry.name for entry in saved.parent.iterdir()] == ["state"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert saved.read_bytes() == before


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be written"):
        buffers().save(tmp_path / "missing" / "state")


@pytest.mark.parametrize("name", ["", "-e4b635f", "-db49596"])
def test_a_file_of_an_earlier_version_goes_on_where_it_was(name: str) -> None:
    """Saved by earlier commits, which named the model and the transcript differently, after one
    answer of `demo-draft`; the tokens are those that they generated next. Two name the bundle as it
    is today, whose plan for GPUs has changed since.
    """
    session = edge.load("demo-draft").session()
    assert session.load(Path(__file__).parent / "states" / f"demo-draft{name}.edge") > 0
    answer = session.chat("And of Spain?", max_tokens=24, temperature=0).finish()
    assert list(answer.tokens) == [
        4034, 391, 312, 4037, 4016, 266, 463, 745, 281, 486, 3600, 305, 361, 544, 4029, 6,
    ]  # fmt: skip
