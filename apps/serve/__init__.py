"""`edge serve BUNDLE`: an OpenAI-compatible server.

`run` owns the process (socket, signals, exit code), `protocol` the bytes of a connection, `guard`
access control, `app` the routes, `wire` bodies and refusals. `bodies`, `requests` and `answers`
parse and write JSON (`responses`, `response_format` and `ollama` for those APIs). `exchange`,
`jobs` and `worker` connect the event loop to the threads in which the model runs, `slots` and
`slot` hold the states they use, `metrics` counts, and `page` is the chat at `/`.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.apps import exporter, options, terminal
from edge.apps.programs import grouped
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.apps.serve.settings import ServerLimits, ServerSettings

KEY_VARIABLE = "EDGE_API_KEY"

_access = partial(typer.Option, rich_help_panel="Access")
_limits = partial(typer.Option, rich_help_panel="Limits")
_seconds = partial(_limits, max=1e6, metavar="S")


@dataclass(frozen=True, kw_only=True)
class CallerOptions:
    """A group of options: who may call."""

    api_key: Annotated[
        str | None,
        _access(
            help=f"Key that clients must send; better in {KEY_VARIABLE}, which `ps` does not show. "
            "Without either, a key is made and printed."
        ),
    ] = None
    no_key: Annotated[
        bool, _access("--no-key", help="Require no key; only on a loopback address.")
    ] = False
    allow_host: Annotated[
        list[str] | None,
        _access(metavar="NAME", help="Another host name of this server; may be repeated."),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        _access(
            metavar="URL", help="Origin of pages that may call: https://host; may be repeated."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """A group of options: the limits of `ServerLimits`."""

    queue: Annotated[int, _limits(min=0, metavar="N", help="Maximum waiting requests.")] = 16
    deadline: Annotated[
        float, _seconds(min=0.1, help="Seconds a request may take, waiting included.")
    ] = 600
    max_prompt_tokens: Annotated[
        int, _limits(min=1, metavar="N", help="Maximum tokens of a prompt.")
    ] = 32768
    max_body_kib: Annotated[
        int, _limits(min=1, metavar="N", help="Maximum KiB of a request body.")
    ] = 1024
    receive_timeout: Annotated[
        float, _seconds(min=0.1, help="Seconds for a whole request to arrive.")
    ] = 10
    send_timeout: Annotated[
        float, _seconds(min=0.1, help="Seconds a client may leave sent data unread.")
    ] = 30
    grace: Annotated[
        float, _seconds(min=0, help="Seconds running answers get to finish on shutdown.")
    ] = 10
    cache_mib: Annotated[
        int,
        _limits(min=0, metavar="N", help="MiB of states kept for later prompts; 0 keeps none."),
    ] = 128

    def read(self) -> ServerLimits:
        """Return the limits. Raises InputError for nan, which older versions of typer accept."""
        from edge.apps.serve.settings import ServerLimits

        for field in ("deadline", "receive_timeout", "send_timeout", "grace"):
            if math.isnan(getattr(self, field)):
                option = "--" + field.replace("_", "-")
                raise InputError("must be a number of seconds, not nan", field=option)
        return ServerLimits(
            body_bytes=self.max_body_kib << 10,
            receive_s=self.receive_timeout,
            send_s=self.send_timeout,
            waiting=self.queue,
            deadline_s=self.deadline,
            prompt_tokens=self.max_prompt_tokens,
            grace_s=self.grace,
            cache_bytes=self.cache_mib << 20,
        )


@grouped
def serve(
    bundle: options.BundleName,
    *,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen on; 0 picks any.")
    ] = 8080,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests. [default: the bundle's]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines on stdout: listening, then ready.")
    ] = False,
    callers: CallerOptions,
    parallel: Annotated[
        int | None,
        options.running(
            min=1,
            max=16,
            metavar="N",
            help="Conversations answered at once. Only the cpu engine joins their steps; on others "
            "they take turns, which is no faster. [default: 4 on the cpu engine, fewer if memory "
            "is short; else 1]",
        ),
    ] = None,
    limiting: LimitOptions,
    context: Annotated[
        int | None,
        options.running(
            min=1,
            metavar="N",
            help="Tokens the KV caches hold, for models with attention. "
            "[default: the trained context, at most 4096]",
        ),
    ] = None,
    pulled: Annotated[
        bool,
        options.running(
            "--pulled", help="Serve every pulled model too, loading each when requested."
        ),
    ] = False,
    log: Annotated[
        bool, typer.Option("--log", help="Write a line of JSON for each request to stderr.")
    ] = False,
    drafts: options.DraftingOptions,
    running: options.RunOptions,
) -> None:
    """Serve the OpenAI API: /v1/responses, /v1/chat/completions, /v1/completions, /v1/embeddings,
    /v1/models; ollama's /api/chat and /api/generate; /health, /metrics, and a chat page at /.

    Listens on this machine only and requires a key, unless told otherwise.

    SIGTERM or Ctrl-C lets running answers finish; a second one exits at once.
    """
    if parallel not in (None, 1) and drafts.draft != "none":
        raise InputError(
            f"must be 1 with --draft, not {parallel}: with a drafter one answer is made at a time",
            field="--parallel",
        )
    drafting, limits = drafts.read(), limiting.read()
    key, generated = _key(callers.api_key, callers.no_key)
    from edge.bundle import open_bundle
    from edge.runtime.engine import check_capacity
    from edge.runtime.model import resolve

    with exporter.packages_of("server", "serving"):
        from edge.apps.serve import run
    # before the address is announced
    options.check_engine(running.engine, running.provider)
    folder = resolve(bundle)
    with open_bundle(folder) as opened, options.named_as_options():
        check_capacity(opened.manifest.model, context)
    listening = run.bind(host, port)
    if key is None and not run.is_loopback(listening):
        raise InputError(
            f"{host} can be reached from other machines", field="--no-key",
            remedy="let clients send a key, or listen on 127.0.0.1",
        )  # fmt: skip
    settings = replace(
        _settings(folder, key, host, callers, limits),
        name=name or Path(os.path.abspath(bundle)).name, pulled=pulled, log=log,
    )  # fmt: skip
    say = _say_json if as_json else say_text
    say(
        {
            "event": "listening",
            "url": run.url(listening),
            "model": settings.name,
            "api_key": key if generated else None,
            "pid": os.getpid(),
        }
    )

    models = _Models(bundle, running, drafting, parallel, context, limits.cache_bytes)
    raise typer.Exit(run.run(settings, listening, models.first, say, models.pulled))


@dataclass(frozen=True)
class _Models:
    """Loader of the served models: the named one, which may have a drafter, and pulled ones."""

    bundle: str
    running: options.RunOptions
    drafting: options.DraftOptions
    parallel: int | None
    context: int | None
    cache_bytes: int

    def first(self) -> tuple[Any, Any]:
        """Load the named model, and make its slots."""
        model = self.running.load(self.bundle)
        requested = self.drafting
        drafter = self.running.load_drafter(requested.draft)
        if note := options.self_drafting_note(model, drafter):
            terminal.say(note, file=sys.stderr, flush=True)
        drafts = None
        if drafter is not None:
            from edge.runtime.speculate.choose import drafting

            with options.named_as_options():
                drafts = drafting(
                    model, drafter, requested.tokens, requested.tree, self.context, requested.accept
                )
        return self._with_slots(model, drafts)

    def pulled(self, name: str) -> tuple[Any, Any]:
        """Load a pulled model, and make its slots."""
        from edge.bundle import store

        found = store.find(name)
        if found is None:
            raise InputError(f"the model {name} has been removed", field="model")
        return self._with_slots(self.running.load(found))

    def _with_slots(self, model: Any, drafts: Any = None) -> tuple[Any, Any]:
        from edge.apps.serve.slots import make_slots

        return make_slots(
            model,
            self.parallel,
            capacity=self.context,
            cache_bytes=self.cache_bytes,
            drafting=drafts,
        )


def _key(option: str | None, no_key: bool) -> tuple[str | None, bool]:
    """Return the key, None for none, and whether it was made here."""
    given = os.environ.get(KEY_VARIABLE) if option is None else option
    if no_key:
        if option is not None:
            raise InputError(
                "contradicts --api-key", field="--no-key", remedy="give one of the two"
            )
        return None, False
    if given is None:
        return f"edge-{secrets.token_urlsafe(24)}", True
    # the key is sent in a header
    if not given or not all("!" <= character <= "~" for character in given):
        raise InputError(
            "must be printable ASCII without spaces, and not empty",
            field=KEY_VARIABLE if option is None else "--api-key",
        )
    return given, False


def _settings(
    folder: Path, key: str | None, host: str, callers: CallerOptions, limits: ServerLimits
) -> ServerSettings:
    from edge.apps.serve.settings import ServerSettings

    allow_host, allow_origin = callers.allow_host or [], callers.allow_origin or []
    loopback = {"localhost", "127.0.0.1", "::1"}
    for name in allow_host:
        if not re.fullmatch(r"[\w.-]+|[0-9a-fA-F:]+", name):
            raise InputError(
                f"{name!r:.80} is not a host name", field="--allow-host",
                remedy="write it without scheme and port, such as robot.local",
            )  # fmt: skip
    for origin in allow_origin:
        if not origin.partition("://")[2] or origin.endswith("/"):
            raise InputError(
                f"{origin!r:.80} is not an origin",
                field="--allow-origin",
                remedy="write it as https://host[:port]",
            )
    return ServerSettings(
        name=folder.name,
        folder=folder,
        key=key,
        hosts=frozenset({*loopback, host.lower(), *(name.lower() for name in allow_host)}),
        # a foreign page comes with a host name, never with a bare address
        any_address=host not in loopback,
        origins=frozenset(origin.lower() for origin in allow_origin),
        limits=limits,
    )


def _say_json(fact: dict[str, Any]) -> None:
    terminal.say(json.dumps(fact), flush=True)


def say_text(fact: dict[str, Any]) -> None:
    """Print an event for people, on standard error."""
    if fact["event"] == "listening":
        lines = [f"{fact['model']} at {fact['url']}"]
        if fact["api_key"] is not None:
            lines.append(f"API key: {fact['api_key']}")
        # browsers do not send the part behind #
        page = fact["url"].removesuffix("v1")
        lines.append(f"page: {page}#{fact['api_key']}" if fact["api_key"] else f"page: {page}")
        lines.append("loading the model …")
    elif fact["event"] == "ready":
        count = fact["parallel"]
        at_once = "one answer at a time" if count == 1 else f"{count} answers at once"
        if count > 1 and not fact["joined"]:
            at_once = (
                f"{count} answers in turn, no faster than one: only the cpu engine joins steps"
            )
        started = f"ready on {fact['engine']} after {fact['load_s']:.1f} s"
        lines = [f"{started}; {at_once}; Ctrl-C stops"]
    else:
        lines = [f"{fact['signal']}: finishing running answers; a second signal exits at once"]
    terminal.say("\n".join(lines), file=sys.stderr, flush=True)
