"""The prompts that drafting is measured on: public test sets where they lie, and texts that repeat.

No data set is in the repository. A folder has them under their usual names; what is absent is said.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edge.apps.prompts import read_prompts
from edge.errors import InputError

FOLDER_VARIABLE = "EDGE_EVAL_DATA"
FILES = {
    "MT-bench": "mt_bench.jsonl",
    "Vicuna": "vicuna_bench.jsonl",
    "GSM8K": "gsm8k.test.jsonl",
    "HumanEval": "humaneval.jsonl.gz",
    "WikiText": "wikitext2.test.txt",
}
REPEATS = "repeats"
PUBLIC = "public"  # all of the files' prompts together
_WORDS = 48  # of an article that are given, to be continued

# made up: what look-up drafting is for is text that says again what the prompt says
REPEATING = (
    "Repeat after me, word for word: The red ball is in the green box. The green box is on the big "
    "table. The big table is in the little house.",
    "Change the name count to total and write the code again:\n"
    "def add(values):\n    count = 0\n    for value in values:\n        count = count + value\n"
    "    return count\n",
    "Say this three times: Once upon a time there was a little cat who liked to sit in the sun.",
    "Correct the spelling and write it again: The dog ran to the parc. The dog saw a bird in the "
    "parc. The bird flew away from the parc.",
)


def prompt_sets(
    folder: Path | None, count: int
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """At most `count` prompts of every set, from all over it; and why others are absent."""
    sets, absent = {}, {}
    for name, file in FILES.items():
        read: Callable[[Path], tuple[str, ...]] = _articles if name == "WikiText" else read_prompts
        if folder is None:
            absent[name] = f"no folder of test sets was named: --data, or {FOLDER_VARIABLE}"
            continue
        try:
            sets[name] = spread(read(folder / file), count)
        except InputError as problem:
            absent[name] = str(problem)
    sets[REPEATS] = spread(REPEATING, count)
    return sets, absent


def spread(prompts: tuple[str, ...], count: int) -> tuple[str, ...]:
    """`count` of them, evenly: test sets are sorted by kind."""
    if len(prompts) <= count:
        return prompts
    return tuple(prompts[index * len(prompts) // count] for index in range(count))


def _articles(path: Path) -> tuple[str, ...]:
    """The beginnings of paragraphs that are long enough to be cut."""
    lines = [line.split(" ") for line in read_prompts(path) if not line.startswith("=")]
    found = tuple(" ".join(words[:_WORDS]) for words in lines if len(words) > 2 * _WORDS)
    if not found:
        raise InputError("holds no long paragraph", file=path)
    return found
