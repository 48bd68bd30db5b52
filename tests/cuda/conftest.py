"""Whole-model tests run wherever the kernels can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import on_device

_EVERYWHERE = ("test_engine_models", "test_engine_track", "test_engine_greedy")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.endswith(_EVERYWHERE):
        on_device.parametrize(metafunc)


@pytest.fixture(autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the test's kernels run."""
    place = getattr(request, "param", on_device.INTERPRETED)
    with on_device.running(place):
        yield place
