"""What every test starts from."""

from __future__ import annotations

import os

# before Triton's first import: kernels are then interpreted, on the CPU
if os.environ.get("EDGE_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

# tiny tensors: a second thread only makes them wait, tenfold when other programs run
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU leave out what would run there as it runs without one."""
    if os.environ.get("EDGE_TEST_DEVICE", "cpu") == "cpu":
        return
    why = "runs in the interpreter, or on a driver of the tests: EDGE_TEST_DEVICE changes nothing"
    for item in items:
        if item.get_closest_marker("without_gpu"):
            item.add_marker(pytest.mark.skip(reason=why))
