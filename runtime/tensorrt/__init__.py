"""TensorRT engines: built on the device that runs them, stored in the user's cache, executed."""
