"""A state that runs, and the states of earlier requests that it can start from.

The output is that of a prompt read from its first token: a state is reused only where all tokens it
consumed begin the prompt. In a conversation those are the earlier messages *as their text encodes*,
so that an answer depends on the request alone and not on what the server remembers.

States are kept at three places, wherever that spares at least `WORTH` tokens: where a prompt leaves
what an earlier one began with (a system prompt that conversations share), before a prompt's last
token (for the same prompt again, and for a conversation whose last answer the client changed), and,
once another conversation takes its place, at the end of an answer.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edge.runtime.constrain.mask import open_mask
from edge.runtime.constrain.tools import ToolUse
from edge.runtime.context import Context, ContextMark, Logits
from edge.runtime.generate import Answer, Generation, generate
from edge.runtime.joined import JoinedEngine
from edge.runtime.model import Model
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler, new_rng
from edge.runtime.speculate.decode import Drafting
from edge.runtime.speculate.grammar import GRAMMAR_ALONE

WORTH = 16  # tokens that a kept state must spare
WINDOW = 4  # what it costs is the logs; a grammar drafts the tokens that it forces
Tokens = NDArray[np.int32]
_TOKEN_BYTES = 48  # of a Python integer, a reference to it, and the number in array and key


class Slot:
    """One request at a time, in one thread.

    Attributes:
        capacity: most tokens the KV caches hold, None without attention.
        state_bytes: memory of the state that runs.
        reused: tokens of the last prompt that were not run again.
        store: the states that are kept.
    """

    def __init__(
        self,
        model: Model,
        *,
        capacity: int | None,
        cache_bytes: int,
        drafting: Drafting | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        """Takes the state's memory. `capacity`: see `Engine.new_state`. `drafting`: of all answers;
        what a bandit learns in one helps the next. `store`: one that slots share.
        """
        self._model = model
        self._drafting = drafting
        window = WINDOW if drafting is None else max(WINDOW, drafting.window)
        state = model.engine.new_state(window=window, capacity=capacity)
        self._context = Context(model.engine, state)
        self.store = PrefixStore(cache_bytes) if store is None else store
        # a state that alone is over the budget is not copied in vain
        self._keeps = self._context.mark().state.nbytes <= cache_bytes
        self._reuses = cache_bytes > 0
        self.capacity = state.capacity
        self.state_bytes = state.nbytes
        self.reused = 0
        self._rng = new_rng(None)
        self._prompt_end: tuple[ContextMark, Logits] | None = None

    def known(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the state has read, and nothing else."""
        held = as_tokens(self._context.tokens)
        same = agree(held, as_tokens(prompt))
        return same if len(held) - same <= self._context.state.reach else 0

    def begin(
        self, tokens: Sequence[int], params: SamplingParams, *, continued: bool,
        tools: ToolUse | None = None, more: bool = False,
    ) -> Generation:  # fmt: skip
        """An answer to the whole prompt `tokens`; nothing runs before it is iterated. `tools`: what
        it may call. `more`: the state after the prompt is kept for `again`.

        Raises ContextFullError when the KV caches cannot hold the prompt.
        """
        self._context.check_room(len(tokens))
        wanted = tuple(tokens)
        self.reused, self._prompt_end = 0, None
        self._rng = new_rng(params.seed)

        def prefill(answer: Answer) -> Logits | None:
            self.reused = answer.reused_tokens = self._recall(wanted)
            logits = self._read(wanted, answer)
            if more and logits is not None:
                self._prompt_end = self._context.mark(), logits.copy()
            return logits

        return self._answer(params, continued, tools, prefill)

    def again(
        self, params: SamplingParams, *, continued: bool, tools: ToolUse | None = None
    ) -> Generation:
        """Another answer to the last prompt, which is not run again; random numbers go on."""

        def prefill(answer: Answer) -> Logits | None:
            if self._prompt_end is None or answer.halted():
                return None
            mark, logits = self._prompt_end
            self._context.restore(mark)
            answer.reused_tokens = len(self._context.tokens)
            return logits

        return self._answer(params, continued, tools, prefill)

    def _answer(
        self, params: SamplingParams, continued: bool, tools: ToolUse | None,
        prefill: Callable[[Answer], Logits | None],
    ) -> Generation:  # fmt: skip
        mask = open_mask(self._model.tokenizer, params.constraint, continued=continued)
        drafting = self._drafting if mask is None else self._drafting or GRAMMAR_ALONE
        answer = Answer(params, self._model.tokenizer, continued=continued, tools=tools)
        sampler = Sampler(replace(params, seed=None), self._rng, mask)

        def finish(succeeded: bool) -> None:
            # however an answer ends, the state is that of its tokens; of one that failed nothing is
            # certain
            if not succeeded:
                self._context.clear()
            if isinstance(self._context.engine, JoinedEngine):
                self._context.engine.leave(self._context.state)

        pieces = generate(
            answer, self._context, sampler, drafting,
            prefill=partial(prefill, answer), finish=finish,
        )  # fmt: skip
        return Generation(answer, pieces, nullcontext())

    def _read(self, wanted: tuple[int, ...], answer: Answer) -> Logits | None:
        """Run the prompt, keeping states on the way; the logits [V] after it."""
        context = self._context
        for place in self._places(wanted):
            if context.feed(wanted[len(context.tokens) : place], answer.halted) is None:
                break
            self.store.add(context.mark())
        rest = wanted[len(context.tokens) :]
        held = len(context.tokens)
        read = context.feed(rest, answer.halted)
        answer.prompt_tokens = len(context.tokens) - held  # fewer where it was halted
        return read

    # -- reuse -----------------------------------------------------------------------------------

    def _recall(self, prompt: tuple[int, ...]) -> int:
        """Make the state the longest there is that begins the prompt; how many tokens that is."""
        context = self._context
        if not self._reuses:
            context.clear()
            return 0
        wanted = as_tokens(prompt)
        live = min(agree(as_tokens(context.tokens), wanted), len(wanted) - 1)
        kept = self.store.longest(wanted)
        reachable = len(context.tokens) - live <= context.state.reach
        if not reachable or (kept is not None and len(kept.tokens) > live):
            self._leave()
            if kept is None:
                context.clear()
            else:
                context.restore(kept.mark)
        return context.align(prompt)

    def _leave(self) -> None:
        """Keep the state that another one takes the place of."""
        tokens = self._context.tokens
        if self._keeps and len(tokens) - self.store.shared(as_tokens(tokens)) >= WORTH:
            self.store.add(self._context.mark())

    def _places(self, wanted: tuple[int, ...]) -> list[int]:
        """How many tokens of the prompt shall have run when the state is kept, in order."""
        if not self._keeps:
            return []
        at, places = self.reused, []
        last = len(wanted) - 1
        for place in (min(self.store.shared(as_tokens(wanted)), last), last):
            if place - at >= WORTH:
                places.append(place)
                at = place
        return places


# -- kept states -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kept:
    """A state and the tokens it has consumed."""

    tokens: Tokens
    mark: ContextMark

    @property
    def nbytes(self) -> int:
        return self.mark.state.nbytes + _TOKEN_BYTES * len(self.tokens)


class PrefixStore:
    """States kept by the tokens that led to them. The least recently used ones make room. Threads
    may share it.

    A recurrent state cannot be cut short, so a kept state helps a prompt only when all of its
    tokens begin it.

    Attributes:
        budget: most bytes of all kept states together.
        nbytes: bytes of them now.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()  # the most recently used last
        # the keys in order: what shares most with a prompt lies next to where it would lie
        self._order: list[bytes] = []

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, wanted: Tokens) -> Kept | None:
        """The longest state that begins `wanted` and leaves at least one token of it to run."""
        size = len(wanted) - 1
        with self._lock:
            while size > 0:
                at = bisect_right(self._order, _key(wanted[:size]))
                if not at:
                    return None
                # what begins `wanted` lies before it, and behind all that is shorter and does
                kept = self._kept[self._order[at - 1]]
                same = agree(kept.tokens, wanted[:size])
                if same == len(kept.tokens):
                    self._kept.move_to_end(self._order[at - 1])
                    return kept
                size = same
            return None

    def shared(self, wanted: Tokens) -> int:
        """Length of the longest prefix that `wanted` shares with the tokens of a kept state."""
        with self._lock:
            at = bisect_right(self._order, _key(wanted))
            beside = [self._kept[key].tokens for key in self._order[max(0, at - 1) : at + 1]]
        return max((agree(tokens, wanted) for tokens in beside), default=0)

    def add(self, mark: ContextMark) -> None:
        """Keep a state, replacing one of the same tokens, then drop what exceeds the budget."""
        new = Kept(as_tokens(mark.consumed.tokens), mark)
        key = _key(new.tokens)
        with self._lock:
            try:
                self._put(key, new)
            except BaseException:  # no memory: half of a change is worse than nothing kept
                self._forget()
                raise

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._forget()

    def _put(self, key: bytes, new: Kept) -> None:
        if key in self._kept:
            self._drop(key)
        self._kept[key] = new
        insort(self._order, key)
        self.nbytes += new.nbytes
        while self.nbytes > self.budget:
            self._drop(next(iter(self._kept)))

    def _forget(self) -> None:
        self._kept.clear()
        self._order.clear()
        self.nbytes = 0

    def _drop(self, key: bytes) -> None:
        self.nbytes -= self._kept.pop(key).nbytes
        del self._order[bisect_left(self._order, key)]


def _key(tokens: Tokens) -> bytes:
    """Bytes that are ordered as the tokens are."""
    return tokens.astype(">u4").tobytes()


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Token ids as an array, to be compared at once."""
    return np.asarray(tokens, np.int32)


def agree(left: Tokens, right: Tokens) -> int:
    """Length of the common prefix of two sequences."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
