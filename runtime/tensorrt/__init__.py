"""TensorRT: engines built on the device they run on, kept in the user's cache, and run."""
