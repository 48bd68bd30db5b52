"""Readings of the kernel and NVML, from a made-up tree and a made-up library."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.apps.measure import memory, roofline
from edge.apps.measure.machine import commit, conditions, governor, machine, power_mode, throttled
from edge.apps.measure.power import Meter, NvmlGpu, PowerLog, Rails, Rapl, why_none
from edge.apps.profile import run
from tests.engine_models import CONFIGS


def tree(root: Path, files: dict[str, str | int]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


MONITOR = "sys/class/hwmon/hwmon3"
ORIN: dict[str, str | int] = {
    "sys/class/hwmon/hwmon0/name": "pwmfan",
    f"{MONITOR}/name": "ina3221",
    f"{MONITOR}/in1_label": "VDD_IN", f"{MONITOR}/in1_input": 5000, f"{MONITOR}/curr1_input": 1200,
    f"{MONITOR}/in2_label": "VDD_CPU_GPU_CV", f"{MONITOR}/in2_input": 5000,
    f"{MONITOR}/curr2_input": 400,
    f"{MONITOR}/in3_label": "VDD_SOC", f"{MONITOR}/in3_input": 4992, f"{MONITOR}/curr3_input": 250,
    f"{MONITOR}/in7_label": "sum of shunt voltages", f"{MONITOR}/in7_input": 12,
    "sys/class/hwmon/hwmon4/name": "soctherm_oc", "sys/class/hwmon/hwmon4/oc1_event_cnt": 0,
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal",
    "sys/class/thermal/thermal_zone0/temp": 51250,
    "sys/class/thermal/thermal_zone1/type": "broken-thermal",
    "sys/class/thermal/cooling_device0/type": "pwm-fan",
    "sys/class/thermal/cooling_device0/cur_state": 2,
    "sys/class/thermal/cooling_device1/type": "cpufreq-cpu0",
    "sys/class/thermal/cooling_device1/cur_state": 0,
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": 1728000,
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "schedutil",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": 729600,
    "var/lib/nvpmodel/status": "pmode:0002",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=1 NAME=25W >\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >",
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
}  # fmt: skip


def test_rails_of_a_jetson(tmp_path: Path) -> None:
    rails = Rails.find(tree(tmp_path, ORIN))
    assert rails is not None and rails.whole == ("VDD_IN",)
    assert rails.read() == pytest.approx(
        {"VDD_IN": 6.0, "VDD_CPU_GPU_CV": 2.0, "VDD_SOC": 4.992 * 0.25}
    )
    (tmp_path / MONITOR / "curr2_input").write_text("garbage")
    assert rails.read().keys() == {"VDD_IN", "VDD_SOC"}


def test_settings_and_conditions_of_a_jetson(tmp_path: Path) -> None:
    root = tree(tmp_path, ORIN)
    assert power_mode(root) == "MAXN_SUPER" and governor(root) == "schedutil"
    assert machine(root)["board"] == "NVIDIA Jetson Orin Nano Developer Kit"
    now = conditions(root)
    assert now.clocks_mhz == (1728.0, 729.6)
    assert now.temperatures_c == {"cpu-thermal": 51.25}
    assert now.to_dict()["clock_mhz"] == {"min": 729.6, "max": 1728.0}


def test_unknown_power_mode_has_its_number(tmp_path: Path) -> None:
    assert power_mode(tree(tmp_path, {"var/lib/nvpmodel/status": "pmode:0003"})) == "mode 3"
    laptop = tree(tmp_path / "b", {"sys/firmware/acpi/platform_profile": "balanced"})
    assert power_mode(laptop) == "balanced"


def test_throttling_is_a_counter_that_rose_or_cooling_at_work(tmp_path: Path) -> None:
    root = tree(tmp_path, ORIN)
    before = conditions(root)
    assert throttled(before, conditions(root)) == []
    tree(root, {"sys/class/hwmon/hwmon4/oc1_event_cnt": 3})
    tree(root, {"sys/class/thermal/cooling_device1/cur_state": 1})
    hot = conditions(root)
    wanted = ["cooling cpufreq-cpu0 (cooling_device1)", "over-current oc1"]
    assert throttled(before, hot) == wanted
    assert throttled(hot, hot) == wanted[:1]  # still cooling, no new event
    assert throttled(before, conditions(tmp_path / "nothing")) is None


def test_counters_of_a_desktop(tmp_path: Path) -> None:
    counter = "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    before = conditions(tree(tmp_path, {counter: 7}))
    assert throttled(before, conditions(tree(tmp_path, {counter: 9}))) == ["cpu0 core"]


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert Rails.find(tmp_path) is None and Rapl.find(tmp_path) is None
    assert power_mode(tmp_path) is None and governor(tmp_path) is None
    nothing = conditions(tmp_path)
    assert (nothing.clocks_mhz, dict(nothing.temperatures_c)) == ((), {})
    assert nothing.to_dict()["clock_mhz"] is None
    assert "no RAPL" in why_none(tmp_path)


# -- energy ---------------------------------------------------------------------------------------

ZONE = "sys/class/powercap/intel-rapl:0"


def rapl_tree(root: Path, energy: int) -> Path:
    files: dict[str, str | int] = {
        f"{ZONE}/name": "package-0", f"{ZONE}/energy_uj": energy,
        f"{ZONE}/max_energy_range_uj": 10_000_000,
    }  # fmt: skip
    return tree(root, files)


def test_counters_wrap_around(tmp_path: Path) -> None:
    rapl = Rapl.find(rapl_tree(tmp_path, 9_000_000))
    assert rapl is not None and rapl.whole == ("package-0",)
    assert rapl.read() == {"package-0": 9.0}
    for energy, joules in ((500_000, 10.5), (9_999_999, 19.999999), (0, 20.0)):
        rapl_tree(tmp_path, energy)
        assert rapl.read()["package-0"] == pytest.approx(joules)


def test_the_platform_is_not_counted_beside_its_packages(tmp_path: Path) -> None:
    rapl_tree(tmp_path, 1)
    tree(tmp_path, {"sys/class/powercap/intel-rapl:1/name": "psys"})
    tree(tmp_path, {"sys/class/powercap/intel-rapl:1/energy_uj": 5})
    rapl = Rapl.find(tmp_path)
    assert rapl is not None and rapl.whole == ("psys",) and rapl.read().keys() == {
        "package-0", "psys"}  # fmt: skip


def test_counters_for_root_only_are_named(tmp_path: Path) -> None:
    rapl_tree(tmp_path, 1)
    (tmp_path / ZONE / "energy_uj").unlink()
    assert Rapl.find(tmp_path) is None and "root only" in why_none(tmp_path)


def test_watts_become_joules_between_two_moments() -> None:
    log = PowerLog("W")
    for i in range(13):  # 4 W for a second, rising to 8 W within the next, and so on for a third
        log.add(i / 4, {"VDD_IN": min(8.0, max(4.0, i))})
    assert log.joules("VDD_IN", [(0.0, 3.0)]) == pytest.approx(4 + 6 + 8)
    assert log.joules("VDD_IN", [(0.5, 1.5), (2.0, 3.0)]) == pytest.approx(2 + 2.5 + 8)
    # between two readings their mean power counts
    assert log.joules("VDD_IN", [(0.9, 2.1)]) == pytest.approx(0.4 + 6 + 0.8)
    assert log.joules("VDD_IN", [(0.1, 0.9)]) is None  # three readings are too few
    assert log.joules("VDD_SOC", [(0.0, 3.0)]) is None
    assert log.joules("VDD_IN", []) is None


def test_counted_joules_are_differences() -> None:
    log = PowerLog("J")
    for i in range(9):
        log.add(i / 4, {"package-0": 100 + 3 * i / 4 + 3 * max(0, i - 4) / 4})
    assert log.joules("package-0", [(0.0, 2.0)]) == pytest.approx(9)
    assert log.joules("package-0", [(0.5, 2.0)]) == pytest.approx(7.5)


def test_a_rail_that_is_missing_once_keeps_its_value() -> None:
    log = PowerLog("W")
    for when, values in ((0.0, {"a": 1.0}), (1.0, {}), (2.0, {"a": 3.0, "b": 5.0})):
        log.add(when, values)
    assert log.readings == {"a": [1.0, 1.0, 3.0], "b": [5.0, 5.0, 5.0]}


def test_meter_reads_at_both_ends(tmp_path: Path) -> None:
    rails = Rails.find(tree(tmp_path, ORIN))
    assert rails is not None
    moments = iter([1.0, 2.0])
    with Meter(rails, lambda: next(moments), period=3600) as meter:
        tree(tmp_path, {f"{MONITOR}/curr1_input": 1400})
    assert meter.log.times == [1.0, 2.0]
    assert meter.log.readings["VDD_IN"] == pytest.approx([6.0, 7.0])


class Library:
    """NVML with one GPU that throttles; clocks are not supported."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = 77
        return 0

    def nvmlDeviceGetName(self, device: ctypes.c_void_p, buffer: Any, size: int) -> int:
        buffer.value = b"NVIDIA Example"
        return 0 if device.value == 77 else 1

    def nvmlDeviceGetPowerUsage(self, device: Any, value: Any) -> int:
        value._obj.value = 31_500
        return 0

    def nvmlDeviceGetTemperature(self, device: Any, sensor: int, value: Any) -> int:
        value._obj.value = 64
        return 0

    def nvmlDeviceGetClockInfo(self, device: Any, kind: int, value: Any) -> int:
        return 3  # NVML_ERROR_NOT_SUPPORTED

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, value: Any) -> int:
        value._obj.value = 0x1 | 0x4 | 0x40  # idle is not throttling
        return 0


def test_gpu_through_nvml() -> None:
    gpu = NvmlGpu.of(Library())
    assert gpu is not None and gpu.read() == {"board": 31.5}
    assert gpu.facts() == {
        "name": "NVIDIA Example", "sm_clock_mhz": None, "memory_clock_mhz": None,
        "temperature_c": 64, "power_limit_w": None,
        "throttled": ["software power cap", "hardware thermal slowdown"],
    }  # fmt: skip


def test_no_gpu_is_no_source() -> None:
    library = Library()
    library.nvmlInit_v2 = lambda: 9  # type: ignore[method-assign]
    assert NvmlGpu.of(library) is None


# -- memory and roofline --------------------------------------------------------------------------


def status(anonymous: int, file: int, peak: int) -> str:
    sizes = {"VmHWM": peak, "RssAnon": anonymous, "RssFile": file, "RssShmem": 0}
    return "\n".join(["Name:\tx", *(f"{name}:\t{size} kB" for name, size in sizes.items())])


def test_memory_of_the_second_bundle_is_without_the_first(tmp_path: Path) -> None:
    def use(before: str, used: str) -> memory.Usage:
        tree(tmp_path, {"status": before, "clear_refs": ""})
        usage = memory.Usage(tmp_path)
        assert (tmp_path / "clear_refs").read_text() == "5"
        usage.loaded()
        tree(tmp_path, {"status": used})
        usage.used()
        return usage

    first = use(status(10, 5, 15), status(60, 15, 90))
    found = first.to_dict()
    assert found is not None
    assert (found["peak"], found["anonymous"], found["file"]) == (90 * 1024, 60 * 1024, 15 * 1024)
    second = use(status(60, 15, 75), status(80, 25, 115))
    found = second.to_dict(first.program)
    assert found is not None
    assert (found["peak"], found["anonymous"], found["file"]) == (55 * 1024, 30 * 1024, 15 * 1024)


def test_memory_that_is_not_told(tmp_path: Path) -> None:
    usage = memory.Usage(tmp_path)
    usage.loaded()
    usage.used()
    assert usage.to_dict() is None


def test_work_of_a_step_and_a_chunk() -> None:
    tied = CONFIGS["mamba1"]
    table = tied.vocab_size * tied.d_model
    step = roofline.work(tied, 1000, 40, 1)
    assert step.bytes == 1080
    chunk = roofline.work(tied, 1000, 40, 64)
    assert chunk.flops - step.flops == pytest.approx(63 * (step.flops - 2 * table))
    untied = CONFIGS["mamba2"]
    assert roofline.work(untied, 1000, 0, 1).bytes < 1000  # of the embedding only one row is read
    roof = roofline.Roof(read=2e3, copy=1e3, buffer_bytes=1, flops=None)
    assert roofline.bound_s(step, roof) == pytest.approx(0.54)


def test_roof_counts_bytes() -> None:
    ticks = iter(float(i) for i in range(1000))  # everything takes a second
    roof = roofline.measure_roof(2, size=1 << 16, rounds=2, clock=lambda: next(ticks))
    assert (roof.read, roof.copy) == (1 << 16, 1 << 16)  # half is read, and half is written
    assert roof.flops == 2 * 1024**3


def test_each_side_is_held_against_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on a GPU against the GPU's, ONNX Runtime beside it against the CPU's."""
    monkeypatch.setenv("EDGE_DEVICE", "interpret")
    own = roofline.Roof(2.0, 1.0, 1, None)
    monkeypatch.setattr(run, "measure_roof", lambda *_, **__: own)
    sides: list[dict[str, str]] = [{"engine": "cuda"}, {"engine": "ort", "provider": "cpu"}]
    roofs = run.roofs_of(run.ProfileRequest("demo"), [run.memory_of(side) for side in sides])
    assert roofs["cpu"] is own
    assert roofs["gpu"].read == roofs["gpu"].copy > 0 and roofs["gpu"].flops is None
    assert roofs["gpu"].buffer_bytes == 8 << 20
    assert run.memory_of({"engine": "ort", "provider": "cuda"}) is None
    assert run.memory_of({"engine": "cpu", "provider": None}) == "cpu"


def test_buffer_is_larger_than_the_last_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(available=8 << 30)
    monkeypatch.setattr(roofline.psutil, "virtual_memory", lambda: free)
    cache = "sys/devices/system/cpu/cpu0/cache"
    root = tree(tmp_path, {f"{cache}/index0/size": "32K", f"{cache}/index3/size": "16M"})
    assert roofline.buffer_size(root) == 8 * 16 << 20
    assert roofline.buffer_size(tmp_path / "nothing") == 64 << 20
    free.available = 128 << 20  # a small board
    assert roofline.buffer_size(root) == 16 << 20


def test_commit_is_that_of_the_checkout_and_not_of_a_repository_around_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, text=True,
                              capture_output=True)  # fmt: skip
        return done.stdout

    file = tmp_path / "__init__.py"
    file.write_text("")
    assert commit(file) is None
    git("init", "--quiet")
    assert commit(file) is None
    git("add", file.name)
    git("commit", "--quiet", "-m", "x")
    head = git("rev-parse", "HEAD").strip()
    assert head.startswith(commit(file) or "none")
    file.write_text("changed")
    assert (commit(file) or "").endswith("-dirty")
