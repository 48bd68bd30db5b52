// GELU, exact or with the tanh approximation: the C++ counterpart of triton_gelu.py.

struct Gelu : Kernel {
  Argument x, y;
  int64_t width, x_stride;
  bool tanh;
  Gelu(const Variant& v)
      : x(v, "x"), y(v, "y"), width(v.integer("WIDTH")), x_stride(v.integer("X_STRIDE")),
        tanh(v.integer("TANH") != 0) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(30 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        blocks(width, [&](int64_t i, int n) {
          vf v = load_some(x.in<const float>(a) + row * x_stride + i, n);
          // (1 + tanh(u)) / 2 is sigmoid(2u)
          vf share = tanh ? sigmoid(1.5957691216057308f * (v + 0.044715f * v * v * v)) : normal(v);
          store_some(y.in<float>(a) + row * width + i, v * share, n);
        });
    });
  }

  // The normal distribution (1 + erf(v / √2)) / 2, error 2e-7. With t = |v| / √2, erfc(t)·exp(t²) is
  // a polynomial of 1 / (1 + 0.4·t), minimax in relative error for t from 0 to 6.5.
  static EDGE_INLINE vf normal(vf v) {
    vf t = absolute(v) * 0.70710678118654752f, u = reciprocal(1.f + 0.4f * t);
    vf p = splat(0.0828498801f);
    p = p * u - 0.4398707f;
    p = p * u + 0.787407453f;
    p = p * u - 0.504992973f;
    p = p * u + 0.510555844f;
    p = p * u + 0.0903421838f;
    p = p * u + 0.250969017f;
    p = p * u + 0.222574059f;
    p = p * u + 1.65217667e-4f;
    vf half = 0.5f * expv(-t * t) * p;
    return choose(v > 0.f, 1.f - half, half);
  }
};

KERNEL("gelu.gelu", Gelu)
