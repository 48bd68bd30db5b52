"""How tensors are rounded, and the scales that follow from what calibration saw."""
