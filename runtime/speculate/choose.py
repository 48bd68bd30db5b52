"""From `draft=` and `draft_tokens=` to a drafter and a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from edge.errors import InputError
from edge.runtime.context import Context
from edge.runtime.speculate.draft import Drafter, Drafting
from edge.runtime.speculate.model_drafter import ModelDrafter
from edge.runtime.speculate.ngram import NgramDrafter
from edge.runtime.speculate.policy import Bandit, Fixed, Policy
from edge.runtime.speculate.vocabulary import Vocabulary, shared_ids

if TYPE_CHECKING:
    from edge.runtime.model import Model

MAX_DRAFT_TOKENS = 64
# lengths the bandit chooses among; a look-up costs nothing, so its drafts may be longer
_MODEL_ARMS = (1, 2, 3, 4, 6)
_NGRAM_ARMS = (3, 7)


def drafting(
    target: Model, draft: Model | Literal["ngram"] | None, tokens: int | None, capacity: int | None
) -> Drafting | None:
    """What a session drafts with; None for nothing.

    `tokens`: of every draft; None leaves the length to a bandit, which may choose not to draft.
    Raises InputError: tokens out of range, or a drafting model of another tokenizer.
    """
    if tokens is not None and not 1 <= tokens <= MAX_DRAFT_TOKENS:
        raise InputError(f"must be 1 … {MAX_DRAFT_TOKENS}, not {tokens}", field="draft_tokens")
    if draft is None:
        return None
    arms = _NGRAM_ARMS if draft == "ngram" else _MODEL_ARMS
    policy: Policy = Bandit(arms) if tokens is None else Fixed(tokens)
    longest = max(arms) if tokens is None else tokens
    if draft == "ngram":
        return Drafting(NgramDrafter(), policy, longest + 1)
    return Drafting(_model_drafter(target, draft, longest, capacity), policy, longest + 1)


def _model_drafter(target: Model, draft: Model, longest: int, capacity: int | None) -> Drafter:
    tokenizer = target.tokenizer
    shared = shared_ids(tokenizer, draft.tokenizer)
    if not shared:
        raise InputError(
            f"{draft.path.name} has another tokenizer than {target.path.name}",
            field="draft",
            remedy="draft with a bundle of the same tokenizer, or with ngram",
        )
    ends = draft.tokenizer.eos
    vocabulary = Vocabulary(tokenizer.vocab_size, shared, ends[0] if ends else 0)
    if capacity is not None and draft.config.max_context is not None:
        capacity = min(capacity, draft.config.max_context)
    # a draft of n tokens consumes n - 1 of them; up to two accepted ones come before
    state = draft.engine.new_state(window=longest + 2, capacity=capacity)
    context = Context(draft.engine, state)
    return ModelDrafter(draft.path.name, context, vocabulary, set(tokenizer.special_ids))
