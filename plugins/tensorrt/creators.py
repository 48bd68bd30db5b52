"""Generate the list of the plugin library's creators (`src/ops.inc`), one for each device op."""

from __future__ import annotations

from pathlib import Path

from edge.plugins.device.statements import DEVICE_OPS

OPS_INC = Path(__file__).with_name("src") / "ops.inc"


def ops_inc() -> str:
    """Return the contents of `src/ops.inc`."""
    head = "// Written by `python -m edge.plugins.tensorrt.creators` from the ops' statements.\n"
    return head + "".join(f"EDGE_OP({name})\n" for name in sorted(DEVICE_OPS))


if __name__ == "__main__":
    OPS_INC.write_text(ops_inc(), encoding="utf-8")
