"""Entry points of the programs, before any slow import."""

from __future__ import annotations

import signal


def edge() -> None:
    """Entry point of the `edge` program."""
    quiet_interrupts()
    from edge.apps.cli import main

    main()


def edge_chat() -> None:
    """Entry point of the `edge-chat` program."""
    quiet_interrupts()
    from edge.apps.chat import main

    main()


def quiet_interrupts() -> None:
    """Make Ctrl-C during imports end the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
