// Helpers for kernels that work on rows of channels.

// Calls f(i, count) for blocks of W channels of a row.
template <class F> inline void blocks(int64_t width, F f) {
  for (int64_t i = 0; i < width; i += W) f(i, (int)std::min<int64_t>(W, width - i));
}

// Smallest piece of work, in items of `operations` operations each: waiting for a preempted thread
// costs far more than a small piece.
inline int64_t items_a_piece(int64_t operations) {
  return std::max<int64_t>(1, (int64_t(1) << 19) / std::max<int64_t>(1, operations));
}

// This thread's memory for a row, zeroed, with room for a whole vector at its end.
inline float* local(int64_t count) {
  void* room = thread_bytes(0, (count + W) * int64_t(sizeof(float)));
  std::memset(room, 0, size_t(count + W) * sizeof(float));
  return static_cast<float*>(room);
}

// The scale of int8 values: one for all channels, one per channel, or 1 if there is none.
struct Scale {
  Argument scale;
  int64_t count;
  Scale(const Variant& v, const char* name, const char* counted)
      : scale(Argument::optional(v, name)), count(scale ? v.integer(counted) : 0) {}
  vf at(const Value* a, int64_t i, int some = W) const {
    const float* p = scale.in<const float>(a);
    return count == 0 ? splat(1.f) : count == 1 ? splat(*p) : load_some(p + i, some);
  }
  float one(const Value* a, int64_t i) const {
    const float* p = scale.in<const float>(a);
    return count == 0 ? 1.f : count == 1 ? *p : p[i];
  }
};

// Stores y as floats, or rounded to int8.
inline void store_rounded(const Argument& y, const Value* a, int64_t at, vf out, const Scale& scale,
                          int64_t channel, int n) {
  if (scale.count)
    store_some(y.in<int8_t>(a) + at, round8(out / scale.at(a, channel, n)), n);
  else
    store_some(y.in<float>(a) + at, out, n);
}

// x · F(z), elementwise
template <vf F(vf), int OPERATIONS> struct Product : Kernel {
  Argument x, z, y;
  int64_t width, x_stride, z_stride;
  Product(const Variant& v)
      : x(v, "x"), z(v, "z"), y(v, "y"), width(v.integer("WIDTH")),
        x_stride(v.integer("X_STRIDE")), z_stride(v.integer("Z_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(OPERATIONS * width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++)
        blocks(width, [&](int64_t i, int n) {
          vf left = load_some(x.in<const float>(a) + row * x_stride + i, n);
          vf right = F(load_some(z.in<const float>(a) + row * z_stride + i, n));
          store_some(y.in<float>(a) + row * width + i, left * right, n);
        });
    });
  }
};
