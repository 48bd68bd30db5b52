"""From what a caller asks to token ids, refusing what cannot fit before it is encoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.errors import InputError
from edge.text.template import Message
from edge.text.tokenizer import Tokenizer, check_text


class PromptReader:
    """Reads prompts for one tokenizer.

    Attributes:
        max_tokens: most tokens of one prompt.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
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
                raise InputError(f"{token!r:.40} is no token id", field="prompt")
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
