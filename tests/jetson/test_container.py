"""The Dockerfiles and the service unit refer to existing things. That they run on a board is
unproven.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge.apps.cli import app
from edge.apps.serve import KEY_VARIABLE
from edge.runtime.tensorrt.library import VARIABLE
from tests.jetson import boards

ROOT = boards.JETSON.parent
FILES = sorted(boards.JETSON.glob("Dockerfile.*"))
SERVICE = boards.JETSON / "edge-serve.service"
LINKS = ("apps", "export", "plugins", "runtime")


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return (INSTRUCTION, the rest) for each; lines are joined, comments removed."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(name.upper(), rest) for name, rest in found]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
class TestDockerfiles:
    def test_the_base_image_is_named_by_a_tag_and_taken_by_its_digest(
        self, file: Path, tmp_path: Path
    ) -> None:
        bases = [rest for name, rest in instructions(file) if name in ("ARG", "FROM")]
        assert bases[1:] == ["$BASE"]
        _, colon, tag = bases[0].rpartition(":")
        assert colon and re.fullmatch(r"[\w.-]*\d[\w.-]*", tag), bases
        name = bases[0].removeprefix("BASE=")
        image = f"{name.rpartition(':')[0]}@sha256:{'a' * 64}"
        # the tag means another image from the second build on
        docker, asked = tmp_path / "docker", tmp_path / "asked"
        docker.write_text(
            f"""#!/bin/sh
echo "$*" >> {asked}
[ "$1" != image ] || echo "other/name@sha256:{"b" * 64}\n{image}"
"""
        )
        docker.chmod(0o755)
        outside = {"PATH": f"{tmp_path}:/usr/bin:/bin", "EDGE_BASE_IMAGES": str(tmp_path / "kept")}
        call = [boards.JETSON / "image.sh", file.suffix[1:], "--pull"]
        for _ in range(2):
            subprocess.run(call, env=outside, check=True, capture_output=True)
            docker.write_text(docker.read_text().replace(image, image.replace("a" * 64, "c" * 64)))
        builds = [line for line in asked.read_text().splitlines() if line.startswith("build ")]
        assert len(builds) == 2 and asked.read_text().count("pull --platform") == 1
        assert all(
            f"--build-arg BASE={image} -t edge:{file.suffix[1:]} --pull" in b for b in builds
        )
        # a daemon that reports no digest
        (tmp_path / "kept").unlink()
        docker.write_text("#!/bin/sh\n")
        refused = subprocess.run(call, env=outside, capture_output=True, text=True)
        assert refused.returncode == 1 and "no digest" in refused.stderr

    def test_every_source_exists_and_nothing_is_missing(self, file: Path) -> None:
        sources: list[str] = []
        for name, rest in instructions(file):
            if name in ("COPY", "ADD"):
                words = [word for word in shlex.split(rest) if not word.startswith("--")]
                sources += words[:-1]
        assert all((ROOT / source).exists() for source in sources), sources
        # the four links of edge/ point to sibling folders
        needed = {"edge", *LINKS, "pyproject.toml", "README.md", "LICENSE", "NOTICE"}
        assert needed <= set(sources)
        assert not [s for s in sources if s.endswith((".engine", ".plan"))]

    def test_it_does_not_run_as_root_and_builds_no_engine(self, file: Path) -> None:
        users = [rest for name, rest in instructions(file) if name == "USER"]
        assert users and users[-1] not in ("root", "0")
        ran = " ".join(rest for name, rest in instructions(file) if name == "RUN")
        assert "edge build" not in ran and "sudo" not in ran

    def test_it_installs_with_the_pins_of_its_jetpack(self, file: Path) -> None:
        constraints = f"constraints-{file.suffix[1:]}.txt"
        text = " ".join(rest for _, rest in instructions(file))
        assert f"--constraint /opt/edge/{constraints}" in text
        assert f"jetson/{constraints}" in text
        assert f"{VARIABLE}=/opt/edge/tensorrt/libedge_tensorrt.so" in text


def service() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(SERVICE)
    return parser


def test_the_service_calls_edge_as_it_is() -> None:
    unit = service()["Service"]
    (build,) = re.findall(r"exec (.*)'", unit["ExecStartPre"])
    for line in (build, unit["ExecStart"]):
        program, command, *words = shlex.split(line)
        assert program == "/opt/edge/venv/bin/edge"
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}, color=False)
        assert shown.exit_code == 0
        for option in (word for word in words if word.startswith("--")):
            assert option in shown.output, option


@pytest.mark.parametrize(("engine", "builds"), [("ort", False), ("tensorrt", True)])
def test_the_service_builds_an_engine_where_one_is_wanted(
    tmp_path: Path, engine: str, builds: bool
) -> None:
    called = tmp_path / "called"
    program = tmp_path / "edge"
    program.write_text(f'#!/bin/sh\necho "$@" > {called}\n')
    program.chmod(0o755)
    line = service()["Service"]["ExecStartPre"].replace("/opt/edge/venv/bin/edge", str(program))
    done = subprocess.run(shlex.split(line), env={"ENGINE": engine, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0 and called.exists() is builds


def test_the_service_is_hardened_and_has_a_key() -> None:
    text, unit = SERVICE.read_text(), service()["Service"]
    assert unit["DynamicUser"] == unit["NoNewPrivileges"] == "yes"
    assert unit["ProtectSystem"] == "strict" and unit["CapabilityBoundingSet"] == ""
    assert unit["Restart"] == "on-failure" and "MemoryMax" in unit
    assert f"{KEY_VARIABLE}=" in text and "EnvironmentFile" in unit
    assert f"EDGE_CACHE=/var/cache/{unit['CacheDirectory']}" in unit["Environment"]
    # these keep a GPU's driver from working
    assert not {"PrivateDevices", "DevicePolicy", "MemoryDenyWriteExecute"} & set(unit)


def test_systemd_accepts_the_service(tmp_path: Path) -> None:
    checker = shutil.which("systemd-analyze")
    if checker is None:
        pytest.skip("no systemd-analyze here: apt install systemd")
    unit = tmp_path / SERVICE.name
    program = shutil.which("true")
    assert program is not None
    unit.write_text(SERVICE.read_text().replace("/opt/edge/venv/bin/edge", program))
    done = subprocess.run(
        [checker, "verify", "--man=no", str(unit)],
        capture_output=True, text=True, env=dict(os.environ, SYSTEMD_COLORS="0"),
    )  # fmt: skip
    about = [line for line in done.stderr.splitlines() if SERVICE.name in line]
    assert not about, about
