"""Models by name: `edge pull`, `list`, `show` and `rm`."""
