// Logits of few ids in the places of all: the C++ counterpart of triton_expand_logits.py.

struct ExpandLogits : Kernel {
  Argument x, index, y;
  int64_t K, width, x_stride;
  static constexpr int64_t PIECE = 4096;
  ExpandLogits(const Variant& v)
      : x(v, "x"), index(v, "index"), y(v, "y"), K(v.within("K", 1)), width(v.integer("WIDTH")),
        x_stride(v.integer("X_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    pool.each(grid[0] * pieces, 2, [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++) {
        int64_t row = each / pieces, start = each % pieces * PIECE;
        const float* in = x.in<const float>(a) + row * x_stride;
        expand(in, smallest(in), index.in<const int32_t>(a), y.in<float>(a) + row * width, start,
               std::min(start + PIECE, width));
      }
    });
  }

 private:
  float smallest(const float* in) const {
    vf top = splat(-INFINITY);
    blocks(K, [&](int64_t k, int n) {
      // what lies behind the last column counts as the first
      vf v = n == W ? load(in + k) : splat(in[0]);
      for (int i = 0; n < W && i < n; i++) v[i] = in[k + i];
      top = larger(-v, top);
    });
    return -largest(top);
  }

  void expand(const float* in, float least, const int32_t* columns, float* out, int64_t first,
              int64_t last) const {
    for (int64_t v = first; v < last; v += W) {
      int n = (int)std::min<int64_t>(W, last - v);
      int32_t all = -1;
      for (int i = 0; i < n; i++) all &= columns[v + i];
      store_some(out + v, splat(least), n);
      if (all < 0) continue;  // none is listed, as for most ids
      for (int i = 0; i < n; i++)
        if (uint32_t(columns[v + i]) < uint32_t(K)) out[v + i] = in[columns[v + i]];
    }
  }
};

KERNEL("expand_logits.expand", ExpandLogits)
