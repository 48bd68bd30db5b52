"""`edge-chat`: talk to a bundle in a terminal, or ask it one thing from a script."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer

from edge.apps import draft_options
from edge.apps.exits import INTERRUPTED, exit_code_of
from edge.runtime import ort_providers

ENGINES = ("auto", "ort", "cuda", "tensorrt")

# plain usage errors: boxes do not survive narrow and dumb terminals
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)


@app.command()
def chat(
    bundle: Annotated[
        str, typer.Argument(help="Bundle folder, or demo, demo-fp16, demo-draft, demo-bytes.")
    ] = "demo",
    engine: Annotated[str, typer.Option(help="auto, ort, cuda or tensorrt.")] = "auto",
    provider: Annotated[str | None, typer.Option(help=ort_providers.HELP)] = None,
    draft: Annotated[
        str, typer.Option(help="Who drafts: another bundle, ngram, or none.")
    ] = "none",
    draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens of every draft, one after the other.")
    ] = None,
    draft_tree: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Children at each depth of every draft: 3,2,2,1,1."),
    ] = None,
    draft_auto: Annotated[
        bool,
        typer.Option("--draft-auto", help="Find the shape of drafts by trying; the default."),
    ] = False,
    accept: Annotated[
        str,
        typer.Option(metavar=draft_options.ACCEPT_METAVAR, help=draft_options.ACCEPT_HELP),
    ] = "exact",
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
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; else one per core, small models one."),
    ] = None,
    spin: Annotated[
        bool, typer.Option("--spin", help="Threads wait awake: for a machine doing nothing else.")
    ] = False,
) -> None:
    """Talk to a bundle. With -p, or text on standard input, answer once: the answer goes to
    standard output, everything else to standard error."""
    if engine not in ENGINES:
        raise typer.BadParameter(f"{engine!r} is none of {', '.join(ENGINES)}")
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": tuple(stop) if stop else None,
    }
    _check(sampling | {"seed": seed}, threads)
    drafts = draft_options.read(draft, draft_tokens, draft_tree, draft_auto, accept)
    # imported late, so that --help and refusals come at once
    from edge.apps.chat import conversation
    from edge.apps.chat import once as one_shot
    from edge.runtime.engine import check_provider

    check_provider(engine, provider)
    once = one_shot.given_prompt(prompt)
    from edge.runtime.model import load

    model = load(bundle, engine=engine, threads=threads, spin=spin, provider=provider)
    drafter, gain = draft_options.drafter(drafts.draft, engine, threads, spin, provider), None
    if drafter is not None:
        from edge.apps.chat.gain import Gain
        from edge.apps.measure.stopwatch import timed

        model, watch = timed(model)
        gain = Gain(watch, chosen=drafts.tokens is None and drafts.tree is None)
    if said := draft_options.of_itself(model, drafter):
        print(said, file=sys.stderr)
    with draft_options.named():
        session = model.session(
            system=system if model.template else None,
            seed=seed,
            draft=drafter,
            draft_tokens=drafts.tokens,
            draft_tree=drafts.tree,
            accept=drafts.accept,
        )
    if system is not None and model.template is None:
        print("note: this model has no chat template; --system is not used", file=sys.stderr)
    if once is not None:
        interrupted = one_shot.answer(session, once, sampling, gain)
    else:
        interrupted = conversation.talk(session, bundle, sampling, gain)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _check(sampling: dict[str, Any], threads: int | None) -> None:
    """Refuse what can be refused before anything is loaded."""
    from edge.errors import InputError
    from edge.runtime.sampling import make_params

    if threads is not None and threads < 1:
        raise InputError(f"must be at least 1, not {threads}", field="--threads")
    try:
        make_params({}, sampling)
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
