"""The CUDA engine: a launch plan over preallocated device memory."""
