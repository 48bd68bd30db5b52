"""Kernels for CPUs: `src/` is compiled by the install where there is a C++ compiler."""
