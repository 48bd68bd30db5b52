"""From logits to a token.

A grammar's mask comes first, then the filters in the order of transformers' generate: logit bias,
penalties, temperature, top-k, top-p, min-p. (llama.cpp scales by temperature last, so the same
top-p keeps other tokens there.) The penalties look at the last `repetition_window` tokens, as
llama.cpp's do, so that their cost and their effect do not grow with the conversation.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, InputError, StateError
from edge.runtime.constrain.statement import KINDS, Constraint, constraint_of
from edge.runtime.result import TokenLogprob
from edge.text.stream import check_stops

if TYPE_CHECKING:
    from edge.runtime.constrain.mask import Mask

Logits = NDArray[np.float32]
_BLOCK = 512  # weights summed at once
_FEW = 256  # tokens that are as quickly sorted as looked through
_PASSES = 8  # over all logits: these are as quick as a sort of those near the best
_NEAR = 8.0  # a model's forty likeliest logits are usually no further than this from the best


def _within(
    default: float | None, low: float, high: float, *, whole: bool = False, above: bool = False
) -> Any:
    """A parameter from `low`, or above it, to `high`; None is allowed where it is the default."""
    return field(default=default, metadata={"range": (low, high, whole, above)})


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is sampled and when it ends. Raises InputError naming every fault there is.

    Attributes:
        temperature: divides the logits; 0 is greedy, and the filters below then change nothing.
        top_k: keep the k likeliest (ties included); 0 is off.
        top_p: keep the smallest set of likeliest tokens whose probabilities sum to p; 1 is off.
        min_p: drop tokens less likely than this share of the likeliest; 0 is off.
        repetition_penalty: divides the positive logits of recent tokens, multiplies negative ones.
        presence_penalty: is taken from the logits of recent tokens; below 0 it favours them.
        frequency_penalty: the same, as often as they occurred.
        repetition_window: how many recent tokens the three concern, prompt included.
        logit_bias: token id → number added to its logit.
        seed: None continues the session's own random numbers.
        max_tokens: most tokens to sample.
        stop: strings that end the answer; never part of it.
        deadline_s: seconds after which the answer ends with what there is; None is never.
        logprobs: report the log probability of each token, and of so many likeliest in its place;
            None reports nothing. See `TokenLogprob`.
        json_schema: the answer is JSON of this schema: an object or its JSON, a pydantic model, or
            True for any JSON.
        regex: the answer matches this expression, in the syntax of Rust's `regex`.
        grammar: the answer is in this grammar, in llguidance's dialect of Lark.
        choices: the answer is one of these texts.
    """

    temperature: float = _within(0.7, 0, 100)
    top_k: int = _within(0, 0, 1 << 31, whole=True)
    top_p: float = _within(1.0, 0, 1, above=True)
    min_p: float = _within(0.0, 0, 1)
    repetition_penalty: float = _within(1.0, 0, 100, above=True)
    presence_penalty: float = _within(0.0, -2, 2)
    frequency_penalty: float = _within(0.0, -2, 2)
    repetition_window: int = _within(64, 0, 1 << 20, whole=True)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = _within(None, 0, (1 << 64) - 1, whole=True)
    max_tokens: int = _within(256, 1, 1 << 31, whole=True)
    stop: tuple[str, ...] = ()
    deadline_s: float | None = _within(None, 0, 1e9, above=True)
    logprobs: int | None = _within(None, 0, 1000, whole=True)
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    choices: Iterable[str] | None = None

    def __post_init__(self) -> None:
        faults: list[InputError] = []
        with collecting(faults):
            # read once: choices may come from an iterator
            self.__dict__["_constraint"] = constraint_of({k: getattr(self, k) for k in KINDS})
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
        """What the answer has to be: that of the last four which was given."""
        found: Constraint | None = self.__dict__["_constraint"]
        return found

    @property
    def remembered(self) -> int:
        """How many of the last tokens make a difference to the next one, besides the logits."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return self.repetition_window if any(penalties) else 0

    @property
    def plainly_greedy(self) -> bool:
        """Whether the likeliest token is always taken, and nothing else of the logits is asked."""
        free = not self.logit_bias and not self.remembered and self.constraint is None
        return self.temperature == 0 and free and self.logprobs is None


class Sampling(TypedDict, total=False):
    """`SamplingParams` as keywords of `Session.chat` and `Session.generate`; None is not given."""

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
    """`given` over `defaults`; None means not given. The stop strings among the defaults do not
    count in an answer that a grammar holds.

    Raises InputError naming every unknown parameter and every wrong value.
    """
    faults = unknown_names(given, Sampling.__annotations__)
    values = {name: value for name, value in defaults.items() if value is not None}
    if any(given.get(kind) is not None for kind in KINDS):
        # a model's own are for its talk, and would cut what has to be whole
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
    """Take note of what is refused, to look at the rest before all of it is: see `refuse`."""
    try:
        yield
    except InputError as fault:
        faults.append(fault)


def unknown_names(given: Iterable[str], known: Collection[str]) -> list[InputError]:
    """A fault for each unknown name."""
    faults = []
    for name in sorted(set(given) - set(known)):
        alike = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {alike[0]!r}?" if alike else f"choose from {', '.join(sorted(known))}"
        faults.append(InputError(f"unknown parameter {name!r:.60}", remedy=hint))
    return faults


def refuse(faults: Sequence[InputError]) -> None:
    """Raise what is wrong, all of it in one InputError; its field is that of the first fault."""
    if len(faults) == 1:
        raise faults[0]
    if faults:
        first, *others = faults
        said = [InputError(first.message, remedy=first.remedy), *others]
        raise InputError("; ".join(map(str, said)), field=first.field)


class Distribution:
    """Tokens and what each of them weighs.

    Attributes:
        ids: [n], distinct, in any order; None for all of the vocabulary, in order.
        weights: [n], none negative; fp32 as they are sampled from, fp64 as differences.
        total: their sum, 0 where there is nothing to draw.
    """

    __slots__ = ("_sums", "ids", "total", "weights")

    def __init__(
        self,
        ids: NDArray[np.intp] | None,
        weights: NDArray[Any],
        sums: NDArray[np.float64] | None = None,
    ) -> None:
        """`sums`: running sums of the weights, where they are known."""
        self.ids = ids
        self.weights = weights
        if sums is None:
            sums = _block_sums(weights).cumsum()
        self._sums = sums
        self.total = float(sums[-1])

    def draw(self, uniform: float) -> int:
        """The token whose share of the whole holds `uniform` in [0, 1); never one of weight 0."""
        weights, sums, start = self.weights, self._sums, 0
        wanted = uniform * self.total
        if len(sums) < len(weights):
            block = min(int(sums.searchsorted(wanted, side="right")), len(sums) - 1)
            wanted -= float(sums[block - 1]) if block else 0.0
            start = block * _BLOCK
            sums = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
        index = start + int(sums.searchsorted(wanted, side="right"))
        if index == start + len(sums):
            # rounding left `wanted` at the very end
            index = int(weights[:index].nonzero()[0][-1])
        return index if self.ids is None else int(self.ids[index])

    def of(self, token: int) -> float:
        """The probability of one token; 0 for one that cannot be drawn."""
        if self.ids is None:
            return float(self.weights[token]) / self.total
        at = int((self.ids == token).argmax())
        return float(self.weights[at]) / self.total if self.ids[at] == token else 0.0

    def probabilities(self) -> NDArray[np.float64]:
        """[n], of each token; they sum to 1."""
        return np.multiply(self.weights, 1 / self.total, dtype=np.float64)

    def without(self, token: int) -> Distribution:
        """What a second, different token is drawn from."""
        weights = self.weights.copy()
        weights[token if self.ids is None else self.ids == token] = 0
        return Distribution(self.ids, weights)

    def minus(self, other: Distribution) -> Distribution:
        """max(p - q, 0) of the probabilities, q being those of the other."""
        ids, rest, taken = self.ids, self.probabilities(), other.probabilities()
        if other.ids is not None:
            size = len(rest) if ids is None else 1 + max(int(ids.max()), int(other.ids.max()))
            everywhere = np.zeros(size)
            everywhere[other.ids] = taken
            taken = everywhere
        rest -= taken if ids is None else taken[ids]
        return Distribution(ids, np.maximum(rest, 0, out=rest))


def _block_sums(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Of each `_BLOCK` weights: a running sum over a whole vocabulary would cost more than the
    rest. Few weights are blocks of their own.
    """
    if len(weights) <= _BLOCK:
        return weights.astype(np.float64)
    starts = np.arange(0, len(weights), _BLOCK)
    return np.add.reduceat(weights, starts, dtype=np.float64)


class Sampler:
    """A function from logits to a token, with its own random numbers.

    The generator is advanced once per sampled token and never by greedy choice, so that its state
    and the logits determine everything that follows.
    """

    def __init__(
        self,
        params: SamplingParams,
        rng: np.random.Generator | None = None,
        mask: Mask | None = None,
    ) -> None:
        """`rng`: random numbers to continue, when `params` names no seed. `mask`: of the grammar of
        one answer, which `allowed` applies.
        """
        self.params = params
        self.mask = mask
        self._adjusts = bool(params.logit_bias or params.remembered)
        if params.seed is not None or rng is None:
            rng = new_rng(params.seed)
        self.rng = rng

    def __call__(self, logits: Logits, history: Sequence[int] = ()) -> int:
        """The next token from logits [V]; `history` are earlier tokens, for the penalties.

        Raises EngineError when no logit is finite or one is NaN or +inf: a model that says nothing
        must not be heard as token 0.
        """
        logits, best = self._best(logits, history)
        if self.params.temperature == 0:
            return best
        return self._candidates(logits, best).draw(self.rng.random())

    def allowed(self, logits: Logits, path: Sequence[int] = ()) -> Logits:
        """Logits [V], -inf where the answer's grammar has no such token after `path`, which comes
        after what was said. The argument itself where there is no grammar.

        Raises EngineError for a grammar that cannot be followed further.
        """
        return logits if self.mask is None else self.mask.allowed(logits, path)

    def distribution(self, logits: Logits, history: Sequence[int] = ()) -> Distribution:
        """What the next token is drawn from at a temperature above 0. Raises as a call does."""
        return self._candidates(*self._best(logits, history))

    def likeliest(self, logits: Logits, history: Sequence[int], count: int) -> list[int]:
        """At most `count` that can be said, the likeliest first, the lowest of equal ones.

        Raises as a call does.
        """
        return _ranked(*self._best(logits, history), count)

    def _best(self, logits: Logits, history: Sequence[int]) -> tuple[Logits, int]:
        """Logits with bias and penalties, and the likeliest token; EngineError where none is."""
        if self._adjusts:
            logits = self._adjusted(logits, history)
        best = int(logits.argmax())  # of a NaN, where there is one
        if not math.isfinite(logits[best]):
            raise EngineError(
                f"the best logit is {float(logits[best])}: nothing can be sampled",
                remedy="the state may be damaged: start a new session, or check the bundle",
            )
        return logits, best

    def _adjusted(self, logits: Logits, history: Sequence[int]) -> Logits:
        """Logits with bias and penalties: a copy, or the argument itself when nothing was said."""
        params = self.params
        if params.logit_bias:
            logits = logits.copy()
            for token, bias in params.logit_bias.items():
                if token >= len(logits):
                    raise InputError(
                        f"token {token} is not below {len(logits)}", field="logit_bias"
                    )
                logits[token] += bias
        if params.remembered and history:
            recent = np.array(history[-params.remembered :], np.intp)
            seen = logits[recent]
            logits = logits.copy()
            penalty = np.float32(params.repetition_penalty)
            # a token that is among them twice gets the same value twice
            logits[recent] = np.where(seen > 0, seen / penalty, seen * penalty)
            if params.presence_penalty or params.frequency_penalty:
                said, count = np.unique(recent, return_counts=True)
                logits[said] -= params.presence_penalty + params.frequency_penalty * count
        return logits

    def _candidates(self, logits: Logits, best: int) -> Distribution:
        """The tokens that survive the filters; they weigh exp((logit - best) / temperature).

        fp32 throughout: weights are then right to 1e-5. 4096 tokens take 15 to 30 µs, 50,000 of a
        model's 0.03 to 0.7 ms.
        """
        params, highest = self.params, logits[best]
        ids: NDArray[np.intp] | None = None
        if 0 < params.top_k < len(logits):
            ids = _top(logits, best, params.top_k)
            logits = logits[ids]
        weights = logits - highest
        # the best one is 0, times anything; the rest must not overflow
        weights *= min(1 / params.temperature, 1e30)
        np.exp(weights, out=weights)
        sums: NDArray[np.float64] | None = None
        if params.top_p < 1:
            kept, weights, sums = _nucleus(weights, params.top_p)
            ids = kept if ids is None else ids[kept]
        if params.min_p > 0:
            # the likeliest has weight 1
            likely = (weights >= params.min_p).nonzero()[0]
            ids, weights = likely if ids is None else ids[likely], weights[likely]
            sums = None
        return Distribution(ids, weights, sums)


def logprob_of(logits: Logits, token: int, count: int) -> TokenLogprob:
    """What a model that says logits [V] gives a token, and its `count` likeliest ones."""
    best = int(logits.argmax())
    highest = float(logits[best])
    # exp of fp32 is right to 1e-7, and ten times as quick
    whole = highest + math.log(np.exp(logits - highest).sum(dtype=np.float64))
    top = _ranked(logits, best, count) if count else []
    return TokenLogprob(
        token,
        float(logits[token]) - whole,
        tuple((other, float(logits[other]) - whole) for other in top),
    )


def _ranked(logits: Logits, best: int, count: int) -> list[int]:
    """See `Sampler.likeliest`; `best` is the first."""
    if count <= _PASSES:
        return _one_by_one(logits, best, count)
    found = _top(logits, best, min(count, len(logits)))
    found = found[np.isfinite(logits[found])]
    ordered: list[int] = found[(-logits[found]).argsort(kind="stable")][:count].tolist()
    return ordered


def _one_by_one(logits: Logits, best: int, count: int) -> list[int]:
    """See `_ranked`."""
    found = [best]
    if count > 1:
        logits = logits.copy()
    while len(found) < count:
        logits[best] = -np.inf
        best = int(logits.argmax())
        if logits[best] == -np.inf:
            break
        found.append(best)
    return found


def _top(logits: Logits, best: int, count: int) -> NDArray[np.intp]:
    """Ids of the `count` likeliest, ties with the last of them included, in order."""
    # of a few near the best it is quickly found which they are
    near = (logits > float(logits[best]) - _NEAR).nonzero()[0]
    values = logits[near]
    if len(near) < count:
        near, values = np.arange(len(logits)), logits
    ranked = values.copy()
    last = len(ranked) - count
    ranked.partition(last)
    found: NDArray[np.intp] = near[values >= ranked[last]]
    return found


def _nucleus(weights: Logits, top_p: float) -> tuple[NDArray[np.intp], Logits, NDArray[np.float64]]:
    """The smallest set with at least `top_p` of the whole weight, likeliest first: (indices,
    weights, running sums of those).
    """
    found, heavy, whole = None, weights, None
    if len(weights) > _FEW:
        whole = weights.sum(dtype=np.float64)
        # the largest weight is 1; of models' tokens those from here on are mostly enough
        found, heavy = _heaviest(weights, top_p * float(whole), (1 - top_p) ** 2 / 6)
    order = (-heavy).argsort(kind="stable")
    heavy = heavy[order]
    sums = heavy.astype(np.float64).cumsum()
    needed = top_p * float(sums[-1] if whole is None else whole)
    count = int(sums.searchsorted(needed)) + 1
    order = order[:count]
    return order if found is None else found[order], heavy[:count], sums[:count]


def _heaviest(weights: Logits, needed: float, floor: float) -> tuple[NDArray[np.intp], Logits]:
    """All weights from some value on, `floor` or less, that are `needed` together: (their indices,
    they).
    """
    while True:
        found = (weights >= floor).nonzero()[0]
        heavy = weights[found]
        if len(found) == len(weights) or heavy.sum(dtype=np.float64) >= needed:
            return found, heavy
        floor = floor / 8 if floor > 1e-30 else 0.0


def new_rng(seed: int | None) -> np.random.Generator:
    """Random numbers from a seed, or from the system without one."""
    return np.random.Generator(np.random.PCG64(seed))


def rng_state(rng: np.random.Generator) -> dict[str, Any]:
    """Everything the generator is, as JSON: its 128-bit numbers as strings."""
    state = rng.bit_generator.state
    return {
        "kind": state["bit_generator"],
        "state": str(state["state"]["state"]),
        "inc": str(state["state"]["inc"]),
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }


def restore_rng(saved: Mapping[str, Any]) -> np.random.Generator:
    """The generator `rng_state` described. Raises StateError when that is malformed."""
    rng = new_rng(0)
    try:
        rng.bit_generator.state = {
            "bit_generator": saved["kind"],
            "state": {"state": int(saved["state"]), "inc": int(saved["inc"])},
            "has_uint32": int(saved["has_uint32"]),
            "uinteger": int(saved["uinteger"]),
        }
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise StateError(f"malformed random numbers: {problem!r}", field="extra.rng") from None
    return rng


def check_number(
    name: str, value: Any, low: float, high: float, whole: bool = False, above: bool = False
) -> float:
    """The value as a float, or as an int of `whole` numbers. Raises InputError: not from `low`, or
    `above` it, to `high`.
    """
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "a whole number" if whole else "a number"
        raise InputError(f"must be {kind}, not {value!r:.40}", field=name)
    # NaN fails every comparison
    if not (low <= value <= high) or (above and value <= low):
        bounds = f"{'above' if above else 'from'} {_plain(low)} to {_plain(high)}"
        raise InputError(f"must be {bounds}, not {value}", field=name)
    return int(value) if whole else float(value)


def _plain(number: float) -> str:
    """A bound as people write it: 2,147,483,648."""
    return f"{int(number):,}" if number == int(number) else f"{number:g}"


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
