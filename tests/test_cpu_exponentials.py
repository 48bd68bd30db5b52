"""`exp` and the functions of it in every instruction set, against double precision."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tomllib
from numpy.typing import NDArray

from edge.plugins.cpu import library
from tests.compiling import compiled

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "plugins/cpu/src"
# `amx` is `avx512` with tiles
SETS = [name for name in library.instruction_sets() if name != "amx"] if library.path() else []
each_set = pytest.mark.parametrize("isa", SETS)
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
INF, NAN = np.float32(np.inf), np.float32(np.nan)
LARGEST = float(np.finfo(np.float32).max)

BODY = """
namespace edge_cpu {
namespace EDGE_ISA {
#include "simd.h"
#define OF(NAME)                                                         \\
  extern "C" void of_##NAME(const float* x, float* y, int64_t count) {   \\
    for (int64_t i = 0; i < count; i += W) store(y + i, NAME(load(x + i))); \\
  }
OF(exp2v) OF(expv) OF(sigmoid) OF(silu) OF(softplus) OF(tanhv)
}  // namespace EDGE_ISA
}  // namespace edge_cpu
"""


@cache
def functions(isa: str) -> ctypes.CDLL:
    """Compile the functions as the file of an instruction set does."""
    source = (SOURCES / f"isa_{isa}.cpp").read_text()
    assert source.count('#include "isa.h"') == 1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    flags = project["tool"]["setuptools"]["ext-modules"][0]["extra-compile-args"]
    options = [*flags, "-fvisibility=default", "-fPIC", "-shared", f"-I{SOURCES}", "-xc++", "-"]
    source = source.replace('#include "isa.h"', BODY)
    return ctypes.CDLL(str(compiled(f"{isa}.so", "g++", *options, source=source)))


def of(isa: str, name: str, x: F32) -> F32:
    """Return the function of x, whose vectors are filled with ones at the end."""
    padded = np.ones((len(x) + 15) // 16 * 16, np.float32)
    padded[: len(x)] = x
    y = np.empty_like(padded)
    pointer = ctypes.c_void_p
    getattr(functions(isa), f"of_{name}")(
        pointer(padded.ctypes.data), pointer(y.ctypes.data), ctypes.c_int64(len(x))
    )
    return y[: len(x)]


def as_f32(*values: float) -> F32:
    return np.asarray(values, np.float32)


def within(least: float, most: float) -> F32:
    """Return numbers from `least` to `most`: the ends and their neighbours, even and small ones."""
    ends = as_f32(least, most)
    even = np.linspace(max(least, -130), min(most, 130), 300_000, dtype=np.float32)
    small = np.geomspace(1e-38, 1, 30_000, dtype=np.float32)
    parts = (ends, np.nextafter(ends, np.float32(0)), even, small, -small, as_f32(0.0, -0.0))
    x = np.concatenate(parts)
    return x[(x >= ends[0]) & (x <= ends[1])]


def softplus(x: F64) -> F64:
    return np.logaddexp(0, x)


def sigmoid(x: F64) -> F64:
    return np.exp(-np.logaddexp(0, -x))


def silu(x: F64) -> F64:
    return x * sigmoid(x)


# name: the function, the range of its relative error, and the error (docs/inside/cpu-engine.md)
FUNCTIONS: dict[str, tuple[Callable[[F64], F64], float, float, float]] = {
    "exp2v": (np.exp2, -126, 127.4, 2e-7),
    "expv": (np.exp, -87, 88, 1e-7),
    "sigmoid": (sigmoid, -87, LARGEST, 2e-7),
    "silu": (silu, -87, LARGEST, 2e-7),
    "softplus": (softplus, -87, LARGEST, 3e-7),
    "tanhv": (np.tanh, -LARGEST, LARGEST, 2e-7),
}


@each_set
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_relative_error_that_is_stated(isa: str, name: str) -> None:
    exact, least, most, error = FUNCTIONS[name]
    x = within(least, most)
    wanted = exact(x.astype(np.float64))
    apart = np.abs(of(isa, name, x) - wanted)
    # the smallest number that is not denormal: below, fp32 has fewer digits
    bound = error * np.maximum(np.abs(wanted), np.finfo(np.float32).tiny)
    worst = int((apart - bound).argmax())
    assert apart[worst] <= bound[worst], f"{name}({x[worst]}) is {apart[worst]} off"
    assert (apart > 0.4 * error * np.abs(wanted)).any(), "the error stated is too large"


@each_set
def test_beyond_the_range(isa: str) -> None:
    low, high = as_f32(-INF, -1000, -127.5), as_f32(128, 1000, INF)
    ends: dict[str, tuple[float, float]] = {"exp2v": (-126, 127.4), "expv": (-87, 88)}
    if isa == "avx512":
        del ends["exp2v"]  # takes any number
        np.testing.assert_array_equal(of(isa, "exp2v", low[:2]), 0)
        np.testing.assert_array_equal(of(isa, "exp2v", high), INF)
    for name, (least, most) in ends.items():
        np.testing.assert_array_equal(of(isa, name, low), of(isa, name, as_f32(least))[0])
        np.testing.assert_array_equal(of(isa, name, high), of(isa, name, as_f32(most))[0])
    for name, most in (("sigmoid", 1e-38), ("softplus", 2e-38)):
        found = of(isa, name, low)
        assert (found >= 0).all() and (found < most).all(), name
    assert (np.abs(of(isa, "silu", low[1:])) < 1e-35).all()
    assert of(isa, "silu", as_f32(-INF))[0] == -INF
    for name, end in (("sigmoid", 1), ("softplus", INF), ("silu", INF), ("tanhv", 1)):
        assert of(isa, name, as_f32(INF))[0] == end, name
    assert of(isa, "tanhv", as_f32(-INF))[0] == -1


@each_set
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays_in_its_lane(isa: str, name: str) -> None:
    x = np.linspace(-3, 3, 48, dtype=np.float32)
    spoilt = np.arange(48) % 5 == 2
    found = of(isa, name, np.where(spoilt, NAN, x))
    np.testing.assert_array_equal(np.isnan(found), spoilt)
    np.testing.assert_array_equal(found[~spoilt], of(isa, name, x)[~spoilt])
