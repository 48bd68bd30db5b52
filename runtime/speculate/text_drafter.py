"""Drafter that runs a bundle with another tokenizer and exchanges text with the target.

The target's text so far is the drafter's prompt. The drafter continues greedily, and its text is
encoded to the target's tokens, which are verified like any draft. They are chosen, not drawn, so
with the exact rule the output is distributed as the target's own.

A target of bytes is usually in the middle of a word, which a drafter of words reads poorly. So the
drafter reads only up to the start of that word, and drafts one with the same beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.errors import EngineError
from edge.runtime.context import Context, Logits
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.shape import Shape
from edge.runtime.speculate.text import (
    Pieces,
    Transcript,
    agreement,
    begins_character,
    begins_word,
    spelled,
    whole_characters,
)
from edge.text.tokenizer import Tokenizer

# Maximum number of tokens that the drafter rewinds to read a word again from its beginning.
BACK = 4
_LONGEST_WORD = 24


class TextDrafter(Drafter):
    """Drafts with a second model that steps ahead in its own tokens.

    Before each draft its state is brought up to the target's text: it is rewound to the longest
    common prefix, or to the beginning of the word there, and reads the target's text from that
    point. It reads a control token of the target as a newline.

    Attributes:
        context: context of the drafting model.
        target: tokenizer of the target.
        heard: text of the target.
        said: text of the drafter's own tokens.
        agreed: number of leading bytes on which `heard` and `said` are known to agree.
    """

    def __init__(
        self, name: str, context: Context, own: Tokenizer, target: Tokenizer, longest: int
    ) -> None:
        """`context`: of the drafting model; its state must be able to rewind longest + BACK tokens.
        `longest`: maximum number of its own tokens that it steps ahead.
        """
        self._name = name
        self.context = context
        self._own = own
        self.target = target
        self._longest = longest
        self._greedy = Sampler(SamplingParams(temperature=0))
        self._pieces = Pieces(own)
        self.heard = Transcript(target, control=b"\n")
        self.said = Transcript(own)
        self.agreed = 0
        self._began = True

    @property
    def name(self) -> str:
        return self._name

    @property
    def nbytes(self) -> int:
        return self.context.state.nbytes

    def begin(self) -> None:
        self._began = True

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """See `Drafter.propose`. Also raises EngineError for text that it cannot encode."""
        context, own_text = self.context, self.said
        self._follow_target(tokens, pending)
        own_text.cut(len(context.tokens))
        end = self._readable_bytes()
        kept, fresh = self._convert(end)
        full = context.state.capacity is not None and (
            kept + len(fresh) + self._longest > context.state.capacity
        )
        if full or not fresh:
            return NOTHING
        logits = self._next_logits(kept, fresh)
        own_text.follow(fresh, kept)
        self.agreed = end
        ids = self._draft_ahead(logits, bytes(self.heard.data[end:]), shape.depth)
        return Draft(tuple(ids), (None,) * len(ids))

    # -- following the target ---------------------------------------------------------------------

    def _follow_target(self, tokens: Sequence[int], pending: int) -> None:
        known = 0 if self._began else len(self.heard.tokens)
        unchanged = self.heard.follow([*tokens[known:], pending], known)
        self.agreed = min(self.agreed, unchanged)
        self._began = False

    def _readable_bytes(self) -> int:
        """Return how many bytes of the target's text to read; a draft must begin with the rest."""
        target_bytes = self.heard.data
        if self.target.kind == "bytes" and self._own.kind != "bytes":
            for at in range(len(target_bytes), max(-1, len(target_bytes) - _LONGEST_WORD), -1):
                if begins_word(target_bytes, at):
                    return at
        return whole_characters(target_bytes)

    def _convert(self, end: int) -> tuple[int, list[int]]:
        """Convert `end` bytes of the target's text to own tokens: (how many of the tokens read so
        far stay, tokens to read after them). The latter are empty for a text without tokens.
        """
        target_bytes, own_text = self.heard.data, self.said
        self.agreed = agreement(own_text.data, target_bytes, self.agreed)
        kept = self._kept_tokens(own_text.tokens_within(min(self.agreed, end)), end)
        start = own_text.end(kept)
        fresh = [] if kept else self._bos()
        if start == end:
            # the last token is read again for its logits
            return (kept - 1, own_text.tokens[kept - 1 : kept]) if kept else (0, fresh)
        try:
            rest = target_bytes[start:end].decode()
        except UnicodeDecodeError:
            raise EngineError(f"{self._name} cannot read the text: it is not UTF-8") from None
        converted = spelled(self._own, rest, own_text.tokens[kept - 1] if start else None)
        if converted is None:
            raise EngineError(
                f"{self._name} cannot encode the text", remedy="draft with another bundle, or ngram"
            )
        return kept, fresh + converted

    def _bos(self) -> list[int]:
        bos = self._own.bos
        silent = bos is not None and not self._own.token_bytes(bos)
        return [bos] if bos is not None and self._own.add_bos and silent else []

    def _kept_tokens(self, maximum: int, end: int) -> int:
        """Return how many of the first `maximum` own tokens stay: all if they end at `end`, else
        those up to the start of the current word if that is in reach.
        """
        own_text, target_bytes = self.said, self.heard.data
        if own_text.end(maximum) == end:
            return maximum
        lowest = max(0, len(own_text.tokens) - self.context.state.reach, maximum - BACK)
        for count in range(maximum, lowest - 1, -1):
            if begins_word(target_bytes, own_text.end(count)):
                return count
        while maximum > 0 and not begins_character(target_bytes, own_text.end(maximum)):
            maximum -= 1
        return maximum

    def _next_logits(self, kept: int, fresh: list[int]) -> Logits:
        """Return the logits after the first `kept` own tokens and the `fresh` ones."""
        reused = self.context.align(fresh, kept)
        if reused < kept:  # the state does not go back that far
            return self._consume(self.said.tokens[:kept] + fresh)
        return self._consume(fresh[reused - kept :])

    def _consume(self, tokens: Sequence[int]) -> Logits:
        """Consume tokens so that at least the last can be rewound, to be read again for its logits.

        Returns the logits after it.
        """
        if len(tokens) > self.context.state.window:
            self.context.feed(tokens[:-1], lambda: False)
            tokens = tokens[-1:]
        return self.context.advance(tokens)

    # -- stepping ahead ---------------------------------------------------------------------------

    def _draft_ahead(self, logits: Logits, unread: bytes, count: int) -> list[int]:
        """Step ahead and return at most `count` tokens of the target. `unread`: unread text of the
        target that the own tokens must begin with; it is not part of the result.
        """
        ids: list[int] = []
        drafted = bytearray()
        for remaining in reversed(range(self._longest)):
            token = self._choose(logits, unread[len(drafted) :])
            if token in self._own.eos:
                return [*ids, *self.target.eos[:1]][:count]
            piece = b"" if token is None else self._own.token_bytes(token)
            drafted += piece
            converted = self._encode_for_target(bytes(drafted[len(unread) :]), bool(unread))
            if token is None or not piece or converted is None:
                break
            ids = converted
            if len(ids) >= count or not remaining:
                break
            logits = self.context.step(token)
            self.said.append(token)
        return ids[:count]

    def _choose(self, logits: Logits, unread: bytes) -> int | None:
        """Return the likeliest token that is compatible with the text begun; None if none is."""
        logits = logits[: self._own.vocab_size]
        if not unread:
            return self._greedy(logits)
        candidates = self._pieces.along(unread)
        return int(candidates[self._greedy(logits[candidates])]) if candidates.size else None

    def _encode_for_target(self, fresh: bytes, is_partial: bool) -> list[int] | None:
        """Encode drafted text to the target's tokens; None if that is not possible."""
        if self.target.kind == "bytes":
            return list(fresh)
        if is_partial:  # the rest of a character cannot be encoded alone
            return None
        try:
            text = fresh[: whole_characters(fresh)].decode()
        except UnicodeDecodeError:
            return None
        return spelled(self.target, text, self.heard.tokens[-1]) if text else []
