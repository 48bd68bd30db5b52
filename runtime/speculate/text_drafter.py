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
        context, said = self.context, self.said
        self._hear(tokens, pending)
        said.cut(len(context.tokens))
        end = self._readable()
        kept, fresh = self._reading(end)
        full = context.state.capacity is not None and (
            kept + len(fresh) + self._longest > context.state.capacity
        )
        if full or not fresh:
            return NOTHING
        logits = self._following(kept, fresh)
        said.follow(fresh, kept)
        self.agreed = end
        ids = self._ahead(logits, bytes(self.heard.data[end:]), shape.depth)
        return Draft(tuple(ids), (None,) * len(ids))

    # -- following the target ---------------------------------------------------------------------

    def _hear(self, tokens: Sequence[int], pending: int) -> None:
        known = 0 if self._began else len(self.heard.tokens)
        stayed = self.heard.follow([*tokens[known:], pending], known)
        self.agreed = min(self.agreed, stayed)
        self._began = False

    def _readable(self) -> int:
        """Return how many bytes of the target's text to read; a draft must begin with the rest."""
        heard = self.heard.data
        if self.target.kind == "bytes" and self._own.kind != "bytes":
            for at in range(len(heard), max(-1, len(heard) - _LONGEST_WORD), -1):
                if begins_word(heard, at):
                    return at
        return whole_characters(heard)

    def _reading(self, end: int) -> tuple[int, list[int]]:
        """Convert `end` bytes of the target's text to own tokens: (how many of the tokens read so
        far stay, tokens to read after them). The latter are empty for a text without tokens.
        """
        heard, said = self.heard.data, self.said
        self.agreed = agreement(said.data, heard, self.agreed)
        kept = self._kept(said.tokens_within(min(self.agreed, end)), end)
        start = said.end(kept)
        fresh = [] if kept else self._opening()
        if start == end:
            # the last token is read again for its logits
            return (kept - 1, said.tokens[kept - 1 : kept]) if kept else (0, fresh)
        try:
            rest = heard[start:end].decode()
        except UnicodeDecodeError:
            raise EngineError(f"{self._name} cannot read the text: it is not UTF-8") from None
        found = spelled(self._own, rest, said.tokens[kept - 1] if start else None)
        if found is None:
            raise EngineError(
                f"{self._name} cannot encode the text", remedy="draft with another bundle, or ngram"
            )
        return kept, fresh + found

    def _opening(self) -> list[int]:
        bos = self._own.bos
        silent = bos is not None and not self._own.token_bytes(bos)
        return [bos] if bos is not None and self._own.add_bos and silent else []

    def _kept(self, most: int, end: int) -> int:
        """Return how many of the first `most` own tokens stay: all if they end at `end`, else those
        up to the start of the current word if that is in reach.
        """
        said, heard = self.said, self.heard.data
        if said.end(most) == end:
            return most
        lowest = max(0, len(said.tokens) - self.context.state.reach, most - BACK)
        for count in range(most, lowest - 1, -1):
            if begins_word(heard, said.end(count)):
                return count
        while most > 0 and not begins_character(heard, said.end(most)):
            most -= 1
        return most

    def _following(self, kept: int, fresh: list[int]) -> Logits:
        """Return the logits after the first `kept` own tokens and the `fresh` ones."""
        reused = self.context.align(fresh, kept)
        if reused < kept:  # the state does not go back that far
            return self._read(self.said.tokens[:kept] + fresh)
        return self._read(fresh[reused - kept :])

    def _read(self, tokens: Sequence[int]) -> Logits:
        """Consume tokens so that at least the last can be rewound, to be read again for its logits.

        Returns the logits after it.
        """
        if len(tokens) > self.context.state.window:
            self.context.feed(tokens[:-1], lambda: False)
            tokens = tokens[-1:]
        return self.context.advance(tokens)

    # -- stepping ahead ---------------------------------------------------------------------------

    def _ahead(self, logits: Logits, begun: bytes, count: int) -> list[int]:
        """Step ahead and return at most `count` tokens of the target. `begun`: unread text of the
        target that the own tokens must begin with; it is not part of the result.
        """
        ids: list[int] = []
        drafted = bytearray()
        for left in reversed(range(self._longest)):
            token = self._choice(logits, begun[len(drafted) :])
            if token in self._own.eos:
                return [*ids, *self.target.eos[:1]][:count]
            piece = b"" if token is None else self._own.token_bytes(token)
            drafted += piece
            found = self._read_by_target(bytes(drafted[len(begun) :]), bool(begun))
            if token is None or not piece or found is None:
                break
            ids = found
            if len(ids) >= count or not left:
                break
            logits = self.context.step(token)
            self.said.append(token)
        return ids[:count]

    def _choice(self, logits: Logits, begun: bytes) -> int | None:
        """Return the likeliest token that is compatible with the text begun; None if none is."""
        logits = logits[: self._own.vocab_size]
        if not begun:
            return self._greedy(logits)
        along = self._pieces.along(begun)
        return int(along[self._greedy(logits[along])]) if along.size else None

    def _read_by_target(self, fresh: bytes, begun: bool) -> list[int] | None:
        """Encode drafted text to the target's tokens; None if that is not possible."""
        if self.target.kind == "bytes":
            return list(fresh)
        if begun:  # the rest of a character cannot be encoded alone
            return None
        try:
            text = fresh[: whole_characters(fresh)].decode()
        except UnicodeDecodeError:
            return None
        return spelled(self.target, text, self.heard.tokens[-1]) if text else []
