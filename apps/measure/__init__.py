"""The one library of figures: what time, memory and power are, and how they are shown.

Programs sample with it (`stopwatch`, `memory`, `power`, `ort_profile`), say what the machine is and
could do (`machine`, `roofline`), sum up (`statistics`, `agreement`) and show (`table`, `page`,
`plots`). Facts are one dictionary, which `--json` prints and tables and the page are made of.
"""
