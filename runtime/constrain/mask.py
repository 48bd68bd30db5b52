"""Token masks: llguidance follows a grammar, and the mask excludes tokens that may not come next.

llguidance runs the vocabulary's bytes through a parser and returns one bit per token. Compiled
grammars are cached, for programs that use the same one repeatedly.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from decimal import Decimal
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, InputError
from edge.runtime.constrain.statement import Constraint, Kind
from edge.text.tokenizer import Segment, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Logits = NDArray[np.float32]

# JSON layout of Python's `json.dumps`. With free white space, small models may write nothing else,
# and fewer tokens are forced.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KEPT = 32  # compiled grammars cached per vocabulary
MAX_SYMBOLS = 50_000  # of a grammar: compile time grows with the square of the optional keys
# multipleOf is checked digit by digit, with a parser state per remainder: 1,000,000 take 10 s
MAX_DIVISOR = 200_000
_DIVISOR = re.compile(r'"multipleOf"\s*:\s*([0-9][0-9.eE+-]*)')
_ASCII_ESCAPE = re.compile(r"\\u00([0-7][0-9a-fA-F])")
REMEDY = "pip install 'mamba-edge[constrain]'; in a checkout, make test does"
# for each byte of the mask, the biases of its 8 tokens: 0 if the bit is set, else -inf
_BIAS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


class Mask:
    """Follows one answer through its grammar.

    Attributes:
        complete: whether the grammar allows no further tokens.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary, kind: Kind) -> None:
        """`matcher`: at the grammar's start, owned by this mask. `kind`: kind of the grammar."""
        self._matcher = matcher
        self._kind = kind
        self._vocabulary = vocabulary
        self._ahead: list[int] = []  # tokens the matcher has consumed beyond the answer
        self.complete = False

    def say(self, token: int) -> None:
        """Add a token to the answer.

        Raises EngineError for a token that the grammar excludes, and InputError as `allowed` does.
        """
        if self._ahead[:1] == [token]:
            del self._ahead[0]
        else:
            self._move_to(())
            self._consume(token)
        self.complete = not self._ahead and self._matcher.is_stopped()

    def allowed(self, logits: Logits, path: Sequence[int] = ()) -> Logits:
        """Return a copy of logits [V] with -inf for tokens that may not come after `path`.

        `path` follows the answer so far. After the grammar's end, returns the logits themselves.
        Raises InputError if the grammar becomes too complex or needs text that the vocabulary
        lacks.
        """
        if not self._move_to(path):
            return logits
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        # `take` is ten times as fast as indexing
        out: Logits = _BIAS.take(bits, axis=0).reshape(-1)[: len(logits)]
        out += logits
        return out

    def within(self, path: Sequence[int]) -> int:
        """Return how many tokens of a path after the answer so far stay within the grammar."""
        self._move_to(())
        return int(self._matcher.validate_tokens(list(path)))

    def forced(self, most: int) -> list[int]:
        """Return at most `most` tokens of the text that the grammar forces next."""
        self._move_to(())
        tokens: list[int] = self._matcher.compute_ff_tokens()[:most]
        # stop before an end token, which is not worth a run
        return tokens[: next((i for i, t in enumerate(tokens) if t in self._vocabulary.ends), most)]

    def _move_to(self, path: Sequence[int]) -> bool:
        """Bring the matcher to the end of `path` and return whether the grammar continues there."""
        ahead, common = self._ahead, 0
        while common < min(len(ahead), len(path)) and ahead[common] == path[common]:
            common += 1
        if len(ahead) > common:
            self._matcher.rollback(len(ahead) - common)
            del ahead[common:]
        for token in path[common:]:
            if self._matcher.is_stopped():
                return False
            self._consume(token)
            ahead.append(token)
        return not self._matcher.is_stopped()

    def _consume(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._check()
            raise EngineError(f"token {token} is outside the grammar")

    def _check(self) -> None:
        """Raise InputError if the matcher failed because of the grammar and not of a token."""
        message = _error_message(self._matcher.get_error()) if self._matcher.is_error() else ""
        if not message or "doesn't satisfy the grammar" in message:
            return
        if message == "NoExtensionBias":
            raise InputError(
                "allows no next text that the model's vocabulary can write", field=self._kind,
                remedy="change the grammar, or use a model whose tokenizer knows all bytes",
            )  # fmt: skip
        raise InputError(
            f"cannot be followed further: {message}",
            field=self._kind,
            remedy="use a simpler grammar",
        )


class GrammarVocabulary:
    """A tokenizer's vocabulary as llguidance reads it, and the grammars compiled for it.

    Attributes:
        ends: ids of end tokens.
        tokenizer: llguidance's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Convert the vocabulary, 0.1 s for 50,000 ids. Raises InputError without llguidance."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ModuleNotFoundError:
            raise InputError("constrained answers need llguidance", remedy=REMEDY) from None
        self._size = tokenizer.vocab_size
        hidden = {*tokenizer.eos, *tokenizer.unassigned}
        tokens = [
            b"" if token in hidden else tokenizer.token_bytes(token) for token in range(self._size)
        ]
        self.ends = frozenset(tokenizer.eos)
        special = [token for token, text in enumerate(tokens) if not text]
        for token in special:
            tokens[token] = _control_bytes(tokenizer.id_to_piece(token))
        ends = list(tokenizer.eos)
        if not ends:  # llguidance needs one: add it after the vocabulary, where it is never sampled
            ends = [len(tokens)]
            special.append(len(tokens))
            tokens.append(_control_bytes("<end>"))
        self._starts_with_space = np.array([text[:1] == b" " for text in tokens])
        # llguidance calls it to tokenize forced text
        wrapped = TokenizerWrapper(_TokenizerAdapter(tokenizer, tokens, ends[0], special))
        self.tokenizer = LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=ends)
        self._compiled: OrderedDict[tuple[Constraint, bool], LLMatcher] = OrderedDict()
        self._lock = Lock()

    def mask(self, constraint: Constraint, stripped: bool) -> Mask:
        """Return a mask at the start of an answer. `stripped`: its first space is not shown.

        Raises InputError naming the parameter of a grammar that cannot be compiled.
        """
        key = constraint, stripped
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is None:
                matcher = self._compiled[key] = self._compile(constraint, stripped)
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return Mask(matcher.deep_copy(), self, constraint.kind)

    def _compile(self, constraint: Constraint, stripped: bool) -> LLMatcher:
        _check_divisors(constraint)
        body = _grammar(constraint)
        matcher = self._matcher(constraint, json.dumps({"grammars": [body]}))
        first_tokens = np.unpackbits(
            np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
        )[: len(self._starts_with_space)].astype(bool)
        if not first_tokens[: self._size].any() and not matcher.is_accepting():
            raise InputError(
                "begins with text that the model's vocabulary cannot write", field=constraint.kind
            )
        if not stripped:
            return matcher
        # the space before the first word is not shown: it is optional, and required if the grammar
        # itself begins with a space
        space = '" "' if first_tokens[self._starts_with_space].any() else '" "?'
        top = {"name": "answer", "lark_grammar": f"start: {space} @body"}
        return self._matcher(constraint, json.dumps({"grammars": [top, body | {"name": "body"}]}))

    def _matcher(self, constraint: Constraint, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, max_grammar_size=MAX_SYMBOLS)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InputError(_error_message(matcher.get_error()), field=constraint.kind)
        return matcher


class _TokenizerAdapter:
    """The tokenizer interface that llguidance expects."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[bytes], end: int, special: list[int]
    ) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end, special
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize text within an answer, so that no leading space is added."""
        before = Segment("", tokens=(0,))
        try:
            tokens = self._tokenizer.encode_segments([before, Segment(text.decode())])[1:]
        except (UnicodeDecodeError, InputError):
            return self._longest_first(text)
        exact = b"".join(self.tokens[token] for token in tokens) == text
        # some tokenizers trim spaces or have no byte tokens
        return tokens if exact else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Tokenize greedily by the longest match, as far as tokens exist."""
        tokens, position = [], 0
        while position < len(text):
            sizes = range(min(self._longest, len(text) - position), 0, -1)
            matches = (self._ids.get(text[position : position + size]) for size in sizes)
            token = next((token for token in matches if token is not None), None)
            if token is None:
                break
            tokens.append(token)
            position += len(self.tokens[token])
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self.tokens)}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.tokens))


def _control_bytes(name: str) -> bytes:
    """Return llguidance's bytes for a control token."""
    return b"\xff" + name.encode()


def _check_divisors(constraint: Constraint) -> None:
    """Raise InputError if values of `multipleOf` need too many parser states."""
    source = _ASCII_ESCAPE.sub(lambda match: chr(int(match[1], 16)), constraint.source)
    texts = _DIVISOR.findall(source)
    if not texts or constraint.kind not in ("json_schema", "grammar"):
        return
    try:
        numbers = [Decimal(text) for text in texts]
        exponent = min(0, *(int(number.normalize().as_tuple().exponent) for number in numbers))
        small = exponent >= -9 and all(number < MAX_DIVISOR for number in numbers)
        integers = {int(number.scaleb(-exponent)) for number in numbers} if small else {0}
    except (ArithmeticError, ValueError):
        integers = {0}
    # several constraints on one number need a state per remainder of their least common multiple
    multiple = math.lcm(*integers) if len(integers) <= 100 else 0
    if (
        not 0 < multiple <= MAX_DIVISOR
        or sum(integers) * (len(numbers) / len(integers)) > 4 * MAX_DIVISOR
    ):
        raise InputError(
            f"has too large values of multipleOf: taken together, they come to more than "
            f"{MAX_DIVISOR}", field=constraint.kind, remedy="use smaller ones",
        )  # fmt: skip


def _grammar(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint as one grammar in llguidance's JSON."""
    if constraint.kind == "json_schema":
        return {"json_schema": _schema(constraint.source)}
    if constraint.kind == "grammar":
        return {"lark_grammar": constraint.source}
    if constraint.kind == "regex":
        return {"lark_grammar": f"start: {_regex(constraint.source)}"}
    choices = json.loads(constraint.source)
    return {"lark_grammar": "start: " + " | ".join(map(literal, choices))}


def _schema(source: str) -> Any:
    """Return a schema with `LAYOUT`; its own "x-guidance", llguidance's options, overrides it."""
    schema = json.loads(source)
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        own_options = schema.get("x-guidance")
        return schema | {
            "x-guidance": LAYOUT | (own_options if isinstance(own_options, dict) else {})
        }
    return schema


def _regex(pattern: str) -> str:
    """Return a regular expression in Lark syntax, between slashes."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern)}/"


def literal(text: str) -> str:
    """Return a text as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _error_message(error: str) -> str:
    """Return llguidance's error message without the grammar that it quotes."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return ": ".join([line.rstrip(":") for line in [*lines[:1], *reasons]]) or "is refused"


_VOCABULARIES: WeakKeyDictionary[Tokenizer, GrammarVocabulary] = WeakKeyDictionary()
_VOCABULARY_LOCK = Lock()


def open_mask(
    tokenizer: Tokenizer, constraint: Constraint | None, *, continued: bool
) -> Mask | None:
    """Return the mask for an answer with this constraint, or None without one.

    `continued`: the answer's first space is shown. Raises InputError without llguidance, and for a
    grammar that cannot be compiled or that the vocabulary cannot write.
    """
    if constraint is None:
        return None
    with _VOCABULARY_LOCK:
        vocabulary = _VOCABULARIES.get(tokenizer)
        if vocabulary is None:
            vocabulary = _VOCABULARIES[tokenizer] = GrammarVocabulary(tokenizer)
    return vocabulary.mask(constraint, tokenizer.strips_space and not continued)
