"""Output of `edge-chat`: text as it arrives, only ever appended, and a line of figures."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from edge.apps.chat.wrap import Wrap, wrapped
from edge.apps.terminal import DIM, harmless, say
from edge.apps.units import megabytes

if TYPE_CHECKING:
    from edge.apps.chat.gain import Gain
    from edge.runtime.result import GenerationResult
    from edge.runtime.session import Session
    from edge.runtime.speculate.decode import Speculation

FLUSH_SECONDS = 0.05  # 20 times a second is as fast as anyone reads, and fits slow serial lines

ENDS = {
    "stop": "",
    "length": "cut at --max-tokens",
    "cancelled": "stopped",
    "deadline": "out of time",
    "context": "the context is full: /reset or /undo",
}


class Stream:
    """Writer of the pieces of an answer, which flushes at most every FLUSH_SECONDS.

    `wraps`: whether lines at a terminal are wrapped between words.
    """

    def __init__(self, out: TextIO, wraps: bool = True) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._wrap = Wrap(self._columns if wraps else lambda: 0)
        self._flushed = 0.0
        self._last = ""

    def write(self, piece: str) -> None:
        """Append a piece; a terminal gets no control characters from a model."""
        if self._terminal:
            piece = self._wrap.feed(harmless(piece))
        self._append(piece)

    def _append(self, piece: str) -> None:
        if not piece:
            return
        self._out.write(piece)
        self._last = piece[-1]
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._out.flush()
            self._flushed = time.monotonic()

    def end(self) -> None:
        """Finish the line."""
        self._append(self._wrap.rest())
        if self._last != "\n":
            self._out.write("\n")
        self._out.flush()

    def _columns(self) -> int:
        """Return the columns of the terminal now; 0 if unknown, as on a serial line."""
        try:
            return os.get_terminal_size(self._out.fileno()).columns
        except (OSError, ValueError):
            return 0


def prepare() -> None:
    """Make characters that a terminal cannot show question marks instead of errors."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def figures(
    result: GenerationResult,
    session: Session,
    gain: Gain | None = None,
    times: float | None = None,
    width: int | None = None,
) -> str:
    """Return one line: tokens and their speed, TTFT, reused tokens, and what drafts did.

    `gain`: the conversation's. `times`: the estimated speed-up of this answer over plain decoding,
    if known. `width`: columns of the line; the least informative parts are left out.
    """
    prompt, rate = f"prompt {result.prompt_tokens}", [_rate(result.prompt_tokens_per_s)]
    generation, pace = f"generation {len(result.tokens)}", [_rate(result.timings.tokens_per_s)]
    first = result.timings.ttft_s
    ttft = [] if first is None else [f"TTFT {first * 1000:.0f} ms"]
    drafted = result.speculation
    drafts = _drafting(drafted, times, gain is not None and gain.chosen) if drafted else []
    reused, state = (
        [f"reused {result.reused_tokens}"],
        [f"state {megabytes(session.state_bytes)}"],
    )
    ended = [ENDS[result.finish_reason]] if ENDS[result.finish_reason] else []
    while True:
        drafting = ", ".join(drafts)
        counts = ["".join([prompt, *rate]), "".join([generation, *pace])]
        parts = [*counts, *ttft, drafting, *reused, *state, *ended]
        line = f"[ {' | '.join(filter(None, parts))} ]"
        if width is None or len(line) <= width:
            return line
        details = drafts if len(drafts) > 1 else []
        removable = next(
            (group for group in (state, details, reused, ttft, rate, drafts, pace) if group), None
        )
        if removable is None:
            return line
        removable.pop()


def facts(result: GenerationResult, session: Session) -> dict[str, Any]:
    """Return an answer and its figures as one JSON object."""
    times, drafted = result.timings, result.speculation
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": len(result.tokens),
        "ttft_ms": None if times.ttft_s is None else 1e3 * times.ttft_s,
        "prefill_tokens_per_s": result.prompt_tokens_per_s,
        "decode_tokens_per_s": times.tokens_per_s,
        "total_s": times.total_s,
        "state_bytes": session.state_bytes,
        "speculation": None if drafted is None else {
            "drafter": drafted.drafter,
            "accept": drafted.accept,
            "acceptance_length": drafted.acceptance_length,
            "drafted_tokens": drafted.drafted,
            "accepted_tokens": drafted.accepted,
            "problem": drafted.problem,
        },
    }  # fmt: skip


def columns() -> int | None:
    """Return the columns of the terminal that notes go to; None if they go elsewhere."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


def _drafting(drafted: Speculation, times: float | None, chosen: bool) -> list[str]:
    """Describe how much of an answer came from drafts, and the estimated speed-up.

    `chosen`: a bandit chooses shapes, so the most frequent one is named.
    """
    from edge.runtime.speculate.shape import LOOK_UP  # imported only when drafting

    parts = []
    if drafted.acceptance_length is not None:
        share = drafted.accepted / (drafted.accepted + drafted.rounds + drafted.steps)
        parts.append(f"{drafted.drafter} {drafted.acceptance_length:.1f} a run")
        if len(drafted.sources) > 1:
            looked_up = drafted.sources[LOOK_UP].rounds
            parts.append(f"{looked_up} of {drafted.rounds} runs by look-up")
        parts.append(f"{share:.0%} drafted")
        if times is not None:
            parts.append(f"about {times:.1f}× plain speed")
        if drafted.accept != "exact":
            parts.append(f"lossy ({drafted.accept})")
        if chosen:
            parts.append(f"mostly {_most_frequent(drafted)}")
    if drafted.problem:
        parts.append(f"{drafted.drafter} given up: {drafted.problem}")
    return parts or [f"{drafted.drafter}: nothing drafted"]


def _most_frequent(drafted: Speculation) -> str:
    """Return the source and shape of most drafts."""
    from edge.runtime.speculate.shape import LOOK_UP, Shape

    counts = {
        (source, branches): count
        for source, share in drafted.sources.items()
        for branches, count in share.shapes.items()
    }
    source, branches = max(counts, key=counts.__getitem__)
    return f"{'look-ups' if source == LOOK_UP else 'drafts'} of {Shape(branches)}"


def _rate(per_second: float | None) -> str:
    return "" if per_second is None else f" at {per_second:.0f} t/s"


def note(text: str) -> None:
    """Print a note on standard error, dimmed if the terminal can."""
    sys.stdout.flush()
    width = columns()
    text = text if width is None else wrapped(text, width)
    say(text, style=DIM if _supports_style(sys.stderr) else ("", ""), file=sys.stderr, flush=True)


def complain(problem: Exception) -> None:
    """Print an error on standard error."""
    message, width = f"error: {problem}", columns()
    say(message if width is None else wrapped(message, width), file=sys.stderr, flush=True)


def _supports_style(stream: TextIO) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not plain
