"""Export a checkpoint with two recipes, compare the bundles, and run the smaller one.

python docs/examples/export_and_run.py [CHECKPOINT]

Without a checkpoint it creates a tiny random Mamba, which reads bytes and outputs nonsense.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import MambaConfig, MambaForCausalLM

import edge
from edge.export.exporter import export_checkpoint


def main(checkpoint: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = Path(checkpoint) if checkpoint else random_mamba(folder / "checkpoint")
        for recipe in ("fp32", "w8"):
            made = export_checkpoint(source, folder / recipe, quant=recipe)
            size = sum(entry.size for entry in made.manifest.files)
            print(f"{recipe}: {made.parameters:,} parameters, {size:,} bytes; {made.accuracy}")

        model = edge.load(folder / "w8")
        session = model.session(seed=1)
        print(repr("".join(session.generate("The robot", max_tokens=16))))
        print(f"state: {session.state_bytes:,} bytes, whatever the length of the text")


def random_mamba(path: Path) -> Path:
    """Write a checkpoint with transformers; without a tokenizer the export reads bytes."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=256, hidden_size=64, state_size=8, num_hidden_layers=2)
    MambaForCausalLM(config).save_pretrained(path)
    return path


if __name__ == "__main__":
    main(*sys.argv[1:])
