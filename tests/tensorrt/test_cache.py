"""Engines in the cache: found again, and refused when a byte, the owner or a component differs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from edge.errors import EngineError
from edge.runtime.tensorrt import cache, sealed
from edge.runtime.tensorrt.profiles import EngineSizes
from tests.facts import says

HERE = {
    "bundle": "b" * 64,
    "graph": "1" * 64,
    "weights": "2" * 64,
    "kind": "tensorrt",
    "tensorrt": "10.3.0",
    "plugins": "3" * 64,
    "kernels": "4" * 64,
    "sm": "87",
    "gpu": "Orin",
    "driver": "12.6",
    "flags": "workspace=256",
    "edge": "1.0",
}
SIZES = EngineSizes(window=8, batch=2, capacity=0, chunk=64)
ENGINE = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "engines"


def stored(sizes: EngineSizes = SIZES, engine: bytes = ENGINE, **changed: str) -> Path:
    return cache.store(HERE | changed, sizes, engine, {"made": "here"})


def found(wanted: EngineSizes = SIZES, **changed: str) -> bytes:
    with cache.find("folder/model", HERE | changed, wanted) as engine:
        return bytes(engine.body)


def refusal(wanted: EngineSizes = SIZES, **changed: str) -> EngineError:
    with pytest.raises(EngineError) as caught:
        found(wanted, **changed)
    assert caught.value.remedy is not None
    return caught.value


# -- kept and found --------------------------------------------------------------------------------


def test_what_is_stored_is_found(place: Path) -> None:
    path = stored()
    assert path.parent == place and found() == ENGINE
    assert cache.there(HERE, SIZES) == path
    stored(engine=b"")
    assert found() == b""


def test_only_the_owner_can_look(place: Path) -> None:
    path = stored()
    assert place.stat().st_mode & 0o777 == 0o700
    for file in (path, place / "key"):
        assert file.stat().st_mode & 0o777 == 0o600
    assert (place / "key").stat().st_size == 32


def test_the_header_is_a_line_of_json_and_the_engine_starts_on_a_page() -> None:
    data = stored().read_bytes()
    magic, header, _ = data.split(b"\n", 2)
    assert magic == b"mamba-edge sealed 1"
    facts = json.loads(header)
    assert facts["components"] == HERE and facts["facts"] == {"made": "here"}
    assert facts["key"] == cache.key(HERE, SIZES)
    start = data.index(ENGINE)
    assert start % 4096 == 0 and len(data) == start + len(ENGINE) + 32


def test_the_body_is_mapped_and_closed() -> None:
    stored()
    engine = cache.find("m", HERE, SIZES)
    assert engine.body.readonly and engine.body.contiguous
    engine.close()
    with pytest.raises(ValueError, match="released"):
        engine.body[0]


@pytest.mark.parametrize("component", sorted(cache.COMPONENTS))
def test_every_component_is_part_of_the_key(component: str) -> None:
    assert cache.key(HERE | {component: "other"}, SIZES) != cache.key(HERE, SIZES)


@pytest.mark.parametrize("field", sorted(EngineSizes.model_fields))
def test_every_size_is_part_of_the_key(field: str) -> None:
    other = SIZES.model_copy(update={field: getattr(SIZES, field) + 1})
    assert cache.key(HERE, other) != cache.key(HERE, SIZES)


def test_another_build_for_the_same_use_takes_its_place(place: Path) -> None:
    first = stored()
    for changed in ("tensorrt", "driver", "plugins", "kernels", "edge", "graph", "weights"):
        assert stored(engine=b"new", **{changed: "other"}) == first
    assert [path.name for path in place.glob("*.engine")] == [first.name]
    assert not list(place.glob("*~")), "an old engine is not worth keeping"


def test_other_uses_are_kept_apart(place: Path) -> None:
    paths = {stored()} | {stored(**{each: "other"}) for each in ("gpu", "sm", "kind", "flags")}
    paths.add(stored(SIZES.model_copy(update={"window": 16})))
    assert len(paths) == 6 == len(list(place.glob("*.engine")))


def test_the_newest_is_taken() -> None:
    old = stored(engine=b"plain")
    stored(SIZES.model_copy(update={"window": 16}), engine=b"aliased", flags="aliased")
    os.utime(old, ns=(0, 0))
    here = {name: value for name, value in HERE.items() if name != "flags"}
    with cache.find("m", here, SIZES) as engine:
        assert engine.body == b"aliased"
    os.utime(old)
    with cache.find("m", here, SIZES) as engine:
        assert engine.body == b"plain"


# -- refused ---------------------------------------------------------------------------------------


def test_without_an_engine_the_command_is_told() -> None:
    stored(bundle="c" * 64)
    assert says(refusal().message, "no TensorRT engine", "bundle")
    problem = refusal(SIZES.model_copy(update={"capacity": 9}))
    command = "edge build folder/model --window 8 --batch 2 --capacity 9 --chunk 64"
    assert str(problem.remedy).endswith(command)


@pytest.mark.parametrize("component", sorted(set(cache.COMPONENTS) - {"bundle"}))
def test_a_foreign_engine_names_what_differs(component: str) -> None:
    stored(**{component: "something"})
    problem = refusal()
    assert problem.field == component
    assert cache.COMPONENTS[component] in problem.message
    assert "was something, is " in problem.message
    assert problem.remedy is not None and "edge build folder/model" in problem.remedy


def test_hashes_that_differ_are_told_in_short() -> None:
    stored(plugins="a" * 64)
    assert "was aaaaaaaaaaaa…, is 333333333333…" in refusal().message


def test_of_several_foreign_engines_the_nearest_is_told_of() -> None:
    stored(gpu="other", driver="other", sm="other")
    near = stored(gpu="other")
    assert refusal().file == str(near)


def test_components_that_are_not_known_here_are_not_compared() -> None:
    stored()
    here = {name: value for name, value in HERE.items() if name != "kernels"}
    cache.find("m", here, SIZES).close()
    with pytest.raises(EngineError, match="the compiled kernels was"):
        cache.find("m", here | {"kernels": "5" * 64}, SIZES)


def test_an_engine_that_is_not_exactly_this_one_is_built_again() -> None:
    assert cache.there(HERE, SIZES) is None
    path = stored(edge="0.9")
    assert cache.there(HERE, SIZES) is None
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert cache.there(HERE | {"edge": "0.9"}, SIZES) is None


# -- altered ---------------------------------------------------------------------------------------


def test_a_changed_byte_anywhere_is_refused() -> None:
    path = stored()
    data = path.read_bytes()
    # every byte of magic and seal, every fifth of the header, some of the engine
    start = data.index(ENGINE)
    header = data.index(b" " * 50)
    places = {*range(24), *range(24, header, 5), header, start - 1}
    places |= {*range(len(data) - 32, len(data)), *range(start, len(data) - 32, 300), start}
    for at in sorted(places):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert "edge build" in str(refusal()), at
    path.write_bytes(data)
    assert found() == ENGINE


def test_other_lengths_and_headers_are_refused() -> None:
    path = stored()
    data = path.read_bytes()
    lengths = (0, 1, 19, 20, 25, 600, 4095, 4096, 4097, -33, -32, -1)
    headers = (
        b"{}", b"[]", b"{", b"\xff\xfe", b'{"bytes": "1"}', b'{"bytes": -32}', b'{"bytes": true}',
        b'{"bytes": 1e3}', b'{"bytes": 3, "bytes": 3}', b'{"bytes": ' + b"[" * 5000 + b"}",
    )  # fmt: skip
    others = [data[:length] for length in lengths]
    others += [sealed.MAGIC + header + b"\nabc" + bytes(32) for header in headers]
    for other in (*others, data + b"\0"):
        path.write_bytes(other)
        assert "edge build" in str(refusal()), other[:60]


def test_an_engine_sealed_with_another_key_is_refused(place: Path) -> None:
    path = stored()
    kept = path.read_bytes()
    (place / "key").unlink()
    path.unlink()
    stored()
    path.write_bytes(kept)
    assert "seal" in refusal().message


def test_without_the_key_nothing_is_trusted(place: Path) -> None:
    stored()
    (place / "key").unlink()
    assert "key" in refusal().message
    stored()
    assert found() == ENGINE


def test_a_header_exchanged_for_another_engine_s_is_refused() -> None:
    one, other = stored(), stored(gpu="other")
    data, header = one.read_bytes(), other.read_bytes()[:4096]
    other.write_bytes(header + data[4096:])
    assert "seal" in refusal(gpu="other").message


def test_a_renamed_engine_is_still_the_one_its_header_says() -> None:
    one = stored()
    other = stored(gpu="other", engine=b"other")
    one.write_bytes(other.read_bytes())
    assert refusal().field == "gpu"


# -- other owners ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o666])
@pytest.mark.parametrize("which", ["engine", "key"])
def test_files_that_others_may_touch_are_refused(place: Path, which: str, mode: int) -> None:
    path = stored() if which == "engine" else (stored(), place / "key")[1]
    path.chmod(mode)
    problem = refusal()
    assert f"{mode:04o}" in problem.message and problem.file == str(path)


@pytest.mark.parametrize("mode", [0o705, 0o750, 0o720, 0o777])
def test_a_folder_that_others_may_enter_is_refused(place: Path, mode: int) -> None:
    stored()
    place.chmod(mode)
    assert refusal().file == str(place)
    with pytest.raises(EngineError, match=f"{mode:04o}"):
        stored()
    with pytest.raises(EngineError, match=f"{mode:04o}"):
        sealed.check_writable()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["engine", "key", "folder"])
def test_what_belongs_to_another_user_is_refused(place: Path, which: str) -> None:
    engine = stored()
    path = {"engine": engine, "key": place / "key", "folder": place}[which]
    os.chown(path, 12345, -1)
    problem = refusal()
    assert "12345" in problem.message and problem.file == str(path)


@pytest.mark.parametrize("which", ["engine", "key"])
def test_links_are_not_followed(place: Path, which: str, tmp_path: Path) -> None:
    path = stored() if which == "engine" else (stored(), place / "key")[1]
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert refusal().file == str(path)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_only_files_are_read(kind: str) -> None:
    path = stored()
    path.unlink()
    path.mkdir() if kind == "folder" else os.mkfifo(path, 0o600)
    assert refusal().file == str(path)


# -- folders that cannot be written ----------------------------------------------------------------


def test_a_file_in_the_folder_s_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    for act in (stored, sealed.check_writable):
        with pytest.raises(EngineError, match="EDGE_CACHE=FOLDER"):
            act()


def test_a_file_system_without_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", "/proc/self/fdinfo")
    with pytest.raises(EngineError, match="EDGE_CACHE=FOLDER"):
        stored()


def test_a_folder_that_can_be_written_is_left_as_it_was(place: Path) -> None:
    stored()
    before = sorted(place.iterdir())
    sealed.check_writable()
    assert sorted(place.iterdir()) == before


# -- timings ---------------------------------------------------------------------------------------


def test_timings_are_kept_by_machine_and_version() -> None:
    assert cache.read_timings(HERE) == b""
    cache.write_timings(HERE, b"measured")
    assert cache.read_timings(HERE | {"bundle": "other", "flags": "other"}) == b"measured"
    for machine in ("tensorrt", "sm", "gpu", "driver", "kind"):
        assert cache.read_timings(HERE | {machine: "other"}) == b""


def test_timings_that_were_altered_are_not_used(place: Path) -> None:
    cache.write_timings(HERE, b"measured")
    (path,) = place.glob("*.timings")
    path.write_bytes(path.read_bytes().replace(b"measured", b"Measured"))
    assert cache.read_timings(HERE) == b""


def test_an_engine_is_no_timings(place: Path) -> None:
    cache.write_timings(HERE, b"measured")
    (timings,) = place.glob("*.timings")
    timings.write_bytes(stored().read_bytes())
    assert cache.read_timings(HERE) == b""
