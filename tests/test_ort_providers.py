"""ONNX Runtime's providers: the choice, the refusals, and the report of which one ran.

A provider other than the CPU's is simulated by a session that runs on the CPU and claims otherwise.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import OrtDevice  # type: ignore[import-untyped]
from rich.console import Console

import edge
from edge.apps import chat, cli
from edge.apps.doctor import ort as doctor_ort
from edge.apps.doctor.checks import judged
from edge.apps.measure.stopwatch import timed
from edge.apps.measure.table import show
from edge.apps.profile import report, words
from edge.apps.profile.run import ProfileRequest, profile
from edge.errors import EngineError, InputError
from edge.onnx_runtime import onnxruntime
from edge.plugins.cpu import library
from edge.runtime import ort_providers
from edge.runtime.cuda import install
from edge.runtime.engines import check_provider, title
from edge.runtime.ort_providers import PROVIDERS, VARIABLE, Choice, choose
from tests import forks
from tests.facts import facts, says
from tests.programs import called


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share no engine: these tests check how each is opened."""
    monkeypatch.setattr("edge.runtime.model.ENGINES_IN_USE", MagicMock(get=lambda key: None))


HERE = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
CPU, CUDA, TENSORRT = PROVIDERS["cpu"], PROVIDERS["cuda"], PROVIDERS["tensorrt"]


@dataclass
class StandIn:
    """A simulated installation of ONNX Runtime.

    Attributes:
        built: providers of its build.
        starts: providers whose libraries exist; others are dropped, as ONNX Runtime drops CUDA's.
        raises: providers for which a session raises, as it does without TensorRT's libraries.
        asked: the providers with their options, for each session.
    """

    built: Sequence[str] = (TENSORRT, CUDA, CPU)
    starts: Sequence[str] = (TENSORRT, CUDA, CPU)
    raises: Sequence[str] = ()
    asked: list[dict[str, dict[str, str]]] = field(default_factory=list)


@pytest.fixture
def ort(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    this, real = StandIn(), onnxruntime.InferenceSession

    class Session(real):  # type: ignore[misc, valid-type]
        def __init__(
            self, graph: bytes, options: Any, providers: Any, enable_fallback: int
        ) -> None:
            # its own fallback prints on standard output
            assert enable_fallback == 0
            this.asked.append(dict(providers))
            if wrong := [name for name in this.asked[-1] if name in this.raises]:
                raise RuntimeError(f"the libraries of {wrong[0]} are not there\n")
            super().__init__(graph, options, providers=[CPU], enable_fallback=0)

        def get_providers(self) -> list[str]:
            return [name for name in this.asked[-1] if name in this.starts]

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: list(this.built))
    # states have copies on the provider's device, here other memory of the CPU
    monkeypatch.setattr(
        ort_providers, "device", lambda provider: None if provider == "cpu" else HERE
    )
    return this


def logits(model: Any) -> np.ndarray:
    state = model.engine.new_state(window=4, capacity=16)
    out: np.ndarray = model.engine.run(np.array([[1, 2, 3]]), state, rows="all").copy()
    return out


# -- choosing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "listed", "names"),
    [
        (None, None, ("cpu",)),
        (None, "", ("cpu",)),
        (None, "tensorrt, cuda,cpu,,cuda", ("tensorrt", "cuda", "cpu")),
        ("cuda", "tensorrt", ("cuda",)),
        ("cpu", "nonsense", ("cpu",)),
    ],
)
def test_the_option_wins_over_the_environment_over_the_cpu(
    option: str | None, listed: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if listed is not None:
        monkeypatch.setenv(VARIABLE, listed)
    assert choose(option).names == names


def test_a_name_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="provider: unknown provider 'CUDA'") as caught:
        edge.load("no-such-bundle", provider="CUDA")
    assert caught.value.remedy == "cpu, cuda or tensorrt"
    monkeypatch.setenv(VARIABLE, "cuda,gpu")
    with pytest.raises(EngineError, match=f"{VARIABLE}: unknown provider 'gpu'"):
        edge.load("no-such-bundle")


@pytest.mark.parametrize("engine", ["cuda", "tensorrt"])
def test_other_engines_have_no_providers(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=f"provider: engine {engine} has no providers"):
        edge.load("no-such-bundle", engine=engine, provider="cuda")
    # the environment variable does not apply to them
    monkeypatch.setenv(VARIABLE, "gpu")
    check_provider(engine, None)
    with pytest.raises(EngineError, match="unknown provider 'gpu'"):
        check_provider("ort", None)


def test_the_cpu_is_the_default_and_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    plain = edge.load("demo-draft", engine="ort")
    named = edge.load("demo-draft", engine="ort", provider="cpu")
    assert plain.engine.provider == named.engine.provider == "cpu"
    assert np.array_equal(logits(plain), logits(named))


@pytest.mark.parametrize(
    ("built", "provider", "asked"),
    [
        ((TENSORRT, CUDA, CPU), "cuda", [CUDA, CPU]),
        ((TENSORRT, CUDA, CPU), "tensorrt", [TENSORRT, CUDA, CPU]),
        ((TENSORRT, CPU), "tensorrt", [TENSORRT, CPU]),
        ((TENSORRT, CUDA, CPU), "cpu", [CPU]),
    ],
)
def test_what_stands_behind_a_provider(
    ort: StandIn, built: Sequence[str], provider: str, asked: list[str]
) -> None:
    ort.built = built
    model = edge.load("demo-draft", provider=provider)
    assert [list(each) for each in ort.asked] == [asked]
    # with TF32 it would not be the model that was exported and checked
    assert ort.asked[0].get(CUDA, {"use_tf32": "0"}) == {"use_tf32": "0"}
    assert model.engine.provider == provider
    assert title(model.engine) == ("ort" if provider == "cpu" else f"ort ({provider})")
    assert timed(model)[1].provider == provider
    assert np.array_equal(logits(model), logits(edge.load("demo-draft", provider="cpu")))


# -- refusals and fallbacks -----------------------------------------------------------------------


def test_a_provider_that_the_build_lacks_is_refused(
    ort: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ort.built = ("AzureExecutionProvider", CPU)
    monkeypatch.setattr(ort_providers, "packages", lambda: ["onnxruntime"])
    with pytest.raises(EngineError) as caught:
        edge.load("demo-draft", provider="cuda")
    said, remedy = str(caught.value), caught.value.remedy or ""
    assert f"built without {CUDA}: it has AzureExecutionProvider, {CPU}" in said
    # the CPU's package must be removed, or it stays in the other's place
    assert remedy.index("pip uninstall -y onnxruntime,") < remedy.index('"mamba-edge[ort-gpu]"')
    assert ort.asked == []


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_provider_that_does_not_start_is_refused(ort: StandIn, provider: str) -> None:
    ort.starts = (CPU,)
    name = PROVIDERS[provider]
    with pytest.raises(
        EngineError, match=facts("cannot start", name, "would run on", f"{CPU} ")
    ) as caught:
        edge.load("demo-draft", provider=provider)
    assert caught.value.field == f"provider {provider}"
    assert ("TensorRT" in (caught.value.remedy or "")) == (provider == "tensorrt")
    ort.raises = (name,)
    with pytest.raises(
        EngineError, match=facts("cannot start", f"{name}: ", f"libraries of {name}")
    ):
        edge.load("demo-draft", provider=provider)


def test_tensorrt_that_would_run_on_cuda_is_not_tensorrt(ort: StandIn) -> None:
    ort.starts = (CUDA, CPU)
    with pytest.raises(EngineError, match=f"would run on {CUDA}, {CPU}"):
        edge.load("demo-draft", provider="tensorrt")


@pytest.mark.parametrize(
    ("built", "starts", "raises", "ran"),
    [
        ((TENSORRT, CUDA, CPU), (TENSORRT, CUDA, CPU), (), "tensorrt"),
        ((TENSORRT, CUDA, CPU), (CUDA, CPU), (TENSORRT,), "cuda"),
        ((CUDA, CPU), (CUDA, CPU), (), "cuda"),
        ((TENSORRT, CUDA, CPU), (CPU,), (TENSORRT,), "cpu"),
        ((CPU,), (CPU,), (), "cpu"),
    ],
)
def test_a_list_in_the_environment_goes_on_to_the_next(
    ort: StandIn,
    built: Sequence[str],
    starts: Sequence[str],
    raises: Sequence[str],
    ran: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "tensorrt,cuda,cpu")
    ort.built, ort.starts, ort.raises = built, starts, raises
    model = edge.load("demo-draft")
    assert model.engine.provider == ran
    assert np.isfinite(logits(model)).all()


def test_a_list_that_ends_says_why_each_did_not_start(
    ort: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "tensorrt,cuda")
    ort.built, ort.starts = (CUDA, CPU), (CPU,)
    with pytest.raises(EngineError) as caught:
        edge.load("demo-draft")
    assert caught.value.field == VARIABLE
    said = str(caught.value)
    assert f"without {TENSORRT}" in said and f"cannot start {CUDA}" in said
    assert says(caught.value.remedy, "list with cpu, or: ")


def test_a_graph_that_does_not_load_is_no_providers_fault() -> None:
    def make(_: ort_providers.Providers) -> Any:
        raise RuntimeError("the graph is damaged")

    with pytest.raises(RuntimeError, match="the graph is damaged"):
        ort_providers.start(Choice(("cpu",), "provider"), make)


def test_standard_output_stays_the_answers(
    ort: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def preload_dlls() -> None:
        calls.append("loaded")
        print("Failed to load libcublas.so")

    monkeypatch.setattr(onnxruntime, "preload_dlls", preload_dlls, raising=False)
    edge.load("demo-draft", provider="cpu")
    assert calls == []
    edge.load("demo-draft", provider="cuda")
    out, err = capsys.readouterr()
    assert (calls, out, err) == (["loaded"], "", "Failed to load libcublas.so\n")


# -- the programs ---------------------------------------------------------------------------------

WITHOUT_CUDA = """
import sys
from edge.onnx_runtime import onnxruntime
onnxruntime.get_available_providers = lambda: ["CPUExecutionProvider"]
from edge.apps import cli
sys.argv[0] = "edge"
cli.main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo-draft", "-p", "hello"),
        ("profile", "demo-draft", "-p", "4", "-n", "2", "-r", "1", "--context", "0"),
        ("eval", "demo-draft", __file__),
        ("serve", "demo-draft", "--port", "0"),
    ],
    ids=["edge-chat", "edge profile", "edge eval", "edge serve"],
)
def test_every_program_hands_the_option_on(arguments: Sequence[str], ort: StandIn) -> None:
    ort.built = (CPU,)
    main = chat.main if arguments[0] == "demo-draft" else cli.main
    code, _, said = called(main, *arguments, "--provider", "cuda")
    assert code == 1 and f"built without {CUDA}" in said


def test_serve_says_what_a_list_came_to() -> None:
    command = [sys.executable, "-c", WITHOUT_CUDA, "serve", "demo-draft", "--port", "0", "--json"]
    environment = os.environ | {VARIABLE: "cuda,cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            listening, ready = json.loads(server.stdout.readline()), server.stdout.readline()
        finally:
            server.terminate()
    assert listening["event"] == "listening"
    assert json.loads(ready)["engine"] == "ort"


def test_drafters_run_on_the_targets_provider(ort: StandIn) -> None:
    from edge.apps.options import RunOptions

    drafter = RunOptions(engine="ort", provider="cuda", threads=1).load_drafter("demo-draft")
    assert isinstance(drafter, edge.Model) and drafter.engine.provider == "cuda"


def test_profile_says_what_ran(ort: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_providers, "packages", lambda: ["onnxruntime-gpu"])
    monkeypatch.setattr(report, "installed", lambda package: "1.31.1")
    request = ProfileRequest(
        "demo-draft", provider="cuda", threads=1, prompts=(4,), generated=3, repetitions=1,
        warmup=0, contexts=(),
    )  # fmt: skip
    facts = report.to_dict(result := profile(request))
    assert (facts["engine"], facts["provider"]) == ("ort", "cuda")
    assert (
        facts["versions"]["onnxruntime-gpu"] == "1.31.1" and "onnxruntime" not in facts["versions"]
    )
    assert [line["provider"] for line in report.lines(result)] == ["cuda"]
    # ONNX Runtime's profiler would time the launches of a GPU's kernels
    assert facts["breakdown"] == {}
    assert "ort cuda" in facts["absent"]["breakdown"]
    show(words.parts(facts), Console(file=(shown := io.StringIO()), width=160))
    assert "| ort cuda |" in shown.getvalue()


def test_profile_gives_the_provider_to_the_side_that_has_providers() -> None:
    request = ProfileRequest("a", engine="ort", provider="cuda", against="cuda")
    assert [request.provider_on(engine) for _, engine in request.sides.values()] == ["cuda", None]
    request.check()
    with pytest.raises(InputError, match="--provider: engine cuda has no providers"):
        ProfileRequest("a", engine="cuda", provider="cpu", against="tensorrt").check()


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_tells_the_providers_of_the_build(ort: StandIn) -> None:
    found = judged("onnxruntime", doctor_ort.onnx_runtime, "demo-draft")
    assert found.status == "ok"
    assert found.detail.endswith(" for cpu, cuda, tensorrt: a step of demo-draft, 4096 logits")


def test_doctor_finds_builds_that_overwrote_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_providers, "packages", lambda: ["onnxruntime", "onnxruntime-gpu"])
    found = judged("onnxruntime", doctor_ort.onnx_runtime, "demo-draft")
    assert found.status == "broken"
    assert found.detail.endswith("onnxruntime and onnxruntime-gpu overwrote each other")
    assert (found.remedy or "").startswith("pip uninstall -y onnxruntime onnxruntime-gpu, ")


def test_doctor_tries_each_provider(ort: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "driver_version", lambda: 13000)
    found = judged("ort cuda", doctor_ort.on_cuda, "demo-draft")
    assert (found.status, found.remedy) == ("ok", None)
    assert says(found.detail, "demo-draft", "ONNX Runtime's by at most")
    ort.raises = (TENSORRT,)
    found = judged("ort tensorrt", doctor_ort.on_tensorrt, "demo-draft")
    assert found.status == "absent" and "libnvinfer.so.10" in found.detail
    monkeypatch.setattr(doctor_ort, "tensorrt_loads", lambda: True)
    found = judged("ort tensorrt", doctor_ort.on_tensorrt, "demo-draft")
    assert found.status == "broken" and f"cannot start {TENSORRT}" in found.detail
    monkeypatch.setattr(install, "driver_version", lambda: None)
    found = judged("ort tensorrt", doctor_ort.on_tensorrt, "demo-draft")
    assert (found.status, found.detail) == ("absent", "no NVIDIA driver")
    ort.built = (CPU,)
    found = judged("ort cuda", doctor_ort.on_cuda, "demo-draft")
    assert (found.status, found.remedy) == ("absent", None) and "built without it" in found.detail


# -- no ONNX Runtime ------------------------------------------------------------------------------


def without(code: str, path: Path | None = None, anew: bool = False) -> str:
    """Return a program's output when the module is missing, or when `path` comes first.

    `anew`: in a Python that has imported nothing.
    """
    hide = "sys.modules['onnxruntime'] = None" if path is None else f"sys.path.insert(0, '{path}')"
    program = f"import sys\n{hide}\n{code}"
    if not anew:
        ended, out, err = forks.run("-c", program)
    else:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        ended, out, err = done.returncode, done.stdout, done.stderr
    assert ended == 0, err
    return out


LOAD = """
import edge
try:
    edge.load("demo-draft", engine="ort")
except edge.EngineError as problem:
    print(problem)
"""


def test_its_absence_is_an_error_that_says_what_to_install() -> None:
    said = without(LOAD)
    assert said.startswith("ONNX Runtime is not installed (")
    for part in ('pip install "mamba-edge[ort]"', "[ort-gpu]", "make chat", "jetson/install.sh"):
        assert part in said


def test_one_that_does_not_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('libcudart.so.12 is not there')")
    assert "libcudart.so.12 is not there" in without(LOAD, tmp_path)
    (tmp_path / "onnxruntime.py").write_text("import nothing_of_this_name")
    assert "No module named 'nothing_of" in without(LOAD, tmp_path)


def test_a_signal_while_it_loads_is_no_fault_of_it(tmp_path: Path) -> None:
    """Its compiled module reports an interrupt this way."""
    fake = "raise ImportError('initialization failed') from {}"
    for cause in ("KeyboardInterrupt()", "SystemExit(143)"):
        (tmp_path / "onnxruntime.py").write_text(fake.format(cause))
        caught = f"except BaseException as found:\n    assert repr(found) == '{cause}', found\n"
        without(f"import edge\ntry:\n    edge.load('demo-draft', engine='ort')\n{caught}", tmp_path)


DOCTOR = """
from edge.apps.doctor import checks as doctor_checks
for name in ("onnxruntime", "ort cuda"):
    found = doctor_checks.judged(name, doctor_checks.CHECKS[name], "demo-draft")
    print(found.status, found.detail, found.remedy)
"""


def test_doctor_finds_it_absent() -> None:
    first, second = without(DOCTOR).splitlines()
    assert first.startswith("absent ONNX Runtime is not installed pip install")
    assert second == "absent ONNX Runtime is not installed None"


@pytest.mark.skipif(library.path() is None, reason="needs the kernels for CPUs")
def test_talking_needs_it_only_where_kernels_are_not_compiled() -> None:
    talk = "sys.argv = ['edge-chat', '-p', 'Hello!', '--max-tokens', '4', '--temperature', '0']\n"
    end = "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    assert without(f"{talk}from edge.apps.chat import main\n{end}").strip()


def test_other_engines_do_without_it() -> None:
    imports = (
        "import edge.runtime.cuda.opening, edge.runtime.tensorrt.opening\n"
        "import edge.apps.profile.run, edge.apps.profile.words, edge.apps.profile.page\n"
    )
    info = "from edge.apps.cli import main\nsys.argv = ['edge', 'info', 'demo-draft']\n"
    end = "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    assert "mamba" in without(f"{imports}{info}{end}", anew=True)


def test_export_says_what_it_lacks() -> None:
    said = without(
        "from edge.errors import EngineError\n"
        "try:\n    import edge.export.exporter\n"
        "except EngineError as problem:\n    print(problem)",
        anew=True,
    )
    assert said.startswith("ONNX Runtime is not installed (")
