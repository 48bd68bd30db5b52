"""A ROS 2 lifecycle node over a mamba-edge model."""
