// RMSNorm and LayerNorm of a value or a sum: the C++ counterpart of triton_norm.py.

// norm.norm: RMSNorm or LayerNorm of x (+ added), for all rows or those listed in `rows`
struct Norm : Kernel {
  Argument x, added, weight, bias, rows, y, total, B;
  Scale scale;
  int64_t width, x_stride, added_stride;
  bool centered;
  float eps;
  Norm(const Variant& v)
      : x(v, "x"), added(Argument::optional(v, "added")), weight(v, "weight"),
        bias(Argument::optional(v, "bias")), rows(Argument::optional(v, "rows")), y(v, "y"),
        total(Argument::optional(v, "total")), B(Argument::optional(v, "B")),
        scale(v, "scale", "SCALES"),
        width(v.integer("WIDTH")), x_stride(v.integer("X_STRIDE")),
        added_stride(v.integer("ADDED_STRIDE")), centered(v.integer("CENTERED") != 0),
        eps((float)v.number("EPS")) {
    if (rows && !B) refuse("B is None");
  }

  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    const int32_t* which = rows.in<const int32_t>(a);
    int64_t batch = which ? B.integer(a) : 1;
    pool.each(grid[0], items_a_piece(8 * width), [&](int64_t first, int64_t last) {
      float* h = local(width);
      for (int64_t row = first; row < last; row++)
        one_row(a, row, which ? which[row / batch] * batch + row % batch : row, h);
    });
  }

  void one_row(const Value* a, int64_t row, int64_t from, float* h) const {
    const float* in = x.in<const float>(a) + from * x_stride;
    const float* add = added ? added.in<const float>(a) + from * added_stride : nullptr;
    float* added_out = add && total ? total.in<float>(a) + row * width : nullptr;
    vf sums{};
    blocks(width, [&](int64_t i, int n) {
      vf v = load_some(in + i, n);
      if (add) v += load_some(add + i, n);
      if (added_out) store_some(added_out + i, v, n);
      store(h + i, v);
      sums += centered ? v : v * v;
    });
    if (centered) {
      float mean = sum(sums) / width;
      for (int64_t i = 0; i < width; i++) h[i] -= mean;
      sums = vf{};
      blocks(width, [&](int64_t i, int) { sums += load(h + i) * load(h + i); });
    }
    float inverse = 1.f / std::sqrt(sum(sums) / width + eps);
    const float *gain = weight.in<const float>(a), *shift = bias.in<const float>(a);
    blocks(width, [&](int64_t i, int n) {
      vf out = load_some(gain + i, n) * (load(h + i) * inverse);
      if (shift) out += load_some(shift + i, n);
      store_rounded(y, a, row * width + i, out, scale, i, n);
    });
  }
};

KERNEL("norm.norm", Norm)
