// RMSNorm of adjacent values: the C++ counterpart of triton_group_norm.py.

// out = gain · in / sqrt(mean(in²) + eps), for `width` values
inline void rms_of(const float* in, const float* gain, float* out, int64_t width, float eps) {
  vf squares{};
  blocks(width, [&](int64_t i, int n) {
    vf v = load_some(in + i, n);
    squares += v * v;
  });
  float inverse = 1.f / std::sqrt(sum(squares) / width + eps);
  blocks(width, [&](int64_t i, int n) {
    store_some(out + i, load_some(gain + i, n) * (load_some(in + i, n) * inverse), n);
  });
}

struct GroupNorm : Kernel {
  Argument x, weight, y;
  int64_t groups, width, x_stride;
  float eps;
  GroupNorm(const Variant& v)
      : x(v, "x"), weight(v, "weight"), y(v, "y"), groups(v.integer("GROUPS")),
        width(v.integer("WIDTH")), x_stride(v.integer("X_STRIDE")), eps((float)v.number("EPS")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0] * groups, items_a_piece(10 * width), [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++) {
        int64_t row = each / groups, start = each % groups * width;
        rms_of(x.in<const float>(a) + row * x_stride + start, weight.in<const float>(a) + start,
               y.in<float>(a) + row * groups * width + start, width, eps);
      }
    });
  }
};

// Norms of the three parts of a row: low-rank dt, B and C
struct PartsNorm : Kernel {
  Argument x, weight, y;
  int64_t widths[3], x_stride;
  float eps;
  PartsNorm(const Variant& v)
      : x(v, "x"), weight(v, "weight"), y(v, "y"),
        widths{v.integer("FIRST"), v.integer("HALF"), v.integer("HALF")},
        x_stride(v.integer("X_STRIDE")), eps((float)v.number("EPS")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    int64_t all = widths[0] + widths[1] + widths[2];
    pool.each(grid[0], items_a_piece(10 * all), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        for (int64_t part = 0, start = 0; part < 3; start += widths[part++])
          rms_of(x.in<const float>(a) + row * x_stride + start, weight.in<const float>(a) + start,
                 y.in<float>(a) + row * all + start, widths[part], eps);
    });
  }
};

KERNEL("group_norm.group_norm", GroupNorm)
KERNEL("group_norm.parts_norm", PartsNorm)
