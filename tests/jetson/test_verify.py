"""jetson/verify.sh: failures, crashes and hangs are results; skipped steps say why."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edge.apps.cli import app
from edge.runtime.cuda import install
from jetson.verify import board
from jetson.verify.__main__ import ROOT, main, run, verify
from jetson.verify.report import BoardReport, Result, figures, load, markdown, tail
from jetson.verify.steps import NEEDS, STEPS, VerifyStep
from tests.facts import says
from tests.jetson import boards

no_gpu = pytest.mark.skipif(install.driver_version() is not None, reason="there is a GPU here")


def step(name: str, code: str, **more: Any) -> VerifyStep:
    return VerifyStep(name, f"claim of {name}", ("-c", code), **more)


RIGHT = step("right", "print('first'); print('{{\"kl\": 0.5, \"right\": true}}')")
WRONG = step("wrong", "print('it | is\\nwrong'); raise SystemExit(1)")
CRASH = step("crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
ABSENT = step("absent", "print('not run: no such board'); raise SystemExit(3)")


def _name(one: VerifyStep) -> str:
    return one.name


def _without(package: str, monkeypatch: Any) -> None:
    """Let this process find all packages but one."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )


class TestSteps:
    """The tests that a step runs are collected in tests/cuda/test_gpu_run.py."""

    @pytest.mark.parametrize("one", STEPS, ids=_name)
    def test_each_program_exists(self, one: VerifyStep) -> None:
        first, *rest = one.command
        if first != "-m":
            assert (ROOT / first).is_file()
            return
        assert importlib.util.find_spec(rest[0]) is not None
        if rest[0] == "edge.apps.cli":
            shown = CliRunner().invoke(app, [rest[1], "--help"], env={"COLUMNS": "200"})
            assert shown.exit_code == 0
            for option in (word for word in rest if word.startswith("--")):
                assert option in shown.output, option

    def test_they_have_names_of_their_own_and_known_needs(self) -> None:
        assert len({one.name for one in STEPS}) == len(STEPS)
        assert {need for one in STEPS for need in one.needs} <= set(NEEDS)

    def test_the_page_names_each(self) -> None:
        page = (boards.JETSON / "README.md").read_text()
        assert [one.name for one in STEPS if f"`{one.name}`" not in page] == []

    def test_plugins_come_before_engines_and_these_before_figures(self) -> None:
        order = [one.name for one in STEPS]
        rising = ["doctor", "single-plugins", "build", "tensorrt-engine", "profile-tensorrt"]
        assert [name for name in order if name in rising] == rising


class TestRunning:
    def test_one_that_fails_does_not_stop_the_others(self, tmp_path: Path) -> None:
        steps = [WRONG, CRASH, ABSENT, RIGHT]
        report = verify("demo", tmp_path, 5, steps)
        found = {one.name: (one.status, one.reason) for one in report.results}
        assert found == {
            "wrong": ("wrong", "exit code 1"),
            "crash": ("wrong", "ended with SIGSEGV"),
            "absent": ("not run", "no such board"),
            "right": ("ok", ""),
        }
        assert report.results[0].tail == "it | is\nwrong"
        assert report.results[-1].figures == {"kl": 0.5, "right": True}

    def test_one_that_hangs_is_ended_with_all_it_started(self, tmp_path: Path) -> None:
        code = (
            "import subprocess, sys, time; "
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
            "print('begun', flush=True); time.sleep(600)"
        )
        found = run(step("hangs", code, limit_s=3), "demo", tmp_path, 60)
        assert (found.status, found.reason) == ("wrong", "did not finish within 3 s")
        assert found.tail == "begun"

    def test_what_it_needs_is_asked_before(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setitem(NEEDS, "wings", lambda bundle: f"{bundle} has no wings")
        found = run(replace(WRONG, needs=("wings",)), "demo", tmp_path, 60)
        assert (found.status, found.reason) == ("not run", "demo has no wings")

    @pytest.mark.parametrize("name", ["first-cubin", "kernels"])
    def test_without_the_exporter_kernels_are_not_run(
        self, name: str, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """JetPack 6 has Python 3.10, whatever is installed here."""
        (one,) = [each for each in STEPS if each.name == name]
        for need in ("gpu", "bindings", "tests"):
            monkeypatch.setitem(NEEDS, need, lambda _: None)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "version_info", (3, 10, 12))
            found = run(one, "demo", tmp_path, 60)
        assert found.status == "not run" and says(found.reason, "exporter", "3.11", "3.10")
        _without("triton", monkeypatch)
        found = run(one, "demo", tmp_path, 60)
        assert (found.status, found.reason) == ("not run", "needs the packages triton")

    def test_without_what_tests_need_they_are_not_run(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        (one,) = [each for each in STEPS if each.name == "kernels"]
        for need in ("gpu", "bindings", "exporter"):
            monkeypatch.setitem(NEEDS, need, lambda _: None)
        _without("hypothesis", monkeypatch)
        found = run(one, "demo", tmp_path, 60)
        assert (found.status, found.reason) == ("not run", "needs the packages hypothesis")

    def test_when_the_time_is_up_the_rest_is_not_run(self, tmp_path: Path) -> None:
        report = verify("demo", tmp_path, 0, [RIGHT])
        assert report.results[0].status == "not run" and "--minutes" in report.results[0].reason

    def test_it_goes_on_with_what_was_not_ok(self, tmp_path: Path, capsys: Any) -> None:
        verify("demo", tmp_path, 5, [RIGHT, WRONG])
        again = verify("demo", tmp_path, 5, [RIGHT, replace(WRONG, command=RIGHT.command)])
        assert [one.status for one in again.results] == ["ok", "ok"]
        assert "(before)" in capsys.readouterr().out
        anew = verify("demo", tmp_path, 5, [WRONG], again=True)
        assert [one.name for one in anew.results] == ["wrong"]


class TestReports:
    def test_one_of_another_machine_or_bundle_is_not_continued(self, tmp_path: Path) -> None:
        facts = board.facts()
        BoardReport("demo", "now", facts, [Result("a", "b", "ok")]).save(tmp_path)
        assert load(tmp_path, "demo", facts) is not None
        later = facts | {"now": {"mem_available_bytes": 1}}
        assert load(tmp_path, "demo", later) is not None, "only the moment differs"
        assert load(tmp_path, "demo-draft", facts) is None
        assert load(tmp_path, "demo", facts | {"found": {"tensorrt": "99.0"}}) is None
        (tmp_path / "report.json").write_text("{")
        assert load(tmp_path, "demo", facts) is None

    def test_the_page_shows_versions_results_and_output(self) -> None:
        facts = board.facts() | {"found": {"jetson": "L4T 36.4.3, power mode MAXN_SUPER"}}
        now = {"power_mode": "25W", "temperature_c": {"cpu": 51.5}, "mem_available_bytes": 5e9}
        results = [
            Result("a", "x | y", "wrong", "exit code 1", 3.2, tail="why", after=now),
            Result("b", "z", "not run", "no GPU"),
        ]
        page = markdown(BoardReport("demo", "2026-11-21", facts, results))
        assert "| jetson | L4T 36.4.3, power mode MAXN_SUPER |" in page
        row = "| a | **WRONG**: exit code 1 | x \\| y |  | 3 | 25W | 51.5 | 5,000 MB |"
        assert row in page.splitlines()
        assert "| b | not run: no GPU |" in page
        assert "## a\n\n```\nwhy\n```" in page and "## b" not in page

    def test_figures_are_the_known_numbers(self) -> None:
        found = {"tpot_ms": 12.3456, "kl": 0.001, "right": True, "answers": [], "tokens": None}
        assert figures(found) == "kl 0.001, tpot_ms 12.35"

    def test_of_a_long_output_the_end_is_kept_from_a_whole_line(self) -> None:
        kept = tail("\n".join(f"line {i}" for i in range(1000)))
        assert kept.startswith("… line ") and kept.endswith("line 999") and len(kept) <= 2003

    def test_a_made_up_board_is_read(self, tmp_path: Path) -> None:
        root = boards.root(tmp_path, "36.4.7")
        boards.write(root / "var/lib/nvpmodel/status", "pmode:0002\n")
        boards.write(root / "etc/nvpmodel.conf", "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n")
        for index, (name, value) in enumerate((("cpu-thermal", "48500"), ("cv0", "-256000"))):
            boards.write(root / f"sys/class/thermal/thermal_zone{index}/type", name)
            boards.write(root / f"sys/class/thermal/thermal_zone{index}/temp", value)
        found = board.now(root)
        assert found["power_mode"] == "MAXN_SUPER"
        assert found["temperature_c"] == {"cpu-thermal": 48.5}
        assert found["mem_available_bytes"] > 0


@no_gpu
def test_without_a_gpu_the_script_says_what_was_not_run(tmp_path: Path) -> None:
    only = "single-plugins,build,cuda-engine,memory-tensorrt"
    command = [str(ROOT / "jetson/verify.sh"), "demo-draft", "--out", str(tmp_path), "--only", only]
    done = subprocess.run(
        command, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert says(done.stdout, "nothing is wrong", "4 of 4")
    found = json.loads((tmp_path / "report.json").read_text())
    assert {one["status"] for one in found["results"]} == {"not run"}
    assert all("NVIDIA driver" in one["reason"] for one in found["results"])
    assert "not run: no NVIDIA driver" in (tmp_path / "report.md").read_text()


def test_what_cannot_be_verified_is_refused_before_an_hour_goes_by(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["verify", "nothing-here", "--out", str(tmp_path / "out")])
    assert main() == 1 and "nothing-here: is neither" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "argv", ["verify", "--only", "doctor,gpu"])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 2
    assert "unknown steps gpu; there are doctor,cpu," in capsys.readouterr().err
