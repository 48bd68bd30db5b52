"""Plugins with Triton's own cubins, over the real cuda-core on a driver that runs no kernels.

What a GPU would be asked to do, with the machine of `tests/gpu`: each kernel is loaded, its
parameters are compared with those of its cubin, and it is launched as the CUDA engine launches it.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.fake_driver import ran, scenario
from tests.tensorrt.plugin_host import whole

pytestmark = pytest.mark.without_gpu


def _launched() -> list[str]:
    """Return the kernels that ran since the last call, with grid, block and shared memory."""
    log = Path(os.environ["FAKE_CUDA_LOG"])
    lines = [line for line in log.read_text().splitlines() if line.startswith("run ")]
    log.write_text("")
    return sorted(line.partition(" arguments=")[0] for line in lines)


@scenario()
def whole_model() -> Any:
    os.environ["EDGE_TEST_DEVICE"] = "cuda"
    from tests.cuda.models import tokens
    from tests.tensorrt import plugin_models

    made = plugin_models.model("mamba2", "w8a8")
    plan, plugins = (made.engine.new_state(window=4, capacity=16) for _ in range(2))
    found = []
    for count, how in ((17, {"commit": True}), (1, {}), (3, {"parents": [-1, 0, 0]})):
        ids = tokens(count, seed=count)
        made.engine.run(ids, plan, rows="all", **how)
        planned = _launched()
        plugin_models.run(made, plugins, ids, **how)
        found.append((planned, _launched()))
    return found


def test_cubins_are_launched_as_the_cuda_engine_launches_them() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    whole()
    for planned, launched in ran(whole_model).result:
        more = Counter(launched) - Counter(planned)
        # the graph always ends in the best tokens, the engine only on request
        assert sorted(line.split()[1] for line in more) == ["blocks", "pick"]
        assert not Counter(planned) - Counter(launched)
