// Elementwise squared ReLU: the C++ counterpart of triton_squared_relu.py.

struct SquaredRelu : Kernel {
  Argument x, y;
  int64_t width, x_stride;
  SquaredRelu(const Variant& v)
      : x(v, "x"), y(v, "y"), width(v.integer("WIDTH")), x_stride(v.integer("X_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(4 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        blocks(width, [&](int64_t i, int n) {
          vf v = load_some(x.in<const float>(a) + row * x_stride + i, n);
          for (int k = 0; k < W; k++) v[k] = v[k] < 0.f ? 0.f : v[k] * v[k];
          store_some(y.in<float>(a) + row * width + i, v, n);
        });
    });
  }
};

KERNEL("squared_relu.squared_relu", SquaredRelu)
