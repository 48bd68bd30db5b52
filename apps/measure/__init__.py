"""Shared library for measuring time, memory and power, and for presenting the figures.

Its modules sample (`stopwatch`, `memory`, `power`, `ort_profile`, `cpu_profile`), describe the
machine and its limits (`machine`, `roofline`), summarize (`statistics`, `agreement`) and present
(`table`, `page`, `plots`). Facts are one dictionary, the source of `--json`, tables and the page.
"""
