"""Command-line programs: `edge` and `edge-chat`."""
