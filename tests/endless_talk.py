"""An endless conversation: `python -m tests.endless_talk 1000000 [BUNDLE] [ENGINE]`.

Prints, for every tenth of the tokens, the CPU time of a turn, the memory, and the stored bytes.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time

import edge
from edge.runtime import memory
from edge.runtime.session import Session

TEXT = "hello robot please count to seven and tell me why the state of a model never grows"


def turn(session: Session, rng: random.Random) -> float:
    """Run a turn of 30 to 200 tokens; return its CPU seconds per token."""
    before, began = session.position, time.process_time()
    text = " ".join(rng.choices(TEXT.split(), k=rng.randint(5, 60)))
    session.chat(text, max_tokens=rng.randint(10, 60), temperature=1.0).finish()
    return (time.process_time() - began) / (session.position - before)


def talk(count: int, bundle: str = "demo-draft", engine: str = "auto") -> None:
    session = edge.load(bundle, threads=1, engine=engine).session(seed=1)
    rng = random.Random(1)
    print(f"{bundle} on {session.model.engine.name}")
    print(f"{'tokens':>9} {'CPU ms a token':>14} {'kept tokens':>12} {'messages':>9} {'MB':>7}")
    for part in range(1, 11):
        spent = []
        while session.position < part * count // 10:
            spent.append(turn(session, rng))
        gc.collect()
        memory.trim()
        print(
            f"{session.position:9} {1e3 * statistics.median(spent):14.3f} "
            f"{len(session.tokens):12} {len(session.messages):9} "
            f"{memory.private_bytes() / 1e6:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    talk(int(sys.argv[1]), *sys.argv[2:])
