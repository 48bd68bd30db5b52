// The product of two values, number by number: the C++ face of triton_multiply.py.

inline vf itself(vf z) { return z; }
using Multiply = Product<itself, 4>;

KERNEL("multiply.multiply", Multiply)
