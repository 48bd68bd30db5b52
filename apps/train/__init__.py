"""`edge train`: train drafters, write their training text, and tune models."""

from __future__ import annotations

from edge.apps.programs import CommandGroup
from edge.apps.train.answers import write_answers
from edge.apps.train.draft import draft
from edge.apps.train.tune import dpo, sft

app = CommandGroup(
    help="Train drafters, write their training text, and tune models.", no_args_is_help=True
)
app.command("draft")(draft)
app.command("answers")(write_answers)
app.command("sft")(sft)
app.command("dpo")(dpo)
