"""`edge train sft MODEL -o OUT --text FILE…` and `edge train dpo MODEL -o OUT --text FILE…`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.apps import exporter
from edge.apps.learning import Learning, learns, picture_of, report
from edge.apps.options import named_as_options
from edge.apps.programs import grouped

if TYPE_CHECKING:
    from edge.export.distill.long_run import LongRun, Summary
    from edge.export.distill.options import PreferenceOptions, TuneOptions

Tuned = Annotated[
    str, typer.Argument(help="Checkpoint to tune: one that edge distill made, or any other.")
]
Teacher = Annotated[
    str | None, typer.Option(help="Checkpoint to stay close to. [default: the untuned model]")
]


@dataclass(frozen=True, kw_only=True)
class _TuneLearning(Learning):
    text: Annotated[
        list[Path],
        typer.Option(
            help="JSON lines of messages; for dpo of prompt, chosen, rejected. May be repeated."
        ),
    ]


@grouped
def sft(
    model: Tuned,
    learning: _TuneLearning,
    teacher: Teacher = None,
    label: Annotated[
        float, learns(help="Share of the loss on the answers; the rest is on the teacher.")
    ] = 1.0,
) -> None:
    """Fine-tune a model on the answers of conversations. Run it again to resume."""
    exporter.needs("training")
    from edge.export.distill.options import TuneOptions
    from edge.export.distill.tuning import FineTuning

    summary = _tuned(FineTuning, TuneOptions, model, teacher, learning, label=label)
    figures = summary.figures
    learning.tell(
        summary,
        f"{summary.path}",
        f"  answers     {figures['loss']:.4f} nats a token held out, perplexity "
        f"{figures['perplexity']:.4g}; teacher {figures['teacher_loss']:.4f}",
        f"next: {learning.export_words(summary.path)}",
    )


@grouped
def dpo(
    model: Tuned,
    learning: _TuneLearning,
    teacher: Teacher = None,
    beta: Annotated[float, learns(help="Penalty for moving away from the teacher.")] = 0.1,
) -> None:
    """Tune a model on chosen and rejected answers. Run it again to resume."""
    exporter.needs("training")
    from edge.export.distill.options import PreferenceOptions
    from edge.export.distill.tuning import PreferenceTuning

    summary = _tuned(PreferenceTuning, PreferenceOptions, model, teacher, learning, beta=beta)
    figures = summary.figures
    learning.tell(
        summary,
        f"{summary.path}",
        f"  held out    loss {figures['loss']:.4f}, margin {figures['margin']:.4f}, chosen "
        f"preferred {figures['preferred']:.1%}",
        f"next: {learning.export_words(summary.path)}",
    )


def _tuned(
    run: Callable[..., LongRun[Any]],
    options: type[TuneOptions | PreferenceOptions],
    model: str,
    teacher: str | None,
    learning: _TuneLearning,
    **own: Any,
) -> Summary:
    """Tune a model with `own` options beside the common ones; return the run's summary."""
    start = learning.checkpoint(model)
    given = options(model=start, **own, **learning.asked())
    teacher_path = start if teacher is None else learning.checkpoint(teacher)
    with named_as_options():
        return run(teacher_path, learning.output, given, report, picture_of).run()
