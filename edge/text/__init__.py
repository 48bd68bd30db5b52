"""Text in, text out: tokenizers, streamed decoding, stop strings, chat templates."""

from edge.text.load import load_template, load_tokenizer
from edge.text.stream import StopMatcher, StreamDecoder
from edge.text.template import ChatTemplate, Message
from edge.text.tokenizer import Segment, Tokenizer

__all__ = [
    "ChatTemplate",
    "Message",
    "Segment",
    "StopMatcher",
    "StreamDecoder",
    "Tokenizer",
    "load_template",
    "load_tokenizer",
]
