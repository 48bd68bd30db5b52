"""The ops: statements, references, ONNX bodies, kernels for GPUs and CPUs, TensorRT plugins."""
