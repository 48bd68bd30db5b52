"""Sampling parameters: their ranges and validation."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import numpy as np

from edge.errors import InputError
from edge.runtime.constrain.statement import KINDS, Constraint, constraint_of
from edge.text.stream import check_stops


def _ranged(
    default: float | None, low: float, high: float, *, whole: bool = False, above: bool = False
) -> Any:
    """Return a field from `low` (exclusive if `above`) to `high`; None is valid if the default."""
    return field(default=default, metadata={"range": (low, high, whole, above)})


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is sampled and when it ends. Raises InputError listing every fault.

    Attributes:
        temperature: divisor of the logits; 0 is greedy, and the filters below then have no effect.
        top_k: keep the k likeliest tokens (ties included); 0 is off.
        top_p: keep the smallest set of likeliest tokens whose probabilities sum to p; 1 is off.
        min_p: drop tokens less likely than this fraction of the likeliest; 0 is off.
        repetition_penalty: divides the positive logits of recent tokens, multiplies negative ones.
        presence_penalty: subtracted from the logits of recent tokens; negative values favour them.
        frequency_penalty: the same, multiplied by how often they occurred.
        repetition_window: number of recent tokens that the three penalties consider, prompt
            included.
        logit_bias: token id → number added to its logit.
        seed: seed of the random numbers; None continues the session's own.
        max_tokens: maximum number of tokens to sample.
        stop: strings that end the answer; never part of it.
        deadline_s: seconds after which the answer ends as it is; None is never.
        logprobs: number of likeliest tokens to report in each place, besides the log probability of
            the sampled one; None reports nothing. See `TokenLogprob`.
        json_schema: schema that the answer conforms to: an object or its JSON, a pydantic model, or
            True for any JSON.
        regex: expression that the answer matches, in the syntax of Rust's `regex`.
        grammar: grammar of the answer, in llguidance's dialect of Lark.
        choices: texts from which the answer is chosen.
    """

    temperature: float = _ranged(0.7, 0, 100)
    top_k: int = _ranged(0, 0, 1 << 31, whole=True)
    top_p: float = _ranged(1.0, 0, 1, above=True)
    min_p: float = _ranged(0.0, 0, 1)
    repetition_penalty: float = _ranged(1.0, 0, 100, above=True)
    presence_penalty: float = _ranged(0.0, -2, 2)
    frequency_penalty: float = _ranged(0.0, -2, 2)
    repetition_window: int = _ranged(64, 0, 1 << 20, whole=True)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = _ranged(None, 0, (1 << 64) - 1, whole=True)
    max_tokens: int = _ranged(256, 1, 1 << 31, whole=True)
    stop: tuple[str, ...] = ()
    deadline_s: float | None = _ranged(None, 0, 1e9, above=True)
    logprobs: int | None = _ranged(None, 0, 1000, whole=True)
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    choices: Iterable[str] | None = None

    def __post_init__(self) -> None:
        faults: list[InputError] = []
        with collecting(faults):
            # read only once: `choices` may be an iterator
            given: dict[str, Any] = {kind: getattr(self, kind) for kind in KINDS}
            some = any(value is not None for value in given.values())
            self.__dict__["_constraint"] = constraint_of(given) if some else None
        for item in fields(self):
            if item.name in KINDS:
                continue
            value = getattr(self, item.name)
            with collecting(faults):
                if item.name == "logit_bias":
                    value = _check_bias(value)
                elif item.name == "stop":
                    value = check_stops(value)
                elif value is not None or item.default is not None:
                    value = check_number(item.name, value, *item.metadata["range"])
                object.__setattr__(self, item.name, value)
        refuse(faults)

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the answer, from the one of the last four parameters that was given."""
        constraint: Constraint | None = self.__dict__["_constraint"]
        return constraint

    @property
    def remembered(self) -> int:
        """Number of recent tokens that the penalties consider; 0 if all penalties are off."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return self.repetition_window if any(penalties) else 0

    @property
    def plainly_greedy(self) -> bool:
        """Whether the likeliest token is always taken and no other use is made of the logits."""
        free = not self.logit_bias and not self.remembered and self.constraint is None
        return self.temperature == 0 and free and self.logprobs is None


class Sampling(TypedDict, total=False):
    """`SamplingParams` as keywords of `Session.chat` and `Session.generate`; None: not given."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_window: int | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    stop: str | Iterable[str] | None
    deadline_s: float | None
    logprobs: int | None
    json_schema: Any
    regex: str | None
    grammar: str | None
    choices: Iterable[str] | None


def make_params(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """Merge `given` over `defaults`; None means not given.

    Default stop strings do not apply to an answer constrained by a grammar. Raises InputError
    listing every unknown parameter and every invalid value.
    """
    faults = unknown_names(given, Sampling.__annotations__)
    values = {name: value for name, value in defaults.items() if value is not None}
    if any(given.get(kind) is not None for kind in KINDS):
        # the model's own stop strings are meant for chat and could truncate constrained output
        values.pop("stop", None)
    values |= {name: value for name, value in given.items() if value is not None}
    with collecting(faults):
        params = SamplingParams(
            **{k: v for k, v in values.items() if k in Sampling.__annotations__}
        )
    refuse(faults)
    return params


@contextmanager
def collecting(faults: list[InputError]) -> Iterator[None]:
    """Collect an InputError in `faults`, so that all checks run before `refuse` raises them."""
    try:
        yield
    except InputError as fault:
        faults.append(fault)


def unknown_names(given: Iterable[str], known: Collection[str]) -> list[InputError]:
    """Return a fault for each unknown name."""
    faults = []
    for name in sorted(set(given) - set(known)):
        similar = difflib.get_close_matches(name, known, 1)
        hint = (
            f"did you mean {similar[0]!r}?"
            if similar
            else f"choose from {', '.join(sorted(known))}"
        )
        faults.append(InputError(f"unknown parameter {name!r:.60}", remedy=hint))
    return faults


def refuse(faults: Sequence[InputError]) -> None:
    """Raise all faults, if any, as one InputError with the field of the first."""
    if len(faults) == 1:
        raise faults[0]
    if faults:
        first, *others = faults
        messages = [InputError(first.message, remedy=first.remedy), *others]
        raise InputError("; ".join(map(str, messages)), field=first.field)


def check_number(
    name: str, value: Any, low: float, high: float, whole: bool = False, above: bool = False
) -> float:
    """Return the value as a float, or as an int if `whole`.

    Raises InputError unless it is from `low` (exclusive if `above`) to `high`.
    """
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "a whole number" if whole else "a number"
        raise InputError(f"must be {kind}, not {value!r:.40}", field=name)
    # NaN fails every comparison
    if not (low <= value <= high) or (above and value <= low):
        bounds = f"{'above' if above else 'from'} {plain_number(low)} to {plain_number(high)}"
        raise InputError(f"must be {bounds}, not {plain_number(value)}", field=name)
    return int(value) if whole else float(value)


def plain_number(number: Any) -> str:
    """Return a number as people write it, such as 2,147,483,648, -1 or 0.5."""
    whole = -1e20 < number < 1e20 and number == int(number)
    return f"{int(number):,}" if whole else f"{number:g}"


def _check_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InputError("must map token ids to numbers", field="logit_bias")
    out: dict[int, float] = {}
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or token < 0:
            raise InputError(f"{token!r:.40} is not a token id", field="logit_bias")
        number = isinstance(value, (int, float, np.integer, np.floating))
        if not number or not math.isfinite(value):
            raise InputError(f"{value!r:.40} is not a finite number", field=f"logit_bias.{token}")
        out[int(token)] = float(value)
    return out
