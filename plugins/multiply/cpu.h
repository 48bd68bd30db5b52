// Elementwise product of two values: the C++ counterpart of triton_multiply.py.

inline vf itself(vf z) { return z; }
using Multiply = Product<itself, 4>;

KERNEL("multiply.multiply", Multiply)
