"""Drafting with another bundle of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from edge.runtime.context import Context
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.accept import draw
from edge.runtime.speculate.draft import Distribution, Draft, Drafter
from edge.runtime.speculate.vocabulary import Vocabulary


class ModelDrafter(Drafter):
    """A second model that steps ahead of the target.

    Its state follows the target's tokens: what was not accepted is rewound, what it has not seen is
    run, before it drafts again. It draws with the target's sampling parameters, so that a token the
    target cannot draw is seldom proposed.
    """

    def __init__(
        self, name: str, context: Context, vocabulary: Vocabulary, special: set[int]
    ) -> None:
        """`context`: of the drafting model, made for runs of the longest draft. `special`: ids of
        the target that no repetition penalty looks at.
        """
        self._name = name
        self._context = context
        self._vocabulary = vocabulary
        self._special = special

    @property
    def name(self) -> str:
        return self._name

    @property
    def nbytes(self) -> int:
        return self._context.state.nbytes

    def propose(
        self, tokens: Sequence[int], pending: int, count: int, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """See `Drafter.propose`."""
        wanted = self._vocabulary.read([*tokens, pending])
        capacity = self._context.state.capacity
        if capacity is not None:
            count = min(count, capacity - len(wanted) + 1)
        if count < 1:
            return Draft((), ())
        logits = self._context.advance(wanted[self._context.align(wanted) :])
        drafted: list[int] = []
        drawn_from: list[Distribution | None] = []
        history = list(recent)
        while True:
            q = Distribution(*sampler.probabilities(self._vocabulary.allowed(logits), history))
            token = draw(q, sampler.rng.random)
            drafted.append(token)
            drawn_from.append(None if len(q.ids) == 1 else q)
            if len(drafted) == count:
                return Draft(tuple(drafted), tuple(drawn_from))
            if token not in self._special:
                history.append(token)
            logits = self._context.step(token)
