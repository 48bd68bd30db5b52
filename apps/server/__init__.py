"""An OpenAI-compatible server over one model: what `edge serve` runs.

`run` owns the process (socket, signals, exit code), `protocol` the bytes of a connection, `app` the
routes, `worker` the one thread in which the model runs, `slot` and `prefixes` the states it reuses.
"""
