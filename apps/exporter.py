"""The exporter, as programs call it: what it needs installed, and what it says of options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from edge.errors import EdgeError, ExportError, InputError

PACKAGES = ("torch", "transformers", "onnx", "gguf")
# fields of errors that are options of `edge export`
_OPTIONS = (
    "quant", "layers", "calibrate", "percentile", "ssm_state", "kv_cache", "embedding", "head",
    "groups",
)  # fmt: skip


def needs(doing: str, kind: type[EdgeError] = ExportError, *extras: str) -> None:
    """Raise `kind`, naming all packages that are absent and what installs them; `extras` beside
    those of the exporter.
    """
    absent = [name for name in PACKAGES if find_spec(name) is None]
    wanted = ["export", *extras]
    if find_spec("onnxruntime") is None:
        absent, wanted = [*absent, "onnxruntime"], [*wanted, "ort"]
    if absent:
        raise kind(
            f"{doing} needs the package{'s' if absent[1:] else ''} {', '.join(absent)}",
            remedy=f"pip install 'mamba-edge[{','.join(wanted)}]', on Python 3.11 or later; in a "
            "checkout, make test does",
        )


@contextmanager
def packages_of(extra: str, doing: str, kind: type[EdgeError] = EdgeError) -> Iterator[None]:
    """Make a package that cannot be imported an error that names the extra which brings it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise kind(
            f"{doing} needs the package {missing.name}",
            remedy=f"pip install 'mamba-edge[{extra}]'; in a checkout, make test does",
        ) from None


@contextmanager
def options_checked() -> Iterator[None]:
    """Make what is refused of an option's value a mistake in usage. A file that is refused, which
    an option names, is none.
    """
    try:
        yield
    except ExportError as problem:
        if problem.file is not None or problem.field not in _OPTIONS:
            raise
        raise InputError(
            problem.message, field=f"--{problem.field.replace('_', '-')}", remedy=problem.remedy
        ) from None
