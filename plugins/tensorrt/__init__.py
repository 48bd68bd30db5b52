"""TensorRT: the graph of plugins, what each plugin launches, and the plugin library in C++."""
