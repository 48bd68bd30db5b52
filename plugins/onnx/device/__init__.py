"""ONNX function bodies of the device ops, so that any ONNX runtime can run the device graph."""

from edge.plugins.onnx.device.library import device_function, device_functions

__all__ = ["device_function", "device_functions"]
