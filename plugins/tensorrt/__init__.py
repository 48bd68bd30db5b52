"""TensorRT: the graph of plugins, what each plugin launches, and the plugin library in C++."""

# behind the name of a state, log or cache: the same memory after the run
OUT = ".out"
