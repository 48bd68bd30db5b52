// Many rows times weights: a panel of weight rows is transposed so that outputs lie side by side,
// then used by all rows of x. No lanes are summed, and a tile's sums stay in registers.
//
// A column of the panel is one 32-bit word of a weight row: a float or four bytes.

// rows of a tile, whose sums take 24 of 32 registers
constexpr int TALL = REGISTERS == 32 ? 12 : 6;
constexpr int64_t WIDE = 2 * W;  // outputs of a panel

#if EDGE_ISA_AVX512
// Transposes the words of 16 vectors.
template <class V> inline void transpose(V* of) {
  __m512i* v = reinterpret_cast<__m512i*>(of);
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    v[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}
constexpr bool TURNS = true;  // transposing is cheap enough for few rows
#else
template <class V> inline void transpose(V* v) {
  for (int i = 0; i < W; i++)
    for (int j = 0; j < i; j++) {
      auto moved = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = moved;
    }
}
constexpr bool TURNS = false;
#endif
// Whether 8-bit and 4-bit weights are interleaved.
#if EDGE_ISA_AVX512 || EDGE_ISA_AVX2
constexpr bool BESIDE = true;
#else
constexpr bool BESIDE = false;
#endif
#if EDGE_ISA_AVX2 && !EDGE_ISA_AVXVNNI
#define EDGE_WIDENS 1
constexpr bool WIDENS = true;  // bytes are multiplied in 16 bits
#else
constexpr bool WIDENS = false;
#endif


// Calls put(word, half, lanes) for every word of rows first ... first + WIDE, `stride` bytes apart.
// Rows from `last` on repeat row last - 1. `lanes` has one word of each of W rows.
template <class F> inline void turn_rows(const void* base, int64_t stride, int64_t first, int64_t last,
                                         int64_t words, F put) {
  for (int half = 0; half < 2; half++) {
    const char* rows[W];
    for (int i = 0; i < W; i++)
      rows[i] = static_cast<const char*>(base) +
                std::min<int64_t>(first + half * W + i, last - 1) * stride;
    int64_t word = 0;
#if EDGE_ISA_AVX512
    for (; word + W <= words; word += W) {
      __m512i v[W];
      for (int i = 0; i < W; i++) v[i] = _mm512_loadu_si512(rows[i] + 4 * word);
      transpose(v);
      for (int i = 0; i < W; i++) put(word + i, half, vi(v[i]));
    }
#endif
    for (; word < words; word++) {
      vi lanes{};
      for (int i = 0; i < W; i++) {
        int32_t one_word;
        std::memcpy(&one_word, rows[i] + 4 * word, 4);
        lanes[i] = one_word;
      }
      put(word, half, lanes);
    }
  }
}

#if EDGE_ISA_I8MM
// The beginning of `tall` for an even number of int8 rows: products of 2 rows by 2 outputs, of two
// words at once. Returns the number of words done.
template <int R>
EDGE_INLINE int64_t tall_by_twos(const int8_t* x, int64_t stride, const int32_t* panel,
                                 int64_t pitch, int64_t words, vi (*sums)[2]) {
  int32x4_t acc[R / 2][4] = {};  // of two rows: two outputs of the first, the same of the second
  int64_t k = 0;
  for (; k + 2 <= words; k += 2, panel += 2 * pitch) {
    int8x16_t w[4];
    for (int half = 0; half < 2; half++) {
      int32x4_t first = vld1q_s32(panel + half * W), second = vld1q_s32(panel + pitch + half * W);
      w[2 * half] = vreinterpretq_s8_s32(vzip1q_s32(first, second));
      w[2 * half + 1] = vreinterpretq_s8_s32(vzip2q_s32(first, second));
    }
    for (int r = 0; r < R / 2; r++) {
      const int8_t* rows = x + 2 * r * stride + 4 * k;
      int8x16_t both = vcombine_s8(vld1_s8(rows), vld1_s8(rows + stride));
      for (int i = 0; i < 4; i++) acc[r][i] = vmmlaq_s32(acc[r][i], both, w[i]);
    }
  }
  for (int r = 0; r < R / 2; r++)
    for (int half = 0; half < 2; half++) {
      int32x4_t left = acc[r][2 * half], right = acc[r][2 * half + 1];
      sums[2 * r][half] += vi(vcombine_s32(vget_low_s32(left), vget_low_s32(right)));
      sums[2 * r + 1][half] += vi(vcombine_s32(vget_high_s32(left), vget_high_s32(right)));
    }
  return k;
}
#endif

// sums[r] += Σ of the products of `words` words of row r and the panel, whose vectors lie `pitch`
// words apart. `add` adds the product of two words.
template <int R, class V, class T, class Add>
inline void tall(const T* x, int64_t stride, const void* panel, int64_t pitch, int64_t words,
                 V (*sums)[2], Add add) {
  const int32_t* row = static_cast<const int32_t*>(panel);
  int64_t k = 0;
#if EDGE_ISA_I8MM
  if constexpr (std::is_same_v<T, int8_t> && R % 2 == 0) {
    k = tall_by_twos<R>(x, stride, row, pitch, words, sums);
    row += k * pitch;
  }
#endif
  V acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = sums[r][0], acc[r][1] = sums[r][1];
  for (; k < words; k++, row += pitch) {
    V left = load_as<V>(row), right = load_as<V>(row + W);
    for (int r = 0; r < R; r++) {
      auto lanes = add.spread(x + r * stride + k * Add::COLUMNS);
      acc[r][0] = add(acc[r][0], left, lanes);
      acc[r][1] = add(acc[r][1], right, lanes);
    }
  }
  for (int r = 0; r < R; r++) sums[r][0] = acc[r][0], sums[r][1] = acc[r][1];
}

// Calls f(RowCount<R>(), m) for tiles of R rows, at most MOST.
template <int R> struct RowCount {
  static constexpr int rows = R;
};
template <int MOST = TALL, class F> inline void tiles(int64_t rows, F f) {
  int64_t m = 0;
  for (; m + MOST <= rows; m += MOST) f(RowCount<MOST>(), m);
  for (; m + 4 <= rows; m += 4) f(RowCount<4>(), m);
  for (; m < rows; m++) f(RowCount<1>(), m);
}

// -- interleaved weights: see Interleaved in kernel.h -----------------------------------------------

// Word `word` of each of the `count` rows of a group that begins at `group`.
template <class T> EDGE_INLINE vf beside(const T* group, int64_t word, int count) {
  return load_some(group + word * count, count);
}
EDGE_INLINE vi words_beside(const void* group, int64_t word, int count) {
  return vi(beside(static_cast<const float*>(group), word, count));
}

// Calls put(word, half, lanes) as `turn_rows` does, but with zeros after the last row.
template <class F> inline void each_beside(const void* base, int64_t stride, int64_t first,
                                           int64_t last, int64_t words, F put) {
  for (int half = 0; half < 2; half++) {
    int64_t n = first + half * W;
    int count = (int)std::min<int64_t>(W, std::max<int64_t>(0, last - n));
    const char* group = static_cast<const char*>(base) + n * stride;
    for (int64_t word = 0; word < words; word++)
      put(word, half, count ? words_beside(group, word, count) : vi{});
  }
}

// Copies row n of an interleaved table of N rows to `out`.
inline void row_beside(const void* base, int64_t N, int64_t n, int64_t words, int word, void* out) {
  int64_t start = n / W * W, count = std::min<int64_t>(W, N - start);
  const char* from = static_cast<const char*>(base) + (start * words + n - start) * word;
  for (int64_t i = 0; i < words; i++, from += count * word)
    std::memcpy(static_cast<char*>(out) + i * word, from, size_t(word));
}

struct AddFloats {
  static constexpr int COLUMNS = 1;  // of a word
  EDGE_INLINE vf spread(const float* x) const { return splat(*x); }
  EDGE_INLINE vf operator()(vf sum, vf w, vf x) const { return sum + w * x; }
};

// Products of four bytes, if the instruction set has them: `x` as `columns_of` returns it.
#if EDGE_WIDENS
struct AddBytes {
  static constexpr bool here = true;
  static constexpr int COLUMNS = 4;
  static constexpr int ROWS = 4;  // of a tile: halves of words take registers
  static constexpr bool NARROW = false;
  struct Halves {
    vi even, odd;
  };
  EDGE_INLINE Halves spread(const int16_t* x) const {
    int32_t first, second;  // two copies, or both would pass through another register
    std::memcpy(&first, x, 4);
    std::memcpy(&second, x + 2, 4);
    return {vi{} + first, vi{} + second};
  }
  EDGE_INLINE vi operator()(vi sum, vi w, Halves x) const {
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(__m256i(w), 8), 8);
    __m256i odd = _mm256_srai_epi16(__m256i(w), 8);
    return sum + (vi(_mm256_madd_epi16(even, __m256i(x.even))) +
                  vi(_mm256_madd_epi16(odd, __m256i(x.odd))));
  }
};
// Widens rows of K columns, a multiple of 4: of each word first the columns 0 and 2, then 1 and 3.
inline const int16_t* columns_of(const int8_t* x, int64_t rows, int64_t K, Pool& pool) {
  int16_t* out = pool.scratch<int16_t>(5, rows * K);
  pool.each(rows, items_a_piece(K), [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) {
      const int8_t* from = x + m * K;
      int16_t* to = out + m * K;
      int64_t k = 0;
      for (; k + 16 <= K; k += 16) {
        __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(from + k)));
        wide = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(wide, 0xd8), 0xd8);
        _mm256_storeu_si256((__m256i*)(to + k), wide);
      }
      for (; k < K; k += 4)
        to[k] = from[k], to[k + 1] = from[k + 2], to[k + 2] = from[k + 1], to[k + 3] = from[k + 3];
    }
  });
  return out;
}

// Products of four nibbles with four bytes, summed in pairs of 16 bits.
struct AddNibbles {
  static constexpr int COLUMNS = 4, ROWS = TALL;
  static constexpr bool NARROW = true;
  static constexpr int64_t MOST = 8;  // words whose products of 15 and -128 a sum holds
  EDGE_INLINE vi spread(const int8_t* x) const {
    int32_t word;
    std::memcpy(&word, x, 4);
    return vi{} + word;
  }
  EDGE_INLINE vi operator()(vi sum, vi w, vi x) const {
    return vi(_mm256_add_epi16(__m256i(sum), _mm256_maddubs_epi16(__m256i(w), __m256i(x))));
  }
  EDGE_INLINE vi widen(vi sum) const {
    return vi(_mm256_madd_epi16(__m256i(sum), _mm256_set1_epi16(1)));
  }
};
#else
struct AddBytes {
  static constexpr int COLUMNS = 4, ROWS = TALL;
  static constexpr bool NARROW = false;  // `widen` makes sums of a narrow type whole
  EDGE_INLINE vi spread(const int8_t* x) const {
    int32_t word;
    std::memcpy(&word, x, 4);
    return vi{} + word;
  }
#if EDGE_ISA_AVX512
  static constexpr bool here = true;
  EDGE_INLINE vi operator()(vi sum, vi w, vi x) const { return dot(sum, __m512i(w), __m512i(x)); }
#elif EDGE_ISA_AVXVNNI
  static constexpr bool here = true;
  EDGE_INLINE vi operator()(vi sum, vi w, vi x) const { return dot(sum, __m256i(w), __m256i(x)); }
#elif EDGE_ISA_DOTPROD
  static constexpr bool here = true;
  EDGE_INLINE vi operator()(vi sum, vi w, vi x) const { return dot(sum, int8x16_t(w), int8x16_t(x)); }
#else
  static constexpr bool here = false;
  EDGE_INLINE vi operator()(vi sum, vi, vi) const { return sum; }
#endif
};
inline const int8_t* columns_of(const int8_t* x, int64_t, int64_t, Pool&) { return x; }
using AddNibbles = AddBytes;
#endif
// Up to this many rows are multiplied as a single row is, so drafts are verified bit for bit.
constexpr int64_t FEW = 16;

// Masks that flip u8 weights with zero point 128, and s8 weights, to the bytes that `dot` takes.
constexpr int32_t FLIP_UNSIGNED = BIASED ? 0 : int32_t(0x80808080);
constexpr int32_t FLIP_SIGNED = BIASED ? int32_t(0x80808080) : 0;

// Calls f(half, n, count) for the vectors of a panel of outputs n ... end.
template <class F> inline void each_half(int64_t n, int64_t end, F f) {
  for (int half = 0; half < 2; half++)
    if (int64_t at = n + half * W; at < end) f(half, at, (int)std::min<int64_t>(W, end - at));
}

constexpr int64_t CACHE_LINE = 64;

// Prefetches into L2: L1 tracks half as many outstanding lines.
inline void fetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch((const char*)from + i, 0, 2);
}

constexpr int64_t AHEAD = 24 << 10;

#if EDGE_ISA_AVX512
// Calls f(word, some, vectors) for every W words of rows first ... last, at most W, `stride` bytes
// apart. A vector has words of one row or, if TURNED, one word of all rows, with zeros after the
// last word. Prefetches in memory order, because rows side by side are not read in that order.
template <bool TURNED, class F>
inline void each_words(const void* base, int64_t stride, int64_t first, int64_t last, F f) {
  const int64_t words = stride / 4;
  const char* start = static_cast<const char*>(base) + first * stride;
  for (int64_t word = 0; word < words; word += W) {
    int some = (int)std::min<int64_t>(W, words - word);
    vi w[W];
    fetch(start + AHEAD + 4 * W * word, 4 * W * W);
    for (int64_t i = 0; i < W; i++) {
      const char* row = start + std::min(i, last - first - 1) * stride + 4 * word;
      w[i] = vi(load_some(reinterpret_cast<const float*>(row), some));
    }
    if (TURNED) transpose(w);
    f(word, some, w);
  }
}

// Sums every 4 lanes of W vectors: lane j of v[i] becomes the sum of lanes 4·i ... 4·i + 3 of v[j].
EDGE_INLINE void sums_of_fours(vi* v) {
  __m512i t[4], u[4];
  for (int i = 0; i < 4; i++) {
    __m512i a = __m512i(v[4 * i]), b = __m512i(v[4 * i + 1]), c = __m512i(v[4 * i + 2]),
            d = __m512i(v[4 * i + 3]);
    a = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    c = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    t[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c));
  }
  for (int i = 0; i < 4; i += 2) {
    u[i] = _mm512_shuffle_i32x4(t[i], t[i + 1], 0x88);
    u[i + 1] = _mm512_shuffle_i32x4(t[i], t[i + 1], 0xdd);
  }
  for (int i = 0; i < 2; i++) {
    v[i] = vi(_mm512_shuffle_i32x4(u[i], u[i + 2], 0x88));
    v[i + 2] = vi(_mm512_shuffle_i32x4(u[i], u[i + 2], 0xdd));
  }
}

// Returns `sum` plus the products of COUNT words of each output and of a row of x.
template <int COUNT> EDGE_INLINE vi dot_words(vi sum, const vi* w, const int8_t* x) {
  AddBytes add;
  vi odd{};  // a second chain, to hide the latency of additions
  for (int i = 0; i < COUNT; i += 2) {
    sum = add(sum, w[i], add.spread(x + 4 * i));
    odd = add(odd, w[i + 1], add.spread(x + 4 * i + 4));
  }
  return sum + odd;
}
#endif

// Most rows of a tile of few rows. A group of weights stays in L1 between tiles.
constexpr int FEW_AT_ONCE = REGISTERS / 4;

// Calls f(RowCount<R>(), m) for few rows, R at a time.
template <class F> inline void few_rows(int64_t rows, F f) {
  int64_t m = 0;
  for (; m + FEW_AT_ONCE <= rows; m += FEW_AT_ONCE) f(RowCount<FEW_AT_ONCE>(), m);
  if (FEW_AT_ONCE > 4 && rows - m >= 4) f(RowCount<4>(), m), m += 4;
  if (rows - m >= 2) f(RowCount<2>(), m), m += 2;
  if (rows > m) f(RowCount<1>(), m);
}
// Copies `count` values of row m as `few_rows` takes them: a tile of R rows is [count, R], at the
// place of its first row, so that one address serves them all.
template <class T>
inline void put_beside(const void* row, int64_t count, int64_t rows, int64_t m, T* out) {
  int64_t first = 0, of_tile = FEW_AT_ONCE;
  for (;; first += of_tile) {
    while (of_tile > rows - first) of_tile /= 2;
    if (m < first + of_tile) break;
  }
  T* to = out + first * count + (m - first);
  const char* from = static_cast<const char*>(row);  // words of int8 rows need not be aligned
  for (int64_t i = 0; i < count; i++) std::memcpy(to + i * of_tile, from + i * sizeof(T), sizeof(T));
}

// sums[r] += Σ of the products of `words` words of a group and row r of a tile. take(words, x, sums)
// unpacks words and adds their products.
template <int R, int BITS, class T, class Take>
EDGE_INLINE void add_group(const char* group, int64_t words, int count, const T* x, vi* sums,
                           Take take) {
  // Several sums of a row hide the latency of additions. Blocks of nibbles overlap without.
  constexpr int CHAINS = WIDENS ? 1 : R < 4 ? 4 / R : R == 4 && BITS == 8 ? 2 : 1;
  vi acc[CHAINS][R] = {};
  for (int r = 0; r < R; r++) acc[0][r] = sums[r];
  auto all = [&](auto load) {
    int64_t k = 0;
    for (; k + CHAINS <= words; k += CHAINS)
      for (int c = 0; c < CHAINS; c++) {
        __builtin_prefetch(group + (k + c) * int64_t(sizeof(vi)) + AHEAD, 0, 2);
        take(load(k + c), x + 4 * R * (k + c), acc[c]);
      }
    for (; k < words; k++) take(load(k), x + 4 * R * k, acc[0]);
  };
  if (count == W)
    all([&](int64_t k) { return load_as<vi>(group + k * int64_t(sizeof(vi))); });
  else
    all([&](int64_t k) { return words_beside(group, k, count); });
  for (int r = 0; r < R; r++) {
    sums[r] = acc[0][r];
    for (int c = 1; c < CHAINS; c++) sums[r] += acc[c][r];
  }
}

// Calls f(panel, n, end) for panels of outputs n ... end, filled by fill(panel, n, end).
template <class Fill, class F>
inline void filled_panels(int64_t N, int64_t words, Pool& pool, Fill fill, F f) {
  pool.each((N + WIDE - 1) / WIDE, 1, [&](int64_t first, int64_t last) {
    int32_t* panel = static_cast<int32_t*>(thread_bytes(1, 4 * words * WIDE));
    for (int64_t each = first; each < last; each++) {
      int64_t n = each * WIDE, end = std::min(n + WIDE, N);
      fill(panel, n, end);
      f(panel, n, end);
    }
  });
}
// The same for words of rows `stride` bytes apart, XOR `flip`.
template <class F> inline void panels(const void* weight, int64_t N, int64_t stride, int64_t words,
                                      int32_t flip, Pool& pool, bool interleaved, F f) {
  auto fill = [&](int32_t* panel, int64_t n, int64_t end) {
    auto put = [&](int64_t word, int half, vi lanes) {
      store_as(panel + word * WIDE + half * W, lanes ^ flip);
    };
    if (interleaved)
      each_beside(weight, stride, n, end, words, put);
    else
      turn_rows(weight, stride, n, end, words, put);
  };
  filled_panels(N, words, pool, fill, f);
}
