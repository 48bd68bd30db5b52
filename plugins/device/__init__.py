"""Device ops: the ops as a GPU runs them, nodes of the device graph `graphs/tensorrt.onnx`."""
