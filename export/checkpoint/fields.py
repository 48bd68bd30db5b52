"""Read a checkpoint's JSON, and refuse all wrong values at once, each by file and field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from edge.config import ModelConfig
from edge.errors import CheckpointError, Faults
from edge.export.checkpoint.files import read_file

Model = TypeVar("Model", bound=BaseModel)

MAX_DIM = 1 << 31
_FP32_MIN, _FP32_MAX = 1.17549436e-38, 3.4028234e38  # smallest normal and largest fp32
MAX_BLOCKS = 2048
RESAVE = "save the checkpoint again, or correct the file by hand"
UNSUPPORTED = "this variant cannot be exported"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; infinities may be bare, or spelled as in transformers 5.

    Raises CheckpointError when the file is absent, too large, not JSON, nested too deeply, or holds
    something other than an object.
    """
    try:
        value = json.loads(read_file(path), object_hook=_infinity)
    except RecursionError as error:
        raise CheckpointError("nested too deeply", file=path, remedy=RESAVE) from error
    except ValueError as error:  # JSON syntax, bad UTF-8, an integer of thousands of digits
        raise CheckpointError(f"not valid JSON: {error}", file=path, remedy=RESAVE) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"holds a JSON {_json_type(value)}, not an object", file=path, remedy=RESAVE
        )
    return value


def _infinity(value: dict[str, Any]) -> Any:
    """Decode transformers 5's `{"__float__": "Infinity"}`; earlier versions wrote Infinity."""
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return value


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


class Fields:
    """Typed access to one JSON object. A `null` counts as absent, as it does upstream.

    A value that is absent without a default, of the wrong type, or out of range is noted, and
    replaced with a plausible one. `model` then refuses the config with all of its faults at once.
    `unknown` are the fields that no family knows.
    """

    def __init__(
        self,
        file: Path,
        values: dict[str, Any],
        prefix: str = "",
        refused: Faults | None = None,
    ) -> None:
        self.file = file
        self.values = values
        self.prefix = prefix
        self.refused = Faults() if refused is None else refused  # shared by a file's sections
        self.unknown: list[str] = []

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    # -- faults -----------------------------------------------------------------------------------

    def refuse(self, name: str, message: str, remedy: str = RESAVE) -> None:
        """Note a fault and continue reading."""
        self.refused.add(f"{self.prefix}{name}".rstrip("."), message, remedy)

    def inconsistent(self, name: str, message: str, remedy: str = RESAVE) -> None:
        """Note that a field contradicts others, unless faults have already been noted."""
        if not self.refused:
            self.refuse(name, message, remedy)

    def stop(self, name: str, message: str, remedy: str = RESAVE) -> NoReturn:
        """Raise for a field that decides how the rest is read, and for all faults noted so far."""
        self.refuse(name, message, remedy)
        self.check()
        raise AssertionError("what was noted is raised")

    def check(self) -> None:
        """Raise CheckpointError with all noted faults; its `field` is the first."""
        self.refused.refuse(CheckpointError, file=self.file)

    # -- values -----------------------------------------------------------------------------------

    def _get(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        if value is None and default is None:
            self.refuse(name, "is missing")
        return default if value is None else value

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_DIM
    ) -> int:
        """Read a whole number in [low, high]."""
        value = self._get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        if value is not None:
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            what = f"outside {low} to {high}" if is_integer else "not a whole number"
            self.refuse(name, f"is {show(value)}, {what}")
        return low if default is None else default

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number that fp32 holds; a smaller one would become 0 and a divisor."""
        value = self._get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
            if value == 0 or _FP32_MIN <= abs(value) <= _FP32_MAX:
                return value
            range_note = "that fp32 holds" if math.isfinite(value) else "that is finite"
            self.refuse(name, f"is {value}, not a number {range_note}")
        elif value is not None:
            self.refuse(name, f"is {show(value)}, not a number")
        return 1.0 if default is None else default

    def epsilon(self, name: str, default: float = 1e-5) -> float:
        """Read a number in (0, 1), which a norm adds to the variance."""
        value = self.number(name, default)
        if 0 < value < 1:
            return value
        self.refuse(name, f"is {value}, not between 0 and 1")
        return default

    def blocks(self, default: int | None = None) -> int:
        """Read the number of blocks of a Transformer or a hybrid."""
        return self.integer("num_hidden_layers", default, high=MAX_BLOCKS)

    def taps(self, name: str) -> int:
        """Read the width of a short convolution: 2 to 16; absent means 4."""
        return self.integer(name, 4, low=2, high=16)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if isinstance(value, bool):
            return value
        self.refuse(name, f"is {show(value)}, not true or false")
        return default

    def section(self, name: str) -> Fields:
        """Read a nested object; absent means empty."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, f"is {show(value)}, not an object")
            value = {}
        return Fields(self.file, value, f"{self.prefix}{name}.", self.refused)

    def indices(self, name: str, count: int, what: str = "layer index") -> tuple[int, ...]:
        """Read distinct indices below `count`, sorted; absent means none."""
        value = self._get(name, ())
        if not isinstance(value, list | tuple):
            self.refuse(name, f"is {show(value)}, not a list")
            return ()
        for index in value:
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
                self.refuse(name, f"holds {show(index)}, not a {what} below {count}")
                return ()
        return tuple(sorted(set(value)))

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Read `count` numbers above 0."""
        value = self._get(name, None)
        listed = value if isinstance(value, list | tuple) else ()
        valid = [v for v in listed if type(v) in (int, float) and 0 < v < math.inf]
        if len(valid) == len(listed) == count:
            return tuple(map(float, valid))
        if value is not None:
            self.refuse(name, f"is {show(value)}, not a list of {count} numbers above 0")
        return (1.0,) * count

    def limits(self, name: str) -> tuple[float, float]:
        """Read a pair low ≤ high of numbers, possibly infinite; absent means (0, ∞)."""
        value = self._get(name, (0.0, math.inf))
        numbers = isinstance(value, list | tuple) and all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in value
        )
        if numbers and len(value) == 2 and 0 <= value[0] <= value[1]:
            with suppress(OverflowError):  # a whole number beyond all floats
                return float(value[0]), float(value[1])
        self.refuse(name, f"is {show(value)}, not a pair 0 <= low <= high")
        return 0.0, math.inf

    def scaled(self, name: str, factor: int, default: float) -> int:
        """Return int(number · factor), at most MAX_DIM, as upstream computes widths."""
        product = int(self.number(name, default) * factor)
        if 1 <= product <= MAX_DIM:
            return product
        self.refuse(name, f"makes a width of {product}, outside 1 to {MAX_DIM}")
        return factor

    def demand(self, name: str, expected: object) -> None:
        """Refuse any value except `expected`; absent is accepted."""
        value = self.values.get(name)
        if value is not None and (type(value) is not type(expected) or value != expected):
            message = f"is {show(value)}; only {show(expected)} is supported"
            self.refuse(name, message, UNSUPPORTED)

    def known_only(self, known: Iterable[str]) -> None:
        """Refuse a field that is unknown and could change the model."""
        for name in sorted(set(self.values) - set(known)):
            self.refuse(name, "is not a known field", "remove it if it does not change the model")

    def build(self, kind: type[Model], /, **values: Any) -> Model:
        """Build a config object; faults that it finds in the file's values are noted."""
        try:
            return kind(**values)
        except ValidationError as error:
            if not self.refused:
                for fault in error.errors(include_url=False):
                    field = ".".join(str(part) for part in fault["loc"])
                    self.refuse(field, f"the values do not make a model: {fault['msg']}")
            return kind.model_construct(**values)

    def model(self, **values: Any) -> ModelConfig:
        """Build the whole config. Raises CheckpointError with all faults of the file."""
        config = self.build(ModelConfig, **values)
        self.check()
        return config


def show(value: object) -> str:
    """Format a value of a config for a message."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a deep list
        text = f"a {_json_type(value)}"
    return text if len(text) <= 60 else f"{text[:57]}..."
