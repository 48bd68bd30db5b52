"""`tests/gpu/run.sh` itself: no failure ends it or gets lost, and what it calls exists.

A stand-in for Python only records how it was called; `test_gpu_pack` has a rehearsal with the real
one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from jetson.verify.steps import STEPS
from tests.collecting import assert_collected

pytestmark = pytest.mark.without_gpu

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/gpu/run.sh"
_STAND_IN = """#!{python} -S
import json, os, sys, time
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
for part, act in {acts!r}.items():
    if part in " ".join(sys.argv):
        exec(act)
"""
# the process that started `timeout`, which started this one
_KILL_THE_SHELL = (
    "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]), 9)"
)


@dataclass(frozen=True)
class Done:
    """The outcome of a run of the script.

    Attributes:
        calls: the command lines that Python received, without its name.
        lines: lines of summary.txt.
    """

    code: int
    calls: list[list[str]]
    lines: list[str]
    errors: str

    def line(self, name: str) -> str:
        (found,) = [line for line in self.lines if line.split()[0] == name]
        return " ".join(found.split()[1:])


def run(folder: Path, *stages: str, acts: dict[str, str] | None = None, **settings: str) -> Done:
    """Run the script with a stand-in for Python, which does `acts` when a command line has their
    key.
    """
    calls, programs = folder / "calls", folder / "bin"
    programs.mkdir()
    stand_in = _STAND_IN.format(python=sys.executable, calls=str(calls), acts=acts or {})
    for name, text in (("python", stand_in), ("nvidia-smi", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    done = script(folder, *stages, PYTHON=str(programs / "python"), **settings)
    summary = folder / "out/summary.txt"
    return Done(
        done.returncode,
        [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else [],
        summary.read_text().splitlines() if summary.exists() else [],
        done.stderr,
    )


def script(folder: Path, *stages: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would, with its results in `folder`/out."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "PYTHONPATH") if name in os.environ}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [SCRIPT, *stages], env={**kept, "PATH": path, "OUT": str(folder / "out"), **settings},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """All stages, without failures."""
    return run(tmp_path_factory.mktemp("whole"))


def test_every_step_has_a_line_and_none_is_lost(whole: Done) -> None:
    assert whole.code == 0, whole.errors
    names = [line.split()[0] for line in whole.lines]
    assert len(set(names)) == len(names)
    for name in ("machine", "first-kernel", "agree-demo", "profile", "figures", "test_linear"):
        assert whole.line(name).startswith("ok")
    files = {line.split()[0] for line in whole.lines if line.startswith("test_")}
    kernels = {file.stem for file in (ROOT / "tests/kernels").glob("test_*.py")}
    assert files > kernels and "test_enqueue_ops" in files
    # each model is written once, before any is measured
    modules = [call[1] for call in whole.calls]
    prepared = [n for n, call in enumerate(whole.calls) if "--prepare" in call]
    assert len(prepared) == 15 == len([name for name in names if name.startswith("prepare-")])
    assert modules.count("edge.apps.bench.gpu") == 19
    assert max(n for n, name in enumerate(modules) if name == "edge.apps.bench.gpu") not in prepared


@pytest.mark.parametrize("stage", ["A", "B", "C"])
def test_a_step_that_fails_ends_nothing_and_shows(stage: str, tmp_path: Path) -> None:
    names = {"A": ("first_cubin", "first-kernel"), "B": ("--prepare", "prepare-tiny-mamba-fp16"),
             "C": ("test_pick", "test_pick")}  # fmt: skip
    part, name = names[stage]
    fails = "print('it was'); print('3 failed', end='\\n\\n'); sys.exit(3)"
    done = run(
        tmp_path, stage, acts={part: fails},
        MODELS="tiny-mamba", RECIPES="fp16", BLOCKS="",
        FILES="tests/kernels/test_pick.py tests/test_x.py",
    )  # fmt: skip
    assert done.code == 1
    assert done.line(name).startswith("FAILED (3)") and done.line(name).endswith("3 failed")
    last = {"A": "profile", "B": "figures", "C": "test_x"}[stage]
    assert done.line(last).startswith("ok")


HANGS = {"A": ("doctor", "doctor", "profile"), "B": ("--prepare", "prepare-a-b", "figures"),
         "C": ("test_x", "test_x", "test_y")}  # fmt: skip


def test_a_step_that_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    def hanging(stage: str) -> Done:
        (tmp_path / stage).mkdir()
        return run(
            tmp_path / stage, stage,
            acts={HANGS[stage][0]: "print('begun', flush=True); time.sleep(600)"},
            LIMIT="3", FILES="tests/test_x.py tests/test_y.py", JOBS="1", MODELS="a", RECIPES="b",
            BLOCKS="",
        )  # fmt: skip

    with ThreadPoolExecutor() as pool:  # the three seconds are spent waiting
        for stage, done in zip(HANGS, pool.map(hanging, HANGS), strict=True):
            _, name, last = HANGS[stage]
            assert done.code == 1 and done.line(name).startswith("ended after 3 s")
            assert done.line(last).startswith("ok")


def test_one_that_was_killed_did_not_run_out_of_time(tmp_path: Path) -> None:
    done = run(
        tmp_path, "A", "C", acts={"doctor": "os.kill(os.getpid(), 9)", "test_x": "sys.exit(137)"},
        FILES="tests/test_x.py",
    )  # fmt: skip
    assert done.code == 1
    assert done.line("doctor").startswith("FAILED (killed)")
    assert done.line("test_x").startswith("FAILED (killed)")


def test_a_test_file_without_a_result_is_a_failure(tmp_path: Path) -> None:
    files = "tests/test_x.py tests/test_y.py"
    done = run(tmp_path, "C", acts={"test_x": _KILL_THE_SHELL}, FILES=files, JOBS="1")
    assert done.code == 1
    assert done.line("test_x") == done.line("test_y") == "FAILED (it left no result)"


def test_what_a_step_says_last_is_not_its_verdict(tmp_path: Path) -> None:
    said = "print('0 FAILED, 1 passed; the longest ended after 2 s')"
    done = run(tmp_path, "A", "C", acts={"-m": said}, FILES="tests/test_x.py")
    assert done.code == 0 and len(done.lines) > 5


def test_a_stage_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "A", "D")
    assert done.code == 2 and "there is no stage D" in done.errors
    assert not done.calls


class TestCommandLines:
    def test_their_modules_are_there(self, whole: Done) -> None:
        for dash, module, *_ in whole.calls:
            assert dash == "-m" and importlib.util.find_spec(module) is not None, module

    def test_their_tests_are_collected(self, whole: Done, tmp_path: Path) -> None:
        """And those of `jetson/verify.sh`, by one process: both have these options."""
        lines: dict[tuple[str, ...], list[str]] = {}
        for call in whole.calls:
            if call[:2] == ["-m", "pytest"]:
                *options, file = call
                at = options.index("--junitxml")
                options[at + 1] = str(tmp_path / "results.xml")
                lines.setdefault(tuple(options), []).append(file)
        (some, few), (options, most) = sorted(lines.items(), key=lambda line: len(line[1]))
        assert few == ["tests/gpu"] and set(some) <= set(options)
        (step,) = [one.line("demo", tmp_path)[1:] for one in STEPS if "pytest" in one.command]
        folders = [part for part in step if part.startswith("tests/")]
        assert set(step) - set(folders) <= {"-q", *options}
        assert_collected([*options, *most, *few, *folders], [*most, *few, *folders])


def test_without_a_driver_nothing_is_begun(tmp_path: Path) -> None:
    """Stage B would write 25 GB of models for nothing."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("bash", "dirname", "env"):
        (bare / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        ["bash", str(SCRIPT)], env={"PATH": str(bare), "OUT": str(tmp_path / "out")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "no NVIDIA driver here" in done.stderr
    assert not (tmp_path / "out").exists()
