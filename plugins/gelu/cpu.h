// GELU, exact or with the tanh approximation: the C++ counterpart of triton_gelu.py.

struct Gelu : Kernel {
  Argument x, y;
  int64_t width, x_stride;
  bool tanh;
  Gelu(const Variant& v)
      : x(v, "x"), y(v, "y"), width(v.integer("WIDTH")), x_stride(v.integer("X_STRIDE")),
        tanh(v.integer("TANH") != 0) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(200 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        blocks(width, [&](int64_t i, int n) {
          vf v = load_some(x.in<const float>(a) + row * x_stride + i, n), out;
          if (tanh) {
            // (1 + tanh(u)) / 2 is sigmoid(2u)
            out = v * sigmoid(1.5957691216057308f * (v + 0.044715f * v * v * v));
          } else {
            for (int k = 0; k < W; k++)
              out[k] = 0.5f * v[k] * (1.f + std::erf(v[k] * 0.70710678118654752f));
          }
          store_some(y.in<float>(a) + row * width + i, out, n);
        });
    });
  }
};

KERNEL("gelu.gelu", Gelu)
