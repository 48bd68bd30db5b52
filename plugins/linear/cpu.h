// Rows times weights, one weight row per output: y[m, n] = Σ_k x[m, k] · w[n, k].
//
// Both are contiguous along k, so a tile of NR weight rows by MR rows of x is summed lane by lane
// and the lanes are added at the end. For few rows, reading the weights dominates. They are read in
// memory order, one weight row after the other: twice as fast as four rows side by side (19 and
// 10 GB/s). Many rows use panels.
//
// The C++ counterpart of triton_linear.py and triton_linear_int8.py.

constexpr int NR = 4, MR = 4;  // a tile has 16 sums and 8 loads a step

// What products are given to: called with (m, n, sums, count) for `count` columns of row m from n on.
// One type for all callers, so that the products are not compiled again for each of them.
class Sink {
  const void* object;
  void (*call)(const void*, int64_t, int64_t, vf, int);
  template <class F>
  static void call_as(const void* f, int64_t m, int64_t n, vf sums, int count) {
    (*static_cast<const F*>(f))(m, n, sums, count);
  }

 public:
  template <class F> Sink(const F& f) : object(&f), call(call_as<F>) {}
  void operator()(int64_t m, int64_t n, vf sums, int count) const {
    call(object, m, n, sums, count);
  }
};

// -- int8 -------------------------------------------------------------------------------------------

#if EDGE_WIDENS
// Rows of x as they are multiplied, each padded by zeros to whole vectors. Widened once, not for
// every weight row.
typedef int16_t OfRow;
inline const int16_t* rows_to_multiply(const int8_t* x, int64_t& x_stride, int64_t rows, int64_t K,
                                       Pool& pool) {
  const int64_t stride = (K + BYTES - 1) / BYTES * BYTES;
  int16_t* out = pool.scratch<int16_t>(5, rows * stride);
  pool.each(rows, items_a_piece(K), [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) {
      for (int64_t k = 0; k < K; k++) out[m * stride + k] = x[m * x_stride + k];
      for (int64_t k = K; k < stride; k++) out[m * stride + k] = 0;
    }
  });
  x_stride = stride;
  return out;
}
inline Packed load_row_rest(const int16_t* p, int64_t) { return load_row(p); }
#else
typedef int8_t OfRow;
inline const int8_t* rows_to_multiply(const int8_t* x, int64_t&, int64_t, int64_t, Pool&) { return x; }
#endif

// sums[m][n] for M rows of x and NR weight rows: exact, plus the bias if BIASED.
template <int M> inline void tile_int8(const OfRow* x, int64_t x_stride, const int8_t* const* w,
                                       int64_t K, int32_t (*sums)[NR]) {
  vi acc[M][NR];
  for (int n = 0; n < NR; n++) {
    vi of_row[M] = {};
    int64_t k = 0;
    auto add = [&] {
      Packed of_w = load_weight(w[n] + k);
      for (int m = 0; m < M; m++) of_row[m] = dot(of_row[m], of_w, load_row(x + m * x_stride + k));
      k += BYTES;
    };
    while (k + CACHE_LINE <= K) {
      __builtin_prefetch(w[n] + k + AHEAD, 0, 2);
      for (int i = 0; i < CACHE_LINE / BYTES; i++) add();
    }
    while (k + BYTES <= K) add();
    if (k < K) {
      Packed of_w = load_weight_rest(w[n] + k, K - k);
      for (int m = 0; m < M; m++)
        of_row[m] = dot(of_row[m], of_w, load_row_rest(x + m * x_stride + k, K - k));
    }
    for (int m = 0; m < M; m++) acc[m][n] = of_row[m];
  }
  for (int m = 0; m < M; m++) sums4(acc[m], sums[m]);
}

// 128·Σx of each row: the excess of a biased product.
inline void biases(const int8_t* x, int64_t x_stride, int64_t rows, int64_t K, Pool& pool,
                   int32_t* out) {
  if (!BIASED) return;
  pool.each(rows, items_a_piece(K), [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) {
      int32_t total = 0;
      const int8_t* p = x + m * x_stride;
      for (int64_t k = 0; k < K; k++) total += p[k];
      out[m] = 128 * total;
    }
  });
}

// Calls f(m, n, sums, count) with the products of weight rows first ... last. They are collected in
// strips of columns, [M, STRIP], so that f takes a vector of columns at a time.
constexpr int64_t STRIP = 64;

inline void product_int8(const OfRow* x, int64_t x_stride, int64_t M, const int8_t* weight,
                         int64_t K, const int32_t* bias, int64_t first, int64_t last, Sink f) {
  int32_t* totals = static_cast<int32_t*>(thread_bytes(1, M * STRIP * int64_t(sizeof(int32_t))));
  for (int64_t start = first; start < last; start += STRIP) {
    int64_t end = std::min(start + STRIP, last);
    for (int64_t n = start; n < end; n += NR) {
      const int8_t* w[NR];
      for (int i = 0; i < NR; i++) w[i] = weight + std::min(n + i, last - 1) * K;
      for (int64_t m = 0; m < M; m += MR) {
        int rows = (int)std::min<int64_t>(MR, M - m);
        int32_t sums[MR][NR];
        const OfRow* from = x + m * x_stride;
        switch (rows) {
          case 1: tile_int8<1>(from, x_stride, w, K, sums); break;
          case 2: tile_int8<2>(from, x_stride, w, K, sums); break;
          case 3: tile_int8<3>(from, x_stride, w, K, sums); break;
          default: tile_int8<4>(from, x_stride, w, K, sums);
        }
        for (int i = 0; i < rows; i++)
          std::memcpy(totals + (m + i) * STRIP + (n - start), sums[i], sizeof sums[i]);
      }
    }
    for (int64_t m = 0; m < M; m++) {
      int32_t excess = BIASED ? bias[m] : 0;
      blocks(end - start, [&](int64_t i, int n) {
        // lanes behind `n` are uninitialized, so that subtracting from them could overflow
        vi exact = vi(load_some(reinterpret_cast<const float*>(totals + m * STRIP + i), n)) - excess;
        f(m, start + i, __builtin_convertvector(exact, vf), n);
      });
    }
  }
}

#if !EDGE_WIDENS  // whose few rows are as fast
// The same for many rows; K is a multiple of 4.
inline void panels_int8(const int8_t* x, int64_t x_stride, int64_t M, const int8_t* weight,
                        int64_t N, int64_t K, const int32_t* bias, Pool& pool, bool interleaved,
                        Sink f) {
  panels(weight, N, K, K / 4, FLIP_SIGNED, pool, interleaved, [&](const int32_t* panel, int64_t n, int64_t end) {
#if EDGE_TILES
    if (pool.tiles && tiles_take(K / 4)) {
      alignas(64) int32_t sums[2 * TILE_ROWS * WIDE];
      return each_tile(M, [&](int64_t m, int64_t rows) {
        tile_sums(x + m * x_stride, x_stride, rows, panel, K / 4, sums);
        for (int64_t r = 0; r < rows; r++)
          each_half(n, end, [&](int half, int64_t at, int count) {
            vi exact = load_as<vi>(sums + r * WIDE + half * W) - bias[m + r];
            f(m + r, at, __builtin_convertvector(exact, vf), count);
          });
      });
    }
#endif
    tiles(M, [&](auto tile, int64_t m) {
      constexpr int R = decltype(tile)::rows;
      vi sums[R][2];
      for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = vi{} - (BIASED ? bias[m + r] : 0);
      tall<R>(x + m * x_stride, x_stride, panel, WIDE, K / 4, sums, AddBytes());
      for (int r = 0; r < R; r++)
        each_half(n, end, [&](int half, int64_t at, int count) {
          f(m + r, at, __builtin_convertvector(sums[r][half], vf), count);
        });
    });
  });
}
#endif

#if EDGE_ISA_AVX512
// The same for 3 to FEW rows; K is a multiple of 16. `first` and `last` count groups of W outputs.
inline void words_int8(const int8_t* x, int64_t x_stride, int64_t M, const int8_t* weight, int64_t N,
                       int64_t K, const int32_t* bias, int64_t first, int64_t last, Sink f) {
  for (int64_t n = first * W; n < std::min(last * W, N); n += W) {
    int count = (int)std::min<int64_t>(W, N - n);
    vi sums[FEW];
    for (int64_t m = 0; m < M; m++) sums[m] = vi{} - (BIASED ? bias[m] : 0);
    each_words<true>(weight, K, n, n + count, [&](int64_t word, int some, vi* w) {
      for (int i = 0; i < W; i++) w[i] ^= FLIP_SIGNED;
      if (some == W) {
        for (int64_t m = 0; m < M; m++)
          sums[m] = dot_words<W>(sums[m], w, x + m * x_stride + 4 * word);
        return;
      }
      for (int64_t m = 0; m < M; m++)
        for (int i = 0; i < some; i += 4)
          sums[m] = dot_words<4>(sums[m], w + i, x + m * x_stride + 4 * (word + i));
    });
    for (int64_t m = 0; m < M; m++) f(m, n, __builtin_convertvector(sums[m], vf), count);
  }
}

#endif

#if !EDGE_WIDENS
// Few rows as `groups_int8` takes them: see `put_beside`.
inline const int8_t* beside_rows(const int8_t* x, int64_t x_stride, int64_t M, int64_t K, Pool& pool) {
  if (M == 1) return x;
  int32_t* out = pool.scratch<int32_t>(1, M * K / 4);
  for (int64_t m = 0; m < M; m++)
    put_beside(x + m * x_stride, K / 4, M, m, out);
  return reinterpret_cast<const int8_t*>(out);
}
// The same for few rows and interleaved weights; K is a multiple of 4.
inline void groups_int8(const int8_t* x, int64_t M, const int8_t* weight, int64_t N, int64_t K,
                        const int32_t* bias, int64_t first, int64_t last, Sink f) {
  AddBytes add;
  for (int64_t n = first * W; n < std::min(last * W, N); n += W) {
    int count = (int)std::min<int64_t>(W, N - n);
    const char* group = reinterpret_cast<const char*>(weight) + n * K;
    few_rows(M, [&](auto tile, int64_t m) {
      constexpr int R = decltype(tile)::rows;
      vi sums[R];
      for (int r = 0; r < R; r++) sums[r] = vi{} - (BIASED ? bias[m + r] : 0);
      add_group<R, 8>(group, K / 4, count, x + m * K, sums, [&](vi w, const int8_t* from, vi* acc) {
        w ^= FLIP_SIGNED;
        for (int r = 0; r < R; r++) acc[r] = add(acc[r], w, add.spread(from + 4 * r));
      });
      for (int r = 0; r < R; r++) f(m + r, n, __builtin_convertvector(sums[r], vf), count);
    });
  }
}
#endif
// Whether int8 weights with rows of K columns are worth interleaving.
inline bool int8_interleaves(int64_t K) { return BESIDE && !WIDENS && K % 4 == 0; }

// Smallest piece of work, in weight rows.
inline int64_t columns_a_piece(int64_t bytes_a_row, int64_t M) {
  int64_t columns = 32768 / std::max<int64_t>(1, bytes_a_row * std::max<int64_t>(1, M / 4));
  return std::max<int64_t>(NR, columns / NR * NR);
}

// Calls f(m, n, sums, count) for all of x [rows, K] · weight [N, K].
inline void multiply_int8(const int8_t* x, int64_t x_stride, int64_t rows, const int8_t* weight,
                          int64_t N, int64_t K, Pool& pool, bool interleaved, Sink f) {
  int32_t* bias = pool.scratch<int32_t>(0, rows);
  biases(x, x_stride, rows, K, pool, bias);
#if !EDGE_WIDENS
  if (AddBytes::here && rows > FEW && K % 4 == 0)
    return panels_int8(x, x_stride, rows, weight, N, K, bias, pool, interleaved, f);
#endif
#if !EDGE_WIDENS
  if (interleaved) {
    const int8_t* tiles = beside_rows(x, x_stride, rows, K, pool);
    return pool.each((N + W - 1) / W, std::max<int64_t>(1, columns_a_piece(K, rows) / W),
                     [&](int64_t first, int64_t last) {
      groups_int8(tiles, rows, weight, N, K, bias, first, last, f);
    });
  }
#endif
#if EDGE_ISA_AVX512
  if (rows > 2 && rows <= FEW && K % 16 == 0)
    return pool.each((N + W - 1) / W, std::max<int64_t>(1, columns_a_piece(K, rows) / W),
                     [&](int64_t first, int64_t last) {
      words_int8(x, x_stride, rows, weight, N, K, bias, first, last, f);
    });
#endif
  const OfRow* prepared = rows_to_multiply(x, x_stride, rows, K, pool);
  pool.each(N, columns_a_piece(K, rows), [&](int64_t first, int64_t last) {
    product_int8(prepared, x_stride, rows, weight, K, bias, first, last, f);
  });
}

// The scales of int8 sums: `scaled` of triton_linear_int8.py.
struct Scaled {
  Argument x_scale, weight_scale, y_scale, y;
  int64_t x_step, weight_step, y_step, N;
  Scaled(const Variant& v, int64_t x_step_, int64_t weight_step_)
      : x_scale(v, "x_scale"), weight_scale(Argument::optional(v, "weight_scale")),
        y_scale(Argument::optional(v, "y_scale")), y(v, "y"), x_step(x_step_),
        weight_step(weight_step_), y_step(v.integer("Y_SCALE_STEP")), N(v.integer("N")) {}
  // Stores `count` columns of row m from n on.
  void store(const Value* a, int64_t m, int64_t n, vf total, int count) const {
    vf unit = splat(x_scale.in<const float>(a)[m * x_step]);
    if (weight_scale) unit *= stepped(weight_scale.in<const float>(a), n, weight_step, count);
    vf out = total * unit;
    if (y_scale)
      store_some(y.in<int8_t>(a) + m * N + n,
                 round8(out / stepped(y_scale.in<const float>(a), n, y_step, count)), count);
    else
      store_some(y.in<float>(a) + m * N + n, out, count);
  }

 private:
  static vf stepped(const float* scale, int64_t n, int64_t step, int count) {
    return step ? load_some(scale + n, count) : splat(*scale);
  }
};

struct LinearInt8 : Kernel {
  Argument x, weight, M;
  int64_t N, K, x_stride;
  Scaled scaled;
  LinearInt8(const Variant& v)
      : x(v, "x"), weight(v, "weight"), M(v, v.knows("M") ? "M" : "tokens"), N(v.integer("N")),
        K(v.integer("K")), x_stride(v.integer("X_STRIDE")),
        scaled(v, v.integer("X_SCALE_STEP", 0), v.integer("WEIGHT_SCALE_STEP")) {}
  void run(const Value* a, const int64_t*, Pool& pool) const override {
    multiply(a, M.integer(a), pool, interleaved != 0);
  }
  int interleavable(Interleaved* out) const override {
    if (!int8_interleaves(K)) return 0;
    out[0] = {weight.place(), W, N, K / 4, 4};
    return 1;
  }
  void multiply(const Value* a, int64_t rows, Pool& pool, bool beside) const {
    multiply_int8(x.in<const int8_t>(a), x_stride, rows, weight.in<const int8_t>(a), N, K, pool,
                  beside, [&](int64_t m, int64_t n, vf sums, int count) {
                    scaled.store(a, m, n, sums, count);
                  });
  }
};

KERNEL("linear_int8.few", LinearInt8)
KERNEL("linear_int8.many", LinearInt8)
