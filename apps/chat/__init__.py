"""`edge-chat`: talk to a bundle in a terminal, or ask it one thing from a script."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.apps import constraints, options
from edge.apps.exits import INTERRUPTED, exit_code_of
from edge.apps.terminal import say
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.runtime.sampling import SamplingParams

# plain usage errors: boxes do not survive narrow and dumb terminals
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)


@app.command()
def chat(
    bundle: options.BundleName = "demo",
    engine: options.Engine = "auto",
    provider: options.Provider = None,
    draft: options.Draft = "none",
    draft_tokens: options.DraftTokens = None,
    draft_tree: options.DraftTree = None,
    draft_auto: options.DraftAuto = False,
    accept: options.Accept = "exact",
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Answer this and leave.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep this much probability.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens less likely than this share of the best.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Make answers repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End answers at this text; may be repeated.")
    ] = None,
    json_schema: constraints.JsonSchema = None,
    regex: constraints.Regex = None,
    grammar: constraints.GrammarFile = None,
    choices: constraints.Choices = None,
    threads: Annotated[int | None, typer.Option(help=options.THREADS_HELP)] = None,
    spin: options.Spin = False,
) -> None:
    """Talk to a bundle. With -p, or text on standard input, answer once: the answer goes to
    standard output, everything else to standard error."""
    options.check_engine(engine)
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": tuple(stop) if stop else None,
        **constraints.read_constraint(json_schema, regex, grammar, choices),
    }
    params = _check(sampling | {"seed": seed}, threads)
    drafting = options.read_drafting(draft, draft_tokens, draft_tree, draft_auto, accept)
    # imported late, so that --help and refusals come at once
    from edge.apps.chat import conversation
    from edge.runtime.constrain.mask import open_mask
    from edge.runtime.engines import check_provider
    from edge.runtime.model import load

    check_provider(engine, provider)
    once = conversation.given_prompt(prompt)
    model = load(bundle, engine=engine, threads=threads, spin=spin, provider=provider)
    drafter = options.load_drafter(drafting.draft, engine, threads, spin, provider)
    with _named():  # a grammar is compiled for the model's vocabulary
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
            system=system if model.template else None,
            seed=seed,
            draft=drafter,
            draft_tokens=drafting.tokens,
            draft_tree=drafting.tree,
            accept=drafting.accept,
        )
    if system is not None and model.template is None:
        say("note: this model has no chat template; --system is not used", file=sys.stderr)
    if once is not None:
        interrupted = conversation.answer_once(session, once, sampling, gain)
    else:
        interrupted = conversation.converse(session, bundle, sampling, gain)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _check(sampling: dict[str, Any], threads: int | None) -> SamplingParams:
    """Refuse what can be refused before anything is loaded, naming options."""
    from edge.runtime.sampling import make_params

    if threads is not None and threads < 1:
        raise InputError(f"must be at least 1, not {threads}", field="--threads")
    with _named():
        return make_params({}, sampling)


@contextmanager
def _named() -> Iterator[None]:
    """Refusals of sampling parameters name the options that they came from."""
    try:
        yield
    except InputError as problem:
        option = _option(problem.field or "")
        # of further faults the message names the parameters
        message = re.sub(r"; ([\w.]+): ", lambda name: f"; {_option(name[1])}: ", problem.message)
        raise InputError(message, field=option, remedy=problem.remedy) from None


def _option(parameter: str) -> str:
    return "--" + parameter.partition(".")[0].replace("_", "-")


def main() -> None:
    """Entry point of the `edge-chat` program."""
    sys.exit(exit_code_of(app))
