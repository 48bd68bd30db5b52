// Rows times float weights, fp32 or fp16: the C++ counterpart of triton_linear.py.

template <int M, class T> inline void tile_float(const float* x, int64_t x_stride,
                                                 const T* const* w, int64_t K, float (*sums)[NR]) {
  vf acc[M][NR];
  for (int n = 0; n < NR; n++) {
    vf of_row[M] = {}, other[M] = {};  // two, to hide the latency of additions
    int64_t k = 0;
    for (; k + 2 * W <= K; k += 2 * W) {
      vf left = load(w[n] + k), right = load(w[n] + k + W);
      for (int m = 0; m < M; m++) {
        of_row[m] += left * load(x + m * x_stride + k);
        other[m] += right * load(x + m * x_stride + k + W);
      }
    }
    for (; k < K; k += W) {
      int some = (int)std::min<int64_t>(W, K - k);
      vf of_w = load_some(w[n] + k, some);
      for (int m = 0; m < M; m++) of_row[m] += of_w * load_some(x + m * x_stride + k, some);
    }
    for (int m = 0; m < M; m++) acc[m][n] = of_row[m] + other[m];
  }
  for (int m = 0; m < M; m++) sums4(acc[m], sums[m]);
}

// Multiplies by weight rows first ... last.
template <class T>
inline void product_float(const float* x, int64_t x_stride, int64_t M, const T* weight, int64_t K,
                          int64_t first, int64_t last, Sink f) {
  for (int64_t n = first; n < last; n += NR) {
    int columns = (int)std::min<int64_t>(NR, last - n);
    const T* w[NR];
    for (int i = 0; i < NR; i++) w[i] = weight + (n + std::min(i, columns - 1)) * K;
    for (int64_t m = 0; m < M; m += MR) {
      int rows = (int)std::min<int64_t>(MR, M - m);
      float sums[MR][NR];
      const float* from = x + m * x_stride;
      switch (rows) {
        case 1: tile_float<1>(from, x_stride, w, K, sums); break;
        case 2: tile_float<2>(from, x_stride, w, K, sums); break;
        case 3: tile_float<3>(from, x_stride, w, K, sums); break;
        default: tile_float<4>(from, x_stride, w, K, sums);
      }
      for (int i = 0; i < rows; i++) {
        vf four{};
        for (int j = 0; j < columns; j++) four[j] = sums[i][j];
        f(m + i, n, four, columns);
      }
    }
  }
}

// Calls f(m, n, sums, count) for the products of all rows and a panel.
inline void times_panel(const float* x, int64_t x_stride, int64_t M, const int32_t* panel, int64_t K,
                        int64_t n, int64_t end, Sink f) {
  tiles(M, [&](auto tile, int64_t m) {
    constexpr int R = decltype(tile)::rows;
    vf sums[R][2] = {};
    tall<R>(x + m * x_stride, x_stride, panel, WIDE, K, sums, AddFloats());
    for (int r = 0; r < R; r++)
      each_half(n, end, [&](int half, int64_t at, int count) {
        f(m + r, at, sums[r][half], count);
      });
  });
}

// Sums R rows of x times G groups of interleaved weights, `count` outputs of the last. Outputs lie
// side by side, so no lanes are summed. Products are added in the order of a panel: a row's bits do
// not depend on the number of rows, and values rounded to fp16 afterwards are the same in prefill and
// decode.
template <int R, int G, class T>
EDGE_INLINE void add_floats(const T* groups, int64_t K, int count, const float* x, int64_t stride,
                            vf (*sums)[R]) {
  constexpr int64_t OF_LINE = std::max<int64_t>(1, CACHE_LINE / int64_t(W * sizeof(T)));
  constexpr int64_t FURTHER = AHEAD / int64_t(G * W * sizeof(T));
  vf acc[G][R] = {};
  AddFloats add;
  auto all = [&](auto word) {
    auto add_word = [&](int64_t k) {
      for (int g = 0; g < G; g++) {
        vf lanes = word(groups + g * K * W, k);
        for (int r = 0; r < R; r++)
          acc[g][r] = add(acc[g][r], lanes, add.spread(x + r * stride + k));
      }
    };
    int64_t k = 0;
    while (k + OF_LINE <= K) {
      int64_t next = k + FURTHER < K ? k + FURTHER : k + FURTHER + (G - 1) * K;  // of the next groups
      for (int g = 0; g < G; g++) __builtin_prefetch(groups + (g * K + next) * W, 0, 2);
      for (int i = 0; i < OF_LINE; i++) add_word(k++);
    }
    while (k < K) add_word(k++);
  };
  if (count == W)
    all([&](const T* group, int64_t k) { return load(group + k * W); });
  else
    all([&](const T* group, int64_t k) { return beside(group, k, count); });
  for (int g = 0; g < G; g++)
    for (int r = 0; r < R; r++) sums[g][r] = acc[g][r];
}
// Calls f(m, n, sums, count) for few rows; `first` and `last` count groups of W outputs.
template <class T>
inline void groups_float(const float* x, int64_t x_stride, int64_t M, const T* weight, int64_t N,
                         int64_t K, int64_t first, int64_t last, Sink f) {
  constexpr int CHAINS = 8;  // sums at least, to hide the latency of additions
  const int64_t end = std::min(last * W, N);
  auto sum = [&](auto groups, int64_t n) {
    few_rows(M, [&](auto tile, int64_t m) {
      constexpr int R = decltype(tile)::rows, all = decltype(groups)::rows;
      constexpr int G = std::max(1, std::min(all, CHAINS / R));
      for (int64_t of = n; of < n + all * W; of += G * W) {
        int count = (int)std::min<int64_t>(W, end - of);
        vf sums[G][R];
        add_floats<R, G>(weight + of * K, K, count, x + m * x_stride, x_stride, sums);
        for (int g = 0; g < G; g++)
          for (int r = 0; r < R; r++) f(m + r, of + g * W, sums[g][r], count);
      }
    });
  };
  int64_t n = first * W;
  for (; n + CHAINS * W <= end; n += CHAINS * W) sum(RowCount<CHAINS>(), n);
  for (; n < end; n += W) sum(RowCount<1>(), n);
}
template <class T>
inline void interleaved_float(const float* x, int64_t x_stride, int64_t M, const T* weight,
                              int64_t N, int64_t K, Pool& pool, Sink f) {
  if (M <= FEW)
    return pool.each((N + W - 1) / W,
                     std::max<int64_t>(1, columns_a_piece(K * sizeof(T), M) / W),
                     [&](int64_t first, int64_t last) {
      groups_float(x, x_stride, M, weight, N, K, first, last, f);
    });
  auto fill = [&](int32_t* panel, int64_t n, int64_t end) {
    float* to = reinterpret_cast<float*>(panel);
    for (int half = 0; half < 2; half++) {
      int64_t at = n + half * W;
      int count = (int)std::min<int64_t>(W, std::max<int64_t>(0, end - at));
      for (int64_t k = 0; k < K; k++)
        store(to + k * WIDE + half * W, count ? beside(weight + at * K, k, count) : vf{});
    }
  };
  filled_panels(N, K, pool, fill, [&](const int32_t* panel, int64_t n, int64_t end) {
    times_panel(x, x_stride, M, panel, K, n, end, f);
  });
}

// Rounds rows of x to fp16, as engines do with fp16 weights, and clips them to ±65504.
inline const float* as_half(const float* x, int64_t stride, int64_t rows, int64_t K, Pool& pool) {
  float* out = pool.scratch<float>(1, rows * K + W);
  pool.each(rows, items_a_piece(4 * K), [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++)
      blocks(K, [&](int64_t k, int n) {
        vf bounded = least(65504.f, most(-65504.f, load_some(x + m * stride + k, n)));
        store_some(out + m * K + k, half_to_float(float_to_half(bounded)), n);
      });
  });
  return out;
}

// Calls f(m, n, sums, count) for all of x [rows, K] · weight [N, K], f32 or f16.
inline void multiply_float(const float* x, int64_t x_stride, int64_t rows, Type type,
                           const void* weight, int64_t N, int64_t K, Pool& pool, bool interleaved,
                           Sink f) {
  if (type == Type::f16) x = as_half(x, x_stride, rows, K, pool), x_stride = K;
  if (type == Type::f32 && rows > FEW && !interleaved)
    return panels(weight, N, 4 * K, K, 0, pool, false,
                  [&](const int32_t* panel, int64_t n, int64_t end) {
      times_panel(x, x_stride, rows, panel, K, n, end, f);
    });
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* w = static_cast<const T*>(weight);
    if (interleaved) return interleaved_float(x, x_stride, rows, w, N, K, pool, f);
    pool.each(N, columns_a_piece(K * sizeof(T), rows), [&](int64_t first, int64_t last) {
      product_float(x, x_stride, rows, w, K, first, last, f);
    });
  });
}
// The interleaving of float weights, which every instruction set uses.
inline Interleaved floats_beside(const Argument& weight, int64_t rows, int64_t K) {
  return {weight.place(), W, rows, K, weight.type == Type::f16 ? 2 : 4};
}

struct LinearFloat : Kernel {
  Argument x, weight, y, M;
  int64_t N, K, x_stride;
  LinearFloat(const Variant& v)
      : x(v, "x"), weight(numbers(v, "weight")), y(v, "y"), M(v, v.knows("M") ? "M" : "tokens"),
        N(v.integer("N")), K(v.integer("K")), x_stride(v.integer("X_STRIDE")) {}
  void run(const Value* a, const int64_t*, Pool& pool) const override {
    multiply(a, M.integer(a), pool, interleaved != 0);
  }
  int interleavable(Interleaved* out) const override {
    if (weight.type == Type::i8) return 0;
    out[0] = floats_beside(weight, N, K);
    return 1;
  }
  void multiply(const Value* a, int64_t rows, Pool& pool, bool beside) const {
    multiply_float(x.in<const float>(a), x_stride, rows, weight.type, weight.in<const char>(a), N, K,
                   pool, beside, [&](int64_t m, int64_t n, vf sums, int count) {
                     store_some(y.in<float>(a) + m * N + n, sums, count);
                   });
  }
};

KERNEL("linear.few", LinearFloat)
KERNEL("linear.many", LinearFloat)
