"""Kernels for CPUs. Installing the package compiles `src/` if there is a C++ compiler."""
