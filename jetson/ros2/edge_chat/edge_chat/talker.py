"""A model in a robot's process: one goal at a time, on its own thread. Independent of ROS.

    unconfigured ─configure→ inactive ─activate→ active ─deactivate→ inactive ─cleanup→ unconfigured

Everything that touches the model runs on the decode thread. So code that reads sensors never waits
for a token, and a GPU's context has one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import edge
from edge.errors import EdgeError, EngineError, Faults, InputError
from edge.runtime.memory import available_bytes

State = Literal["unconfigured", "inactive", "active"]
OnPiece = Callable[[str], object]

_LOW_MEMORY = 256 << 20  # available bytes below which diagnostics warn
_NAN = float("nan")
_TYPE_NAMES = {str: "a string", int: "an integer", float: "a number"}


class Refused(Exception):
    """A request cannot be carried out now; nothing was done."""


@dataclass(frozen=True)
class NodeSettings:
    """The node's parameters. `threads` 0 is one per core; `deadline_s` 0 and "" mean none."""

    bundle: str = "demo"
    engine: str = "auto"
    draft: str = ""
    threads: int = 0
    system: str = ""
    max_tokens: int = 128
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    deadline_s: float = 30.0
    warmup_tokens: int = 8
    diagnostics_s: float = 1.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> NodeSettings:
        """Build settings from a node's parameters.

        A float may be given as an integer, as YAML reads `deadline_s: 30`. Raises InputError naming
        every parameter of a wrong type or value.
        """
        faults, settings = Faults(), dict(values)
        for setting in fields(cls):
            value, kind = settings[setting.name], type(setting.default)
            if kind is float and type(value) is int:
                settings[setting.name] = float(value)
            elif type(value) is not kind:
                message = f"must be {_TYPE_NAMES[kind]}, not {value!r:.40}"
                faults.add(setting.name, message, "set the node's parameter")
            elif setting.name == "diagnostics_s" and value <= 0:
                faults.add(
                    setting.name, f"must be above 0, not {value}", "set the node's parameter"
                )
        faults.refuse(InputError)
        return cls(**settings)


@dataclass(frozen=True)
class GoalRequest:
    """The request for one answer; None stands for the node's setting.

    Attributes:
        chat: whether the prompt is a message in the model's template, not a text to continue.
        keep: whether to continue the conversation.
        json_schema, regex, choices: constraint of the answer, one of them at most.
    """

    prompt: str
    chat: bool = True
    keep: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    deadline_s: float | None = None
    stop: tuple[str, ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] | None = None

    @classmethod
    def of(cls, goal: Any) -> GoalRequest:
        """Convert a `Generate` goal, in which defaults stand for the node's settings."""
        return cls(
            prompt=goal.prompt,
            chat=goal.chat,
            keep=goal.keep,
            max_tokens=goal.max_tokens if goal.max_tokens > 0 else None,
            temperature=goal.temperature if goal.temperature >= 0 else None,
            seed=goal.seed if goal.seed >= 0 else None,
            deadline_s=goal.deadline_s if goal.deadline_s >= 0 else None,
            stop=tuple(goal.stop),
            json_schema=goal.json_schema or None,
            regex=goal.regex or None,
            choices=tuple(goal.choices) or None,
        )


@dataclass(frozen=True)
class Outcome:
    """The result of a goal. `error` says what went wrong, if finish_reason is "error"."""

    text: str
    finish_reason: str
    error: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    ttft_s: float = _NAN
    tokens_per_s: float = _NAN

    def fill(self, result: Any) -> Any:
        """Fill a `Generate` result, whose fields have the same names, and return it."""
        for field in fields(self):
            setattr(result, field.name, getattr(self, field.name))
        return result


class Goal:
    """An answer being generated."""

    def __init__(self, session: Any) -> None:
        self.cancelled = threading.Event()
        self._session = session
        self._ended = threading.Event()
        self._outcome: Outcome | None = None

    def cancel(self) -> None:
        """End it within one step, or one chunk of its prompt. Callable from any thread."""
        self.cancelled.set()
        session = self._session
        if session is not None:
            session.cancel()

    def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Return its outcome, or None if there is none after `timeout_s`."""
        self._ended.wait(timeout_s)
        return self._outcome

    def end(self, outcome: Outcome) -> None:
        """Set the outcome. Called by the decode thread."""
        self._session = None  # a goal must not keep it alive after cleanup
        self._outcome = outcome
        self._ended.set()


@dataclass
class Counts:
    """Counts since the node was configured, the last outcome, and why the engine is broken."""

    answers: int = 0
    cancelled: int = 0
    errors: int = 0
    last: Outcome | None = None
    broken: str = ""


class Talker:
    """The model with its lifecycle, as the module describes it. Methods are thread-safe."""

    def __init__(self) -> None:
        self._state: State = "unconfigured"
        self._settings = NodeSettings()
        self._thread: ThreadPoolExecutor | None = None
        self._model: Any = None
        self._session: Any = None
        self._goal: Goal | None = None
        self._lock = threading.RLock()
        self._counts = Counts()

    @property
    def state(self) -> State:
        return self._state

    # -- lifecycle -------------------------------------------------------------------------------

    def configure(self, settings: NodeSettings) -> None:
        """Load the model and allocate its session. Raises EdgeError or Refused."""
        self._require("unconfigured")
        thread = ThreadPoolExecutor(1, "edge-decode")
        try:
            self._model, self._session = thread.submit(_load, settings).result()
        except BaseException:
            thread.shutdown()
            raise
        self._thread, self._settings, self._counts = thread, settings, Counts()
        self._state = "inactive"

    def activate(self) -> None:
        """Warm up by generating and discarding an answer. Raises EdgeError or Refused."""
        self._require("inactive")
        if self._settings.warmup_tokens > 0:
            self._on_thread(self._warm_up)
        self._state = "active"

    def deactivate(self) -> None:
        """Accept no more goals, and end the running one. Raises Refused."""
        self._require("active")
        self._close()

    def cleanup(self) -> None:
        """Free everything. Raises Refused."""
        self._require("inactive")
        self._free()

    def shutdown(self) -> None:
        """Free everything, in any state."""
        self._close()
        self._free()

    def _close(self) -> None:
        with self._lock:  # a goal either begins before this, and is ended, or is refused
            self._state = "inactive"
        self._end_goal()

    def _free(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            # the last references are dropped on the thread that made them
            thread.submit(self._forget).result()
            thread.shutdown()
        self._state = "unconfigured"

    def _forget(self) -> None:
        self._session = self._model = None

    def _require(self, state: State) -> None:
        if self._state != state:
            raise Refused(f"is {self._state}, not {state}")

    def _on_thread(self, work: Callable[[], Any]) -> Any:
        assert self._thread is not None
        return self._thread.submit(work).result()

    def _warm_up(self) -> None:
        generate = self._generator_for(
            GoalRequest("Hello", chat=self._model.template is not None, temperature=0.0)
        )
        for _ in generate(self._settings.warmup_tokens):
            pass
        self._session.reset()

    # -- goals -----------------------------------------------------------------------------------

    def start(self, request: GoalRequest, on_piece: OnPiece = lambda piece: None) -> Goal:
        """Begin an answer. `on_piece` receives its text in pieces, on the decode thread.

        Raises Refused when the node is not active, another goal runs, or the engine has failed.
        """
        with self._lock:
            if reason := self.refusal():
                raise Refused(reason)
            assert self._thread is not None
            self._goal = goal = Goal(self._session)
            self._thread.submit(self._answer, goal, request, on_piece)
            return goal

    def refusal(self) -> str | None:
        """Return why a goal would be refused now, or None if it would be accepted."""
        if self._state != "active":
            return f"is {self._state}, not active"
        if self._counts.broken:
            return f"has a failed engine; configure it again: {self._counts.broken}"
        if self._goal is not None:
            return "is answering another goal"
        return None

    def _answer(self, goal: Goal, request: GoalRequest, on_piece: OnPiece) -> None:
        try:
            outcome = self._generate(goal, request, on_piece)
        except EdgeError as problem:
            outcome = Outcome("", "error", str(problem))
            if isinstance(problem, EngineError):
                self._counts.broken = str(problem)
        except Exception as problem:
            outcome = Outcome("", "error", f"{type(problem).__name__}: {problem}")
        self._count(outcome)
        with self._lock:
            self._goal = None
        goal.end(outcome)

    def _generate(self, goal: Goal, request: GoalRequest, on_piece: OnPiece) -> Outcome:
        if not request.keep:
            self._session.reset()
        generation = self._generator_for(request)(request.max_tokens or self._settings.max_tokens)
        try:
            if goal.cancelled.is_set():  # before there was a generation to cancel
                generation.cancel()
            for piece in generation:
                on_piece(piece)
            result = generation.result
        finally:
            generation.close()
        times = result.timings
        return Outcome(
            result.text,
            result.finish_reason,
            "",
            result.prompt_tokens,
            result.reused_tokens,
            len(result.tokens),
            _NAN if times.ttft_s is None else times.ttft_s,
            _NAN if times.tokens_per_s is None else times.tokens_per_s,
        )

    def _generator_for(self, request: GoalRequest) -> Callable[[int], Any]:
        """Return a function from the maximum number of tokens to a generation."""
        settings, session = self._settings, self._session
        deadline = settings.deadline_s if request.deadline_s is None else request.deadline_s
        sampling = {
            "temperature": settings.temperature
            if request.temperature is None
            else request.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "repetition_penalty": settings.repetition_penalty,
            "seed": request.seed,
            "stop": request.stop,
            "deadline_s": deadline or None,
            "json_schema": request.json_schema,
            "regex": request.regex,
            "choices": request.choices,
        }
        method = session.chat if request.chat else session.generate
        return lambda max_tokens: method(request.prompt, max_tokens=max_tokens, **sampling)

    def _end_goal(self) -> None:
        goal = self._goal
        if goal is not None:
            goal.cancel()
            goal.wait()

    def _count(self, outcome: Outcome) -> None:
        counts = self._counts
        counts.answers += 1
        counts.cancelled += outcome.finish_reason == "cancelled"
        counts.errors += outcome.finish_reason == "error"
        counts.last = outcome

    # -- the conversation ------------------------------------------------------------------------

    def reset(self) -> None:
        """Clear the conversation. Raises Refused."""
        self._between_goals(lambda: self._session.reset())

    def save(self, path: str) -> int:
        """Save the conversation with its state; return its tokens. Raises StateError or Refused."""

        def save() -> int:
            self._session.save(Path(path))
            position: int = self._session.position
            return position

        tokens: int = self._between_goals(save)
        return tokens

    def load(self, path: str) -> int:
        """Resume a saved conversation; return its tokens. Raises StateError or Refused."""
        tokens: int = self._between_goals(lambda: self._session.load(Path(path)))
        return tokens

    def _between_goals(self, work: Callable[[], Any]) -> Any:
        with self._lock:
            if reason := self.refusal():
                raise Refused(reason)
            # holding the lock keeps goals out
            return self._on_thread(work)

    # -- diagnostics ----------------------------------------------------------------------------

    def health(self) -> tuple[Literal["ok", "warn", "error"], str, dict[str, str]]:
        """Return level, message and values for a diagnostics message."""
        from edge.apps.measure.machine import conditions, power_mode

        counts, free = self._counts, available_bytes()
        temperatures = [t for t in conditions().temperatures_c.values() if t > -200]
        last = counts.last
        values = {
            "bundle": self._settings.bundle,
            "engine": self._model.engine.name if self._model is not None else "",
            "answers": str(counts.answers),
            "cancelled": str(counts.cancelled),
            "errors": str(counts.errors),
            "tokens_per_s": f"{last.tokens_per_s:.2f}" if last else "",
            "ttft_s": f"{last.ttft_s:.4f}" if last else "",
            "temperature_c": f"{max(temperatures):.1f}" if temperatures else "",
            "mem_available_bytes": "" if free is None else str(free),
            "power_mode": power_mode() or "",
        }
        if counts.broken:
            return "error", counts.broken, values
        if free is not None and free < _LOW_MEMORY:
            return "warn", f"only {free >> 20} MiB of memory available", values
        return "ok", self._state, values


def _load(settings: NodeSettings) -> tuple[Any, Any]:
    threads = settings.threads or None
    model = edge.load(settings.bundle, engine=settings.engine, threads=threads)
    draft: Any = settings.draft or None
    if draft not in (None, "ngram"):
        draft = edge.load(draft, engine=settings.engine, threads=threads)
    # the node has no undo, and each level would hold a state
    return model, model.session(system=settings.system or None, undo_levels=1, draft=draft)
