// Rows times weights of 8 or 4 bits in blocks of columns that share a scale: the C++ counterpart of
// triton_linear_bits.py and triton_linear_int4.py.
//
// Rows are int8, or are rounded to int8 in the same blocks, scaled by their largest absolute value.
// The sum of a block is exact. In packed rows of 4 bits, low nibbles hold the columns 0, 2, 4 ...
// and high nibbles the others. Rows of x are split likewise.

inline int64_t bits_of(const Variant& v) {
  int64_t bits = v.integer("BITS");
  if (bits != 4 && bits != 8) refuse("BITS must be 4 or 8");
  return bits;
}

// Reorders each run of columns: first its columns 0, 2, 4 ..., then 1, 3, 5 ...
inline void apart(const int8_t* x, int64_t K, int64_t run, int8_t* out) {
  for (int64_t start = 0; start < K; start += run)
    for (int64_t k = 0; k < run / 2; k++) {
      out[start + k] = x[start + 2 * k];
      out[start + run / 2 + k] = x[start + 2 * k + 1];
    }
}

// Rounds a block of floats to int8. Returns its scale: NaN if a value is NaN or infinite, so that
// the outputs are NaN too.
inline float round_block(const float* x, int64_t count, int8_t* out) {
  vf top{}, spoiled{};
  blocks(count, [&](int64_t i, int n) {
    vf v = load_some(x + i, n);
    top = larger(absolute(v), top);
    spoiled += v * 0.f;
  });
  float step = largest(top) / 127.f;
  if (step == 0.f) step = 1.f;
  blocks(count, [&](int64_t i, int n) {
    store_some(out + i, round8(load_some(x + i, n) / splat(step)), n);
  });
  return step + sum(spoiled);
}

// The scales of blocks, [N, blocks], and their minimums or null.
template <class S> struct Units {
  const S *scales, *minimums;
};

// The layout and the products of block-quantized rows. A vector of packed weights may hold several
// blocks, whose sums then stay in separate lanes.
struct Blocked {
  int64_t N, K, bits, shared;
  bool minimum;  // quants are offsets from a minimum
  int64_t vector, block, step, count, groups;  // first three in bytes; blocks a step; steps a row

  Blocked(const Variant& v, int64_t bits_, bool minimum_ = false)
      : N(v.integer("N")), K(v.integer("K")), bits(bits_), shared(v.within("SHARED", 8 / bits_)),
        minimum(minimum_) {
    if (K % shared || shared * bits % 8) refuse("SHARED must divide K into blocks of whole bytes");
    if (minimum && bits != 4) refuse("BITS must be 4 with minimums");
    vector = bits == 8 ? BYTES : SMALL;
    block = step = shared * bits / 8;
    count = 1;
    if (vector % block == 0 && block % (vector / W) == 0) {
      count = vector / block;
      step = vector;
    }
    groups = (bytes() + step - 1) / step;
  }
  int64_t bytes() const { return K * bits / 8; }
  int64_t blocks_a_row() const { return K / shared; }
  int64_t padded() const { return (blocks_a_row() + W - 1) / W * W; }
  // The zero point to subtract from sums: of nibbles, or of bytes that are multiplied unsigned.
  int32_t zero() const { return minimum ? 0 : bits == 4 ? 8 : BIASED ? 128 : 0; }
  // Whether outputs lie side by side: in panels, or as weights that are interleaved or turned.
  bool turned(int64_t rows, bool interleaved) const {
    if (rows > FEW) return AddBytes::here && shared % (32 / bits) == 0;
    return words() > 0 && (TURNS || interleaved);
  }
  // Words of a block that few rows take at once; 0 if they are summed lane by lane.
  int64_t words() const {
    if (!BESIDE || block % 16) return 0;
    int64_t of_block = block / 4;
    if (bits == 4) return 4;  // low and high nibbles of more words would not fit in registers
    return of_block % W == 0 ? W : W % of_block == 0 ? of_block : 0;
  }

  // Rows of x as int8, and their scales for blocks of a panel or for lanes: see `lanes`. For few
  // rows and interleaved weights, all of them as `put_beside` puts them.
  struct Prepared {
    int8_t* q;       // [rows, K], padded by a vector
    float* worth;    // [rows, blocks], or [rows, groups, W]
    int32_t* start;  // initial sums, which subtract the weights' zero point
    float* sums;     // [rows, padded]: sum of x in each block, for minimums
  };
  template <class Round>
  Prepared prepare(int64_t rows, bool interleaved, Pool& pool, Round round) const {
    bool panels = turned(rows, interleaved), beside = panels && interleaved && rows <= FEW;
    int64_t each = panels ? blocks_a_row() : groups * W;
    Prepared out{pool.scratch<int8_t>(2, rows * K + BYTES), pool.scratch<float>(1, rows * each),
                 pool.scratch<int32_t>(0, rows * each),
                 minimum ? pool.scratch<float>(3, rows * padded()) : nullptr};
    pool.each(rows, items_a_piece(8 * K), [&](int64_t first, int64_t last) {
      int64_t of_blocks = padded() * int64_t(sizeof(float)), aligned = (K + 3) / 4 * 4;
      char* room = static_cast<char*>(thread_bytes(1, 2 * aligned + 3 * of_blocks + 64));
      float* worth = reinterpret_cast<float*>(room);
      int32_t* start = reinterpret_cast<int32_t*>(room + of_blocks);
      float* sums = reinterpret_cast<float*>(room + 2 * of_blocks);
      int8_t* whole = reinterpret_cast<int8_t*>(room + 3 * of_blocks);
      int8_t* split = whole + aligned;
      for (int64_t m = first; m < last; m++) {
        round(m, whole, worth);
        for (int64_t b = 0; b < blocks_a_row(); b++) {
          int32_t total = 0;
          for (int64_t k = 0; k < shared; k++) total += whole[b * shared + k];
          start[b] = -zero() * total;
          sums[b] = worth[b] * float(total);
        }
        for (int64_t b = blocks_a_row(); b < padded(); b++) sums[b] = 0.f;
        if (bits == 4) apart(whole, K, rows > FEW && panels ? shared : K, split);
        const int8_t* q = bits == 4 ? split : whole;
        auto put = [&](auto* row, int64_t count, auto* to) {
          if (beside) return put_beside(row, count, rows, m, to);
          std::memcpy(to + m * count, row, size_t(count) * sizeof *row);
        };
        if (beside)
          put(reinterpret_cast<const int32_t*>(q), K / 4, reinterpret_cast<int32_t*>(out.q));
        else
          std::memcpy(out.q + m * K, q, size_t(K));
        if (minimum) put(sums, padded(), out.sums);
        if (!panels) {
          lanes(worth, start, out.worth + m * each, out.start + m * each);
          continue;
        }
        put(worth, each, out.worth);
        put(start, each, out.start);
      }
    });
    return out;
  }
  // Copies a block's scale to its lanes. Only the first of them gets the block's initial sum.
  void lanes(const float* worth, const int32_t* start, float* to, int32_t* begin) const {
    for (int64_t i = 0; i < groups * W; i++) {
      int64_t of = W / count, b = i / of;
      bool here = b < blocks_a_row();
      to[i] = here ? worth[b] : 0.f;
      begin[i] = here && i % of == 0 ? start[b] : 0;
    }
  }

  // Lists what to interleave: the weights, the scales of `unit` bytes, and the minimums if any.
  int interleavable(Interleaved* out, int packed, int scales, int minimums, int unit) const {
    if (!words() || !turned(FEW + 1, true)) return 0;
    out[0] = {packed, W, N, bytes() / 4, 4};
    out[1] = {scales, W, N, blocks_a_row(), unit};
    out[2] = {minimums, W, N, blocks_a_row(), unit};
    return minimums < 0 ? 2 : 3;
  }

  // Calls f(m, n, sums, count) for all rows and columns.
  template <class S>
  void multiply(const Prepared& x, const uint8_t* packed, Units<S> units, int64_t rows, Pool& pool,
                bool interleaved, Sink f) const {
    if (turned(rows, interleaved)) {
      if (rows > FEW) return by_panels(x, packed, units, rows, pool, interleaved, f);
      if (interleaved)
        return bits == 8   ? by_groups<8, false>(x, packed, units, rows, pool, f)
               : minimum ? by_groups<4, true>(x, packed, units, rows, pool, f)
                         : by_groups<4, false>(x, packed, units, rows, pool, f);
#if EDGE_ISA_AVX512
      switch (words()) {
        case 4:
          return bits == 8 ? by_words<8, 4>(x, packed, units, rows, pool, f)
                           : by_words<4, 4>(x, packed, units, rows, pool, f);
        case 8: return by_words<8, 8>(x, packed, units, rows, pool, f);
        default: return by_words<8, W>(x, packed, units, rows, pool, f);
      }
#endif
    }
    pool.each(N, columns_a_piece(bytes(), rows), [&](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; n += NR) {
        int columns = (int)std::min<int64_t>(NR, last - n);
        const uint8_t* w[NR];
        Units<S> unit[NR];
        for (int j = 0; j < NR; j++) {
          int64_t row = n + std::min(j, columns - 1);
          w[j] = packed + row * bytes();
          unit[j] = of_row(units, row);
        }
        for (int64_t m = 0; m < rows; m += MR) {
          float sums[MR][NR];
          int some = (int)std::min<int64_t>(MR, rows - m);
          Prepared from{x.q + m * K, x.worth + m * groups * W, x.start + m * groups * W,
                        minimum ? x.sums + m * padded() : nullptr};
          bits == 8 ? tile<8>(from, some, w, unit, sums) : tile<4>(from, some, w, unit, sums);
          for (int i = 0; i < some; i++) {
            vf four{};
            for (int j = 0; j < NR; j++) four[j] = sums[i][j];
            f(m + i, n, four, columns);
          }
        }
      }
    });
  }

 private:
  template <class S> Units<S> of_row(Units<S> units, int64_t n) const {
    int64_t at = n * blocks_a_row();
    return {units.scales + at, minimum ? units.minimums + at : nullptr};
  }
  template <int BITS, class S> void tile(const Prepared& x, int rows, const uint8_t* const* w,
                                         const Units<S>* unit, float (*sums)[NR]) const {
    switch (rows) {
      case 1: return tile_of<1, BITS>(x, w, unit, sums);
      case 2: return tile_of<2, BITS>(x, w, unit, sums);
      case 3: return tile_of<3, BITS>(x, w, unit, sums);
      default: return tile_of<4, BITS>(x, w, unit, sums);
    }
  }
  template <int ROWS, int BITS, class S>
  void tile_of(const Prepared& x, const uint8_t* const* w, const Units<S>* unit,
               float (*sums)[NR]) const {
    const SpreadLanes spread(count);
    const int64_t whole = step % vector == 0 ? bytes() / step : 0;  // steps that are whole vectors
    vf acc[ROWS][NR];
    for (int j = 0; j < NR; j++) {
      vf of_row[ROWS] = {};
      if (minimum) add_minimums(x, unit[j].minimums, of_row);
      const S* scales = unit[j].scales;
      int64_t g = 0;
      if (step == (BITS == 8 ? BYTES : SMALL))
        g = minimum ? by_vectors<BITS, true>(x, w[j], scales, whole, spread, of_row)
                    : by_vectors<BITS, false>(x, w[j], scales, whole, spread, of_row);
      for (; g < whole; g++) {
        vi total[ROWS];
        begin(x, g, total);
        sum_up<BITS>(x, w[j], g * step, g * step + step, total);
        scale(x, g, spread(scales + g * count), total, of_row);
      }
      for (; g < groups; g++) {
        vi total[ROWS];
        begin(x, g, total);
        int64_t end = std::min(g * step + step, bytes());
        int64_t k = sum_up<BITS>(x, w[j], g * step, end, total);
        if (k < end) {
          if constexpr (BITS == 8)
            add(x, k, load_unsigned_rest(w[j] + k, end - k), total);
          else
            add_nibbles(x, k, load_small_rest(w[j] + k, end - k), total);
        }
        vf worth = spread.some(scales + g * count, blocks_a_row() - g * count);
        scale(x, g, worth, total, of_row);
      }
      for (int m = 0; m < ROWS; m++) acc[m][j] = of_row[m];
    }
    for (int m = 0; m < ROWS; m++) sums4(acc[m], sums[m]);
  }
  // Sums steps of one vector each: the addresses of all rows stay in registers, and sums start from
  // 0 with minimums. Returns the number of steps.
  template <int BITS, bool MINIMUM, int ROWS, class S>
  EDGE_INLINE int64_t by_vectors(const Prepared& x, const uint8_t* w, const S* scales,
                                 int64_t steps, const SpreadLanes& spread,
                                 vf (&of_row)[ROWS]) const {
    const int64_t half = K / 2;
    const int8_t* q[ROWS];
    const float* worth[ROWS];
    const int32_t* start[ROWS];
    for (int m = 0; m < ROWS; m++) {
      q[m] = x.q + m * K;
      worth[m] = x.worth + m * groups * W;
      start[m] = x.start + m * groups * W;
    }
    for (int64_t g = 0; g < steps; g++, scales += count) {
      int64_t k = g * (BITS == 8 ? BYTES : SMALL);
      vi total[ROWS];
      for (int m = 0; m < ROWS; m++) total[m] = MINIMUM ? vi{} : load_as<vi>(start[m] + g * W);
      if constexpr (BITS == 8) {
        Packed whole = load_unsigned(w + k);
        for (int m = 0; m < ROWS; m++) total[m] = dot(total[m], whole, load_row(q[m] + k));
      } else {
        Small nibbles = load_small(w + k), low = low_nibbles(nibbles), high = high_nibbles(nibbles);
        for (int m = 0; m < ROWS; m++)
          total[m] = dot_small(dot_small(total[m], low, load_small(q[m] + k)), high,
                               load_small(q[m] + half + k));
      }
      vf of_weights = spread(scales);
      for (int m = 0; m < ROWS; m++)
        of_row[m] += __builtin_convertvector(total[m], vf) *
                     (of_weights * load(worth[m] + g * W));
    }
    return steps;
  }
  template <int ROWS, class S>
  EDGE_INLINE void add_minimums(const Prepared& x, const S* minimums, vf (&of_row)[ROWS]) const {
    blocks(blocks_a_row(), [&](int64_t b, int n) {
      vf least = load_some(minimums + b, n);
      for (int m = 0; m < ROWS; m++) of_row[m] += least * load(x.sums + m * padded() + b);
    });
  }
  template <int ROWS>
  EDGE_INLINE void begin(const Prepared& x, int64_t g, vi (&total)[ROWS]) const {
    for (int m = 0; m < ROWS; m++) total[m] = load_as<vi>(x.start + (m * groups + g) * W);
  }
  template <int ROWS> EDGE_INLINE void scale(const Prepared& x, int64_t g, vf worth,
                                             const vi (&total)[ROWS], vf (&of_row)[ROWS]) const {
    for (int m = 0; m < ROWS; m++)
      of_row[m] += __builtin_convertvector(total[m], vf) *
                   (worth * load(x.worth + (m * groups + g) * W));
  }
  // Adds the whole vectors of bytes k ... end of a weight row. Returns where they end.
  template <int BITS, int ROWS>
  EDGE_INLINE int64_t sum_up(const Prepared& x, const uint8_t* w, int64_t k, int64_t end,
                             vi (&total)[ROWS]) const {
    constexpr int64_t VECTOR = BITS == 8 ? BYTES : SMALL;
    for (; k + VECTOR <= end; k += VECTOR) {
      if constexpr (BITS == 8)
        add(x, k, load_unsigned(w + k), total);
      else
        add_nibbles(x, k, load_small(w + k), total);
    }
    return k;
  }
  // Adds the products of all rows and a vector of weights, from byte k of its row on.
  template <int ROWS>
  EDGE_INLINE void add(const Prepared& x, int64_t k, Packed w, vi (&total)[ROWS]) const {
    for (int m = 0; m < ROWS; m++) total[m] = dot(total[m], w, load_row(x.q + m * K + k));
  }
  template <int ROWS>
  EDGE_INLINE void add_nibbles(const Prepared& x, int64_t k, Small w, vi (&total)[ROWS]) const {
    Small low = low_nibbles(w), high = high_nibbles(w);
    for (int m = 0; m < ROWS; m++) {
      const int8_t* q = x.q + m * K + k;
      total[m] = dot_small(dot_small(total[m], low, load_small(q)), high, load_small(q + K / 2));
    }
  }

  template <class S>
  void by_panels(const Prepared& x, const uint8_t* packed, Units<S> units, int64_t rows, Pool& pool,
                 bool interleaved, Sink f) const {
    if (bits == 8)
      by_panels<AddBytes>(x, columns_of(x.q, rows, K, pool), packed, units, rows, pool, interleaved,
                          f);
    else
      by_panels<AddNibbles>(x, x.q, packed, units, rows, pool, interleaved, f);
  }
  template <class Add, class T, class S>
  void by_panels(const Prepared& x, const T* q, const uint8_t* packed, Units<S> units, int64_t rows,
                 Pool& pool, bool interleaved, Sink f) const {
    int64_t of_row = blocks_a_row(), words = shared / 4;  // words per block
    pool.each((N + WIDE - 1) / WIDE, 1, [&](int64_t first, int64_t last) {
      int64_t of_panel = K * WIDE, of_scales = of_row * WIDE * int64_t(sizeof(float));
      char* room = static_cast<char*>(thread_bytes(1, of_panel + (1 + minimum) * of_scales));
      int32_t* panel = reinterpret_cast<int32_t*>(room);
      float* scales = reinterpret_cast<float*>(room + of_panel);
      float* minimums = reinterpret_cast<float*>(room + of_panel + of_scales);
      for (int64_t each = first; each < last; each++) {
        int64_t n = each * WIDE, end = std::min(n + WIDE, N);
        fill(packed, n, end, panel, interleaved);
        turn_units(units.scales, n, end, WIDE, scales, interleaved);
        if (minimum) turn_units(units.minimums, n, end, WIDE, minimums, interleaved);
#if EDGE_TILES
        // 4-bit blocks are shorter than a tile and gain nothing
        if (pool.tiles && bits == 8 && tiles_take(words)) {
          by_tiles(x, panel, scales, n, end, rows, f);
          continue;
        }
#endif
        tiles<Add::ROWS>(rows, [&](auto tile, int64_t m) {
          constexpr int R = decltype(tile)::rows;
          vf acc[R][2] = {};
          for (int64_t b = 0; b < of_row; b++) {
            vi total[R][2];
            for (int r = 0; r < R; r++)
              total[r][0] = total[r][1] = vi{} + x.start[(m + r) * of_row + b];
            sum_block<R, Add>(q + m * K + b * shared, panel + b * words * WIDE, words, total);
            vf left = load(scales + b * WIDE), right = load(scales + b * WIDE + W);
            for (int r = 0; r < R; r++) {
              vf worth = splat(x.worth[(m + r) * of_row + b]);
              acc[r][0] += __builtin_convertvector(total[r][0], vf) * (left * worth);
              acc[r][1] += __builtin_convertvector(total[r][1], vf) * (right * worth);
            }
          }
          if (minimum) {  // a separate sum, as for few rows
            vf least[R][2] = {};
            tall<R>(x.sums + m * padded(), padded(), minimums, WIDE, of_row, least, AddFloats());
            for (int r = 0; r < R; r++) acc[r][0] += least[r][0], acc[r][1] += least[r][1];
          }
          for (int r = 0; r < R; r++)
            each_half(n, end, [&](int half, int64_t at, int count) {
              f(m + r, at, acc[r][half], count);
            });
        });
      }
    });
  }
  // Adds the products of R rows and the words of a block.
  template <int R, class Add, class T>
  EDGE_INLINE void sum_block(const T* x, const int32_t* panel, int64_t words, vi (*total)[2]) const {
    if constexpr (!Add::NARROW) {
      tall<R>(x, K, panel, WIDE, words, total, Add());
    } else {
      for (int64_t word = 0; word < words; word += Add::MOST) {
        vi part[R][2] = {};
        tall<R>(x + 4 * word, K, panel + word * WIDE, WIDE, std::min(words - word, Add::MOST), part,
                Add());
        for (int r = 0; r < R; r++)
          for (int half = 0; half < 2; half++) total[r][half] += Add().widen(part[r][half]);
      }
    }
  }
#if EDGE_TILES
  // Multiplies one panel by AMX. Block sums are scaled as in `by_panels`, so the bits are equal.
  void by_tiles(const Prepared& x, const int32_t* panel, const float* scales, int64_t n, int64_t end,
                int64_t rows, Sink f) const {
    const int64_t of_row = blocks_a_row(), words = shared / 4;
    alignas(64) int32_t sums[2 * TILE_ROWS * WIDE];
    each_tile(rows, [&](int64_t m, int64_t some) {
      vf acc[2 * TILE_ROWS][2] = {};
      for (int64_t b = 0; b < of_row; b++) {
        tile_sums(x.q + m * K + b * shared, K, some, panel + b * words * WIDE, words, sums);
        vf left = load(scales + b * WIDE), right = load(scales + b * WIDE + W);
        for (int64_t r = 0; r < some; r++) {
          vf worth = splat(x.worth[(m + r) * of_row + b]);
          vi start = vi{} + x.start[(m + r) * of_row + b];
          vi one = load_as<vi>(sums + r * WIDE) + start;
          vi other = load_as<vi>(sums + r * WIDE + W) + start;
          acc[r][0] += __builtin_convertvector(one, vf) * (left * worth);
          acc[r][1] += __builtin_convertvector(other, vf) * (right * worth);
        }
      }
      for (int64_t r = 0; r < some; r++)
        each_half(n, end, [&](int half, int64_t at, int count) {
          f(m + r, at, acc[r][half], count);
        });
    });
  }
#endif
  // Transposes the scales or minimums of `wide` outputs: side by side, block after block.
  template <class S>
  void turn_units(const S* units, int64_t n, int64_t end, int64_t wide, float* out,
                  bool interleaved = false) const {
    for (int64_t j = 0; interleaved && j < wide; j += W) {
      int count = (int)std::min<int64_t>(W, std::max<int64_t>(0, end - n - j));
      const S* group = units + (n + j) * blocks_a_row();
      for (int64_t b = 0; b < blocks_a_row(); b++)
        store(out + b * wide + j, count ? beside(group, b, count) : vf{});
    }
    for (int64_t j = 0; !interleaved && j < wide; j += W)
      blocks(blocks_a_row(), [&](int64_t b, int count) {
        vf v[W];
        for (int i = 0; i < W; i++)
          v[i] = load_some(units + std::min(n + j + i, end - 1) * blocks_a_row() + b, count);
        transpose(v);
        for (int i = 0; i < count; i++) store(out + (b + i) * wide + j, v[i]);
      });
  }
#if EDGE_ISA_AVX512
  template <int BITS, int STEP, class S>
  void by_words(const Prepared& x, const uint8_t* packed, Units<S> units, int64_t rows, Pool& pool,
                Sink f) const {
    BITS == 4 && rows == 1 ? by_words<BITS, STEP, true>(x, packed, units, rows, pool, f)
              : by_words<BITS, STEP, false>(x, packed, units, rows, pool, f);
  }
  // Few rows: W outputs at a time. Outputs lie side by side, so a block is scaled once, not in
  // every vector. Weights are transposed in registers. With one row and 4 bits, the sums are
  // transposed instead: they are exact, so the bits are the same.
  template <int BITS, int STEP, bool ONE, class S>
  void by_words(const Prepared& x, const uint8_t* packed, Units<S> units, int64_t rows, Pool& pool,
                Sink f) const {
    const int64_t of_row = blocks_a_row(), of_block = block / 4, of_units = of_row * W;
    pool.each((N + W - 1) / W, std::max<int64_t>(1, columns_a_piece(bytes(), rows) / W),
              [&](int64_t first, int64_t last) {
      int64_t nbytes = (1 + minimum) * of_units * int64_t(sizeof(float));
      float* scales = static_cast<float*>(thread_bytes(1, nbytes));
      for (int64_t n = first * W, end; n < std::min(last * W, N); n = end) {
        end = std::min<int64_t>(n + W, N);
        turn_units(units.scales, n, end, W, scales);
        fetch(units.scales + end * of_row, of_units * int64_t(sizeof(S)));
        if (minimum) {
          turn_units(units.minimums, n, end, W, scales + of_units);
          fetch(units.minimums + end * of_row, of_units * int64_t(sizeof(S)));
        }
        vf acc[FEW];
        vi totals[FEW];
        for (int64_t m = 0; m < rows; m++) acc[m] = vf{};
        // f(m, begun) adds words `word` to `word` + STEP to the sum of row m
        auto add = [&](int64_t word, auto f) {
          int64_t b = word / of_block, within = word % of_block;
          vf worth = load(scales + b * W);
          for (int64_t m = 0; m < (ONE ? 1 : rows); m++) {
            vi total = f(m, within ? totals[m] : vi{} + x.start[m * of_row + b]);
            if (within + STEP < of_block)
              totals[m] = total;
            else
              acc[m] += __builtin_convertvector(total, vf) * (worth * x.worth[m * of_row + b]);
          }
        };
        if (BITS == 4 && ONE)
          each_words<false>(packed, bytes(), n, end, [&](int64_t word, int some, vi* w) {
            for (int i = 0; i < W; i++) w[i] = nibbles_times(w[i], x.q + 4 * word);
            sums_of_fours(w);
            for (int at = 0; at < some; at += STEP)
              add(word + at, [&](int64_t, vi begun) { return begun + w[at / STEP]; });
          });
        else
          each_words<true>(packed, bytes(), n, end, [&](int64_t word, int some, const vi* w) {
            for (int at = 0; at < some; at += STEP) {
              vi low[STEP], high[STEP];
              for (int i = 0; BITS == 4 && i < STEP; i++) {
                low[i] = w[at + i] & 0x0f0f0f0f;
                high[i] = w[at + i] >> 4 & 0x0f0f0f0f;
              }
              add(word + at, [&](int64_t m, vi begun) {
                const int8_t* q = x.q + m * K + 4 * (word + at);
                if (BITS == 8) return dot_words<STEP>(begun, w + at, q);
                return dot_words<STEP>(dot_words<STEP>(begun, low, q), high, q + K / 2);
              });
            }
          });
        for (int64_t m = 0; m < rows; m++) {
          vf least{};
          if (minimum)
            for (int64_t b = 0; b < of_row; b++)
              least += load(scales + of_units + b * W) * x.sums[m * padded() + b];
          f(m, n, minimum ? acc[m] + least : acc[m], int(end - n));
        }
      }
    });
  }
  // Products of a vector of words of one output and a row of x.
  EDGE_INLINE vi nibbles_times(vi words, const int8_t* q) const {
    AddBytes add;
    vi low = add(vi{}, words & 0x0f0f0f0f, load_as<vi>(q));
    return add(low, words >> 4 & 0x0f0f0f0f, load_as<vi>(q + K / 2));
  }
#endif
  // Few rows and interleaved weights, which are read in memory order: W outputs at a time.
  template <int BITS, bool MINIMUM, class S>
  void by_groups(const Prepared& x, const uint8_t* packed, Units<S> units, int64_t rows, Pool& pool,
                 Sink f) const {
    if constexpr (BITS == 8)
      by_groups<AddBytes, 8, MINIMUM>(x, columns_of(x.q, rows, K, pool), packed, units, rows, pool,
                                      f);
    else
      by_groups<AddNibbles, 4, MINIMUM>(x, x.q, packed, units, rows, pool, f);
  }
  template <class Add, int BITS, bool MINIMUM, class T, class S>
  void by_groups(const Prepared& x, const T* rows_of_x, const uint8_t* packed, Units<S> units,
                 int64_t rows, Pool& pool, Sink f) const {
    const int64_t of_row = blocks_a_row(), of_block = block / 4, half = K / 2;
    const int64_t ahead = AHEAD / (block * BITS / 8);  // scales of the weights that are fetched
    Add add;
    pool.each((N + W - 1) / W, std::max<int64_t>(1, columns_a_piece(bytes(), rows) / W),
              [&](int64_t first, int64_t last) {
      for (int64_t n = first * W; n < std::min(last * W, N); n += W) {
        int count = (int)std::min<int64_t>(W, N - n);
        const char* group = reinterpret_cast<const char*>(packed) + n * bytes();
        const Units<S> unit = this->of_row(units, n);
        few_rows(rows, [&](auto tile, int64_t m) {
          constexpr int R = decltype(tile)::rows;
          const T* q = rows_of_x + m * K;
          const float* worths = x.worth + m * of_row;
          const int32_t* starts = x.start + m * of_row;
          vf acc[R] = {};
          for (int64_t b = 0; b < of_row; b++) {
            vi total[R];
            for (int r = 0; r < R; r++) total[r] = MINIMUM ? vi{} : vi{} + starts[b * R + r];
            auto add_words = [&](int64_t word, int64_t some,
                                 vi* sums) __attribute__((always_inline)) {
              const char* words = group + (b * of_block + word) * count * 4;
              add_group<R, BITS>(words, some, count, q + (b * block + 4 * word) * R, sums,
                                 [&](vi w, const T* from, vi* to) {
                if (BITS == 8) {
                  w ^= FLIP_UNSIGNED;
                  for (int r = 0; r < R; r++) to[r] = add(to[r], w, add.spread(from + 4 * r));
                  return;
                }
                vi low = w & 0x0f0f0f0f, high = w >> 4 & 0x0f0f0f0f;
                const T* others = from + half * R;
                for (int r = 0; r < R; r++) {
                  to[r] = add(to[r], low, add.spread(from + 4 * r));
                  to[r] = add(to[r], high, add.spread(others + 4 * r));
                }
              });
            };
            if constexpr (!Add::NARROW) {
              add_words(0, of_block, total);
            } else {
              for (int64_t word = 0; word < of_block; word += Add::MOST / 2) {
                vi part[R] = {};
                add_words(word, std::min(of_block - word, Add::MOST / 2), part);
                for (int r = 0; r < R; r++) total[r] += add.widen(part[r]);
              }
            }
            vf worth = beside(unit.scales, b, count);
            __builtin_prefetch(unit.scales + b * count + ahead, 0, 2);
            if (MINIMUM) __builtin_prefetch(unit.minimums + b * count + ahead, 0, 2);
            for (int r = 0; r < R; r++)
              acc[r] += __builtin_convertvector(total[r], vf) * (worth * worths[b * R + r]);
          }
          if (MINIMUM) {  // a loop of its own: sums of both would not stay in registers
            const float* sums = x.sums + m * padded();
            vf minimums[R] = {};
            for (int64_t b = 0; b < of_row; b++) {
              vf least = beside(unit.minimums, b, count);
              for (int r = 0; r < R; r++) minimums[r] += least * sums[b * R + r];
            }
            for (int r = 0; r < R; r++) acc[r] += minimums[r];
          }
          for (int r = 0; r < R; r++) f(m + r, n, acc[r], count);
        });
      }
    });
  }
  // Fills a panel with words: for 4 bits, a block's even columns and then its odd ones.
  void fill(const uint8_t* packed, int64_t n, int64_t end, int32_t* panel, bool interleaved) const {
    int64_t of_block = block / 4;
    auto put = [&](int64_t word, int half, vi lanes) {
      if (bits == 8) return store_as(panel + word * WIDE + half * W, lanes ^ FLIP_UNSIGNED);
      int64_t at = word / of_block * (2 * of_block) + word % of_block;
      store_as(panel + at * WIDE + half * W, lanes & 0x0f0f0f0f);
      store_as(panel + (at + of_block) * WIDE + half * W, (lanes >> 4) & 0x0f0f0f0f);
    };
    if (interleaved)
      each_beside(packed, bytes(), n, end, bytes() / 4, put);
    else
      turn_rows(packed, bytes(), n, end, bytes() / 4, put);
  }
};

// Float rows, whose blocks are rounded to int8, as the op's definition allows.
struct LinearBits : Kernel {
  Argument x, packed, scales, minimums, y, M;
  int64_t x_stride;
  Blocked blocked;
  LinearBits(const Variant& v)
      : x(v, "x"), packed(v, "packed"), scales(v, "scales"),
        minimums(Argument::optional(v, "minimums")), y(v, "y"), M(v, "M"),
        x_stride(v.integer("X_STRIDE")), blocked(v, bits_of(v), bool(minimums)) {
    if (minimums && minimums.type != scales.type) refuse("minimums must have the type of scales");
  }
  int interleavable(Interleaved* out) const override {
    int unit = scales.type == Type::f16 ? 2 : 4;
    return blocked.interleavable(out, packed.place(), scales.place(), minimums.place(), unit);
  }
  void run(const Value* a, const int64_t*, Pool& pool) const override {
    int64_t rows = M.integer(a), shared = blocked.shared, N = blocked.N;
    auto prepared = blocked.prepare(rows, interleaved != 0, pool,
                                    [&](int64_t m, int8_t* q, float* worth) {
      const float* in = x.in<const float>(a) + m * x_stride;
      for (int64_t b = 0; b < blocked.blocks_a_row(); b++)
        worth[b] = round_block(in + b * shared, shared, q + b * shared);
    });
    auto multiply = [&](auto* t) {
      using S = std::remove_pointer_t<decltype(t)>;
      Units<S> units{scales.in<const S>(a), minimums.in<const S>(a)};
      blocked.multiply(prepared, packed.in<const uint8_t>(a), units, rows, pool, interleaved != 0,
                       [&](int64_t m, int64_t n, vf sums, int count) {
                         store_some(y.in<float>(a) + m * N + n, sums, count);
                       });
    };
    scales.type == Type::f16 ? multiply((Half*)nullptr) : multiply((float*)nullptr);
  }
};

// int8 rows that share one scale.
struct LinearInt4 : Kernel {
  Argument x, packed, scales, minimums, M;
  int64_t x_stride;
  Blocked blocked;
  Scaled scaled;
  LinearInt4(const Variant& v)
      : x(v, "x"), packed(v, "packed"), scales(v, "scales"),
        minimums(Argument::optional(v, "minimums")), M(v, "M"), x_stride(v.integer("X_STRIDE")),
        blocked(v, 4, bool(minimums)), scaled(v, 0, 0) {
    if (minimums && minimums.type != scales.type) refuse("minimums must have the type of scales");
  }
  int interleavable(Interleaved* out) const override {
    int unit = scales.type == Type::f16 ? 2 : 4;
    return blocked.interleavable(out, packed.place(), scales.place(), minimums.place(), unit);
  }
  void run(const Value* a, const int64_t*, Pool& pool) const override {
    int64_t rows = M.integer(a), K = blocked.K;
    auto prepared = blocked.prepare(rows, interleaved != 0, pool,
                                    [&](int64_t m, int8_t* q, float* worth) {
      std::memcpy(q, x.in<const int8_t>(a) + m * x_stride, size_t(K));
      for (int64_t b = 0; b < blocked.blocks_a_row(); b++) worth[b] = 1.f;
    });
    auto multiply = [&](auto* t) {
      using S = std::remove_pointer_t<decltype(t)>;
      Units<S> units{scales.in<const S>(a), minimums.in<const S>(a)};
      blocked.multiply(prepared, packed.in<const uint8_t>(a), units, rows, pool, interleaved != 0,
                       [&](int64_t m, int64_t n, vf sums, int count) {
                         scaled.store(a, m, n, sums, count);
                       });
    };
    scales.type == Type::f16 ? multiply((Half*)nullptr) : multiply((float*)nullptr);
  }
};

KERNEL("linear_bits.one", LinearBits)
KERNEL("linear_bits.few", LinearBits)
KERNEL("linear_bits.many", LinearBits)
KERNEL("linear_int4.one", LinearInt4)
KERNEL("linear_int4.few", LinearInt4)
KERNEL("linear_int4.many", LinearInt4)
