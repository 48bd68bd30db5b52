// The product of two values, number by number: the C++ face of triton_multiply.py.

struct Multiply : Kernel {
  Argument x, z, y;
  int64_t width, x_stride, z_stride;
  Multiply(const Variant& v)
      : x(v, "x"), z(v, "z"), y(v, "y"), width(v.integer("WIDTH")),
        x_stride(v.integer("X_STRIDE")), z_stride(v.integer("Z_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(4 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        blocks(width, [&](int64_t i, int n) {
          vf left = load_some(x.in<const float>(a) + row * x_stride + i, n);
          vf right = load_some(z.in<const float>(a) + row * z_stride + i, n);
          store_some(y.in<float>(a) + row * width + i, left * right, n);
        });
    });
  }
};

KERNEL("multiply.multiply", Multiply)
