"""Builds the drafter and policy for the options `draft=`, `draft_tokens=` and `draft_tree=`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from edge.errors import InputError
from edge.runtime.context import Context
from edge.runtime.engine import MAX_WINDOW
from edge.runtime.parameters import collecting, refuse
from edge.runtime.speculate.accept import EXACT, Rule, rule_of
from edge.runtime.speculate.decode import Drafting
from edge.runtime.speculate.draft import Drafter
from edge.runtime.speculate.model_drafter import ModelDrafter, Vocabulary, batch_sizes, shared_ids
from edge.runtime.speculate.ngram import CombinedDrafter, NgramDrafter
from edge.runtime.speculate.policy import Bandit, Experience, Fixed, Outlook, Policy, Round
from edge.runtime.speculate.shape import LOOK_UP, Shape
from edge.runtime.speculate.text import writes_text
from edge.runtime.speculate.text_drafter import BACK, TextDrafter
from edge.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edge.runtime.model import Model

MAX_DRAFT_TOKENS = 64
# shapes that the bandit chooses from
_CHAINS = (1, 2, 3, 4, 6)
_TREES = ((2, 1), (2, 1, 1, 1), (3, 2, 1))
# A look-up costs nothing, and its length is known before it is used. Long ones need states with a
# larger window, whose extra memory may be at most _WINDOW_MEMORY times that of the weights.
_LOOK_UPS = (1, 2, 3, 5, 7)
_LONG_LOOK_UPS = (11, 15)
_WINDOW_MEMORY = 1 / 8
_BYTE_CHAINS = (3, 6, 10, 15)
# approximate bytes per word, the ratio of steps between drafters of bytes and of words
_WORD = 4

# target → drafter → name of the rule; entries live as long as both models
_EXPERIENCES: WeakKeyDictionary[Model, WeakKeyDictionary[Model, dict[str, Experience]]] = (
    WeakKeyDictionary()
)


def drafting(
    target: Model,
    draft: Model | Literal["ngram"] | None,
    tokens: int | None,
    tree: Sequence[int] | Literal["ucb"] | None,
    capacity: int | None,
    accept: str = "exact",
) -> Drafting | None:
    """Return a session's drafter, policy and rule; None without `draft`.

    Args:
        draft: drafting model, or "ngram" for look-up.
        tokens: fixed number of tokens of every draft.
        tree: fixed number of children at each depth, or "ucb": one of the trees of Mamba Drafters,
            chosen by the paper's UCB. Without `tokens` and `tree` a bandit chooses the shape; it
            may also choose no draft, or a look-up in place of the drafting model.
        capacity: capacity of the drafting model's KV caches.
        accept: name of the acceptance rule.

    Raises InputError if `tokens` or `tree` is out of range, both are given, the rule is unknown,
    the drafter cannot draft the tree, or the drafting model's tokenizer is neither the target's nor
    able to exchange text with it.
    """
    faults: list[InputError] = []
    learned, fixed = tree == UCB, None
    with collecting(faults):
        fixed = None if learned and tokens is None else _fixed_shape(tokens, tree)
    with collecting(faults):
        rule = rule_of(accept)
    refuse(faults)
    if draft is None:
        return None
    trees = learned or (fixed is not None and not fixed.chain)
    if trees and not target.engine.trees:
        raise InputError(
            f"the engine of {target.path.name} runs chains, not trees",
            field="draft_tree",
            remedy="draft_tokens, or an engine with plugins",
        )
    if draft == "ngram":
        if trees:
            raise _chains_only("ngram")
        shapes = [Shape(fixed.branches, LOOK_UP)] if fixed else _look_up_shapes(target)
        look_up, policy = _ngram(shapes), _policy(fixed, shapes, target, target, rule)
        return Drafting(look_up, policy, _window(shapes), rule)
    if isinstance(draft, str) or not hasattr(draft, "tokenizer"):
        raise InputError(
            f"must be a model or ngram, not {draft!r:.40}", field="draft",
            remedy='a loaded one, edge.load("demo-draft"), or "ngram"',
        )  # fmt: skip
    shared = shared_ids(target.tokenizer, draft.tokenizer)
    if trees and not shared:
        raise _chains_only(f"{draft.path.name}, which has another tokenizer,")
    shapes = [fixed] if fixed else [*ARMS] if learned else _arms(target, draft, shared)
    if trees and not all(_runs(target, shape) for shape in shapes):
        raise InputError(
            f"a tree of {_window(shapes)} tokens is too large for engine {target.engine.name}, "
            f"which runs at most {target.engine.most_tree}",
            field="draft_tree",
            remedy="a smaller tree, such as (3, 2, 1), or draft_tokens",
        )
    longest = max(shape.depth for shape in shapes)
    drafter: Drafter = (
        _model_drafter(target, draft, shared, shapes, capacity)
        if shared
        else _text_drafter(target, draft, longest, capacity)
    )
    if learned:
        return Drafting(drafter, Ucb(shapes, _cost(target, draft)), _window(shapes), rule)
    if not fixed:
        look_ups = _look_up_shapes(target)
        drafter, shapes = CombinedDrafter(drafter, _ngram(look_ups)), [*shapes, *look_ups]
    return Drafting(drafter, _policy(fixed, shapes, target, draft, rule), _window(shapes), rule)


def _fixed_shape(tokens: int | None, tree: Sequence[int] | str | None) -> Shape | None:
    if tokens is not None and tree is not None:
        raise InputError("drafts cannot have both a length and a shape", field="draft_tokens",
                         remedy="give draft_tokens or draft_tree")  # fmt: skip
    if tokens is not None:
        if not 1 <= tokens <= MAX_DRAFT_TOKENS:
            raise InputError(
                f"must be from 1 to {MAX_DRAFT_TOKENS}, not {tokens}", field="draft_tokens"
            )
        return Shape.of_chain(tokens)
    if isinstance(tree, str):
        raise InputError(
            f"{tree!r:.40} is not a tree", field="draft_tree", remedy="(3, 2, 1), or ucb"
        )
    return None if tree is None else _tree_shape(tree)


def _tree_shape(branches: Sequence[int]) -> Shape:
    if not branches:
        raise InputError("is empty", field="draft_tree", remedy="give branches such as 3,2,1")
    for depth, count in enumerate(branches):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"must be at least 1, not {count!r}", field=f"draft_tree[{depth}]")
    # the run also has the token before the tree; cut first, because products grow quickly
    shape = Shape(tuple(branches[:MAX_WINDOW]))
    if shape.depth > MAX_DRAFT_TOKENS or shape.nodes > MAX_WINDOW - 1:
        raise InputError(
            f"{shape.nodes} tokens in {len(branches)} depths do not fit: a window holds at most "
            f"{MAX_WINDOW - 1} drafted tokens, {MAX_DRAFT_TOKENS} deep",
            field="draft_tree",
            remedy="fewer branches, or fewer depths",
        )
    return shape


def _chains_only(name: str) -> InputError:
    return InputError(f"{name} drafts chains, not trees", field="draft_tree",
                      remedy="draft_tokens, or a bundle of the same tokenizer")  # fmt: skip


def _policy(
    fixed: Shape | None, shapes: Sequence[Shape], target: Model, draft: Model, rule: Rule
) -> Policy:
    if fixed:
        return Fixed(shapes[0])
    return Bandit(shapes, _experience(target, draft, rule), exact=rule is EXACT)


def _experience(target: Model, draft: Model, rule: Rule) -> Experience:
    """Return what earlier sessions of this pair learned; for look-up, `draft` is the target."""
    drafts = _EXPERIENCES.setdefault(target, WeakKeyDictionary())
    experiences = drafts.setdefault(draft, {})
    if rule.name not in experiences:
        experiences[rule.name] = Experience(_cost(target, draft))
    return experiences[rule.name]


def _cost(target: Model, draft: Model) -> float:
    """Return the cost of a drafter's run in steps of the target, taken as the ratio of weights."""
    return min(1.0, _weight_bytes(draft) / _weight_bytes(target))


def _weight_bytes(model: Model) -> int:
    """Return the approximate bytes of a model's weights: those of its bundle's largest file."""
    return max(file.size for file in model.manifest.files)


def _ngram(shapes: Sequence[Shape]) -> NgramDrafter:
    return NgramDrafter(max(shape.depth for shape in shapes))


def _look_up_shapes(target: Model) -> list[Shape]:
    long = target.tokenizer.kind == "bytes" or _affords_long(target)
    lengths = _LOOK_UPS + _LONG_LOOK_UPS if long else _LOOK_UPS
    return _fitting(target, [Shape.of_chain(length, LOOK_UP) for length in lengths])


def _affords_long(target: Model) -> bool:
    engine, window = target.engine, max(_LONG_LOOK_UPS) + 1
    if window > engine.longest_window:
        return False
    usual_bytes, long_bytes = (
        engine.memory_plan(window=size)["state_ring"] for size in (max(_LOOK_UPS) + 1, window)
    )
    return long_bytes - usual_bytes <= _WINDOW_MEMORY * _weight_bytes(target)


def _fitting(target: Model, shapes: list[Shape]) -> list[Shape]:
    """Return the shapes whose verifying run fits the target's engine, or the first shape if none
    does, so that the engine refuses it.
    """
    return [
        s for s in shapes if s.nodes < target.engine.longest_window and _runs(target, s)
    ] or shapes[:1]


def _runs(target: Model, shape: Shape) -> bool:
    """Return whether the target's engine can verify a draft of this shape, if it is a tree."""
    return shape.chain or shape.nodes < target.engine.most_tree


def _window(shapes: Sequence[Shape]) -> int:
    """Return the number of tokens of the largest verifying run."""
    return max(shape.nodes for shape in shapes) + 1


def _arms(target: Model, draft: Model, shared: int) -> list[Shape]:
    if not shared:
        # bytes are short tokens, so a drafter of words drafts more of them
        words = target.tokenizer.kind == "bytes" and draft.tokenizer.kind != "bytes"
        lengths = _BYTE_CHAINS if words else _CHAINS
        return _fitting(target, [Shape.of_chain(length) for length in lengths])
    arms = [Shape.of_chain(length) for length in _CHAINS]
    # with attention, each sequence of a batch would need KV caches, slow to copy
    trees = target.engine.trees and not draft.config.has_attention
    return _fitting(target, arms + [Shape(tree) for tree in _TREES] if trees else arms)


def _model_drafter(
    target: Model, draft: Model, shared: int, shapes: Sequence[Shape], capacity: int | None
) -> ModelDrafter:
    name, target_tokenizer, draft_tokenizer = draft.path.name, target.tokenizer, draft.tokenizer
    vocabulary = Vocabulary(
        target_tokenizer.vocab_size, shared, draft_tokenizer.eos[0] if draft_tokenizer.eos else 0
    )
    # a draft of n tokens consumes n - 1, after up to two accepted tokens
    longest = max(shape.depth for shape in shapes)
    context = _context(draft, longest + 2, capacity)
    batches = {
        size: draft.engine.new_state(batch=size, window=1, capacity=context.state.capacity)
        for size in batch_sizes(shapes)
    }
    return ModelDrafter(name, context, vocabulary, set(target_tokenizer.special_ids), batches)


def _text_drafter(target: Model, draft: Model, longest: int, capacity: int | None) -> TextDrafter:
    name, target_tokenizer, draft_tokenizer = draft.path.name, target.tokenizer, draft.tokenizer
    for tokenizer, owner in ((target_tokenizer, target), (draft_tokenizer, draft)):
        if not writes_text(tokenizer):
            raise InputError(
                f"{name} has another tokenizer than {target.path.name}, and that of "
                f"{owner.path.name} cannot encode all text",
                field="draft",
                remedy="draft with a bundle of the same tokenizer, or with ngram",
            )
    steps = _own_steps(longest, draft_tokenizer, target_tokenizer)
    return TextDrafter(
        name, _context(draft, steps + BACK + 2, capacity), draft_tokenizer, target_tokenizer, steps
    )


def _context(draft: Model, window: int, capacity: int | None) -> Context:
    if capacity is not None and draft.config.max_context is not None:
        capacity = min(capacity, draft.config.max_context)
    return Context(draft.engine, draft.engine.new_state(window=window, capacity=capacity))


def _own_steps(longest: int, own: Tokenizer, target: Tokenizer) -> int:
    """Return how many of its own tokens a drafter steps for `longest` tokens of the target."""
    if (own.kind == "bytes") == (target.kind == "bytes"):
        return longest
    return longest * _WORD if own.kind == "bytes" else -(-2 * longest // _WORD)


UCB: Literal["ucb"] = "ucb"
# appendix C.6, table 7
ARMS = (Shape((3, 3, 2, 1)), Shape((3, 2, 2, 1, 1)), Shape((2, 2, 2, 1, 1, 1)))


class Ucb(Policy):
    """UCB over a few trees exactly as in Mamba Drafters, section 3.2, as a baseline for `Bandit`.

    It has no arm without a draft and none for look-up, and learns nothing across sessions.

    After one round of every arm, it chooses the arm with the highest sum of mean reward and bonus
    λ_UCB·√(2·ln t / n), where n of t rounds used the arm (equation 1).

    The reward of a round is -(1 + λ_γ·γ) / N (equation 2), with γ the depth of the tree and N the
    tokens of the round. The paper's N counts accepted tokens only; here it includes the token that
    every round yields, since otherwise a round without acceptance would have no reward.

    Attributes:
        pulls: number of rounds of each arm.
    """

    # λ_UCB; not reported in the paper; about the spread of the arms' rewards
    BONUS = 0.1

    def __init__(self, arms: Sequence[Shape], run: float) -> None:
        """`run`: λ_γ, the cost of a run of the drafting model in steps of the target."""
        self.pulls = dict.fromkeys(arms, 0)
        self._rewards = dict.fromkeys(arms, 0.0)
        self._run = run

    def choose(self, outlook: Outlook) -> Shape:
        t = sum(self.pulls.values())

        def bound(arm: Shape) -> float:
            pulls = self.pulls[arm]
            if not pulls:
                return math.inf
            return self._rewards[arm] / pulls + self.BONUS * math.sqrt(2 * math.log(t) / pulls)

        return max(self.pulls, key=bound)

    def learn(self, done: Round) -> None:
        if done.asked in self.pulls:
            self.pulls[done.asked] += 1
            self._rewards[done.asked] -= (1 + self._run * done.asked.depth) / (len(done.ranks) + 1)
