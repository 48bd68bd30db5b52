"""What every test starts from."""

from __future__ import annotations

import os

# before Triton's first import: kernels are then interpreted, on the CPU
if os.environ.get("EDGE_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

# tiny tensors: a second thread only makes them wait, tenfold when other programs run
torch.set_num_threads(1)
