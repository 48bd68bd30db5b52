// Rotation of rows by slow ⊗ fastᵀ: the C++ face of triton_hadamard.py.

// out[r] = Σ_k left[r, k] · right[k, :]
inline void multiply(const float* left, int64_t rows, int64_t K, const float* right, int64_t width,
                     float* out) {
  int64_t whole = width / WIDE * WIDE;
  for (int64_t i = 0; i < whole; i += WIDE)
    tiles(rows, [&](auto tile, int64_t r) {
      constexpr int R = decltype(tile)::rows;
      vf sums[R][2] = {};
      tall<R>(left + r * K, K, right + i, width, K, sums, AddFloats());
      for (int j = 0; j < R; j++) {
        store(out + (r + j) * width + i, sums[j][0]);
        store(out + (r + j) * width + i + W, sums[j][1]);
      }
    });
  for (int64_t r = 0; r < rows; r++)
    blocks(width - whole, [&](int64_t i, int n) {
      vf sum{};
      for (int64_t k = 0; k < K; k++)
        sum += left[r * K + k] * load_some(right + k * width + whole + i, n);
      store_some(out + r * width + whole + i, sum, n);
    });
}

// out = slow · X · fast of one row X [P, Q]
inline void rotate(const float* row, const float* slow, const float* fast, int64_t P, int64_t Q,
                   float* mixed, float* out) {
  multiply(slow, P, P, row, Q, mixed);
  multiply(mixed, P, Q, fast, Q, out);
}

struct Rotation {
  Argument slow, fast, y;
  Scale scale;
  int64_t P, Q;
  Rotation(const Variant& v)
      : slow(v, "slow"), fast(v, "fast"), y(v, "y"), scale(v, "scale", "SCALES"),
        P(v.integer("P")), Q(v.integer("Q")) {}
  void store_row(const Value* a, int64_t row, const float* in, float* mixed, float* out) const {
    rotate(in, slow.in<const float>(a), fast.in<const float>(a), P, Q, mixed, out);
    blocks(P * Q, [&](int64_t i, int n) {
      store_rounded(y, a, row * P * Q + i, load(out + i), scale, i, n);
    });
  }
};

struct Hadamard : Kernel {
  Rotation rotation;
  Argument x;
  int64_t x_stride;
  Hadamard(const Variant& v) : rotation(v), x(v, "x"), x_stride(v.integer("X_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    int64_t width = rotation.P * rotation.Q;
    int64_t operations = 2 * width * (rotation.P + rotation.Q);
    pool.each(grid[0], items_a_piece(operations), [&](int64_t first, int64_t last) {
      float* room = local(2 * width + W);
      for (int64_t row = first; row < last; row++)
        rotation.store_row(a, row, x.in<const float>(a) + row * x_stride, room, room + width);
    });
  }
};

KERNEL("hadamard.hadamard", Hadamard)
