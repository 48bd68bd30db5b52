// Elementwise soft cap: the C++ counterpart of triton_soft_cap.py.

struct SoftCap : Kernel {
  Argument x, y;
  int64_t width, x_stride;
  float cap;
  SoftCap(const Variant& v)
      : x(v, "x"), y(v, "y"), width(v.integer("WIDTH")), x_stride(v.integer("X_STRIDE")),
        cap((float)v.number("CAP")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(50 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        blocks(width, [&](int64_t i, int n) {
          vf v = load_some(x.in<const float>(a) + row * x_stride + i, n);
          store_some(y.in<float>(a) + row * width + i, soft_cap(v, cap), n);
        });
    });
  }
};

KERNEL("soft_cap.soft_cap", SoftCap)
