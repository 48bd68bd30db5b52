"""The result of an answer: text, tokens, finish reason and timings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge.text.tools import ToolCall

if TYPE_CHECKING:
    from edge.runtime.speculate.decode import Speculation

FinishReason = Literal["stop", "length", "cancelled", "deadline", "context"]


@dataclass(frozen=True)
class Timings:
    """Seconds since the request, on a monotonic clock; tokenizing is not included.

    Attributes:
        prompt_s: time at which the prompt was consumed.
        token_s: time at which each token was sampled.
        total_s: time at which the answer ended.
    """

    prompt_s: float
    token_s: tuple[float, ...]
    total_s: float

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None if there was none."""
        return self.token_s[0] if self.token_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Generation speed over the gaps between tokens; None for fewer than two tokens."""
        span = self.token_s[-1] - self.token_s[0] if self.token_s else 0.0
        return (len(self.token_s) - 1) / span if span > 0 else None


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a sampled token under the model.

    Natural logarithms of the model's own distribution: the softmax of its raw logits at temperature
    1, before grammar mask, bias, penalties and filters. With drafts they come from the run that
    verified the token, so they do not depend on the drafter.

    Attributes:
        token: id of the token.
        logprob: its log probability.
        top: (token, log probability) of the likeliest tokens, in descending order, including those
            that a filter or grammar excludes.
        at: number of characters of the answer before the token's text.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    at: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """The result of an answer.

    Attributes:
        text: all text that was emitted.
        tokens: all sampled tokens, including an end token and those of a stop string.
        finish_reason: `stop`: an end token, a stop string, or the end of the answer's grammar;
            `length`: max_tokens; `context`: the KV caches are full; `cancelled` or `deadline`: the
            text is incomplete.
        prompt_tokens: number of tokens fed before the first was sampled.
        reused_tokens: number of prompt tokens that the state already held.
        timings: when prompt, tokens and answer were done.
        speculation: drafting statistics; None without a drafter or a grammar, whose forced tokens
            are verified as drafts.
        logprobs: log probability of each token, if `SamplingParams.logprobs` requested them.
        tool_calls: the complete tool calls; they are not part of the text.
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
        """Prefill speed; None if nothing was fed."""
        spent = self.timings.prompt_s
        return self.prompt_tokens / spent if self.prompt_tokens and spent > 0 else None
