"""What two tokenizers have in common: ids that mean the same to a target and its drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge.runtime.generate import Logits
from edge.text.tokenizer import Tokenizer


def shared_ids(target: Tokenizer, drafter: Tokenizer) -> int:
    """How many ids, from 0 on, both spell alike; 0 unless one vocabulary begins with the other.

    Files of one vocabulary differ (other settings, a chat model's added control tokens), so they
    are compared id by id: 50,000 take 20 ms.
    """
    count = min(target.vocab_size, drafter.vocab_size)
    if target.fingerprint == drafter.fingerprint:
        return count
    same = all(target.id_to_piece(i) == drafter.id_to_piece(i) for i in range(count))
    return count if same else 0


@dataclass(frozen=True)
class Vocabulary:
    """Ids of a target as its drafter takes and gives them.

    Attributes:
        size: ids of the target's tokenizer.
        shared: of them, the first ones, those that the drafter has too.
        stand_in: what the drafter reads in place of the others.
    """

    size: int
    shared: int
    stand_in: int = 0

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the target, for the drafter."""
        if self.shared == self.size:
            return [*tokens]
        return [token if token < self.shared else self.stand_in for token in tokens]

    def allowed(self, logits: Logits) -> Logits:
        """The drafter's logits as of the target's tokens: [size], those it has not being -inf."""
        if self.shared == self.size:
            return logits[: self.size]
        padded = np.full(self.size, -np.inf, np.float32)
        padded[: self.shared] = logits[: self.shared]
        return padded
