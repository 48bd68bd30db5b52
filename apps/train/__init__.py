"""`edge train`: drafters, and what they learn from."""

from __future__ import annotations

import typer

from edge.apps.options import HELP
from edge.apps.train.answers import write_answers
from edge.apps.train.draft import draft

app = typer.Typer(
    help="Train drafters, and write what they learn from.", no_args_is_help=True,
    context_settings=HELP, pretty_exceptions_enable=False, add_completion=False,
)  # fmt: skip
app.command("draft", context_settings=HELP)(draft)
app.command("answers", context_settings=HELP)(write_answers)
