"""Bundles: what is written reads back; what was altered is refused, by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from edge.bundle import BundleWriter, Manifest, open_bundle, stamps
from edge.bundle.strict_json import loads
from edge.config import Mamba2Config, MlpConfig, ModelConfig, RopeConfig
from edge.errors import BundleError, ExportError
from tests.facts import facts, says

FIELDS: dict[str, Any] = {
    "created_by": "test",
    "model": ModelConfig(
        family="t", vocab_size=8, d_model=4, layers=(MlpConfig(d_intermediate=4),)
    ),
    "quantization": {"recipe": "fp32", "bits": 32},
    "opset": {"": 21},
    "graphs": {"ort": "graphs/ort.onnx"},
    "limits": {"chunk": 64},
    "tokenizer": {"kind": "bytes", "vocab_size": 256},
    "provenance": {"source": "x", "family": "t", "fingerprint": "0" * 64},
}


def write(target: Path, weights: bytes = b"w" * 1000) -> Manifest:
    with BundleWriter(target) as writer:
        writer.path("graphs/ort.onnx").write_bytes(b"graph")
        writer.path("weights.bin").write_bytes(weights)
        return writer.finish(**FIELDS)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write(tmp_path / "b")
    return tmp_path / "b"


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = bundle / "manifest.json"
    data = json.loads(path.read_bytes())
    change(data)
    path.write_text(json.dumps(data))


def refused(bundle: Path) -> BundleError:
    with pytest.raises(BundleError) as caught, open_bundle(bundle) as opened:
        opened.verify()
    return caught.value


def test_written_bundle_reads_back(bundle: Path) -> None:
    with open_bundle(bundle) as opened:
        opened.verify()
        assert opened.read("weights.bin") == b"w" * 1000
        assert opened.read("graphs/ort.onnx") == b"graph"
        assert opened.manifest.model == FIELDS["model"]


def test_same_content_gives_same_bytes(bundle: Path, tmp_path: Path) -> None:
    write(tmp_path / "again")
    first, second = (p / "manifest.json" for p in (bundle, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()


def test_missing_file(bundle: Path) -> None:
    (bundle / "weights.bin").unlink()
    assert "missing weights.bin" in str(refused(bundle))


def test_truncated_file_at_every_cut(bundle: Path) -> None:
    whole = (bundle / "weights.bin").read_bytes()
    for cut in (0, 1, 500, 999):
        (bundle / "weights.bin").write_bytes(whole[:cut])
        problem = refused(bundle)
        assert f"has {cut} bytes, the manifest says 1000" in str(problem)
        assert problem.file is not None and problem.file.endswith("weights.bin")


def test_trailing_bytes(bundle: Path) -> None:
    with (bundle / "weights.bin").open("ab") as file:
        file.write(b"!")
    assert "has 1001 bytes" in str(refused(bundle))


def test_sparse_terabyte_is_refused_before_reading(bundle: Path) -> None:
    os.truncate(bundle / "weights.bin", 1 << 40)
    assert f"has {1 << 40} bytes" in str(refused(bundle))


@pytest.mark.parametrize("offset", [0, 1, 499, 999])
def test_one_flipped_bit(bundle: Path, offset: int) -> None:
    data = bytearray((bundle / "weights.bin").read_bytes())
    data[offset] ^= 1
    (bundle / "weights.bin").write_bytes(data)
    problem = refused(bundle)
    assert "SHA-256" in str(problem) and "weights.bin" in str(problem)


def test_every_flipped_bit_of_the_manifest_is_noticed(bundle: Path) -> None:
    with open_bundle(bundle) as opened:
        fingerprint = opened.fingerprint
    path = bundle / "manifest.json"
    original = path.read_bytes()
    for index in range(0, len(original), 7):
        path.write_bytes(original[:index] + bytes([original[index] ^ 4]) + original[index + 1 :])
        try:
            with open_bundle(bundle) as opened:
                assert opened.fingerprint != fingerprint
        except BundleError:
            pass


def test_extra_file(bundle: Path) -> None:
    (bundle / "graphs" / "more.bin").write_bytes(b"x")
    assert "graphs/more.bin" in str(refused(bundle))


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "graphs/../../x", "a\\b", "a\0b", "", "./w", "a//b", "ä", "x" * 256],
)
def test_path_that_leaves_the_folder(bundle: Path, path: str) -> None:
    edit_manifest(bundle, lambda m: m["files"][0].update(path=path))
    problem = refused(bundle)
    assert problem.field is not None and problem.field.startswith("files.0.path")


@pytest.mark.parametrize("version", [0, 2, "1", True, 1.0, None, 10**30, [1]])
def test_unknown_schema_version(bundle: Path, version: object) -> None:
    edit_manifest(bundle, lambda m: m.update(schema_version=version))
    problem = refused(bundle)
    assert problem.field == "schema_version" and problem.remedy is not None


def test_unknown_and_missing_keys_are_named(bundle: Path) -> None:
    edit_manifest(bundle, lambda m: m["model"].update(surprise=1))
    assert refused(bundle).field == "model.surprise"
    edit_manifest(bundle, lambda m: (m["model"].pop("surprise"), m["model"].pop("d_model")))
    assert refused(bundle).field == "model.d_model"


@pytest.mark.parametrize("spell", [str, float, bool])
def test_a_number_is_a_number_and_nothing_that_equals_it(
    bundle: Path, spell: Callable[[int], object]
) -> None:
    """The C library refuses the same: tests/test_libedge_hostile.py."""
    edit_manifest(
        bundle,
        lambda m: (
            m["quantization"].update(bits=spell(8)),
            m["model"].update(d_model=spell(m["model"]["d_model"])),
            m["files"][0].update(size=spell(m["files"][0]["size"])),
            m["limits"].update(chunk=spell(1)),
        ),
    )
    said = str(refused(bundle))
    fields = "quantization.bits", "model.d_model", "files.0.size", "limits.chunk"
    assert all(says(said, f"{field}: ", "integer") for field in fields), said


def test_text_is_an_infinity_where_a_limit_may_be_one_alone() -> None:
    mamba2 = Mamba2Config(d_inner=8, d_ssm=8, head_dim=4)
    data = json.loads(mamba2.model_dump_json())
    assert Mamba2Config.model_validate_json(json.dumps(data), strict=True) == mamba2
    for limit in (["0", "inf"], [0, "1e9"], [True, "inf"], [0, "nan"]):
        with pytest.raises(ValidationError, match="dt_limit"):
            Mamba2Config.model_validate_json(json.dumps(data | {"dt_limit": limit}), strict=True)
    with pytest.raises(ValidationError, match="theta"):
        RopeConfig.model_validate_json('{"dim": 4, "theta": "inf"}', strict=True)


def test_all_faults_of_a_manifest_are_told_at_once(bundle: Path) -> None:
    edit_manifest(
        bundle,
        lambda m: (m["model"].pop("d_model"), m["limits"].update(chunk=0), m.update(opset=5)),
    )
    said = str(refused(bundle))
    assert all(field in said for field in ("model.d_model", "limits.chunk", "opset"))


def test_duplicate_entry_and_unlisted_graph(bundle: Path) -> None:
    edit_manifest(bundle, lambda m: m["files"].append(m["files"][0]))
    assert "listed twice" in str(refused(bundle))
    edit_manifest(bundle, lambda m: (m["files"].pop(), m["graphs"].update(ort="graphs/no.onnx")))
    assert "graphs/no.onnx" in str(refused(bundle))


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
def test_file_replaced_by_something_else(bundle: Path, tmp_path: Path, kind: str) -> None:
    weights = bundle / "weights.bin"
    if kind == "symlink":
        shutil.move(weights, tmp_path / "real")
        weights.symlink_to(tmp_path / "real")
    else:
        weights.unlink()
        os.mkfifo(weights) if kind == "fifo" else weights.mkdir()
    assert "weights.bin" in str(refused(bundle))


def test_linked_folder_inside_is_not_followed(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle / "graphs", tmp_path / "graphs")
    (bundle / "graphs").symlink_to(tmp_path / "graphs")
    assert "graphs" in str(refused(bundle))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff", b'{"a":1,"a":2}', b"[" * 10**5, b'{"x": NaN}']
)
def test_malformed_manifest(bundle: Path, text: bytes) -> None:
    (bundle / "manifest.json").write_bytes(text)
    assert "manifest.json" in str(refused(bundle))


def test_not_a_bundle(tmp_path: Path) -> None:
    assert "edge export" in str(refused(tmp_path))
    assert "edge export" in str(refused(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("x")
    assert "not a folder" in str(refused(tmp_path / "file"))


def test_swap_after_the_check_is_not_seen(bundle: Path) -> None:
    with open_bundle(bundle) as opened:
        opened.fd("weights.bin")
        replacement = bundle / "other"
        replacement.write_bytes(b"e" * 1000)
        os.replace(replacement, bundle / "weights.bin")
        assert opened.read("weights.bin") == b"w" * 1000


def test_stamp_spares_hashing_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stamps, "SMALLEST", 1000)
    write(tmp_path / "b")
    with open_bundle(tmp_path / "b") as opened:
        entry = opened.manifest.entry("weights.bin")
        assert entry is not None
        fd = os.open(tmp_path / "b" / "weights.bin", os.O_RDONLY)
        assert not stamps.is_known(opened.fingerprint, entry, fd)
        opened.verify()
        assert stamps.is_known(opened.fingerprint, entry, fd)
        os.close(fd)
    data = bytearray(b"w" * 1000)
    data[7] = 0
    (tmp_path / "b" / "weights.bin").write_bytes(data)
    assert "SHA-256" in str(refused(tmp_path / "b"))


def test_writer_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), BundleWriter(tmp_path / "b") as writer:
        writer.path("weights.bin").write_bytes(b"x")
        raise RuntimeError("interrupted")
    assert list(tmp_path.iterdir()) == []


def test_writer_replaces_a_bundle_but_nothing_else(bundle: Path, tmp_path: Path) -> None:
    write(bundle, weights=b"new")
    with open_bundle(bundle) as opened:
        assert opened.read("weights.bin") == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    with pytest.raises(ExportError, match="not a bundle"):
        BundleWriter(precious)
    assert (precious / "thesis.txt").read_text() == "years"


@pytest.mark.parametrize(
    "manifest",
    ['{"manifest_version": 3}', '{"files": [1], "schema_version": 1, "model": 1}', "[", ""],
)
def test_writer_replaces_no_folder_of_another_manifest(manifest: str, tmp_path: Path) -> None:
    """Browser extensions and many other things have a manifest.json."""
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "script.js").write_text("mine")
    with pytest.raises(ExportError, match=facts("exists", "not a bundle")):
        BundleWriter(tmp_path)


def test_writer_loses_no_file_that_was_put_into_a_bundle(bundle: Path) -> None:
    (bundle / "talks").mkdir()
    (bundle / "talks" / "mine.state").write_text("saved there")
    with pytest.raises(ExportError, match=r"would be lost: talks/mine\.state"):
        write(bundle)
    assert (bundle / "talks" / "mine.state").is_file()
    (bundle / "talks" / "mine.state").unlink()
    (bundle / "weights.bin").unlink()
    write(bundle)


def test_strict_json_depth_counts_brackets_outside_strings_only() -> None:
    assert loads(b'{"a": "[[[[\\"[[", "b": [1]}', max_depth=2) == {"a": '[[[["[[', "b": [1]}
    with pytest.raises(ValueError, match="nested 3 deep"):
        loads(b"[[[1]]]", max_depth=2)
