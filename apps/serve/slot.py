"""A running state, and the states of earlier requests that it can start from.

The output is that of a prompt read from its first token: a state is reused only if all tokens it
consumed are a prefix of the prompt. In a conversation these are the earlier messages *as their text
encodes*, so that an answer depends on the request alone and not on what the server remembers.

States are kept at three places, if that saves at least `WORTH` tokens: where a prompt diverges from
an earlier one (after a system prompt that conversations share), before a prompt's last token (for
the same prompt again, and for a conversation whose last answer the client changed), and at the end
of an answer, once another conversation takes its slot.
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

WORTH = 16  # tokens that a kept state must save
WINDOW = 4  # costs memory for the logs; a grammar drafts the tokens that it forces
Tokens = NDArray[np.int32]
_TOKEN_BYTES = 48  # a Python integer, a reference to it, and its entries in array and key


class Slot:
    """A state that runs one request at a time, in one thread.

    Attributes:
        capacity: tokens that the KV caches hold; None without attention.
        state_bytes: memory of the running state.
        reused: tokens of the last prompt that were not run again.
        store: kept states.
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
        """Allocate the state. `capacity`: see `Engine.new_state`. `drafting`: used for all answers,
        so that what a bandit learns in one helps the next. `store`: shared with other slots.
        """
        self._model = model
        self._drafting = drafting
        window = WINDOW if drafting is None else max(WINDOW, drafting.window)
        state = model.engine.new_state(window=window, capacity=capacity)
        self._context = Context(model.engine, state)
        self.store = PrefixStore(cache_bytes) if store is None else store
        # a state that alone exceeds the budget is not copied in vain
        self._keeps = self._context.mark().state.nbytes <= cache_bytes
        self._reuses = cache_bytes > 0
        self.capacity = state.capacity
        self.state_bytes = state.nbytes
        self.reused = 0
        self._rng = new_rng(None)
        self._prompt_end: tuple[ContextMark, Logits] | None = None

    def known(self, prompt: Sequence[int]) -> int:
        """Return the length of the prefix shared with a prompt; 0 if rewinding cannot reach it."""
        consumed = as_tokens(self._context.tokens)
        shared = agree(consumed, as_tokens(prompt))
        return shared if len(consumed) - shared <= self._context.state.reach else 0

    def begin(
        self, tokens: Sequence[int], params: SamplingParams, *, continued: bool,
        tools: ToolUse | None = None, more: bool = False,
    ) -> Generation:  # fmt: skip
        """Return an answer to the whole prompt `tokens`; nothing runs before it is iterated.

        `tools`: tools it may call. `more`: keep the state after the prompt for `again`.

        Raises ContextFullError when the KV caches cannot hold the prompt.
        """
        self._context.check_room(len(tokens))
        prompt = tuple(tokens)
        self.reused, self._prompt_end = 0, None
        self._rng = new_rng(params.seed)

        def prefill(answer: Answer) -> Logits | None:
            self.reused = answer.reused_tokens = self._reuse_longest(prompt)
            logits = self._read(prompt, answer)
            if more and logits is not None:
                self._prompt_end = self._context.mark(), logits.copy()
            return logits

        return self._start_answer(params, continued, tools, prefill)

    def again(
        self, params: SamplingParams, *, continued: bool, tools: ToolUse | None = None
    ) -> Generation:
        """Return another answer to the last prompt, which is not run again; the RNG continues."""

        def prefill(answer: Answer) -> Logits | None:
            if self._prompt_end is None or answer.halted():
                return None
            mark, logits = self._prompt_end
            self._context.restore(mark)
            answer.reused_tokens = len(self._context.tokens)
            return logits

        return self._start_answer(params, continued, tools, prefill)

    def _start_answer(
        self, params: SamplingParams, continued: bool, tools: ToolUse | None,
        prefill: Callable[[Answer], Logits | None],
    ) -> Generation:  # fmt: skip
        mask = open_mask(self._model.tokenizer, params.constraint, continued=continued)
        drafting = self._drafting if mask is None else self._drafting or GRAMMAR_ALONE
        answer = Answer(params, self._model.tokenizer, continued=continued, tools=tools)
        sampler = Sampler(replace(params, seed=None), self._rng, mask)

        def finish(succeeded: bool) -> None:
            # however an answer ends, the state is that of its tokens, unless it failed
            if not succeeded:
                self._context.clear()
            if isinstance(self._context.engine, JoinedEngine):
                self._context.engine.leave(self._context.state)

        pieces = generate(
            answer, self._context, sampler, drafting,
            prefill=partial(prefill, answer), finish=finish,
        )  # fmt: skip
        return Generation(answer, pieces, nullcontext())

    def _read(self, prompt: tuple[int, ...], answer: Answer) -> Logits | None:
        """Run the prompt, keeping states on the way; return the logits [V] after it."""
        context = self._context
        for place in self._lengths_to_keep(prompt):
            if context.feed(prompt[len(context.tokens) : place], answer.halted) is None:
                break
            self.store.add(context.mark())
        rest = prompt[len(context.tokens) :]
        start = len(context.tokens)
        logits = context.feed(rest, answer.halted)
        answer.prompt_tokens = len(context.tokens) - start  # fewer where it was halted
        return logits

    def _reuse_longest(self, prompt: tuple[int, ...]) -> int:
        """Go to the longest known state that is a prefix of the prompt; return its length."""
        context = self._context
        if not self._reuses:
            context.clear()
            return 0
        prompt_tokens = as_tokens(prompt)
        live = min(agree(as_tokens(context.tokens), prompt_tokens), len(prompt_tokens) - 1)
        kept = self.store.longest(prompt_tokens)
        reachable = len(context.tokens) - live <= context.state.reach
        if not reachable or (kept is not None and len(kept.tokens) > live):
            self._store_running()
            if kept is None:
                context.clear()
            else:
                context.restore(kept.mark)
        return context.align(prompt)

    def _store_running(self) -> None:
        """Keep the running state, which another one is about to replace."""
        tokens = self._context.tokens
        if self._keeps and len(tokens) - self.store.shared(as_tokens(tokens)) >= WORTH:
            self.store.add(self._context.mark())

    def _lengths_to_keep(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the lengths of the prompt's prefixes whose states are kept, in order."""
        if not self._keeps:
            return []
        previous, places = self.reused, []
        last = len(prompt) - 1
        for place in (min(self.store.shared(as_tokens(prompt)), last), last):
            if place - previous >= WORTH:
                places.append(place)
                previous = place
        return places


@dataclass(frozen=True, eq=False)
class KeptState:
    """A state and the tokens it has consumed."""

    tokens: Tokens
    mark: ContextMark

    @property
    def nbytes(self) -> int:
        return self.mark.state.nbytes + _TOKEN_BYTES * len(self.tokens)


class PrefixStore:
    """Kept states by the tokens that led to them; the least recently used is evicted. Thread-safe.

    A recurrent state cannot be truncated, so a kept state helps a prompt only if all of its tokens
    are a prefix of the prompt.

    Attributes:
        budget: maximum bytes of all kept states together.
        nbytes: their bytes now.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, KeptState] = OrderedDict()  # the most recently used last
        # sorted keys: the one that shares most with a prompt is next to its insertion point
        self._order: list[bytes] = []

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, wanted: Tokens) -> KeptState | None:
        """Return the longest state that is a prefix of `wanted` and leaves a token of it to run."""
        size = len(wanted) - 1
        with self._lock:
            while size > 0:
                index = bisect_right(self._order, _key(wanted[:size]))
                if not index:
                    return None
                # a prefix of `wanted` sorts before it, and behind all shorter prefixes
                kept = self._kept[self._order[index - 1]]
                shared = agree(kept.tokens, wanted[:size])
                if shared == len(kept.tokens):
                    self._kept.move_to_end(self._order[index - 1])
                    return kept
                size = shared
            return None

    def shared(self, wanted: Tokens) -> int:
        """Return the length of the longest prefix that `wanted` shares with a kept state."""
        with self._lock:
            index = bisect_right(self._order, _key(wanted))
            neighbours = [
                self._kept[key].tokens for key in self._order[max(0, index - 1) : index + 1]
            ]
        return max((agree(tokens, wanted) for tokens in neighbours), default=0)

    def add(self, mark: ContextMark) -> None:
        """Keep a state, replacing one of the same tokens; then evict states beyond the budget."""
        new = KeptState(as_tokens(mark.consumed.tokens), mark)
        key = _key(new.tokens)
        with self._lock:
            try:
                self._put(key, new)
            except BaseException:  # out of memory: half a change is worse than an empty store
                self._drop_all()
                raise

    def clear(self) -> None:
        """Drop all kept states."""
        with self._lock:
            self._drop_all()

    def _put(self, key: bytes, new: KeptState) -> None:
        if key in self._kept:
            self._drop(key)
        self._kept[key] = new
        insort(self._order, key)
        self.nbytes += new.nbytes
        while self.nbytes > self.budget:
            self._drop(next(iter(self._kept)))

    def _drop_all(self) -> None:
        self._kept.clear()
        self._order.clear()
        self.nbytes = 0

    def _drop(self, key: bytes) -> None:
        self.nbytes -= self._kept.pop(key).nbytes
        del self._order[bisect_left(self._order, key)]


def _key(tokens: Tokens) -> bytes:
    """Return bytes that sort as the tokens do."""
    return tokens.astype(">u4").tobytes()


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Return token ids as an array, for vectorized comparison."""
    return np.asarray(tokens, np.int32)


def agree(left: Tokens, right: Tokens) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
