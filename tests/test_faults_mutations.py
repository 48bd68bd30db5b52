"""Mutations of everything that this package parses itself: a typed error, or a sound value.

There are 125,000; EDGE_MUTATIONS=8 makes it a million.

Parsers of other packages are behind hashes and their own checks (tests/test_faults_bundles.py). A
hang shows as a test that does not end; a crash ends the worker.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from edge import protobuf
from edge.bundle import strict_json
from edge.bundle.manifest import SCHEMA_VERSION, Manifest
from edge.bundle.strict_json import read_document as parse_document
from edge.errors import EdgeError, StateError
from edge.launch import Launch, LaunchPlan, Pointer, Program, Size, Variant, Weight
from edge.runtime import statefile
from edge.runtime.layout import Identity, StateLayout
from tests.mutations import mutated
from tests.session_models import bundle, model
from tests.test_faults_saving import in_memory

# groups that different processes take
GROUPS = 2
TIMES = int(os.environ.get("EDGE_MUTATIONS", "1"))
COUNTS = {"manifest": 12_500, "plan": 37_500, "state": 6_250, "json": 34_375, "wire": 34_375}
Parse = Callable[[bytes, int], None]


def manifest_bytes() -> tuple[bytes, Parse]:
    data = json.loads((bundle("base") / "manifest.json").read_text())
    # mutations in long lists add nothing new
    data["accuracy"] = {}

    def parse(raw: bytes, seed: int) -> None:
        parse_document(raw, Path("manifest.json"), Manifest, SCHEMA_VERSION, None)

    return json.dumps(data).encode(), parse


def plan_bytes() -> tuple[bytes, Parse]:
    pointer = Pointer(space="weight", name="w", at=3)
    plan = LaunchPlan(
        variants=(
            Variant(
                kernel="a.b", arguments=("x", "n"), types=("*fp32:16", "i32"), constants={"N": 4}
            ),
        ),
        launches=(Launch(variant=0, grid=(Size(of="TB"),) * 3, arguments=(pointer, Size(of="T"))),),
        programs=(Program(kind="chain", max_rows=1, launches=(0,)),),
        values={},
        inputs={},
        weights={"w": Weight(dtype="f32", offset=0, elements=64)},
        taps=(4,),
    )

    def parse(raw: bytes, seed: int) -> None:
        try:
            LaunchPlan.model_validate_json(raw)
        except ValidationError:
            return

    return plan.to_json(), parse


def json_bytes() -> tuple[bytes, Parse]:
    text = b'{"a": [1, 2.5e3, {"b": "c\\n\\u00e9", "d": [[], {}]}], "e": null, "f": -0.0}'

    def parse(raw: bytes, seed: int) -> None:
        try:
            value = strict_json.loads(raw)
        except ValueError:
            return
        json.dumps(value, allow_nan=False)

    return text, parse


def wire_bytes() -> tuple[bytes, Parse]:
    inner = protobuf.put(1, 0, 300) + protobuf.put(2, 2, b"piece") + protobuf.put(3, 5, b"\0" * 4)
    data = (
        protobuf.put(1, 2, inner) * 3 + protobuf.put(7, 1, b"\1" * 8) + protobuf.put(9, 0, 1 << 40)
    )

    def parse(raw: bytes, seed: int) -> None:
        try:
            for number, _, value in protobuf.fields(raw):
                if number == 1 and isinstance(value, bytes):
                    list(protobuf.fields(value))
        except ValueError:
            return

    return data, parse


def state_bytes(folder: Path) -> tuple[bytes, Parse]:
    config = model("hybrid").config
    layout = StateLayout.of(config, capacity=4)
    identity = Identity(model="m" * 64, quantization="fp32", tokenizer="t")
    rng = np.random.default_rng(1)
    shapes = layout.recurrent | layout.cache_shapes(2)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    file = folder / "state"
    statefile.write(file, identity, layout, 2, tensors, {"messages": ["hello"], "n": [1, 2]})
    good = file.read_bytes()
    head = struct.calcsize("<8sIIQQ")

    def parse(raw: bytes, seed: int) -> None:
        if seed % 2:  # as if written so: the digest fits
            rest = raw[:head] + raw[head + 32 :]
            raw = raw[:head] + hashlib.sha256(rest).digest() + raw[head + 32 :]
        file.write_bytes(raw)
        try:
            saved = statefile.read(file, identity, layout)
        except StateError:
            return
        assert {name: t.shape for name, t in saved.tensors.items()} == {
            name: layout.cache_shapes(saved.position).get(name, layout.recurrent.get(name))
            for name in saved.tensors
        }
        assert all(np.isfinite(tensor).all() for tensor in saved.tensors.values())

    return good, parse


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("case", COUNTS)
def test_mutations(case: str, group: int) -> None:
    with in_memory() as folder:
        mutate(case, group, folder)


def mutate(case: str, group: int, folder: Path) -> None:
    makers: dict[str, Callable[[], tuple[bytes, Parse]]] = {
        "manifest": manifest_bytes,
        "plan": plan_bytes,
        "state": lambda: state_bytes(folder),
        "json": json_bytes,
        "wire": wire_bytes,
    }
    good, parse = makers[case]()
    parse(good, 0)
    each = TIMES * COUNTS[case] // GROUPS
    rng = random.Random()
    for seed in range(group * each, (group + 1) * each):
        rng.seed(seed)
        raw = mutated(good, rng)
        try:
            parse(raw, seed)
        except EdgeError:
            continue
        except BaseException as problem:
            pytest.fail(f"{case}, seed {seed}: {problem!r} of {raw[:300]!r}")
