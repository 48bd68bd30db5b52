"""From `draft=` and `draft_tokens=` to a drafter and a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from edge.errors import InputError
from edge.runtime.context import Context
from edge.runtime.speculate.draft import Drafter, Drafting
from edge.runtime.speculate.model_drafter import ModelDrafter
from edge.runtime.speculate.ngram import NgramDrafter
from edge.runtime.speculate.policy import Bandit, Fixed, Policy
from edge.runtime.speculate.text import writes_text
from edge.runtime.speculate.text_drafter import BACK, TextDrafter
from edge.runtime.speculate.vocabulary import Vocabulary, shared_ids
from edge.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edge.runtime.model import Model

MAX_DRAFT_TOKENS = 64
# lengths the bandit chooses among; a look-up costs nothing, so its drafts may be longer
_MODEL_ARMS = (1, 2, 3, 4, 6)
_NGRAM_ARMS = (3, 7)
_BYTE_ARMS = (3, 6, 10, 15)
# bytes of a word, about: how much more or less a drafter of bytes steps
_WORD = 4


def drafting(
    target: Model, draft: Model | Literal["ngram"] | None, tokens: int | None, capacity: int | None
) -> Drafting | None:
    """What a session drafts with; None for nothing.

    `tokens`: of every draft; None leaves the length to a bandit, which may choose not to draft.
    Raises InputError: tokens out of range, or a drafting model of another tokenizer that there is
    no way to by text.
    """
    if tokens is not None and not 1 <= tokens <= MAX_DRAFT_TOKENS:
        raise InputError(f"must be 1 … {MAX_DRAFT_TOKENS}, not {tokens}", field="draft_tokens")
    if draft is None:
        return None
    arms = _NGRAM_ARMS if draft == "ngram" else _arms(target, draft)
    policy: Policy = Bandit(arms) if tokens is None else Fixed(tokens)
    longest = max(arms) if tokens is None else tokens
    if draft == "ngram":
        return Drafting(NgramDrafter(), policy, longest + 1)
    return Drafting(_model_drafter(target, draft, longest, capacity), policy, longest + 1)


def _arms(target: Model, draft: Model) -> tuple[int, ...]:
    """Bytes are small tokens: a drafter of words is asked for more of them."""
    words = target.tokenizer.kind == "bytes" and draft.tokenizer.kind != "bytes"
    return _BYTE_ARMS if words else _MODEL_ARMS


def _model_drafter(target: Model, draft: Model, longest: int, capacity: int | None) -> Drafter:
    name, theirs, own = draft.path.name, target.tokenizer, draft.tokenizer
    if capacity is not None and draft.config.max_context is not None:
        capacity = min(capacity, draft.config.max_context)

    def context(window: int) -> Context:
        state = draft.engine.new_state(window=window, capacity=capacity)
        return Context(draft.engine, state)

    if shared := shared_ids(theirs, own):
        vocabulary = Vocabulary(theirs.vocab_size, shared, own.eos[0] if own.eos else 0)
        # a draft of n tokens consumes n - 1 of them; up to two accepted ones come before
        return ModelDrafter(name, context(longest + 2), vocabulary, set(theirs.special_ids))
    for tokenizer, whose in ((theirs, target), (own, draft)):
        if not writes_text(tokenizer):
            raise InputError(
                f"{name} has another tokenizer than {target.path.name}, and that of "
                f"{whose.path.name} cannot write all text",
                field="draft",
                remedy="draft with a bundle of the same tokenizer, or with ngram",
            )
    steps = _own_steps(longest, own, theirs)
    return TextDrafter(name, context(steps + BACK + 2), own, theirs, steps)


def _own_steps(longest: int, own: Tokenizer, target: Tokenizer) -> int:
    """How many tokens of its own a drafter steps for `longest` ones of the target."""
    if (own.kind == "bytes") == (target.kind == "bytes"):
        return longest
    return longest * _WORD if own.kind == "bytes" else -(-2 * longest // _WORD)
