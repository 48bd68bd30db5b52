"""How an answer ended, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge.text.tools import ToolCall

if TYPE_CHECKING:
    from edge.runtime.speculate.decode import Speculation

FinishReason = Literal["stop", "length", "cancelled", "deadline", "context"]


@dataclass(frozen=True)
class Timings:
    """Seconds on a monotonic clock, from the request on, tokenizing not included.

    Attributes:
        prompt_s: until the prompt was consumed.
        token_s: when each token was sampled.
        total_s: until the answer ended.
    """

    prompt_s: float
    token_s: tuple[float, ...]
    total_s: float

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, or None when there was none."""
        return self.token_s[0] if self.token_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Generation speed over the gaps between tokens; None for fewer than two."""
        span = self.token_s[-1] - self.token_s[0] if self.token_s else 0.0
        return (len(self.token_s) - 1) / span if span > 0 else None


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found a token that was said.

    Natural logarithms of the model's own distribution: softmax over its logits as they come, at
    temperature 1, before a grammar's mask, bias, penalties and filters. With drafts they are those
    of the run that verified the token, so they do not depend on the drafter.

    Attributes:
        top: (token, logarithm), the likeliest first; whether or not they could be said here.
        at: characters of the answer before the token's text.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    at: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """How an answer ended.

    Attributes:
        text: everything that was given out.
        tokens: everything that was sampled, an end token and those of a stop string included.
        finish_reason: `stop`: an end token, a stop string, or the end of the answer's grammar;
            `length`: max_tokens; `context`: the KV caches are full; `cancelled` or `deadline`: the
            text is what there was.
        prompt_tokens: tokens that were fed for this answer before the first was sampled.
        reused_tokens: tokens of the prompt that the state already held.
        speculation: what drafting did; None without a drafter or a grammar, whose forced tokens
            are verified as drafts.
        logprobs: of each of the tokens, where `SamplingParams.logprobs` asked for them.
        tool_calls: those that are complete; they are no part of the text.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    timings: Timings
    speculation: Speculation | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Prefill speed; None when nothing was fed."""
        spent = self.timings.prompt_s
        return self.prompt_tokens / spent if self.prompt_tokens and spent > 0 else None
