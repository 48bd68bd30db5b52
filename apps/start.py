"""Where the programs begin, before anything is imported that takes time."""

from __future__ import annotations

import signal


def edge() -> None:
    """Entry point of the `edge` program."""
    _quiet()
    from edge.apps.cli import main

    main()


def edge_chat() -> None:
    """Entry point of the `edge-chat` program."""
    _quiet()
    from edge.apps.chat import main

    main()


def _quiet() -> None:
    """Ctrl-C while modules are imported ends the process, without a traceback through them."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
