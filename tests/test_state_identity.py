"""A state depends on what its identity covers: not on a bundle's README, and on nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.bundle import open_bundle
from edge.errors import StateError
from edge.runtime import statefile
from edge.runtime.layout import Identity
from edge.runtime.model import resolve
from edge.text.template import Message
from tests.malformed import resigned
from tests.session_models import bundle, model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("demo-draft"), tmp_path / "bundle"))


def saved(folder: Path, to: Path) -> Path:
    with edge.load(folder, threads=1) as model:
        session = model.session()
        session.chat("Hello!", max_tokens=4, temperature=0).finish()
        session.save(to)
    return to


def loads(folder: Path, state: Path) -> int:
    """Return the messages of a loaded conversation."""
    with edge.load(folder, threads=1) as model:
        session = model.session()
        session.load(state)
        return len(session.messages)


def test_what_a_bundle_says_of_itself_is_no_part_of_a_state(folder: Path, tmp_path: Path) -> None:
    state = saved(folder, tmp_path / "state")
    with (folder / "README.md").open("a") as readme:
        readme.write("More.\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["provenance"]["source"] = "elsewhere"
    manifest["generation"] = {"temperature": 0.5}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    resigned(folder)
    assert loads(folder, state) == 2


def test_other_weights_are_another_model(folder: Path, tmp_path: Path) -> None:
    state = saved(folder, tmp_path / "state")
    weights = bytearray((folder / "weights.bin").read_bytes())
    weights[-1] ^= 1
    (folder / "weights.bin").write_bytes(weights)
    resigned(folder)
    with pytest.raises(StateError, match="another model"):
        loads(folder, state)


@pytest.mark.parametrize("damage", ["other weights", "other tokenizer", "smaller caches"])
def test_a_chat_whose_state_cannot_be_used_is_read_again(damage: str, tmp_path: Path) -> None:
    """And continues as if the messages were given anew."""
    kind = "hybrid" if damage == "smaller caches" else "chat"
    ask: dict[str, Any] = {"max_tokens": 5, "temperature": 0}
    theirs, ours = model(kind), model("bytes" if damage == "other tokenizer" else kind)
    if damage == "other weights":
        changed = Path(shutil.copytree(bundle(kind), tmp_path / "changed"))
        weights = bytearray((changed / "weights.bin").read_bytes())
        weights[-1] ^= 1
        (changed / "weights.bin").write_bytes(weights)
        resigned(changed)
        ours = edge.load(changed, threads=1)
    before = theirs.session(system="Be brief.")
    before.chat("Hello!", **ask).finish()
    before.save(tmp_path / "state")
    size = before.position
    session = ours.session(capacity=size - 1) if kind == "hybrid" else ours.session()
    with pytest.raises(StateError):
        session.load(tmp_path / "state")
    assert not session.messages and not session.position
    assert session.load(tmp_path / "state", replay=True) == 0
    said = session.messages
    assert [(m.role, m.content) for m in said] == [(m.role, m.content) for m in before.messages]
    if kind != "hybrid":  # which has no room for more
        again = ours.session().chat([*said, Message("user", "And now?")], **ask).finish()
        assert session.chat("And now?", **ask).finish().tokens == again.tokens
        session.undo()
    session.undo()
    assert not session.messages
    raw = bytearray((tmp_path / "state").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "state").write_bytes(raw)
    with pytest.raises(StateError, match="SHA-256"):
        session.load(tmp_path / "state", replay=True)


def test_states_saved_by_the_whole_manifest_are_still_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bundle(folder) as bundle:
        identity = Identity.of_bundle(bundle)
    assert identity.bundle and identity.bundle != identity.model

    def as_before(ours: Identity) -> dict[str, str]:
        told = {"quantization": ours.quantization, "tokenizer": ours.tokenizer}
        return {"model": ours.bundle, **told}

    with monkeypatch.context() as earlier:
        earlier.setattr(statefile, "told", as_before)
        state = saved(folder, tmp_path / "state")
    assert identity.bundle.encode() in state.read_bytes()
    assert loads(folder, state) == 2
