"""A drafting model with a look-up beside it, which costs nothing and is often right."""

from __future__ import annotations

from collections.abc import Sequence

from edge.runtime.sampling import Sampler
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.ngram import NgramDrafter
from edge.runtime.speculate.policy import Outlook
from edge.runtime.speculate.shape import LOOK_UP, Shape


class CombinedDrafter(Drafter):
    """Drafts by look-up or by the model, as the shape says.

    While it looks up the model falls behind the text. It reads what it has missed when it is asked
    next, in one run: its state is rewound to the text's, as after any draft of its own.
    """

    goes_on = True
    # to read, of a model that has failed: so much that no policy asks it
    _HOPELESS = 1 << 40

    def __init__(self, model: Drafter, look_up: NgramDrafter) -> None:
        self._model = model
        self._look_up = look_up
        self._read = 0  # tokens of this text that the model was asked with last
        self._failed = False  # in this answer

    @property
    def name(self) -> str:
        return f"{self._model.name} and {self._look_up.name}"

    @property
    def nbytes(self) -> int:
        return self._model.nbytes + self._look_up.nbytes

    def begin(self) -> None:
        """See `Drafter.begin`."""
        self._model.begin()
        self._look_up.begin()
        self._failed = False

    def outlook(self, tokens: Sequence[int], pending: int) -> Outlook:
        """See `Drafter.outlook`."""
        found = self._look_up.outlook(tokens, pending)
        if self._look_up.restarted:
            self._read = 0  # another text: the model may have some of it, which is not asked
        behind = self._HOPELESS if self._failed else len(tokens) + 1 - self._read
        return Outlook(found.matched, found.found, behind)

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """See `Drafter.propose`."""
        if shape.source == LOOK_UP:
            return self._look_up.propose(tokens, pending, shape, sampler, recent)
        if self._failed:
            return NOTHING
        self._read, self._failed = 0, True  # where it fails, nothing is known
        draft = self._model.propose(tokens, pending, shape, sampler, recent)
        self._read, self._failed = len(tokens) + 1, False
        return draft
