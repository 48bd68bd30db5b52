"""The `cpu` engine: a bundle's launch plan over compiled kernels for CPUs."""
