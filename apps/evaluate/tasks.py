"""`--tasks`: zero-shot and few-shot tasks through lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.errors import EdgeError, InputError
from edge.runtime.model import Model

NEEDS = "pip install 'mamba-edge[eval]'"


def run_tasks(
    model: Model,
    names: Sequence[str],
    *,
    folder: Path | None,
    limit: int | None,
    fewshot: int | None,
    chat: bool,
    max_length: int | None,
) -> dict[str, dict[str, float]]:
    """Run tasks. Return metrics by task under the harness's names: `acc,none`, `acc_stderr,none`.

    `folder`: your own task files, which take precedence over the harness's. Raises EdgeError when
    lm-eval is not installed, InputError when a task does not exist or cannot be loaded.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from edge.apps.evaluate.harness import EdgeLM
    except ModuleNotFoundError as missing:
        raise EdgeError(
            f"tasks need the package {missing.name}", field="--tasks", remedy=NEEDS
        ) from None
    if folder is not None and not folder.is_dir():
        raise InputError("is not a folder", file=folder, field="--task-path")
    if chat and model.template is None:
        raise InputError("the bundle has no chat template", field="--chat")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # the harness and datasets print to standard output, which is reserved for the result
    with contextlib.redirect_stdout(sys.stderr):
        # reading the index of the harness's own thousands of tasks takes ten seconds
        manager = TaskManager(include_path=folder, include_defaults=False)
        if not set(names) <= set(manager.all_tasks):
            manager = TaskManager(include_path=folder)
        tasks = _check_loadable(manager, names)
        results = lm_eval.simple_evaluate(
            model=EdgeLM(model, max_length=max_length),
            tasks=tasks,
            task_manager=manager,
            limit=limit,
            num_fewshot=fewshot,
            apply_chat_template=chat,
            log_samples=False,
            torch_random_seed=None,  # nothing here uses torch; seeding would import it
        )
    assert results is not None  # only other processes of a distributed run get none
    return {task: _numbers(values) for task, values in results["results"].items()}


def _check_loadable(manager: Any, names: Sequence[str]) -> list[Any]:
    """Check that all tasks load, and return their names. Raises InputError otherwise."""
    known = set(manager.all_tasks)
    for name in names:
        if name not in known:
            raise InputError(
                f"unknown task {name!r}",
                field="--tasks",
                remedy="name a task of lm-eval, or of a folder given by --task-path",
            )
        try:
            manager.load([name])
        except Exception as problem:  # data that cannot be fetched, files that do not parse, …
            raise InputError(
                f"{name} cannot be loaded: {type(problem).__name__}: {problem}"[:500],
                field="--tasks",
                remedy="tasks of lm-eval download their data; use --task-path for a folder of "
                "tasks with local data",
            ) from problem
    return list(names)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
