"""Prompts as token ids: given by a user, or rendered for a turn of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge import log
from edge.errors import InputError
from edge.runtime.context import Context, ContextMark, Logits, common_prefix
from edge.runtime.transcript import Conversation
from edge.text.template import ChatTemplate, Message
from edge.text.tokenizer import Tokenizer, check_text

if TYPE_CHECKING:
    from edge.runtime.constrain.tools import ToolUse
    from edge.runtime.generate import Answer
    from edge.runtime.result import FinishReason

SHOWN = 2048  # minimum tokens that the prompt of a long conversation keeps


@dataclass
class Turn:
    """A prompt to read and the conversation it belongs to; kept for `regenerate`.

    Attributes:
        tokens: tokens of the prompt.
        conversation: the conversation to answer; None in a running text.
        tools: tools that the answer may call.
        anew: whether the state has read a different transcript.
        cut: start and number of the tokens in the context that the prompt leaves out.
        read: mark after the prompt, before the answer, and the logits [V] there.
    """

    tokens: list[int]
    conversation: Conversation | None
    anew: bool = False
    cut: tuple[int, int] = (0, 0)
    tools: ToolUse | None = None
    read: tuple[ContextMark, Logits] | None = None

    def read_into(
        self, context: Context, answer: Answer, on_progress: log.Progress | None
    ) -> Logits | None:
        """Bring the context to the end of the prompt and return the logits [V] there.

        Returns None if the answer was halted.
        """
        if self.read is not None:
            mark, logits = self.read
            context.restore(mark)
            answer.reused_tokens = len(context.tokens)
            return logits
        chat = self.conversation is not None
        if self.anew and context.forgotten:
            context.clear()  # the forgotten tokens may not match the new transcript
        context.forget(*self.cut)
        answer.reused_tokens = context.align(self.tokens) if chat else len(context.tokens)
        feed = self.tokens[answer.reused_tokens :] if chat else self.tokens
        consumed, answer.prompt_length = len(context.tokens), len(feed)

        def report() -> None:
            answer.prompt_tokens = len(context.tokens) - consumed  # fewer if halted
            if on_progress is not None:
                on_progress("prefill", answer.prompt_tokens, answer.prompt_length)

        def halted() -> FinishReason | None:
            report()
            return answer.halted()

        last_logits = context.feed(feed, halted)
        report()
        if last_logits is not None:
            self.read = context.mark(), last_logits.copy()
        return last_logits


class PromptReader:
    """Reads prompts for one tokenizer.

    Attributes:
        max_tokens: maximum number of tokens in a prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_tokens: int, template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.max_tokens = max_tokens

    def encode(self, prompt: str | Sequence[int] | None) -> list[int]:
        """Return the token ids of a text, or the given ids.

        Raises InputError for invalid text and for ids out of range.
        """
        tokenizer = self._tokenizer
        if prompt is None:
            return []
        if isinstance(prompt, str):
            check_text(prompt)
            self._check_text_size(len(prompt.encode()))
            return tokenizer.encode(prompt)
        self.check_length(len(prompt))
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise InputError(f"{token!r:.40} is not a token id", field="prompt")
            tokenizer.check_id(int(token))
        return [int(token) for token in prompt]

    def with_bos(self, tokens: list[int], text: bool) -> list[int]:
        """Return `tokens` as the start of a text, after the model's `bos` if it uses one."""
        tokenizer = self._tokenizer
        if tokenizer.bos is None or not text:
            return tokens
        return [tokenizer.bos, *tokens] if tokenizer.add_bos or not tokens else tokens

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Raise InputError for messages that are invalid text, or too long for any tokenization."""
        for message in messages:
            check_text(message.content)
        self._check_text_size(sum(len(message.content.encode()) for message in messages))

    def _check_text_size(self, size: int) -> None:
        self.check_length(-(-size // self._tokenizer.longest_piece))

    def check_length(self, count: int) -> None:
        """Raise InputError if `count` tokens exceed `max_tokens`."""
        if count > self.max_tokens:
            raise InputError(
                f"has at least {count} tokens, at most {self.max_tokens} allowed",
                field="prompt",
                remedy="send less; in Python, max_prompt_tokens can be raised",
            )

    def turn(
        self, conversation: Conversation, context: Context, *, anew: bool, tools: ToolUse | None
    ) -> Turn:
        """Return the turn that answers a conversation, continuing from the context.

        `anew`: whether the context has read a different transcript. Raises InputError if too many
        tokens are new.
        """
        turn = self._shortened(
            Turn(self._encode(conversation, tools), conversation, anew, tools=tools), context
        )
        start, count = turn.cut
        current = [] if anew else context.tokens
        if count:
            current = current[:start] + current[start + count :]
        self.check_length(len(turn.tokens) - common_prefix(current, turn.tokens))
        return turn

    def last_said(self, conversation: Conversation) -> Turn | None:
        """Rebuild the last turn of a chat after `undo`, `restore` or `load`; its prompt is reread.

        Returns None for a running text, where the end of the prompt is unknown.
        """
        if not conversation.messages or conversation.messages[-1].role != "assistant":
            return None
        before = Conversation(conversation.messages[:-1], conversation.skipped)
        return Turn(self._encode(before), before)

    def _shortened(self, turn: Turn, context: Context) -> Turn:
        """Return the turn, with the older half of its messages left out if it has many tokens.

        The state has read the older messages and is kept, if the later ones render the same without
        them. If they render differently, the older half is left out only of prompts that would be
        too long, and the rest is read again.
        """
        conversation, long = turn.conversation, turn.tokens
        is_short = context.capacity is not None or len(long) <= 2 * SHOWN
        if is_short or conversation is None or (halved := conversation.halved()) is None:
            return turn
        short = self._encode(halved, turn.tools)
        prefix = common_prefix(long, short)
        after = prefix + len(long) - len(short)
        same_rest = after >= prefix and long[after:] == short[prefix:]
        if same_rest and not turn.anew and context.tokens[:after] == long[:after]:
            return Turn(short, halved, cut=(prefix, after - prefix), tools=turn.tools)
        if turn.anew or len(long) <= self.max_tokens:
            return turn
        return Turn(short, halved, tools=turn.tools)

    def _encode(self, conversation: Conversation, tools: ToolUse | None = None) -> list[int]:
        """Return the prompt's tokens for the shown messages; empty for a base model."""
        if self._template is None:
            return []
        return self._template.encode(conversation.shown, tools=tools.declared if tools else ())
