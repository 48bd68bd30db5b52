"""Damaged or hostile bundles and states: libedge refuses what Python refuses.

`make -C runtime/libedge asan` runs many more of them under the address sanitizer.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import struct
from collections import Counter
from pathlib import Path

import pytest

from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.errors import EdgeError
from tests.libedge import BUNDLE, STATE, CBundle, CModel, EdgeFault
from tests.malformed import file_cases, link_cases, manifest_cases, resigned, text_cases
from tests.mutations import mutated
from tests.test_bundle_sizes import listed, needs_holes
from tests.test_libedge import compiled, folder, native

pytestmark = compiled
# of demo-draft, whose plan is small
SOURCE = "demo-draft"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    shutil.copytree(folder(SOURCE), tmp_path / "bundle")
    return tmp_path / "bundle"


def judged(target: Path) -> str:
    """Return "refused" if C refuses it, else "taken"; what C accepts Python must accept too."""
    try:
        CBundle(target)
    except EdgeFault as fault:
        assert fault.status == BUNDLE and fault.message and fault.file, fault
        return "refused"
    try:
        with open_bundle(target) as opened:
            open_plan(opened)
    except EdgeError as problem:
        raise AssertionError(f"taken, and refused by Python: {problem}") from problem
    return "taken"


def test_every_field_of_a_manifest(target: Path) -> None:
    manifest = target / "manifest.json"
    before = manifest.read_bytes()
    found, wrong = Counter[str](), []
    for number, (name, spoil) in enumerate([*manifest_cases(json.loads(before)), *text_cases()]):
        if number % 7 and not name.startswith("manifest:"):
            continue  # a different number fails differently: every place is covered
        spoil(target)
        try:
            found[judged(target)] += 1
        except AssertionError as problem:
            wrong.append(f"{name}: {problem}"[:300])
        manifest.write_bytes(before)
    assert not wrong, "\n".join(wrong)
    assert found["refused"] > 80 and found["refused"] > 3 * found["taken"]


def test_a_number_is_a_number_and_nothing_that_equals_it(target: Path) -> None:
    manifest = target / "manifest.json"
    before = json.loads(manifest.read_bytes())
    for value in ("8", 8.0, True, "inf"):
        data = copy.deepcopy(before)
        data["quantization"]["bits"] = data["model"]["norm"]["eps"] = value
        data["limits"]["chunk"] = data["files"][0]["size"] = value
        manifest.write_text(json.dumps(data))
        with pytest.raises(EdgeFault) as caught:
            CBundle(target)
        said = str(caught.value)
        fields = "quantization.bits", "limits.chunk", "files.0.size", "model.norm.eps"
        assert all(field in said for field in fields), said
        assert caught.value.file.endswith("manifest.json") and judged(target) == "refused"
    data = copy.deepcopy(before)
    data["generation"]["temperature"] = "inf"
    manifest.write_text(json.dumps(data))
    with pytest.raises(EdgeFault, match="must be a number"):
        CBundle(target)


def test_files_that_are_not_what_they_were(tmp_path: Path) -> None:
    """Damaged, rehashed and loaded: refused, or run as Python would."""
    paths = ["graphs/cuda.json", "weights.bin"]
    found = Counter[str]()
    for _, spoil in [*file_cases(paths), *link_cases(paths)]:
        target = tmp_path / "bundle"
        shutil.copytree(folder(SOURCE), target)
        spoil(target)
        try:
            CModel(target).session()
            found["taken"] += 1
        except EdgeFault as fault:
            assert fault.status == BUNDLE, fault
            found["refused"] += 1
        shutil.rmtree(target)
        (tmp_path / "outside").unlink(missing_ok=True)
    # weights with other values are still weights
    assert found["refused"] >= 0.6 * found.total() and found["taken"] > 0


def test_altered_after_it_was_listed(target: Path) -> None:
    for path in ("weights.bin", "graphs/cuda.json"):
        data = bytearray((target / path).read_bytes())
        data[len(data) // 2] ^= 1
        (target / path).write_bytes(data)
        with pytest.raises(EdgeFault, match="SHA-256") as caught:
            CModel(target)
        assert caught.value.file.endswith(path)
        shutil.copy(folder(SOURCE) / path, target / path)
    os.mkfifo(target / "more")
    with pytest.raises(EdgeFault, match="does not list: more"):
        CBundle(target)


def test_sparse_files_are_not_hashed(target: Path) -> None:
    """What takes no disk would take hours: weights, files called like weights, many others."""
    needs_holes(target)
    before = (target / "manifest.json").read_bytes()
    for sizes, says in (
        ({"x.bin": 200 << 30}, "at most"),
        ({f"docs/x{i}": 3 << 20 for i in range(400)}, "besides weights"),
        ({"weights.bin": 200 << 30}, "is sparse"),
    ):
        listed(target, sizes)
        with pytest.raises(EdgeFault, match=says):
            CBundle(target).verify()
        for name in sizes.keys() - {"weights.bin"}:
            (target / name).unlink()
        (target / "manifest.json").write_bytes(before)


def test_mutated_plans(target: Path) -> None:
    plan = target / "graphs/cuda.json"
    before, found = plan.read_bytes(), Counter[str]()
    for seed in range(100):
        plan.write_bytes(mutated(before, random.Random(seed)))
        resigned(target)
        found[judged(target)] += 1
    assert found["refused"] > 40


def test_plans_that_say_something_else(target: Path) -> None:
    """Well-formed plans that do not belong to the model, or point outside its memory."""
    before = json.loads((target / "graphs/cuda.json").read_text())
    pointer = before["launches"][1]["arguments"][0]
    assert pointer["space"] == "value"
    changes = {
        "launches.1": lambda plan: plan["launches"][1]["arguments"][0].update(at=1 << 40),
        "values.logits": lambda plan: plan["values"]["logits"].update(dtype="f16"),
        "programs": lambda plan: plan["programs"].pop(),
        "launches.0": lambda plan: plan["launches"][0].update(variant=999),
        "weights.": lambda plan: next(iter(plan["weights"].values())).update(offset=1 << 40),
        "logs.": lambda plan: next(iter(plan["logs"].values())).update(width=1),
        "taps": lambda plan: plan.update(taps=[9, -(1 << 63)]),
        "inputs.tokens": lambda plan: plan["inputs"]["tokens"].update(dtype="i8"),
        "launches.0.tokens": lambda plan: plan["variants"][0]["types"].__setitem__(0, "*fp32"),
        "variants.0.constants": lambda plan: plan["variants"][0]["constants"].update(D=1 << 40),
        "variants.0.constants.D": lambda plan: plan["variants"][0]["constants"].update(D=[]),
        "more": lambda plan: plan.update(more=1),
    }
    for field, change in changes.items():
        plan = json.loads(json.dumps(before))
        change(plan)
        (target / "graphs/cuda.json").write_text(json.dumps(plan))
        resigned(target)
        with pytest.raises(EdgeFault) as caught:
            model = CModel(target)
            model.session()
        fault = caught.value
        assert fault.status == BUNDLE and fault.file.endswith("cuda.json"), (field, fault)
        assert fault.field.startswith(field), fault


def test_states_that_were_hashed_anew(tmp_path: Path) -> None:
    """Even with a valid digest, header, tensors and transcript are checked before anything is
    accepted.
    """
    session = native("demo").session(capacity=16)
    session.run([1, 2, 3], 1)
    session.save(tmp_path / "state")
    data = (tmp_path / "state").read_bytes()
    _, _, header, payload, extra = struct.unpack("<8sIIQQ", data[:32])
    parts = [data[64 : 64 + header], data[64 + header : 64 + header + payload],
             data[64 + header + payload :]]  # fmt: skip
    assert len(parts[2]) == extra
    found = Counter[str]()
    rng = random.Random(0)
    for number in range(90):
        changed = list(parts)
        which = number % 3
        # of the payload only the part that names the tensors
        cut = len(changed[which]) if which != 1 else 1000
        changed[which] = mutated(changed[which][:cut], rng) + changed[which][cut:]
        prefix = struct.pack("<8sIIQQ", b"EDGESTAT", 1, *map(len, changed))
        digest = hashlib.sha256(prefix + b"".join(changed)).digest()
        (tmp_path / "other").write_bytes(prefix + digest + b"".join(changed))
        before = session.tokens
        try:
            session.load(tmp_path / "other")
            found["taken"] += 1
        except EdgeFault as fault:
            assert fault.status == STATE, fault
            assert session.tokens == before
            found["refused"] += 1
    assert found["refused"] > 55


def test_plans_of_more_values_than_memory_is_for(target: Path) -> None:
    """Each of the file's two bytes would take fifty."""
    (target / "graphs/cuda.json").write_text("[" + "0," * (1 << 22) + "0]")
    resigned(target)
    with pytest.raises(EdgeFault, match="too many values"):
        CBundle(target)


def test_messages_are_fit_to_print(target: Path) -> None:
    """No control characters from strangers, no partial characters, no files left open."""
    (target / "manifest.json").write_text(
        (target / "manifest.json")
        .read_text()
        .replace("weights.bin", "\\u001b[31m\\u009b\\u0007", 1)
    )
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EdgeFault, match=r"[?]") as caught:
        CBundle(target)
    assert caught.value.message.isprintable(), caught.value
    for length in range(505, 513):
        with pytest.raises(EdgeFault) as caught:
            CBundle(target / ("x" * length + "ü" * 100))
        assert caught.value.file.startswith(str(target)[:8])  # read as strict UTF-8
    assert len(os.listdir("/proc/self/fd")) == before
