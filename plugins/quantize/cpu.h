// Quantization to int8 and back, by known scales or by row: the C++ counterpart of
// triton_rounding.py.

struct Quantize : Kernel {
  Argument x, y;
  Scale scale;
  int64_t width, x_stride;
  bool back;
  Quantize(const Variant& v)
      : x(v, "x"), y(v, "y"), scale(v, "scale", "SCALES"), width(v.integer("WIDTH")),
        x_stride(v.integer("X_STRIDE")), back(v.integer("BACK") != 0) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(8 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        blocks(width, [&](int64_t i, int n) {
          vf step = scale.at(a, i, n);
          vf out = round8(load_some(x.in<const float>(a) + row * x_stride + i, n) / step);
          int64_t at = row * width + i;
          if (back)
            store_some(y.in<float>(a) + at, step * out, n);
          else
            store_some(y.in<int8_t>(a) + at, out, n);
        });
    });
  }
};

struct Dequantize : Kernel {
  Argument x, y;
  Scale scale;
  int64_t width, x_stride;
  Dequantize(const Variant& v)
      : x(v, "x"), y(v, "y"), scale(v, "scale", "SCALES"), width(v.integer("WIDTH")),
        x_stride(v.integer("X_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(8 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        blocks(width, [&](int64_t i, int n) {
          vf v = load_some(x.in<const int8_t>(a) + row * x_stride + i, n);
          store_some(y.in<float>(a) + row * width + i, scale.at(a, i, n) * v, n);
        });
    });
  }
};

struct QuantizeRows : Kernel {
  Argument x, scale, y;
  int64_t width, x_stride;
  bool back;
  QuantizeRows(const Variant& v)
      : x(v, "x"), scale(Argument::optional(v, "scale")), y(v, "y"),
        width(v.integer("WIDTH")), x_stride(v.integer("X_STRIDE")), back(v.integer("BACK") != 0) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(12 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        const float* in = x.in<const float>(a) + row * x_stride;
        vf top{};
        blocks(width, [&](int64_t i, int n) { top = larger(absolute(load_some(in + i, n)), top); });
        float step = largest(top) / 127.f;
        if (step == 0.f) step = 1.f;
        if (scale) scale.in<float>(a)[row] = step;
        blocks(width, [&](int64_t i, int n) {
          vf out = round8(load_some(in + i, n) / splat(step));
          int64_t at = row * width + i;
          if (back)
            store_some(y.in<float>(a) + at, step * out, n);
          else
            store_some(y.in<int8_t>(a) + at, out, n);
        });
      }
    });
  }
};

struct SplitQuantizeRows : Kernel {
  Argument x, scale, y, outliers;
  int64_t width, x_stride;
  float threshold;
  SplitQuantizeRows(const Variant& v)
      : x(v, "x"), scale(v, "scale"), y(v, "y"), outliers(v, "outliers"), width(v.integer("WIDTH")),
        x_stride(v.integer("X_STRIDE")), threshold((float)v.number("THRESHOLD")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(16 * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        const float* in = x.in<const float>(a) + row * x_stride;
        float* apart = outliers.in<float>(a) + row * width;
        vf top{}, none{};
        blocks(width, [&](int64_t i, int n) {
          vf v = load_some(in + i, n);
          auto large = absolute(v) >= splat(threshold);
          store_some(apart + i, choose(large, v, none), n);
          top = larger(choose(large, none, absolute(v)), top);
        });
        float step = largest(top) / 127.f;
        if (step == 0.f) step = 1.f;
        scale.in<float>(a)[row] = step;
        blocks(width, [&](int64_t i, int n) {
          vf v = load_some(in + i, n);
          vf small = choose(absolute(v) >= splat(threshold), none, v);
          store_some(y.in<int8_t>(a) + row * width + i, round8(small / splat(step)), n);
        });
      }
    });
  }
};

KERNEL("rounding.split_quantize_rows", SplitQuantizeRows)
KERNEL("rounding.quantize", Quantize)
KERNEL("rounding.dequantize", Dequantize)
KERNEL("rounding.quantize_rows", QuantizeRows)
