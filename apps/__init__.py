"""The programs: `edge` and `edge-chat`."""
