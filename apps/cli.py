"""`edge`: export, inspect, evaluate, profile and serve bundles."""

from __future__ import annotations

import sys

import typer

from edge.apps import (
    build_command,
    doctor_command,
    eval_command,
    export_command,
    info_command,
    profile_command,
    serve_command,
)
from edge.apps.exits import exit_code_of

app = typer.Typer(
    name="edge",
    help="Mamba, Mamba-2 and hybrid language models on small devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("export")(export_command.export)
app.command("info")(info_command.info)
app.command("serve")(serve_command.serve)
app.command("eval")(eval_command.evaluate)
app.command("build")(build_command.build)
app.command("profile")(profile_command.profile)
app.command("doctor")(doctor_command.doctor)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        import edge

        print(edge.__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the `edge` program."""
    sys.exit(exit_code_of(app))


if __name__ == "__main__":
    main()
