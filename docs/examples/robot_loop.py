"""Run a model inside a robot's process: a deadline, a cancel, and a control loop that never waits.

python docs/examples/robot_loop.py [BUNDLE]

The model has a thread of its own. The control loop only polls a queue, so a slow token cannot
delay a control step. Python itself gives no hard real-time guarantee.
"""

import queue
import sys
import threading
import time

import edge

PERIOD_S = 0.01


class Speaker(threading.Thread):
    """Thread that answers one question at a time and puts the text into `pieces`."""

    def __init__(self, model: edge.Model) -> None:
        super().__init__(daemon=True)
        # a tiny model's answers end too soon to be interrupted: forbid the tokens that end them
        self.endless = dict.fromkeys(model.tokenizer.eos, -1e4)
        self.session = model.session(system="Answer briefly.")
        self.before = self.session.snapshot()
        self.questions: queue.Queue[tuple[str, float] | None] = queue.Queue()
        self.pieces: queue.Queue[str] = queue.Queue()
        self.reasons: queue.Queue[str] = queue.Queue()

    def run(self) -> None:
        while (asked := self.questions.get()) is not None:
            question, deadline_s = asked
            # every question starts from the same state
            self.session.restore(self.before)
            answer = self.session.chat(
                question, max_tokens=1_000_000, deadline_s=deadline_s, logit_bias=self.endless
            )
            for piece in answer:
                self.pieces.put(piece)
            self.reasons.put(answer.result.finish_reason)

    def stop_talking(self) -> None:
        """End the answer within one step; safe from any thread, and without an answer."""
        self.session.cancel()


def main(bundle: str = "demo-draft") -> None:
    # demo-draft has only Mamba layers: no context ever fills, so only the deadline ends an answer
    speaker = Speaker(edge.load(bundle))
    speaker.start()

    speaker.questions.put(("What do you see?", 0.1))
    print(f"\n[ended by {control(speaker)}]")

    speaker.questions.put(("Tell me a long story.", 5.0))
    print(f"\n[ended by {control(speaker, patience=3)}]")

    speaker.questions.put(None)
    speaker.join(timeout=5)


def control(speaker: Speaker, *, patience: int | None = None) -> str:
    """Run the control loop; cancel the answer after `patience` pieces of text."""
    heard = 0
    for _ in range(1000):
        # … read sensors, command motors …
        while not speaker.pieces.empty():
            print(speaker.pieces.get(), end="", flush=True)
            heard += 1
        if patience is not None and heard >= patience:
            speaker.stop_talking()
        if not speaker.reasons.empty():
            return speaker.reasons.get()
        time.sleep(PERIOD_S)
    raise TimeoutError("the model neither answered nor met its deadline")


if __name__ == "__main__":
    main(*sys.argv[1:])
