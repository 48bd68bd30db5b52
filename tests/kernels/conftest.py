"""Every kernel is tested wherever it can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import on_device

# these tests do not depend on the device
_APART = ("test_quick_interpreter", "test_races", "test_signatures")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not metafunc.module.__name__.endswith(_APART):
        on_device.parametrize(metafunc)


@pytest.fixture(autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the test's kernels run."""
    place = getattr(request, "param", on_device.INTERPRETED)
    with on_device.running(place):
        yield place
