"""Helpers for commands that call the exporter: missing packages and refused options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from edge.apps import interrupts
from edge.errors import EdgeError, ExportError, InputError

PACKAGES = ("torch", "transformers", "onnx", "gguf")
# fields of errors that are options of `edge export`
_OPTIONS = (
    "quant", "layers", "calibrate", "percentile", "ssm_state", "kv_cache", "embedding", "head",
    "groups",
)  # fmt: skip


def needs(doing: str, kind: type[EdgeError] = ExportError, *extras: str) -> None:
    """Load torch. Raises as `check_packages` does."""
    check_packages(doing, kind, *extras)
    with interrupts.raising_nothing():
        import_module("torch")


def check_packages(doing: str, kind: type[EdgeError] = ExportError, *extras: str) -> None:
    """Raise `kind` when packages are missing, naming all and the pip command.

    `extras`: extras to install besides those of the exporter.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    required = ["export", *extras]
    if find_spec("onnxruntime") is None:
        missing, required = [*missing, "onnxruntime"], [*required, "ort"]
    if missing:
        raise kind(
            f"{doing} needs the package{'s' if missing[1:] else ''} {', '.join(missing)}",
            remedy=f"pip install 'mamba-edge[{','.join(required)}]', on Python 3.11 or later; in a "
            "checkout, run make test",
        )


@contextmanager
def packages_of(extra: str, doing: str, kind: type[EdgeError] = EdgeError) -> Iterator[None]:
    """Turn a missing package into an error that names the extra that provides it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise kind(
            f"{doing} needs the package {missing.name}",
            remedy=f"pip install 'mamba-edge[{extra}]'; in a checkout, run make test",
        ) from None


@contextmanager
def options_checked() -> Iterator[None]:
    """Turn a refused option value, but no refused file, into a usage error."""
    try:
        yield
    except ExportError as problem:
        if problem.file is not None or problem.field not in _OPTIONS:
            raise
        raise InputError(
            problem.message, field=f"--{problem.field.replace('_', '-')}", remedy=problem.remedy
        ) from None
