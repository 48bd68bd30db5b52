"""What a session is asked to be: the options of `Model.session`, checked all at once."""

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
# copies of a state besides those of `undo`: from before an answer that is being made, and from the
# ends of its prompt and of the one before
_HELD = 3


class SessionOptions(TypedDict, total=False):
    """Keywords of `Model.session`.

    Attributes:
        system: the chat's first message.
        window: most tokens of a run that can be taken back; see `Engine.new_state`.
        capacity: tokens the KV caches hold; None is the trained context, at most 4096.
        seed: of random numbers that answers without a seed of their own draw from.
        max_prompt_tokens: most tokens of one prompt, besides those that the session holds.
        undo_levels: how many turns `undo` can take back; each holds a copy of one state.
        max_bytes: most memory that the state and these copies may take; more is refused when the
            session is made. None is any.
        draft: another model, best one of the same vocabulary, or "ngram": it proposes tokens for
            this one to verify.
        draft_tokens: how many it proposes in a row.
        draft_tree: or a tree of them, with so many children of every node at each depth; "ucb" is
            one of three, as Mamba Drafters chooses. Without either, what proves quickest.
        accept: "exact", or "top-3": lossy, a drafted token is accepted while it is among the
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
    """See `SessionOptions`; a drafter may have widened the window."""

    system: str | None
    window: int
    capacity: int | None
    max_prompt_tokens: int
    undo_levels: int
    rng: np.random.Generator
    drafting: Drafting | None


def check_options(model: Model, options: Mapping[str, Any]) -> CheckedOptions:
    """The options of a session that `model` can have.

    Raises InputError naming every unknown option and every value that is out of range; EngineError,
    StateError without memory.
    """
    system, capacity = options.get("system"), options.get("capacity")
    window, accept = options.get("window", DEFAULT_WINDOW), options.get("accept", "exact")
    draft, tree = options.get("draft"), options.get("draft_tree")
    draft_tokens = options.get("draft_tokens")
    longest = options.get("max_prompt_tokens", MAX_PROMPT_TOKENS)
    levels = options.get("undo_levels", UNDO_LEVELS)
    drafter: Drafting | None = None

    faults = unknown_names(options, SessionOptions.__annotations__)
    with collecting(faults):
        check_text(system or "")
    with collecting(faults):
        rng = new_rng(SamplingParams(seed=options.get("seed")).seed)
    with collecting(faults):
        check_number("max_prompt_tokens", longest, 1, 1 << 31, whole=True)
    with collecting(faults):
        check_number("undo_levels", levels, 0, 1 << 16, whole=True)
    plan: Mapping[str, int] = {}
    with collecting(faults):
        plan = model.engine.memory_plan(window=window, capacity=capacity)  # refuses both sizes
    # speculation is imported with a drafter only
    if (draft, draft_tokens, tree, accept) != (None, None, None, "exact"):
        with collecting(faults):
            from edge.runtime.speculate.choose import drafting

            drafter = drafting(model, draft, draft_tokens, tree, capacity, accept)
    refuse(faults)
    if drafter is not None and window < drafter.window:
        window = drafter.window
        plan = model.engine.memory_plan(window=window, capacity=capacity)
    if (most := options.get("max_bytes")) is not None:
        _check_bytes(plan, max(1, levels) + _HELD, most)
    return CheckedOptions(system, window, capacity, longest, levels, rng, drafter)


def _check_bytes(plan: Mapping[str, int], copies: int, most: int) -> None:
    """Raises StateError where a state of this plan with its copies takes more than `most`."""
    state = plan["state_ring"] + plan["kv_cache"] + plan["logits"]
    needed = state + copies * plan["snapshot"]
    if needed > most:
        raise StateError(
            f"{most} is less than the {needed} needed: {state} for the state and "
            f"{plan['snapshot']} for each of {copies} copies that undo and regenerate keep",
            field="max_bytes",
            remedy="make capacity, window or undo_levels smaller",
        )
