"""`edge doctor`: every line comes from running something, and no failure stops it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from edge.apps.doctor import checks as doctor_checks
from edge.apps.doctor import line, summary
from edge.apps.doctor.checks import Finding, Status, examine, judged
from edge.errors import EngineError
from tests.cuda.fake_driver import ran, scenario


def edge(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edge.apps.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


def test_json_has_every_check_and_what_runs_is_ok() -> None:
    facts = json.loads(edge("--json").stdout)
    checks = {check["name"]: check for check in facts["checks"]}
    assert tuple(checks) == tuple(doctor_checks.CHECKS)
    assert set(checks["gpu"]) == {"name", "status", "detail", "remedy"}
    assert checks["machine"]["status"] == checks["onnxruntime"]["status"] == "ok"
    assert "a step of demo-draft, 4096 logits" in checks["onnxruntime"]["detail"]


def test_a_bundle_that_is_not_there_is_a_finding() -> None:
    found = judged("onnxruntime", doctor_checks.CHECKS["onnxruntime"], "no-such-bundle")
    assert line(found).startswith("BROKEN  onnxruntime     no-such-bundle")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("kill -ILL $$", "its process ended with SIGILL"),
        ("echo of little use >&2; exit 3", "its process ended with exit code 3: of little use"),
        ("exit 0", "its process ended with exit code 0"),
        ("sleep 20", "did not finish within 1 s"),
    ],
)
def test_a_check_that_crashes_or_hangs_is_a_finding(
    script: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(doctor_checks, "LIMIT_S", 1.0)
    assert examine("gpu", "demo-draft") == Finding("gpu", "broken", expected)


def test_an_error_is_told_with_its_remedy() -> None:
    def typed(_: str) -> Any:
        raise EngineError("does not go", field="engine", remedy="turn it off and on")

    def untyped(_: str) -> Any:
        raise OSError("no such library")

    found = judged("a", typed, "")
    assert found == Finding("a", "broken", "engine: does not go", "turn it off and on")
    assert judged("b", untyped, "").detail == "OSError: no such library"
    assert line(found).splitlines() == [
        "BROKEN  a               engine: does not go",
        "                        → turn it off and on",
    ]


CPU_ONLY: dict[str, Status] = {"cuda engine": "absent", "tensorrt engine": "absent"}
ABSENT: dict[str, Status] = dict.fromkeys(
    ("onnxruntime", "cpu engine", "cuda engine", "tensorrt engine", "engine auto"), "absent"
)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ({}, "x runs here on ort, cpu, cuda, tensorrt. Nothing is broken, "),
        (CPU_ONLY | {"driver": "absent"}, "x runs here on ort, cpu. Nothing is broken, "),
        (CPU_ONLY | {"gpu": "broken"}, "x runs here on ort, cpu. To be repaired: gpu."),
        (ABSENT, "No engine runs x here: install what is absent"),
    ],
)
def test_the_last_line_tells_what_runs(status: dict[str, Status], told: str) -> None:
    findings = [Finding(name, status.get(name, "ok"), "…") for name in doctor_checks.CHECKS]
    assert summary("x", findings).startswith(told)


def test_a_jetson_is_recognised_by_its_files(tmp_path: Path) -> None:
    files = {
        "etc/nv_tegra_release": "# R36 (release), REVISION: 4.4, GCID: 1, BOARD: generic\n",
        "var/lib/nvpmodel/status": "pmode:0002",
        "etc/nvpmodel.conf": "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
        "proc/device-tree/model": "NVIDIA Jetson Orin Nano\0",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    found = doctor_checks.about_jetson("", tmp_path)
    assert found == ("ok", "L4T 36.4.4, power mode MAXN_SUPER", None)
    assert doctor_checks.about_machine("", tmp_path)[1].startswith("NVIDIA Jetson Orin Nano, ")
    release = tmp_path / "etc/nv_tegra_release"
    release.write_text(release.read_text().replace("4.4", "4.7"))
    status, detail, remedy = doctor_checks.about_jetson("", tmp_path)
    assert (status, remedy) == ("broken", "update to L4T 36.5")
    assert "refuses large allocations" in detail


# -- over the fake driver -------------------------------------------------------------------------


@scenario({}, {"fail": "cuMemAlloc:1:2"}, {"fail": "cuMemcpyHtoDAsync:1:700"}, {"devices": 0})
def gpu() -> Any:
    return asdict(judged("gpu", doctor_checks.gpu, "demo-draft"))


def test_a_gpu_is_copied_to_and_from() -> None:
    found = ran(gpu).result
    assert found["status"] == "ok"
    assert found["detail"].startswith("GPU 0 (Fake 0), sm_87, 8 SMs, ")
    full = ran(gpu, fail="cuMemAlloc:1:2").result
    assert full["status"] == "broken" and "no room for" in full["detail"]
    lost = ran(gpu, fail="cuMemcpyHtoDAsync:1:700").result
    assert lost["status"] == "broken" and lost["remedy"] == "start a new process"
    assert "CUDA_ERROR_NO_DEVICE" in ran(gpu, devices=0).result["detail"]


@scenario({}, {"version": 12060})
def packages() -> Any:
    names = ("driver", "cuda-core", "kernels")
    checks = doctor_checks.CHECKS
    return {name: asdict(judged(name, checks[name], "demo-draft")) for name in names}


def test_packages_are_held_against_the_driver() -> None:
    found = ran(packages).result
    assert found["driver"]["detail"] == "for CUDA 13.0"
    assert found["cuda-core"]["status"] == "ok"
    assert found["kernels"]["status"] in ("ok", "absent")
    older = ran(packages, version=12060).result
    assert older["driver"]["detail"] == "for CUDA 12.6"
    if importlib.metadata.version("cuda-bindings").startswith("13."):
        assert older["cuda-core"]["status"] == "broken"
        assert '"cuda-bindings>=12,<13"' in older["cuda-core"]["remedy"]
