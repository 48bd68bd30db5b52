"""Random schemas from hypothesis, and answers of random models to each, all of which must be valid.

python -m tests.constrained_outputs 10000      takes minutes; the test suite makes a few of them
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.session_models import model

KINDS = ("chat", "base", "bytes")
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=6)
_MOST = 3000  # tokens: more than any of these schemas needs


def _numbers(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda low, size: {"type": kind, "minimum": low, "maximum": low + size},
        st.integers(-1000, 1000), st.integers(0, 2000),
    )  # fmt: skip


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    _numbers("integer"),
    _numbers("number"),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3), st.integers(0, 6),
    ),
    st.sampled_from([{"type": "string", "pattern": p} for p in
                     ("^[a-z]{1,5}$", "^[0-9]{3}-[0-9]{2}$", "^(left|right)( turn)?$")]),
    st.builds(lambda values: {"enum": values},
              st.lists(st.one_of(WORDS, st.integers(-9, 99), st.booleans(), st.none()),
                       min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, WORDS),
)  # fmt: skip


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], count: int) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "additionalProperties": False,
                "required": sorted(properties)[:count]}  # fmt: skip

    return st.builds(made, st.dictionaries(WORDS, inner, max_size=4), st.integers(0, 4))


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low,
                                  "maxItems": low + more},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    either = st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
    return st.one_of(_objects(inner), arrays, either)


SCHEMAS = _objects(st.recursive(LEAVES, _nested, max_leaves=6))


def check(kind: str, schema: dict[str, Any], seeds: range, temperature: float = 2.0) -> int:
    """Generate one answer per seed and validate it with jsonschema; return the number of tokens."""
    judge = jsonschema.Draft202012Validator(schema)
    count = 0
    for seed in seeds:
        session = model(kind).session(undo_levels=0)
        result = session.generate(
            "the state", temperature=temperature, seed=seed, json_schema=schema, max_tokens=_MOST
        ).finish()
        assert result.finish_reason == "stop", (kind, schema, seed, result.text[:200])
        judge.validate(json.loads(result.text))
        count += len(result.tokens)
    return count


def run(examples: int, each: int) -> tuple[int, int]:
    """Check `each` answers to each schema, cycling through the vocabularies; return answers and
    tokens.
    """
    done = [0, 0]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS)
    def judged(schema: dict[str, Any]) -> None:
        first = done[0]
        done[1] += check(KINDS[first // each % len(KINDS)], schema, range(first, first + each))
        done[0] += each

    judged()
    return done[0], done[1]


if __name__ == "__main__":
    wanted, each = int(sys.argv[1]), 20
    answers, tokens = run(-(-wanted // each), each)
    print(f"{answers} answers of {tokens} tokens, all valid")
