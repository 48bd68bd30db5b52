// RMSNorm in groups of neighbouring values: the C++ face of triton_group_norm.py.

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
        const float* in = x.in<const float>(a) + row * x_stride + start;
        const float* gain = weight.in<const float>(a) + start;
        float* out = y.in<float>(a) + row * groups * width + start;
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
    });
  }
};

KERNEL("group_norm.group_norm", GroupNorm)
