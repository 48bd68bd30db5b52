"""Standard ONNX ops that exported graphs contain: their references and kernels."""
