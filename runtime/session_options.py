"""The options of `Model.session` and their validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from edge.errors import StateError
from edge.runtime.engine import DEFAULT_WINDOW
from edge.runtime.parameters import (
    SamplingParams,
    check_number,
    collecting,
    refuse,
    unknown_names,
)
from edge.runtime.sampling import new_rng
from edge.text.tokenizer import check_text

if TYPE_CHECKING:
    from edge.runtime.model import Model
    from edge.runtime.speculate.decode import Drafting

MAX_PROMPT_TOKENS = 1 << 17
UNDO_LEVELS = 4
# copies of a state besides those of `undo`: before the answer in progress, after its prompt, and
# after the previous prompt
_EXTRA_COPIES = 3


class SessionOptions(TypedDict, total=False):
    """Keywords of `Model.session`.

    Attributes:
        system: the chat's first message.
        window: maximum number of tokens that can be rewound; see `Engine.new_state`.
        capacity: number of tokens the KV caches hold; None is the trained context, at most 4096.
        seed: seed of the random numbers for answers without a seed of their own.
        max_prompt_tokens: maximum number of tokens in a prompt, besides those the session holds.
        undo_levels: number of turns that `undo` can take back; each keeps a copy of one state.
        max_bytes: maximum memory of the state and its copies; creating a session that needs more
            fails. None is no limit.
        draft: another model, preferably with the same vocabulary, or "ngram", which proposes
            tokens for this one to verify.
        draft_tokens: number of tokens drafted in a row.
        draft_tree: number of children per node at each depth of a drafted tree; "ucb" picks one of
            three trees, as in Mamba Drafters. Without this and `draft_tokens`, a bandit picks the
            fastest form.
        accept: "exact", or "top-3", which is lossy: a drafted token is accepted if it is among the
            target's three likeliest.
    """

    system: str | None
    window: int
    capacity: int | None
    seed: int | None
    max_prompt_tokens: int
    undo_levels: int
    max_bytes: int | None
    draft: Model | Literal["ngram"] | None
    draft_tokens: int | None
    draft_tree: Sequence[int] | Literal["ucb"] | None
    accept: str


@dataclass
class CheckedOptions:
    """Validated options: see `SessionOptions`. A drafter may have enlarged the window."""

    system: str | None
    window: int
    capacity: int | None
    max_prompt_tokens: int
    undo_levels: int
    rng: np.random.Generator
    drafting: Drafting | None


def check_options(model: Model, options: Mapping[str, Any]) -> CheckedOptions:
    """Validate the options of a session of `model`.

    Raises InputError listing every unknown option and every value out of range; EngineError or
    StateError if memory runs out.
    """
    system, capacity = options.get("system"), options.get("capacity")
    window, accept = options.get("window", DEFAULT_WINDOW), options.get("accept", "exact")
    draft, tree = options.get("draft"), options.get("draft_tree")
    draft_tokens = options.get("draft_tokens")
    max_prompt_tokens = options.get("max_prompt_tokens", MAX_PROMPT_TOKENS)
    undo_levels = options.get("undo_levels", UNDO_LEVELS)
    drafter: Drafting | None = None

    faults = unknown_names(options, SessionOptions.__annotations__)
    with collecting(faults):
        check_text(system or "")
    with collecting(faults):
        rng = new_rng(SamplingParams(seed=options.get("seed")).seed)
    with collecting(faults):
        check_number("max_prompt_tokens", max_prompt_tokens, 1, 1 << 31, whole=True)
    with collecting(faults):
        check_number("undo_levels", undo_levels, 0, 1 << 16, whole=True)
    plan: Mapping[str, int] = {}
    with collecting(faults):
        plan = model.engine.memory_plan(window=window, capacity=capacity)  # refuses both sizes
    # imported late: only sessions with a drafter need speculation
    if (draft, draft_tokens, tree, accept) != (None, None, None, "exact"):
        with collecting(faults):
            from edge.runtime.speculate.choose import drafting

            drafter = drafting(model, draft, draft_tokens, tree, capacity, accept)
    refuse(faults)
    if drafter is not None and window < drafter.window:
        window = drafter.window
        plan = model.engine.memory_plan(window=window, capacity=capacity)
    if (max_bytes := options.get("max_bytes")) is not None:
        _check_bytes(plan, max(1, undo_levels) + _EXTRA_COPIES, max_bytes)
    return CheckedOptions(system, window, capacity, max_prompt_tokens, undo_levels, rng, drafter)


def _check_bytes(plan: Mapping[str, int], copies: int, max_bytes: int) -> None:
    """Raise StateError if a state of this plan and its copies take more than `max_bytes` bytes."""
    state = plan["state_ring"] + plan["kv_cache"] + plan["logits"]
    needed = state + copies * plan["snapshot"]
    if needed > max_bytes:
        raise StateError(
            f"{max_bytes} is less than the {needed} needed: {state} for the state and "
            f"{plan['snapshot']} for each of {copies} copies that undo and regenerate keep",
            field="max_bytes",
            remedy="make capacity, window or undo_levels smaller",
        )
