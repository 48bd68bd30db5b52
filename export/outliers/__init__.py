"""The outlier trial: does quantization hold on a model with the outliers of a large one?"""

from edge.export.outliers.outliers import Y_PEAKS, observe, with_outliers

__all__ = ["Y_PEAKS", "observe", "with_outliers"]
