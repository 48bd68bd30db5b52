"""What every test starts from."""

from __future__ import annotations

import torch

# tiny tensors: a second thread only makes them wait, tenfold when other programs run
torch.set_num_threads(1)
