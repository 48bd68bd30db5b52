"""Check the golden sentence as docs/examples/c/chat_tokens.c says it, on any machine.

python -m tests.aarch64.chat_tokens COMMAND…     the program, after an emulator and its options
"""

from __future__ import annotations

import subprocess
import sys

from edge.bundle import open_bundle
from edge.runtime.model import resolve
from tests.golden import SENTENCES


def main(*command: str) -> None:
    for name, sentence in SENTENCES.items():
        folder = resolve(name)
        with open_bundle(folder) as opened:
            ends = opened.manifest.tokenizer.eos
        ids = sentence.ids
        wanted = ids[: next((at + 1 for at, each in enumerate(ids) if each in ends), len(ids))]
        words = [*command, str(folder), *map(str, sentence.prompt_ids)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        said = [int(word) for word in done.stdout.split()]
        if said[: len(ids)] != wanted:
            raise AssertionError(f"{name}: chat_tokens says {said}, not {wanted}")
    print(f"ok: {', '.join(SENTENCES)} say the golden sentence by {' '.join(command)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
