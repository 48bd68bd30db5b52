"""`edge`: pull, export, run, inspect, evaluate, profile and serve models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer

from edge.apps.exits import leave
from edge.apps.programs import CommandGroup, HarmlessGroup
from edge.apps.terminal import say

# command → module and function, imported only when the command is called
COMMANDS: Mapping[str, tuple[str, str]] = {
    "pull": ("edge.apps.models.pull", "pull"),
    "list": ("edge.apps.models.listing", "list_models"),
    "show": ("edge.apps.models.listing", "show"),
    "rm": ("edge.apps.models.listing", "remove"),
    "run": ("edge.apps.chat", "chat"),
    "chat": ("edge.apps.chat", "chat"),
    "export": ("edge.apps.export", "export"),
    "distill": ("edge.apps.distill", "distill"),
    "train": ("edge.apps.train", "app"),
    "info": ("edge.apps.info", "info"),
    "serve": ("edge.apps.serve", "serve"),
    "eval": ("edge.apps.evaluate", "evaluate"),
    "build": ("edge.apps.build", "build"),
    "profile": ("edge.apps.profile", "profile"),
    "doctor": ("edge.apps.doctor", "doctor"),
}
# short help for the list of commands, which is cut off at 80 columns
_SHORT_HELP = {
    "pull": "Fetch a model and convert it to a bundle.",
    "list": "List the pulled models.",
    "show": "Show what a model is and where it came from.",
    "run": "Talk to a bundle (the same as chat).",
    "export": "Convert a checkpoint into a bundle that the runtime can run.",
    "info": "Show sizes, provenance and the memory plan.",
    "serve": "Serve the OpenAI and ollama APIs, and a chat page.",
    "build": "Build the engine that --engine tensorrt runs.",
    "profile": "Measure TTFT, TPOT, tokens/s, memory, and where time goes.",
    "doctor": "Check what works here, what is absent, and what is broken.",
}


class _Commands(HarmlessGroup):
    """Group of commands that imports each command only when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # names only: suggestions for a misspelt command are looked up here
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), function)
        if isinstance(command, typer.Typer):
            return typer.main.get_command(command)
        program = CommandGroup()
        program.command(cmd_name, short_help=_SHORT_HELP.get(cmd_name))(command)
        return typer.main.get_command(program)


app = CommandGroup(
    name="edge",
    cls=_Commands,
    help="Mamba, Mamba-2 and hybrid language models on small devices.",
    no_args_is_help=True,
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        import edge

        say(edge.__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the `edge` program."""
    leave(app)


if __name__ == "__main__":
    main()
