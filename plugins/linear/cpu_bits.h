// Rows times weights of 8 or 4 bits in blocks of columns that share a scale: the C++ face of
// triton_linear_bits.py and triton_linear_int4.py.

// Columns 0, 2, 4 ... of rows of K, then 1, 3, 5 ...: what the nibbles of a packed row meet.
template <class T> inline const T* apart(const T* x, int64_t stride, int64_t rows, int64_t K,
                                         T* out) {
  for (int64_t m = 0; m < rows; m++)
    for (int64_t k = 0; k < K / 2; k++) {
      out[m * K + k] = x[m * stride + 2 * k];
      out[m * K + K / 2 + k] = x[m * stride + 2 * k + 1];
    }
  return out;
}

inline int64_t bits_of(const Variant& v) {
  int64_t bits = v.integer("BITS");
  if (bits != 4 && bits != 8) refuse("BITS must be 4 or 8");
  return bits;
}

// A row of weights as floats less their zero point, times the scale of their block.
inline void unpack(const uint8_t* packed, const float* units, int64_t K, int64_t bits,
                   int64_t shared, float* out) {
  for (int64_t b = 0; b < K / shared; b++) {
    const uint8_t* in = packed + b * shared * bits / 8;
    float *to = out + b * shared, unit = units[b];
    if (bits == 4) {
      for (int64_t k = 0; k < shared; k++)
        to[k] = (float(in[k / 2] >> (k % 2 * 4) & 15) - 8.f) * unit;
    } else {
      for (int64_t k = 0; k < shared; k++) to[k] = (float(in[k]) - 128.f) * unit;
    }
  }
}

struct LinearBits : Kernel {
  Argument x, packed, scales, y, M;
  int64_t N, K, x_stride, bits, shared;
  LinearBits(const Variant& v)
      : x(v, "x"), packed(v, "packed"), scales(v, "scales"), y(v, "y"), M(v, "M"),
        N(v.integer("N")), K(v.integer("K")), x_stride(v.integer("X_STRIDE")),
        bits(bits_of(v)), shared(v.within("SHARED", 2)) {}

  void run(const Value* a, const int64_t*, Pool& pool) const override {
    int64_t rows = M.integer(a);
    const float* in = as_half(x.in<const float>(a), x_stride, rows, K, pool);
    // few rows: weights become floats in registers. Many: once for all rows, in the nearest cache
    bool direct = rows <= MR && shared * bits / 8 % W == 0;
    if (direct && bits == 4) in = apart(in, K, rows, K, pool.scratch<float>(2, rows * K + W));
    pool.each(N, columns_a_piece(K * bits / 8, rows), [&](int64_t first, int64_t last) {
      float* room = direct ? nullptr : local(NR * (K + W));
      for (int64_t n = first; n < last; n += NR) {
        int columns = (int)std::min<int64_t>(NR, last - n);
        if (!direct) {
          expanded(a, in, rows, n, columns, room);
          continue;
        }
        float sums[MR][NR];
        switch (rows) {
          case 1: tile<1>(a, in, n, columns, sums); break;
          case 2: tile<2>(a, in, n, columns, sums); break;
          case 3: tile<3>(a, in, n, columns, sums); break;
          default: tile<4>(a, in, n, columns, sums);
        }
        for (int64_t m = 0; m < rows; m++)
          for (int j = 0; j < columns; j++) y.in<float>(a)[m * N + n + j] = sums[m][j];
      }
    });
  }

 private:
  const uint8_t* row(const Value* a, int64_t n) const {
    return packed.in<const uint8_t>(a) + n * (K * bits / 8);
  }
  const float* units(const Value* a, int64_t n) const {
    return scales.in<const float>(a) + n * (K / shared);
  }

  template <int ROWS> void tile(const Value* a, const float* in, int64_t n, int columns,
                                float (*sums)[NR]) const {
    const uint8_t* w[NR];
    const float* unit[NR];
    for (int j = 0; j < NR; j++) {
      w[j] = row(a, n + std::min(j, columns - 1));
      unit[j] = units(a, n + std::min(j, columns - 1));
    }
    vf acc[ROWS][NR] = {};
    for (int64_t b = 0; b < K / shared; b++) {
      vf block[ROWS][NR] = {};
      if (bits == 8)
        bytes<ROWS>(w, in, b * shared, block);
      else
        nibbles<ROWS>(w, in, b * shared / 2, block);
      for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < NR; j++) acc[m][j] += block[m][j] * unit[j][b];
    }
    for (int m = 0; m < ROWS; m++) sums4(acc[m], sums[m]);
  }
  template <int ROWS> void bytes(const uint8_t* const* w, const float* in, int64_t start,
                                 vf (*block)[NR]) const {
    for (int64_t k = start; k < start + shared; k += W) {
      if (k % 64 == 0)
        for (int j = 0; j < NR; j++) __builtin_prefetch(w[j] + k + NR * K);
      vf of_x[ROWS];
      for (int m = 0; m < ROWS; m++) of_x[m] = load(in + m * K + k);
      for (int j = 0; j < NR; j++) {
        vf of_w = ubytes_to_float(w[j] + k) - 128.f;
        for (int m = 0; m < ROWS; m++) block[m][j] += of_w * of_x[m];
      }
    }
  }
  template <int ROWS> void nibbles(const uint8_t* const* w, const float* in, int64_t start,
                                   vf (*block)[NR]) const {
    for (int64_t k = start; k < start + shared / 2; k += W) {
      if (k % 64 == 0)
        for (int j = 0; j < NR; j++) __builtin_prefetch(w[j] + k + NR * K / 2);
      vf even[ROWS], odd[ROWS];
      for (int m = 0; m < ROWS; m++) {
        even[m] = load(in + m * K + k);
        odd[m] = load(in + m * K + K / 2 + k);
      }
      for (int j = 0; j < NR; j++) {
        vf low, high;
        nibbles_to_float(w[j] + k, low, high);
        for (int m = 0; m < ROWS; m++) block[m][j] += low * even[m] + high * odd[m];
      }
    }
  }

  void expanded(const Value* a, const float* in, int64_t rows, int64_t n, int columns,
                float* room) const {
    for (int j = 0; j < columns; j++)
      unpack(row(a, n + j), units(a, n + j), K, bits, shared, room + j * K);
    product_float(in, K, rows, room, K, 0, columns,
                  [&](int64_t m, int64_t, const float(*sums)[NR], int r, int c) {
                    for (int i = 0; i < r; i++)
                      for (int j = 0; j < c; j++) y.in<float>(a)[(m + i) * N + n + j] = sums[i][j];
                  });
  }
};

// int8 rows times 4-bit weights: exact in a block, blocks are added in fp32.
struct LinearInt4 : Kernel {
  Argument x, packed, scales, M;
  int64_t N, K, x_stride, shared;
  Scaled scaled;
  LinearInt4(const Variant& v)
      : x(v, "x"), packed(v, "packed"), scales(v, "scales"), M(v, "M"), N(v.integer("N")),
        K(v.integer("K")), x_stride(v.integer("X_STRIDE")), shared(v.within("SHARED", 2)),
        scaled(v, 0, 0) {}

  void run(const Value* a, const int64_t*, Pool& pool) const override {
    int64_t rows = M.integer(a), groups = K / shared;
    const int8_t* in = x.in<const int8_t>(a);
    // nibbles count from 0, weights from -8: each block's sum is 8·Σx too large
    int32_t* excess = pool.scratch<int32_t>(0, rows * groups);
    pool.each(rows * groups, items_a_piece(shared), [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++) {
        const int8_t* block = in + each / groups * x_stride + each % groups * shared;
        int32_t total = 0;
        for (int64_t k = 0; k < shared; k++) total += block[k];
        excess[each] = -8 * total;
      }
    });
    in = apart(in, x_stride, rows, K, pool.scratch<int8_t>(2, rows * K + 64));
    pool.each(N, columns_a_piece(K / 2, rows), [&](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; n += NR) {
        int columns = (int)std::min<int64_t>(NR, last - n);
        for (int64_t m = 0; m < rows; m += MR) {
          float sums[MR][NR];
          int some = (int)std::min<int64_t>(MR, rows - m);
          switch (some) {
            case 1: tile<1>(a, in + m * K, excess + m * groups, n, columns, sums); break;
            case 2: tile<2>(a, in + m * K, excess + m * groups, n, columns, sums); break;
            case 3: tile<3>(a, in + m * K, excess + m * groups, n, columns, sums); break;
            default: tile<4>(a, in + m * K, excess + m * groups, n, columns, sums);
          }
          for (int i = 0; i < some; i++) {
            vf four{};
            for (int j = 0; j < NR; j++) four[j] = sums[i][j];
            scaled.store(a, m + i, n, four, columns);
          }
        }
      }
    });
  }

 private:
  template <int ROWS> void tile(const Value* a, const int8_t* in, const int32_t* excess, int64_t n,
                                int columns, float (*sums)[NR]) const {
    const int64_t groups = K / shared, half = shared / 2;
    const uint8_t* w[NR];
    const float* unit[NR];
    for (int j = 0; j < NR; j++) {
      int64_t row = n + std::min(j, columns - 1);
      w[j] = packed.in<const uint8_t>(a) + row * (K / 2);
      unit[j] = scales.in<const float>(a) + row * groups;
    }
    vf acc[ROWS][NR] = {};
    for (int64_t b = 0; b < groups; b++) {
      vi block[ROWS][NR] = {};
      int64_t k = b * half, end = k + half;
      for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < NR; j++) block[m][j][0] = excess[m * groups + b];
      for (int j = 0; j < NR; j++) __builtin_prefetch(w[j] + k + NR * (K / 2));
      for (; k + SMALL <= end; k += SMALL) {
        Small even[ROWS], odd[ROWS];
        for (int m = 0; m < ROWS; m++) {
          even[m] = load_small(in + m * K + k);
          odd[m] = load_small(in + m * K + K / 2 + k);
        }
        for (int j = 0; j < NR; j++) {
          Small packed_w = load_small(w[j] + k);
          Small low = low_nibbles(packed_w), high = high_nibbles(packed_w);
          for (int m = 0; m < ROWS; m++)
            block[m][j] = dot_small(dot_small(block[m][j], low, even[m]), high, odd[m]);
        }
      }
      for (; k < end; k++)
        for (int j = 0; j < NR; j++)
          for (int m = 0; m < ROWS; m++)
            block[m][j][0] += (w[j][k] & 15) * in[m * K + k] + (w[j][k] >> 4) * in[m * K + K / 2 + k];
      for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < NR; j++)
          acc[m][j] += __builtin_convertvector(block[m][j], vf) * unit[j][b];
    }
    for (int m = 0; m < ROWS; m++) sums4(acc[m], sums[m]);
  }
};

KERNEL("linear_bits.few", LinearBits)
KERNEL("linear_bits.many", LinearBits)
KERNEL("linear_int4.few", LinearInt4)
KERNEL("linear_int4.many", LinearInt4)
