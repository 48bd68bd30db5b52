"""`edge train`: drafters and what they learn from, and tuning."""

from __future__ import annotations

import typer

from edge.apps.options import HELP
from edge.apps.train.answers import write_answers
from edge.apps.train.draft import draft
from edge.apps.train.tune import dpo, sft

app = typer.Typer(
    help="Train drafters, write what they learn from, and tune models.", no_args_is_help=True,
    context_settings=HELP, pretty_exceptions_enable=False, add_completion=False,
)  # fmt: skip
app.command("draft", context_settings=HELP)(draft)
app.command("answers", context_settings=HELP)(write_answers)
app.command("sft", context_settings=HELP)(sft)
app.command("dpo", context_settings=HELP)(dpo)
