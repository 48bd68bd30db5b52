"""`edge-chat`: chat with a bundle in a terminal, or get one answer from a script."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.apps import interrupts, options
from edge.apps.chat.context import POLICIES
from edge.apps.constraints import FormOptions
from edge.apps.exits import INTERRUPTED, leave
from edge.apps.programs import CommandGroup, grouped
from edge.apps.terminal import say
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.runtime.parameters import SamplingParams

app = CommandGroup()

_sampling = partial(typer.Option, rich_help_panel="Sampling (defaults come from the model)")
_memory = partial(typer.Option, rich_help_panel="Memory")

# the default bundle: the first if it was pulled, otherwise the second
HYBRID, DEMO = "smollm2-hybrid", "demo"


def _version(asked: bool) -> None:
    if asked:
        import edge

        say(edge.__version__)
        raise typer.Exit


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """A group of options: how tokens are chosen."""

    max_tokens: Annotated[int | None, _sampling(help="Maximum number of tokens of an answer.")] = (
        None
    )
    temperature: Annotated[float | None, _sampling(help="0 is greedy.")] = None
    top_k: Annotated[int | None, _sampling(help="Keep the k likeliest tokens; 0 is off.")] = None
    top_p: Annotated[
        float | None, _sampling(help="Keep the likeliest tokens up to this total probability.")
    ] = None
    min_p: Annotated[
        float | None, _sampling(help="Drop tokens less likely than this share of the best.")
    ] = None
    repetition_penalty: Annotated[float | None, _sampling(help="1 is off.")] = None
    seed: Annotated[int | None, _sampling(help="Make answers repeatable.")] = None
    stop: Annotated[
        list[str] | None, _sampling(help="End answers at this text; may be repeated.")
    ] = None

    def read(self) -> dict[str, Any]:
        """Return the sampling options of each answer; the seed belongs to the session."""
        given = vars(self) | {"stop": tuple(self.stop) if self.stop else None}
        return {name: value for name, value in given.items() if name != "seed"}


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """A group of options: how much a conversation keeps."""

    context: Annotated[
        int | None,
        _memory(
            min=1,
            metavar="N",
            help="Tokens the KV caches hold. [default: the trained context, at most 4096]",
        ),
    ] = None
    context_policy: Annotated[
        str,
        _memory(
            metavar="drop|stop", help="When the context is full: drop the oldest turns, or stop."
        ),
    ] = "drop"
    undo_levels: Annotated[
        int | None, _memory(min=0, metavar="N", help="Turns that /undo can take back. [default: 4]")
    ] = None
    window: Annotated[
        int | None,
        _memory(
            min=1, metavar="N", help="Maximum number of tokens that can be rewound. [default: 8]"
        ),
    ] = None

    def sizes(self) -> dict[str, int]:
        """Return the session's size arguments that were given."""
        sizes = {"capacity": self.context, "undo_levels": self.undo_levels, "window": self.window}
        return {name: value for name, value in sizes.items() if value is not None}


@app.command()
@grouped
def chat(
    bundle: Annotated[
        str | None,
        typer.Argument(help=f"{options.BUNDLE_HELP} [default: {HYBRID} if pulled, else {DEMO}]"),
    ] = None,
    *,
    run: options.RunOptions,
    drafts: options.DraftingOptions,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Answer this prompt and exit.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With -p or a pipe: print one JSON object.")
    ] = False,
    sampled: SamplingOptions,
    form: FormOptions,
    memory: MemoryOptions,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Chat with a bundle. With -p, or text on standard input, answer once: the answer goes to
    standard output, everything else to standard error."""
    # numpy's thread pool is not used here, and starting it takes a seventh of the startup time
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sampling = sampled.read() | form.read()
    if memory.context_policy not in POLICIES:
        raise InputError(
            f"must be drop or stop, not {memory.context_policy!r:.60}", field="--context-policy"
        )
    params = _check(sampling | {"seed": sampled.seed})
    drafting = drafts.read()
    # imported late, so that --help and option errors appear at once
    from edge.apps.chat import conversation
    from edge.bundle import store
    from edge.runtime.constrain.mask import open_mask

    if bundle is None:
        bundle = HYBRID if store.find(HYBRID) else DEMO
    options.check_engine(run.engine, run.provider)
    once = conversation.given_prompt(prompt)
    if as_json and once is None:
        raise InputError("works only for one answer", field="--json", remedy="give -p, or a pipe")
    if not store.find(bundle) and (store.is_source(bundle) or bundle == HYBRID):
        from edge.apps.models import offer

        bundle = offer.ready(bundle)
    model, drafter = run.load(bundle), run.load_drafter(drafting.draft)
    with options.named_as_options():  # compiles the grammar for the model's vocabulary
        open_mask(model.tokenizer, params.constraint, continued=model.template is None)
    gain = None
    if drafter is not None:
        from edge.apps.chat.gain import Gain
        from edge.apps.measure.stopwatch import timed

        model, watch = timed(model)
        gain = Gain(watch, chosen=drafting.tokens is None and drafting.tree is None)
    if note := options.self_drafting_note(model, drafter):
        say(note, file=sys.stderr)
    with options.named_as_options():
        session = model.session(
            **memory.sizes(),
            system=system if model.template else None,
            seed=sampled.seed,
            draft=drafter,
            draft_tokens=drafting.tokens,
            draft_tree=drafting.tree,
            accept=drafting.accept,
        )
    if system is not None and model.template is None:
        say("note: this model has no chat template; --system is not used", file=sys.stderr)
    interrupts.unwatched()
    if once is not None:
        interrupted = conversation.answer_once(session, once, sampling, gain, as_json)
    else:
        drops = memory.context_policy == "drop"
        interrupted = conversation.converse(session, bundle, sampling, gain, drops)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _check(sampling: dict[str, Any]) -> SamplingParams:
    """Validate the sampling options before anything is loaded; errors name the options."""
    from edge.runtime.parameters import make_params

    with options.named_as_options():
        return make_params({}, sampling)


def main() -> None:
    """Entry point of the `edge-chat` program."""
    leave(app)
