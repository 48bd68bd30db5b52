"""Requests that wait for the model or are being answered, and the events of their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge.apps.serve.errors import ApiError
from edge.apps.serve.requests import EmbeddingRequest, ParsedRequest
from edge.apps.serve.slots import SlotPool
from edge.runtime.embed import Vectors
from edge.runtime.generate import Generation
from edge.runtime.model import Model
from edge.runtime.result import GenerationResult, TokenLogprob
from edge.text.tools import CallDelta


@dataclass(frozen=True)
class Piece:
    """Next part of one of a request's answers: text, logprobs of the tokens that begin in it, and
    parts of tool calls.
    """

    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True)
class Ended:
    """End of all answers. `reused`: tokens of the prompt that were not run again."""

    results: tuple[GenerationResult, ...]
    reused: int


@dataclass(frozen=True)
class Embedded:
    """The vectors [d_model] of a request's texts, in order."""

    asked: EmbeddingRequest
    vectors: tuple[Vectors, ...]
    took_s: float


Asked = ParsedRequest | EmbeddingRequest
Event = Piece | Ended | Embedded | ApiError  # text, then how it ended


@dataclass(frozen=True)
class Served:
    """A loaded model, and the states it runs in."""

    model: Model
    slots: SlotPool


class Job:
    """One request to answer.

    Attributes:
        until: deadline on the monotonic clock.
        served: model that answers; None for the one loaded last.
        client: address of the client.
        begun: whether the model has started on it.
    """

    def __init__(
        self,
        asked: Asked,
        until: float,
        post: Callable[[Event], None],
        served: Served | None = None,
        client: str = "",
    ) -> None:
        """`post` is called in the worker's thread with every event."""
        self.asked = asked
        self.until = until
        self.post = post
        self.served = served
        self.client = client
        self.came = time.monotonic()
        self.begun = False
        self.cancelled = threading.Event()
        self._generation: Generation | None = None

    def cancel(self) -> None:
        """End the job within one step or chunk, or before it begins. Callable from any thread."""
        self.cancelled.set()
        generation = self._generation
        if generation is not None:
            generation.cancel()

    def attach(self, generation: Generation) -> None:
        """Make `cancel` end this generation from now on."""
        self._generation = generation
        if self.cancelled.is_set():  # cancelled in between
            generation.cancel()
