"""TensorRT: the device graph, the launches of its plugins, and the plugin library in C++."""

# suffix of the name of a state, log or cache for the same memory after the run
OUT = ".out"
