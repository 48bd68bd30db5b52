// Many rows times a panel by AMX: tiles of 16 rows by 16 outputs, summed over 64 columns at a time.
//
// A panel (cpu_panel.h) has the layout that AMX needs: words of four columns, outputs side by side.
// Sums are exact integers, so they equal those of the other instruction sets.
//
// The instructions are inline assembly because this file is also compiled for machines without AMX.

#if EDGE_ISA_AVX512 && defined(__linux__) && (__clang_major__ >= 12 || __GNUC__ >= 11)
#define EDGE_TILES 1

constexpr int64_t TILE_ROWS = 16, TILE_WORDS = 16;

// Returns whether `words` words of a row fill whole tiles.
inline bool tiles_take(int64_t words) { return words % TILE_WORDS == 0; }

// The tile configuration for up to 32 rows of x. Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7
// weights. A thread releases it before it waits, so that context switches save no tiles.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileShapes(int64_t x_rows) {
    const int64_t upper = std::min(x_rows, TILE_ROWS), lower = x_rows - upper;
    for (int tile : {0, 1, 4}) set(tile, upper);
    for (int tile : {6, 7}) set(tile, TILE_WORDS);
    if (lower)
      for (int tile : {2, 3, 5}) set(tile, lower);
  }
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
  static void release() { asm volatile("tilerelease"); }

 private:
  void set(int tile, int64_t count) {
    rows[tile] = uint8_t(count);
    row_bytes[tile] = 64;
  }
};

// Writes out[row, output] = Σ x[row, k] · panel[k, output] over `words` words, [x_rows, WIDE]. The
// shapes for `x_rows` rows must be loaded.
inline void tile_sums(const int8_t* x, int64_t stride, int64_t x_rows, const int32_t* panel,
                      int64_t words, int32_t* out) {
  const int64_t panel_stride = WIDE * 4;
  const bool lower = x_rows > TILE_ROWS;
  const int8_t* x_lower = x + TILE_ROWS * stride;
  asm volatile("tilezero %tmm0\n\ttilezero %tmm1");
  if (lower) asm volatile("tilezero %tmm2\n\ttilezero %tmm3");
  for (int64_t word = 0; word < words; word += TILE_WORDS) {
    const int32_t* weights = panel + word * WIDE;
    asm volatile(
        "tileloadd (%0,%1,1), %%tmm4\n\t"
        "tileloadd (%2,%4,1), %%tmm6\n\t"
        "tileloadd (%3,%4,1), %%tmm7\n\t"
        "tdpbsud %%tmm6, %%tmm4, %%tmm0\n\t"
        "tdpbsud %%tmm7, %%tmm4, %%tmm1" ::"r"(x + 4 * word),
        "r"(stride), "r"(weights), "r"(weights + W), "r"(panel_stride)
        : "memory");
    if (lower)
      asm volatile(
          "tileloadd (%0,%1,1), %%tmm5\n\t"
          "tdpbsud %%tmm6, %%tmm5, %%tmm2\n\t"
          "tdpbsud %%tmm7, %%tmm5, %%tmm3" ::"r"(x_lower + 4 * word),
          "r"(stride)
          : "memory");
  }
  asm volatile("tilestored %%tmm0, (%0,%2,1)\n\ttilestored %%tmm1, (%1,%2,1)" ::"r"(out),
               "r"(out + W), "r"(panel_stride)
               : "memory");
  if (!lower) return;
  int32_t* below = out + TILE_ROWS * WIDE;
  asm volatile("tilestored %%tmm2, (%0,%2,1)\n\ttilestored %%tmm3, (%1,%2,1)" ::"r"(below),
               "r"(below + W), "r"(panel_stride)
               : "memory");
}

// Calls f(m, count) for groups of up to 32 rows, m to m + count, with their shapes loaded.
template <class F> inline void each_tile(int64_t rows, F f) {
  for (int64_t m = 0; m < rows; m += 2 * TILE_ROWS) {
    int64_t some = std::min(rows - m, 2 * TILE_ROWS);
    if (m == 0 || some < 2 * TILE_ROWS) TileShapes(some).load();
    f(m, some);
  }
  TileShapes::release();
}
#endif
