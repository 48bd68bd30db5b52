"""Prompts as token ids: what a user gives, and what a turn of a chat is rendered as."""

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

SHOWN = 2048  # tokens of a conversation that prompts are rendered with, at least, where it is long


@dataclass
class Turn:
    """A prompt to be read, and what it is the prompt of; kept for `regenerate`.

    Attributes:
        tokens: of the prompt.
        conversation: what it answers; None in a running text.
        tools: what the answer may call.
        anew: the state has read another transcript.
        cut: where tokens that the prompt leaves out lie in the context, and how many.
        read: where the prompt had been read and nothing of the answer, and the logits [V] there.
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
        """Bring the context to the end of the prompt; the logits [V] there, None where the answer
        was halted.
        """
        if self.read is not None:
            mark, logits = self.read
            context.restore(mark)
            answer.reused_tokens = len(context.tokens)
            return logits
        chat = self.conversation is not None
        if self.anew and context.forgotten:
            context.clear()  # what it has forgotten may not be in the new transcript
        context.forget(*self.cut)
        answer.reused_tokens = context.align(self.tokens) if chat else len(context.tokens)
        feed = self.tokens[answer.reused_tokens :] if chat else self.tokens
        held, answer.prompt_length = len(context.tokens), len(feed)

        def tell() -> None:
            answer.prompt_tokens = len(context.tokens) - held  # fewer where it was halted
            if on_progress is not None:
                on_progress("prefill", answer.prompt_tokens, answer.prompt_length)

        def halted() -> FinishReason | None:
            tell()
            return answer.halted()

        read = context.feed(feed, halted)
        tell()
        if read is not None:
            self.read = context.mark(), read.copy()
        return read


class PromptReader:
    """Reads prompts for one tokenizer.

    Attributes:
        max_tokens: most tokens of one prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_tokens: int, template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.max_tokens = max_tokens

    def encode(self, prompt: str | Sequence[int] | None) -> list[int]:
        """Token ids of a text, or those given. Raises InputError: no text, ids out of range."""
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
        """`tokens` as the beginning of a text: after the model's `bos`, where it wants one."""
        tokenizer = self._tokenizer
        if tokenizer.bos is None or not text:
            return tokens
        return [tokenizer.bos, *tokens] if tokenizer.add_bos or not tokens else tokens

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Raise InputError for messages that are no text, or too long whatever their tokens are."""
        for message in messages:
            check_text(message.content)
        self._check_text_size(sum(len(message.content.encode()) for message in messages))

    def _check_text_size(self, size: int) -> None:
        self.check_length(-(-size // self._tokenizer.longest_piece))

    def check_length(self, count: int) -> None:
        """Raise InputError for more tokens than allowed."""
        if count > self.max_tokens:
            raise InputError(
                f"has at least {count} tokens, at most {self.max_tokens} allowed",
                field="prompt",
                remedy="send less, or raise max_prompt_tokens",
            )

    def turn(
        self, conversation: Conversation, context: Context, *, anew: bool, tools: ToolUse | None
    ) -> Turn:
        """The turn that answers a conversation, after what the context holds. `anew`: the context
        has read another transcript. Raises InputError: too much that is new.
        """
        turn = self._shown(
            Turn(self._encoded(conversation, tools), conversation, anew, tools=tools), context
        )
        start, count = turn.cut
        held = [] if anew else context.tokens
        if count:
            held = held[:start] + held[start + count :]
        self.check_length(len(turn.tokens) - common_prefix(held, turn.tokens))
        return turn

    def last_said(self, conversation: Conversation) -> Turn | None:
        """The last turn of a chat that came back by `undo`, `restore` or `load`: its prompt is read
        again. None for a running text, whose prompt has no known end.
        """
        if not conversation.messages or conversation.messages[-1].role != "assistant":
            return None
        before = Conversation(conversation.messages[:-1], conversation.skipped)
        return Turn(self._encoded(before), before)

    def _shown(self, turn: Turn, context: Context) -> Turn:
        """The turn, with the older half of its messages left out where it has many tokens and the
        state, having read them, stays what it is: the later ones are rendered alike without them.
        Where they are not, they are left out of prompts that would be too long, and read again.
        """
        conversation, long = turn.conversation, turn.tokens
        few = context.capacity is not None or len(long) <= 2 * SHOWN
        if few or conversation is None or (less := conversation.halved()) is None:
            return turn
        short = self._encoded(less, turn.tools)
        same = common_prefix(long, short)
        after = same + len(long) - len(short)
        alike = after >= same and long[after:] == short[same:]
        if alike and not turn.anew and context.tokens[:after] == long[:after]:
            return Turn(short, less, cut=(same, after - same), tools=turn.tools)
        if turn.anew or len(long) <= self.max_tokens:
            return turn
        return Turn(short, less, tools=turn.tools)

    def _encoded(self, conversation: Conversation, use: ToolUse | None = None) -> list[int]:
        """Tokens of the prompt for what is shown of a conversation; none of a base model."""
        if self._template is None:
            return []
        return self._template.encode(conversation.shown, tools=use.declared if use else ())
