"""Which rows a causal convolution of a run reads: state, replayed tokens, new tokens.

Rows are numbered [state slot: K-1 | log slots: S | new tokens: T].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.runtime.cuda.ledger import LAST, Step, Tree, log_slots

Ints = NDArray[np.int32]


def rows(step: Step, width: int) -> Ints:
    """Rows of everything up to the run's last token in order, as if it were a chain."""
    state = np.arange(width - 1, dtype=np.int32)
    log = np.asarray(step.pending, np.int32) + np.int32(width - 1)
    first = width - 1 + log_slots(step.after.window)
    new = np.arange(first, first + len(step.slots), dtype=np.int32)
    return np.concatenate([state, log, new])


def fill(step: Step, width: int, taps: Ints, state_taps: Ints) -> None:
    """Write `taps` [T, K], oldest first and itself last, and `state_taps` [K-1].

    The latter are the rows of the state that is stored; without one they are not read.
    """
    order, replayed = rows(step, width), len(step.pending)
    if step.parents is None:
        taps[:] = order[np.arange(replayed, replayed + len(step.slots))[:, None] + np.arange(width)]
    else:
        before, new = order[: width - 1 + replayed], order[width - 1 + replayed :]
        tree = Tree(step.parents, step.slots)
        for node in range(len(step.slots)):
            path = np.concatenate([before, new[list(tree.path(node))]])
            taps[node] = path[len(path) - width :]
    end = replayed + len(step.slots) if step.store == LAST else step.advance
    state_taps[:] = order[end : end + width - 1]
