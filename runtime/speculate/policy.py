"""Who says what shape the next draft has, and what there is to learn from a round."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from edge.runtime.speculate.shape import Shape


class Outlook(NamedTuple):
    """What is known before a drafter is asked.

    Attributes:
        matched: how many tokens, up to the pending one, a look-up has found said before.
        found: what followed them then.
        behind: tokens that a drafting model has yet to read, the pending one among them.
    """

    matched: int = 0
    found: tuple[int, ...] = ()
    behind: int = 1


NO_OUTLOOK = Outlook()


class Round(NamedTuple):
    """What came of one draft, or of a plain step.

    Attributes:
        asked: the shape that was asked for; `NO_DRAFT` for a step.
        nodes: tokens that were drafted; 0 where the drafter had nothing to say.
        offered: children of the root, and of every node that stood.
        ranks: which of them stood, depth by depth: 0 is the first that was drawn. One token more
            came out of the round than these.
        draft_s, verify_s: seconds in the drafter, and in the target's run and what it took to
            choose by it.
        outlook: what was known before.
        came: the tokens that came out of it.
    """

    asked: Shape
    nodes: int
    offered: tuple[int, ...]
    ranks: tuple[int, ...]
    draft_s: float
    verify_s: float
    outlook: Outlook = NO_OUTLOOK
    came: tuple[int, ...] = ()


class Policy(Protocol):
    """Chooses the shape of the next draft and learns from how the round went."""

    def begin(self, greedy: bool) -> None:
        """An answer begins; `greedy`: at temperature 0."""
        return

    def choose(self, outlook: Outlook) -> Shape:
        """What to draft; `NO_DRAFT` is a plain step."""
        ...

    def learn(self, done: Round) -> None:
        """A round that was not cut short by the end of an answer."""
        ...

    def rests(self, outlook: Outlook) -> bool:
        """Whether a step is to be taken without choosing or learning; `rested` says how long it
        took.
        """
        return False

    def rested(self, seconds: float) -> None:
        """All of a round that `rests` has said to pass."""
        return


class Fixed(Policy):
    """The same shape in every round."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def choose(self, outlook: Outlook) -> Shape:
        return self._shape

    def learn(self, done: Round) -> None:
        pass
