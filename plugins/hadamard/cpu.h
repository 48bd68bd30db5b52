// Rotation of rows by slow ⊗ fastᵀ: the C++ counterpart of triton_hadamard.py.

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

// Returns whether a matrix is one number doubled to its order by [[A, A], [A, -A]] (Sylvester).
inline bool is_doubled(const float* matrix, int64_t order) {
  int64_t n = order;
  for (; n % 2 == 0; n /= 2) {
    int64_t half = n / 2;
    vi differs{};
    for (int64_t i = 0; i < half; i++)
      blocks(half, [&](int64_t k, int some) {
        const float *above = matrix + i * order + k, *below = above + half * order;
        vf a = load_some(above, some);
        differs |= vi(a != load_some(above + half, some)) | vi(a != load_some(below, some)) |
                   vi(a != -load_some(below + half, some));
      });
    if (sum(differs)) return false;
  }
  return n == 1;
}
// Returns the largest d up to `most` for which a matrix is A ⊗ H, with H = [[1, 1], [1, -1]]
// doubled to order d. A consists of every d-th number of every d-th row.
inline int64_t doubled_inside(const float* matrix, int64_t order, int64_t most) {
  int64_t d = 1;
  for (; 2 * d <= most && order % (2 * d) == 0; d *= 2)
    for (int64_t i = 0; i < order; i += 2 * d)
      for (int64_t k = 0; k < order; k += 2 * d) {
        const float *above = matrix + i * order + k, *below = above + d * order;
        if (above[0] != above[d] || above[0] != below[0] || above[0] != -below[d]) return d;
      }
  return d;
}

// Swaps lanes i and i ^ STEP.
template <int STEP> EDGE_INLINE vf swapped(vf v) {
#if EDGE_ISA_AVX512
  if (STEP == 8) return vf(_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e));
  if (STEP == 4) return vf(_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1));
  return vf(STEP == 2 ? _mm512_permute_ps((__m512)v, 0x4e) : _mm512_permute_ps((__m512)v, 0xb1));
#elif EDGE_ISA_AVX2
  if (STEP == 4) return vf(_mm256_permute2f128_ps((__m256)v, (__m256)v, 1));
  return vf(STEP == 2 ? _mm256_permute_ps((__m256)v, 0x4e) : _mm256_permute_ps((__m256)v, 0xb1));
#elif EDGE_ISA_NEON
  float32x4_t x = (float32x4_t)v;
  return vf(STEP == 2 ? vextq_f32(x, x, 2) : vrev64q_f32(x));
#else
  vf out;
  for (int i = 0; i < W; i++) out[i] = v[i ^ STEP];
  return out;
#endif
}
// Each pair of lanes that differ by STEP becomes its sum and its difference.
template <int STEP> EDGE_INLINE vf paired(vf v) {
  vf sign;
  for (int i = 0; i < W; i++) sign[i] = i & STEP ? -1.f : 1.f;
  return swapped<STEP>(v) + v * sign;
}
// Multiplies a row of COUNT vectors by unit · [[1, 1], [1, -1]] doubled to its length.
template <int COUNT> inline void double_row(const float* row, float unit, float* out) {
  vf v[COUNT];
  for (int i = 0; i < COUNT; i++) v[i] = load(row + i * W);
#pragma GCC unroll 8
  for (int half = COUNT / 2; half; half /= 2)
    for (int i = 0; i < COUNT; i++)
      if (!(i & half)) {
        vf a = v[i], b = v[i + half];
        v[i] = a + b, v[i + half] = a - b;
      }
  for (int i = 0; i < COUNT; i++) {
    if (W > 8) v[i] = paired<W / 2>(v[i]);
    if (W > 4) v[i] = paired<W / 4 == 4 ? 4 : W / 2>(v[i]);
    store(out + i * W, paired<1>(paired<2>(v[i])) * unit);
  }
}

struct Rotation {
  Argument slow, fast, y;
  Scale scale;
  int64_t P, Q;
  Rotation(const Variant& v)
      : slow(v, "slow"), fast(v, "fast"), y(v, "y"), scale(v, "scale", "SCALES"),
        P(v.integer("P")), Q(v.integer("Q")) {}

  // slow ⊗ fastᵀ as the product of a smaller matrix `left`, [P / wide, P / wide], and a doubled
  // matrix of order wide · Q, which takes additions instead of products. `wide` is 0, and `left` is
  // slow, if fast is not such a matrix.
  struct Parts {
    const float* left;
    int64_t wide;
  };
  static constexpr int64_t MOST = 32;  // maximum number of vectors of a doubled row
  Parts parts(const Value* a, Pool& pool) const {
    const float* whole = slow.in<const float>(a);
    int64_t vectors = Q / W;
    bool fits = Q % W == 0 && vectors && vectors <= MOST && !(vectors & (vectors - 1));
    if (!fits || !is_doubled(fast.in<const float>(a), Q)) return {whole, 0};
    int64_t wide = doubled_inside(whole, P, MOST / vectors), rows = P / wide;
    float* left = pool.scratch<float>(0, rows * rows);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t k = 0; k < rows; k++) left[i * rows + k] = whole[(i * P + k) * wide];
    return {left, wide};
  }
  // per row
  int64_t operations(const Parts& of) const {
    return 2 * P * Q * (of.wide ? P / of.wide + 10 : P + Q);
  }
  void store_row(const Value* a, int64_t row, const Parts& of, const float* in, float* mixed,
                 float* out) const {
    if (of.wide) {
      double_rows(in, *fast.in<const float>(a), of.wide * Q, mixed);
      multiply(of.left, P / of.wide, P / of.wide, mixed, of.wide * Q, out);
    } else {
      multiply(of.left, P, P, in, Q, mixed);
      multiply(mixed, P, Q, fast.in<const float>(a), Q, out);
    }
    blocks(P * Q, [&](int64_t i, int n) {
      store_rounded(y, a, row * P * Q + i, load(out + i), scale, i, n);
    });
  }

 private:
  void double_rows(const float* in, float unit, int64_t width, float* out) const {
    for (int64_t i = 0; i < P * Q; i += width) switch (width / W) {
        case 1: double_row<1>(in + i, unit, out + i); break;
        case 2: double_row<2>(in + i, unit, out + i); break;
        case 4: double_row<4>(in + i, unit, out + i); break;
        case 8: double_row<8>(in + i, unit, out + i); break;
        case 16: double_row<16>(in + i, unit, out + i); break;
        default: double_row<32>(in + i, unit, out + i);
      }
  }
};

struct Hadamard : Kernel {
  Rotation rotation;
  Argument x;
  int64_t x_stride;
  Hadamard(const Variant& v) : rotation(v), x(v, "x"), x_stride(v.integer("X_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    int64_t width = rotation.P * rotation.Q;
    Rotation::Parts parts = rotation.parts(a, pool);
    pool.each(grid[0], items_a_piece(rotation.operations(parts)), [&](int64_t first, int64_t last) {
      float* room = local(2 * width + W);
      for (int64_t row = first; row < last; row++)
        rotation.store_row(a, row, parts, x.in<const float>(a) + row * x_stride, room,
                           room + width);
    });
  }
};

KERNEL("hadamard.hadamard", Hadamard)
