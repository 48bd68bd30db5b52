"""The runtime as model `edge` of lm-evaluation-harness. Importing this module registers it.

It needs the package lm-eval but not torch: `pip install 'mamba-edge[eval]'`. In a program:

    import edge.apps.evaluate.harness
    lm_eval.simple_evaluate(model="edge", model_args={"bundle": "demo"}, tasks=[…])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from numpy.typing import NDArray
from tqdm import tqdm

from edge.apps.evaluate.score import nats
from edge.apps.evaluate.windows import DEFAULT_WINDOW
from edge.apps.measure.agreement import Logits
from edge.errors import InputError
from edge.runtime.model import Model, load
from edge.text.template import Message

MAX_ANSWER = 256  # tokens, for tasks without a limit of their own
Scored = tuple[float, bool]


@register_model("edge")
class EdgeLM(TemplateLM):
    """A bundle as a model of the harness.

    Encodes text and truncates context as the harness's `HFLM` does, so that figures compare.

    Attributes:
        model: the loaded bundle.
        max_length: maximum context of a prediction in tokens. Default: the context that attention
            was trained for, else 2048.
    """

    def __init__(
        self,
        bundle: str | Model,
        threads: int | None = None,
        max_length: int | None = None,
        **ignored: Any,
    ) -> None:
        """`ignored`: batch_size, device and other arguments that the harness always passes."""
        super().__init__()
        self.model = bundle if isinstance(bundle, Model) else load(bundle, threads=threads)
        trained = self.model.config.max_context
        self.max_length = max_length or trained or DEFAULT_WINDOW
        if trained is not None and self.max_length > trained:
            raise InputError(
                f"the attention layers were trained for {trained} positions", field="max_length"
            )
        self._scorer = _ContextScorer(self.model, self.max_length)
        self._templated = False

    # -- text and tokens -------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context: `bos`, else an end token, else a line feed (bytes).

        It is never predicted.
        """
        tokenizer = self.model.tokenizer
        if tokenizer.bos is not None:
            return tokenizer.bos
        return tokenizer.eos[0] if tokenizer.eos else tokenizer.encode("\n")[0]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Encode a text.

        Text that looks like a special token is parsed as one only in prompts from a chat template,
        as everywhere in the runtime.
        """
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode(string, special=self._templated)
        add = tokenizer.add_bos if add_special_tokens is None else add_special_tokens
        if add and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
            ids.insert(0, tokenizer.bos)
        return ids

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the key of the template in the harness's caches: the bundle's fingerprint."""
        return self.model.fingerprint if chat_template and self.model.template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render the prompt of a conversation.

        Without the generation prompt, a last assistant message is the beginning of an answer and
        stays open.
        """
        if self.model.template is None:
            raise InputError("has no chat template", file=self.model.path)
        self._templated = True
        messages = [Message(turn["role"], turn["content"]) for turn in chat_history]
        prefix = ""
        if not add_generation_prompt and messages and messages[-1].role == "assistant":
            prefix = messages.pop().content
        return self.model.template.render_text(messages) + prefix

    # -- what tasks ask --------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **ignored: Any,
    ) -> list[Scored]:
        """Return (ln p, whether greedy decoding gives the same tokens) of each continuation.

        A shared context is read once. Context beyond `max_length` is cut from the left.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            groups.setdefault(self._truncate(context, continuation), []).append(index)
        scores: list[Scored] = [(0.0, True)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood") as bar:
            for shared, indices in groups.items():
                self._scorer.begin(shared)
                for index in indices:
                    request, _, continuation = requests[index]
                    scores[index] = self._scorer.score(continuation)
                    if request is not None:
                        self.cache_hook.add_partial("loglikelihood", request, scores[index])
                    bar.update()
        return scores

    def _truncate(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        if len(continuation) > self.max_length:
            raise InputError(
                f"a continuation of {len(continuation)} tokens does not fit into a context of "
                f"{self.max_length}"
            )
        # the last token is predicted and not fed
        return tuple(context[-(self.max_length + 1 - len(continuation)) :])

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return ln p of whole texts, read in the harness's windows."""
        totals = []
        for request in tqdm(requests, disable=disable_tqdm, desc="loglikelihood_rolling"):
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
            total = sum(ln_p for ln_p, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True))
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate answers, greedy unless a task samples, without the stop string."""
        texts = []
        for request in tqdm(requests, disable=disable_tqdm, desc="generate_until"):
            context, gen_kwargs = request.args
            texts.append(self._generate(context, normalize_gen_kwargs(gen_kwargs, MAX_ANSWER)))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _generate(self, context: str, gen_kwargs: Mapping[str, Any]) -> str:
        count = gen_kwargs["max_gen_toks"]
        room = self.max_length - count
        if room < 1:
            raise InputError(
                f"an answer of {count} tokens leaves no room in a context of {self.max_length}",
                field="max_gen_toks",
                remedy="lower it in the task's generation_kwargs",
            )
        prompt = (self.tok_encode(context) or [self.prefix_token_id])[-room:]
        session = self.model.session(capacity=self.max_length, undo_levels=1)
        # the bundle's own sampling parameters are for chats
        sampling: dict[str, Any] = {
            "temperature": gen_kwargs["temperature"] if gen_kwargs["do_sample"] else 0.0,
            "top_k": gen_kwargs.get("top_k", 0),
            "top_p": gen_kwargs.get("top_p", 1.0),
            "min_p": gen_kwargs.get("min_p", 0.0),
            "repetition_penalty": gen_kwargs.get("repetition_penalty", 1.0),
            "seed": gen_kwargs.get("seed", 0),
            "max_tokens": count,
            "stop": tuple(term for term in gen_kwargs["until"] if term),
        }
        return session.generate(prompt, **sampling).finish().text


class _ContextScorer:
    """A state that reads a context once and is restored to it for every continuation."""

    def __init__(self, model: Model, capacity: int) -> None:
        self._engine = model.engine
        self._vocab_size = model.tokenizer.vocab_size
        self._unassigned = list(model.tokenizer.unassigned)
        self._state = model.engine.new_state(window=1, capacity=capacity)

    def begin(self, context: Sequence[int]) -> None:
        """Read a context of at least one token."""
        self._state.clear()
        for logits in self._feed(context, "last"):
            self._first_logits = logits[-1:].copy()
        self._snapshot = self._state.snapshot()

    def score(self, continuation: Sequence[int]) -> Scored:
        """Return (Σ ln p, whether it is greedy) of a continuation of the context."""
        ids = np.array(continuation, np.int64)
        total = -float(nats(self._first_logits, ids[:1]).sum())
        greedy = bool((self._greedy_ids(self._first_logits) == ids[:1]).all())
        self._state.restore(self._snapshot)
        position = 1
        for logits in self._feed(continuation[:-1], "all"):
            targets = ids[position : position + len(logits)]
            total -= float(nats(logits, targets).sum())
            greedy &= bool((self._greedy_ids(logits) == targets).all())
            position += len(logits)
        return total, greedy

    def _greedy_ids(self, logits: Logits) -> NDArray[np.intp]:
        """Return greedy choices. Unassigned ids and padding rows are never chosen."""
        logits = logits[:, : self._vocab_size]
        if self._unassigned:
            logits = logits.copy()
            logits[:, self._unassigned] = -np.inf
        choices: NDArray[np.intp] = logits.argmax(-1)
        return choices

    def _feed(self, ids: Sequence[int], rows: Any) -> Iterator[Logits]:
        chunk = self._engine.chunk
        for start in range(0, len(ids), chunk):
            tokens = np.array([ids[start : start + chunk]], np.int64)
            yield self._engine.run(tokens, self._state, rows=rows, commit=True)[0]
