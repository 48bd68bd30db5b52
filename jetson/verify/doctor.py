"""`edge doctor` with a verdict: exit code 1 if something is broken."""

from __future__ import annotations

import sys

from edge.apps.doctor import line
from edge.apps.doctor.checks import CHECKS, examine


def main(bundle: str) -> int:
    broken = 0
    for name in CHECKS:
        finding = examine(name, bundle)
        print(line(finding), flush=True)
        broken += finding.status == "broken"
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
