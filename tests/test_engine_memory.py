"""The memory plan equals what states take; bundles are checked before they are loaded."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edge
from edge.apps import chat, cli
from edge.apps.exits import exit_code_of
from edge.apps.info import collect, describe
from edge.apps.serve.worker import ModelWorker
from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.errors import BundleError, EngineError, StateError
from edge.export.exporter import export_checkpoint
from edge.plugins.cpu import library
from edge.runtime import memory, ort_session
from edge.runtime.cpu import planning
from edge.runtime.cuda.weights import DeviceWeights
from edge.runtime.engines import open_engine
from edge.runtime.layout import Identity, StateLayout
from tests import transformers_checkpoints
from tests.engine_models import ALL_KINDS, ROUNDED, config_of, engine, plain, tokens
from tests.int8_models import save_int8_bundle


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    source = transformers_checkpoints.save_bamba(folder / "checkpoint")
    export_checkpoint(source, folder / "bundle")
    return folder / "bundle"


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(("batch", "window", "capacity"), [(1, 8, None), (3, 2, 50)])
def test_the_plan_is_what_a_state_takes(
    kind: str, batch: int, window: int, capacity: int | None
) -> None:
    sizes = {"batch": batch, "window": window, "capacity": capacity}
    plan = engine(kind).memory_plan(**sizes)  # type: ignore[arg-type]
    state = engine(kind).new_state(**sizes)  # type: ignore[arg-type]
    assert plan["state_ring"] + plan["kv_cache"] == state.nbytes
    logs = [ring.nbytes for name, ring in state.rings.items() if name.endswith("_log")]
    based = [state.layout.bytes_of(name, state.layout.recurrent[name]) for name in state.bases]
    slots, bases = (4 if logs else 2) * window + 1, min(2 * window, 6) + 2
    slot = plan["state"] - sum(based)
    assert plan["state_ring"] == slots * slot + bases * sum(based) + sum(logs)
    assert plan["logits"] == state.workspace.logits(1).base.nbytes
    parts = ("weights", "state_ring", "kv_cache", "logits", "workspace")
    assert plan["total"] == sum(plan[part] for part in parts)
    assert all(plan[part] >= 0 for part in plan)


@pytest.mark.parametrize("kind", ROUNDED)
def test_every_value_takes_what_its_type_takes(kind: str) -> None:
    state, full = engine(kind).new_state(), engine(plain(kind)).new_state()
    dtypes = ROUNDED[kind][1]
    for name, ring in state.rings.items():
        assert ring.dtype == np.dtype(dtypes.get(name, np.float32))
        smaller = {"int8": 4, "float16": 2}.get(dtypes.get(name, ""), 1)
        assert ring.nbytes * smaller == full.rings[name].nbytes
        assert ring.ctypes.data % 64 == 0
    assert engine(kind).memory_plan()["state"] < engine(plain(kind)).memory_plan()["state"]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_snapshot_costs_one_state_and_the_rows_in_use(kind: str) -> None:
    state = engine(kind).new_state()
    engine(kind).run(tokens(10), state, commit=True)
    rows = sum(cache[:, :, :10].nbytes for cache in state.caches.values())
    plan = engine(kind).memory_plan()
    assert state.snapshot().nbytes == plan["state"] + rows
    assert plan["snapshot"] == plan["state"] + plan["kv_cache"]
    assert (plan["kv_cache"] > 0) == config_of(kind).has_attention


def test_a_bundle_says_what_its_states_are_kept_in(tmp_path: Path) -> None:
    with open_bundle(save_int8_bundle(tmp_path / "b", ("int8", "fp16"))) as bundle:
        facts = collect(bundle, context=64)
        before = memory.plan_bundle(bundle.manifest, capacity=64)
        loaded = open_engine(bundle, "ort", threads=1)
    state = loaded.new_state(capacity=64)
    loaded.run(tokens(5), state)
    ring = {name: array.dtype.name for name, array in state.rings.items()}
    assert set(ring.values()) == {"int8", "float16"} == set(facts["state_dtypes"])
    snapshot = state.snapshot()
    assert facts["state_bytes"] == before["state"]
    assert facts["state_bytes"] == sum(a.nbytes for a in snapshot.recurrent.values())
    assert (
        facts["kv_cache_bytes"]
        == before["kv_cache"]
        == sum(cache.nbytes for cache in state.caches.values())
    )
    assert "partly float16 and int8" in describe(facts)
    assert {facts["kv_cache_dtype"]} == {cache.dtype.name for cache in state.caches.values()}
    assert before["state_ring"] + before["kv_cache"] == state.nbytes


def test_a_manifest_that_says_other_types(tmp_path: Path) -> None:
    folder = save_int8_bundle(tmp_path / "b", ("int8", "fp16"))
    said = json.loads((folder / "manifest.json").read_text())
    said["state_dtypes"]["layers.0.ssm_state"] = "float16"
    (folder / "manifest.json").write_text(json.dumps(said))
    with open_bundle(folder) as bundle, pytest.raises(EngineError, match="the manifest") as caught:
        open_engine(bundle, "ort", threads=1)
    assert caught.value.field == "layers.0.ssm_state"


def test_the_plan_before_loading(exported: Path) -> None:
    with open_bundle(exported) as bundle:
        before = memory.plan_bundle(bundle.manifest, window=4, capacity=64)
        after = open_engine(bundle, "ort", threads=1).memory_plan(window=4, capacity=64)
    assert before["weights"] > (exported / "weights.bin").stat().st_size
    assert before["snapshots"] == 0
    same = after.keys() - {"weights", "total"}
    assert {key: before[key] for key in same} == {key: after[key] for key in same}
    parts = ("weights", "state_ring", "kv_cache", "logits", "workspace", "program", "snapshots")
    assert before["total"] == max(sum(before[part] for part in parts), before["loading"])


@pytest.mark.skipif(library.path() is None, reason="needs the kernels for CPUs")
def test_the_plan_before_loading_is_that_of_the_engine_cpu(exported: Path) -> None:
    with open_bundle(exported) as bundle:
        sizes: dict[str, Any] = {"window": 4, "capacity": 64}
        before = planning.plan_bundle(bundle.manifest, open_plan(bundle), snapshots=2, **sizes)
        after = open_engine(bundle, "cpu", threads=1).memory_plan(**sizes)
    same = after.keys() - {"weights", "total"}
    assert {key: before[key] for key in same} == {key: after[key] for key in same}
    assert abs(before["weights"] - after["weights"]) <= 0.05 * after["weights"]
    parts = ("weights", "state_ring", "kv_cache", "logits", "workspace", "program", "snapshots")
    assert before["total"] == sum(before[part] for part in parts) >= before["loading"]
    assert before["snapshots"] == 2 * before["snapshot"]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_workspace_of_several_sequences(kind: str) -> None:
    config = config_of(kind)
    fixed = memory.workspace_bytes(config, 0, 1, 0)

    def workspace(batch: int, chunk: int) -> int:
        layout = StateLayout.of(config, batch=batch)
        return memory.plan(config, layout, window=2, chunk=chunk, weights=0)["workspace"] - fixed

    assert workspace(1, 64) > workspace(1, 16) > 0
    if config.has_attention:  # token by token, whatever a run may hold
        assert workspace(3, 64) == workspace(3, 16) < workspace(1, 16)
        assert workspace(6, 16) == 2 * workspace(3, 16)
    else:
        assert workspace(3, 16) == 3 * workspace(1, 16)


def test_refused_before_it_is_loaded() -> None:
    plan = engine("mamba1").memory_plan()
    memory.check_fits(plan)
    memory.check_fits(plan, available=plan["total"])
    with pytest.raises(EngineError, match="MiB are available"):
        memory.check_fits(plan, available=plan["total"] - 1)
    with pytest.raises(EngineError, match="needs"):
        memory.check_fits({"total": 1 << 60})
    available = memory.available_bytes()
    assert available is not None
    assert 0 < available < 1 << 50
    assert memory.private_bytes() > 0


@pytest.mark.parametrize("engine", ["ort", "cpu"])
def test_no_load_begins_that_has_no_room(
    engine: str, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "cpu" and library.path() is None:
        pytest.skip("needs the kernels for CPUs")
    with open_bundle(exported) as bundle:
        sizes = {"window": 1, "capacity": 1}
        if engine == "cpu":
            least = planning.plan_bundle(bundle.manifest, open_plan(bundle), **sizes)["total"]
        else:
            least = memory.plan_bundle(bundle.manifest, **sizes)["total"]
    started: list[object] = []
    monkeypatch.setattr(ort_session, "load", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(DeviceWeights, "read", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(memory, "available_bytes", lambda: least - 1)
    with pytest.raises(EngineError, match="MiB are available") as caught:
        edge.load(exported, engine=engine)
    assert not started
    assert caught.value.file == str(exported)
    assert "fewer bits" in str(caught.value.remedy)
    assert "EDGE_MEMORY_CHECK=off" in str(caught.value.remedy)
    monkeypatch.undo()
    for available in (least, None):
        monkeypatch.setattr(memory, "available_bytes", lambda it=available: it)
        edge.load(exported, engine=engine, threads=1)


def test_a_state_without_room_and_what_is_tried_all_the_same(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = edge.load(exported, threads=1)
    plan = loaded.engine.memory_plan(capacity=64)
    size = plan["state_ring"] + plan["kv_cache"] + plan["logits"]
    monkeypatch.setattr(memory, "available_bytes", lambda: size)
    loaded.session(capacity=64)
    with pytest.raises(StateError, match="MiB are available") as caught:
        loaded.session(capacity=65)
    assert "smaller capacity" in str(caught.value.remedy)
    monkeypatch.setenv(memory.CHECK_VARIABLE, "off")
    loaded.session(capacity=65)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1)
    edge.load(exported, threads=1)


@pytest.mark.parametrize(
    "program", [["edge-chat"], ["edge", "eval"], ["edge", "profile"]], ids=" ".join
)
def test_programs_refuse_it_too(
    program: list[str],
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text of several words\n" * 20)
    rest = {"edge-chat": ["-p", "hello"], "eval": [str(text)], "profile": []}[program[-1]]
    monkeypatch.setattr(sys, "argv", [*program, str(exported), *rest])
    monkeypatch.setattr(sys, "stdin", None)  # closed: nothing is piped in
    monkeypatch.setattr(memory, "available_bytes", lambda: 1)
    app = chat.app if program == ["edge-chat"] else cli.app
    assert exit_code_of(app) == 1
    assert "of memory, 0 MiB are available" in capsys.readouterr().err


def test_a_server_refuses_it_too(exported: Path) -> None:
    def load() -> tuple[Any, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "available_bytes", lambda: 1)
            return edge.load(exported), None

    worker = ModelWorker(load, lambda: None)
    worker.start()
    worker.join(60)
    assert worker.state == "failed"
    assert isinstance(worker.problem, EngineError)


def test_what_control_groups_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def group(path: str, limit: str, used: int, cached: int) -> None:
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")

    own = tmp_path / "cgroup"
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_GROUP", own)
    own.write_text("4:memory:/old\n0::/a/b\n")
    whole = memory.available_bytes()
    assert whole is not None and whole > 1000, "no group says anything"
    group("a", "max", 50, 0)
    group("a/b", "1000", 900, 60)
    assert memory.available_bytes() == 160
    group("a", "500", 450, 0)  # a limit above, shared with others
    assert memory.available_bytes() == 50
    group("a", "500", 600, 0)
    assert memory.available_bytes() == 0
    own.write_text("0::/../outside\n")
    assert (memory.available_bytes() or 0) > 1000
    group(".", "70", 10, 0)  # a container's own group, shown as the root
    assert memory.available_bytes() == 60


def test_a_bundle_runs(exported: Path) -> None:
    with open_bundle(exported) as bundle:
        loaded = open_engine(bundle, threads=1)
        expected = Identity.of_bundle(bundle).model
    state = loaded.new_state()  # the bundle may be closed by now
    assert state.identity.model == expected
    assert np.isfinite(loaded.run(np.array([[1, 2, 3]]), state)).all()


def test_a_file_exchanged_while_loading(exported: Path, tmp_path: Path) -> None:
    for number, harm in enumerate((
        lambda file: os.replace(shutil.copy(file, f"{file}.new"), file),  # the same bytes, new file
        lambda file: os.utime(file),
        lambda file: os.unlink(file),
        lambda file: (os.rename(file, f"{file}.old"), os.symlink(f"{file}.old", file)),
    )):  # fmt: skip
        folder = shutil.copytree(exported, tmp_path / str(number))
        with (
            open_bundle(folder) as bundle,
            pytest.raises(BundleError) as caught,
            ort_session.unchanged(bundle),
        ):
            harm(folder / "weights.bin")
        assert caught.value.file == str(folder / "weights.bin")


def test_damaged_weights_are_found_before_use(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "bundle")
    with (folder / "weights.bin").open("r+b") as stream:
        stream.seek(100)
        stream.write(b"\xff")
    with open_bundle(folder) as bundle, pytest.raises(BundleError, match="SHA-256"):
        open_engine(bundle, threads=1)


def test_a_folder_swapped_while_loading_is_not_read(exported: Path, tmp_path: Path) -> None:
    """The path leads elsewhere and back again: the loaded files are the checked ones."""
    good, evil, path = (tmp_path / name for name in ("good", "evil", "bundle"))
    shutil.copytree(exported, good)
    shutil.copytree(exported, evil)
    weights = bytearray((evil / "weights.bin").read_bytes())
    weights[:] = bytes(len(weights))
    (evil / "weights.bin").write_bytes(weights)
    path.symlink_to(good)
    tokens = np.array([[1, 2, 3]])
    with open_bundle(path) as bundle:
        expected = _first_logits(open_engine(bundle, "ort", threads=1), tokens)
    with open_bundle(path) as bundle:
        bundle.verify()
        path.unlink()
        path.symlink_to(evil)
        loaded = open_engine(bundle, "ort", threads=1)
        path.unlink()
        path.symlink_to(good)
    assert np.array_equal(_first_logits(loaded, tokens), expected)


def _first_logits(engine: Any, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = engine.run(tokens, engine.new_state()).copy()
    return found
