"""Sampling of tokens from logits.

A grammar's mask comes first, then the filters in the order of transformers' `generate`: logit bias,
penalties, temperature, top-k, top-p, min-p. (llama.cpp applies the temperature last, so the same
top-p keeps different tokens there.) Like llama.cpp's, the penalties consider the last
`repetition_window` tokens, so that their cost and effect do not grow with the conversation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, InputError, StateError
from edge.runtime.parameters import SamplingParams
from edge.runtime.result import TokenLogprob

if TYPE_CHECKING:
    from edge.runtime.constrain.mask import Mask

Logits = NDArray[np.float32]
_BLOCK = 512  # weights summed at once
_SORTED_TOKENS = 256  # up to this many tokens, sorting is as fast as filtering first
_ARGMAX_PASSES = 8  # up to this many argmax passes over all logits are as fast as a partial sort
_NEAR_LOGITS = 8.0  # the forty likeliest logits are usually within this distance of the best


class Distribution:
    """Tokens and their unnormalized probabilities.

    Attributes:
        ids: [n], distinct, in any order; None for the whole vocabulary in order.
        weights: [n], not negative; fp32 for sampling, fp64 for differences of distributions.
        total: sum of the weights; 0 if nothing can be drawn.
    """

    __slots__ = ("_sums", "ids", "total", "weights")

    def __init__(
        self,
        ids: NDArray[np.intp] | None,
        weights: NDArray[Any],
        sums: NDArray[np.float64] | None = None,
    ) -> None:
        """`sums`: running sums of the weights, if already known."""
        self.ids = ids
        self.weights = weights
        if sums is None:
            sums = _block_sums(weights).cumsum()
        self._sums = sums
        self.total = float(sums[-1])

    def draw(self, uniform: float) -> int:
        """Return the token at quantile `uniform` in [0, 1); never one of weight 0."""
        weights, sums, start = self.weights, self._sums, 0
        target = uniform * self.total
        if len(sums) < len(weights):
            block = min(int(sums.searchsorted(target, side="right")), len(sums) - 1)
            target -= float(sums[block - 1]) if block else 0.0
            start = block * _BLOCK
            sums = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
        index = start + int(sums.searchsorted(target, side="right"))
        if index == start + len(sums):
            # rounding left `target` beyond the last weight
            index = int(weights[:index].nonzero()[0][-1])
        return index if self.ids is None else int(self.ids[index])

    def of(self, token: int) -> float:
        """Return the probability of a token; 0 if it cannot be drawn."""
        if self.ids is None:
            return float(self.weights[token]) / self.total
        at = int((self.ids == token).argmax())
        return float(self.weights[at]) / self.total if self.ids[at] == token else 0.0

    def probabilities(self) -> NDArray[np.float64]:
        """Return the probabilities [n], which sum to 1."""
        return np.multiply(self.weights, 1 / self.total, dtype=np.float64)

    def without(self, token: int) -> Distribution:
        """Return the distribution with `token` excluded."""
        weights = self.weights.copy()
        weights[token if self.ids is None else self.ids == token] = 0
        return Distribution(self.ids, weights)

    def minus(self, other: Distribution) -> Distribution:
        """Return max(p - q, 0), where q are the probabilities of `other`."""
        ids, rest, subtracted = self.ids, self.probabilities(), other.probabilities()
        if other.ids is not None:
            size = len(rest) if ids is None else 1 + max(int(ids.max()), int(other.ids.max()))
            dense = np.zeros(size)
            dense[other.ids] = subtracted
            subtracted = dense
        rest -= subtracted if ids is None else subtracted[ids]
        return Distribution(ids, np.maximum(rest, 0, out=rest))


def _block_sums(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sums of blocks of `_BLOCK` weights; up to one block, the weights themselves.

    A running sum over a whole vocabulary would cost more than the rest of sampling.
    """
    if len(weights) <= _BLOCK:
        return weights.astype(np.float64)
    starts = np.arange(0, len(weights), _BLOCK)
    return np.add.reduceat(weights, starts, dtype=np.float64)


class Sampler:
    """A function from logits to a token, with its own random numbers.

    The generator advances once per sampled token and never for a greedy choice, so its state and
    the logits determine everything that follows.
    """

    def __init__(
        self,
        params: SamplingParams,
        rng: np.random.Generator | None = None,
        mask: Mask | None = None,
    ) -> None:
        """`rng`: generator to continue if `params` has no seed. `mask`: grammar mask of the answer.

        Only `allowed` applies the mask.
        """
        self.params = params
        self.mask = mask
        self._adjusts = bool(params.logit_bias or params.remembered)
        if params.seed is not None or rng is None:
            rng = new_rng(params.seed)
        self.rng = rng

    def __call__(self, logits: Logits, history: Sequence[int] = ()) -> int:
        """Return the next token for logits [V]. `history`: earlier tokens, for the penalties.

        Raises EngineError if no logit is finite or one is NaN or +inf, instead of returning
        token 0.
        """
        logits, best = self._best(logits, history)
        if self.params.temperature == 0:
            return best
        return self._candidates(logits, best).draw(self.rng.random())

    def allowed(self, logits: Logits, path: Sequence[int] = ()) -> Logits:
        """Return logits [V] with -inf for tokens that the answer's grammar excludes after `path`.

        `path` follows the answer so far. Without a grammar, returns the argument itself. Raises
        EngineError if the grammar cannot be followed further.
        """
        return logits if self.mask is None else self.mask.allowed(logits, path)

    def distribution(self, logits: Logits, history: Sequence[int] = ()) -> Distribution:
        """Return the distribution of the next token at a temperature above 0.

        Raises as a call does.
        """
        return self._candidates(*self._best(logits, history))

    def likeliest(self, logits: Logits, history: Sequence[int], count: int) -> list[int]:
        """Return at most `count` possible tokens, the likeliest first, lower ids first on a tie.

        Raises as a call does.
        """
        return _ranked(*self._best(logits, history), count)

    def _best(self, logits: Logits, history: Sequence[int]) -> tuple[Logits, int]:
        """Return logits with bias and penalties, and the likeliest token. Raises EngineError."""
        if self._adjusts:
            logits = self._adjust(logits, history)
        best = int(logits.argmax())  # index of a NaN, if there is one
        if not math.isfinite(logits[best]):
            raise EngineError(
                f"the best logit is {float(logits[best])}: nothing can be sampled",
                remedy="the state may be damaged: start a new session, or check the bundle",
            )
        return logits, best

    def _adjust(self, logits: Logits, history: Sequence[int]) -> Logits:
        """Return logits with bias and penalties: a copy, or the argument itself if none apply."""
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
            # a repeated token is assigned the same value twice
            logits[recent] = np.where(seen > 0, seen / penalty, seen * penalty)
            if params.presence_penalty or params.frequency_penalty:
                tokens, count = np.unique(recent, return_counts=True)
                logits[tokens] -= params.presence_penalty + params.frequency_penalty * count
        return logits

    def _candidates(self, logits: Logits, best: int) -> Distribution:
        """Return the tokens that pass the filters, with weights exp((logit - best) / temperature).

        fp32 throughout, which is accurate to 1e-5. 4096 tokens take 15 to 30 µs, a real model's
        50,000 take 0.03 to 0.7 ms.
        """
        params, highest = self.params, logits[best]
        ids: NDArray[np.intp] | None = None
        if 0 < params.top_k < len(logits):
            ids = _top(logits, best, params.top_k)
            logits = logits[ids]
        weights = logits - highest
        # the best one is 0 and stays 0; cap the factor so that the rest does not overflow
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
    """Return the log probability of a token under logits [V], and the `count` likeliest tokens."""
    best = int(logits.argmax())
    highest = float(logits[best])
    # exp in fp32 is accurate to 1e-7 and ten times as fast
    log_total = highest + math.log(np.exp(logits - highest).sum(dtype=np.float64))
    top = _ranked(logits, best, count) if count else []
    return TokenLogprob(
        token,
        float(logits[token]) - log_total,
        tuple((other, float(logits[other]) - log_total) for other in top),
    )


def _ranked(logits: Logits, best: int, count: int) -> list[int]:
    """Return the `count` likeliest tokens, `best` first: see `Sampler.likeliest`."""
    if count <= _ARGMAX_PASSES:
        return _argmax_passes(logits, best, count)
    ids = _top(logits, best, min(count, len(logits)))
    ids = ids[np.isfinite(logits[ids])]
    ordered: list[int] = ids[(-logits[ids]).argsort(kind="stable")][:count].tolist()
    return ordered


def _argmax_passes(logits: Logits, best: int, count: int) -> list[int]:
    tokens = [best]
    if count > 1:
        logits = logits.copy()
    while len(tokens) < count:
        logits[best] = -np.inf
        best = int(logits.argmax())
        if logits[best] == -np.inf:
            break
        tokens.append(best)
    return tokens


def _top(logits: Logits, best: int, count: int) -> NDArray[np.intp]:
    """Return the ids of the `count` likeliest tokens and ties with the last, in id order."""
    # partition only the few logits near the best, which is faster
    near = (logits > float(logits[best]) - _NEAR_LOGITS).nonzero()[0]
    values = logits[near]
    if len(near) < count:
        near, values = np.arange(len(logits)), logits
    ranked = values.copy()
    last = len(ranked) - count
    ranked.partition(last)
    ids: NDArray[np.intp] = near[values >= ranked[last]]
    return ids


def _nucleus(weights: Logits, top_p: float) -> tuple[NDArray[np.intp], Logits, NDArray[np.float64]]:
    """Return the smallest set with at least `top_p` of the total weight, likeliest first.

    The result is (indices, weights, running sums of the weights).
    """
    indices, heavy, total = None, weights, None
    if len(weights) > _SORTED_TOKENS:
        total = weights.sum(dtype=np.float64)
        # the largest weight is 1; tokens above this floor usually suffice for real models
        indices, heavy = _heaviest(weights, top_p * float(total), (1 - top_p) ** 2 / 6)
    order = (-heavy).argsort(kind="stable")
    heavy = heavy[order]
    sums = heavy.astype(np.float64).cumsum()
    needed = top_p * float(sums[-1] if total is None else total)
    count = int(sums.searchsorted(needed)) + 1
    order = order[:count]
    return order if indices is None else indices[order], heavy[:count], sums[:count]


def _heaviest(weights: Logits, needed: float, floor: float) -> tuple[NDArray[np.intp], Logits]:
    """Return all weights above some threshold that sum to at least `needed`: (indices, weights).

    The threshold is `floor` or lower.
    """
    while True:
        indices = (weights >= floor).nonzero()[0]
        heavy = weights[indices]
        if len(indices) == len(weights) or heavy.sum(dtype=np.float64) >= needed:
            return indices, heavy
        floor = floor / 8 if floor > 1e-30 else 0.0


def new_rng(seed: int | None) -> np.random.Generator:
    """Return a generator with this seed, or with one from the system for None."""
    return np.random.Generator(np.random.PCG64(seed))


def rng_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return the generator's complete state as JSON, with its 128-bit numbers as strings."""
    state = rng.bit_generator.state
    return {
        "kind": state["bit_generator"],
        "state": str(state["state"]["state"]),
        "inc": str(state["state"]["inc"]),
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }


def restore_rng(saved: Mapping[str, Any]) -> np.random.Generator:
    """Return the generator that `rng_state` saved. Raises StateError if malformed."""
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
