// Mamba-2's scan of many tokens, the C++ counterpart of triton_scan_chunks.py. A vector is one column
// of W channels of the state, so that C·h needs no sum across a vector. Tokens go through a few
// columns at a time, which stay in registers.
//
// Between h and its decays h_t = d_t·h_(t-1) + u_t·B_t, a product per element is saved: with the
// product c_t of all decays since token s, g_t = h_t / c_t obeys g_t = g_(t-1) + (u_t / c_t)·B_t.
// A new s begins before c_t becomes small.

struct ScanChunks : ScanHeads {
  static constexpr int ACROSS = 2, SPAN = ACROSS * W;        // vectors and channels of a tile
  static constexpr int COLUMNS = REGISTERS == 16 ? 4 : 8;    // columns of a tile
  static constexpr int64_t FEW = 8;                          // tokens that do not pay
  static constexpr float SMALL = 1e-15f;                     // c_t that begins a new s

  using ScanHeads::ScanHeads;

  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    Course course(run_fields.in<const int32_t>(a), tokens.integer(a), batch.integer(a),
                  replay.in<const int32_t>(a), slots.in<const int32_t>(a), nullptr);
    if (tree || state.type != Type::f32 || course.store == 1 || course.tokens < FEW)
      return ScanHeads::run(a, grid, pool);
    int64_t all = course.pending + course.tokens, padded = (N + W - 1) / W * W;
    int64_t tiles = (N + COLUMNS - 1) / COLUMNS, of_group = tiles * all * 2 * COLUMNS;
    int64_t room = 2 * all * padded, count = groups * course.batch;
    float* rows = pool.scratch<float>(2, count * (room + of_group) + W);
    pool.each(count, items_a_piece(8 * of_group), [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++) {
        float* wide = rows + each * (room + of_group);
        widen(a, course, each / groups, each % groups, wide, padded);
        by_tiles(wide, all, padded, tiles, wide + room);
      }
    });
    pool.each(heads * course.batch, items_a_piece(4 * P * N * all),
              [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++) {
        int64_t sequence = each / heads, head = each % heads;
        int64_t group = sequence * groups + head / (heads / groups);
        one_head(a, course, sequence, head, rows + group * (room + of_group) + room, tiles);
      }
    });
  }

 private:
  // Places B and C, rows of `padded` columns, as [tiles, tokens, B or C, COLUMNS].
  void by_tiles(const float* wide, int64_t all, int64_t padded, int64_t tiles, float* out) const {
    for (int64_t tile = 0; tile < tiles; tile++)
      for (int64_t j = 0; j < all; j++, out += 2 * COLUMNS) {
        const float* from = wide + j * padded + tile * COLUMNS;
        std::memcpy(out, from, COLUMNS * sizeof(float));
        std::memcpy(out + COLUMNS, from + all * padded, COLUMNS * sizeof(float));
      }
  }

  // The tokens from `first` on that share an s, and what the state is multiplied by before them.
  struct Stretch {
    int64_t first;
    float before;
  };

  void one_head(const Value* a, const Course& course, int64_t sequence, int64_t head,
                const float* tiled, int64_t tiles) const {
    const int64_t all = course.pending + course.tokens, wide = (P + SPAN - 1) / SPAN * SPAN;
    const int64_t columns = tiles * COLUMNS;
    int64_t size = room_for(all, wide) + course.tokens * wide + SPAN * (2 * all + columns) + all;
    float* memory = static_cast<float*>(thread_bytes(0, size * int64_t(sizeof(float))));
    HeadTokens of = tokens_of(a, course, sequence, head, wide, memory);
    float* read = memory + room_for(all, wide);
    float *fed = read + course.tokens * wide, *out = fed + all * SPAN, *h = out + all * SPAN;
    float* since = h + columns * SPAN;
    auto* stretches = reinterpret_cast<Stretch*>(thread_bytes(1, (all + 1) * sizeof(Stretch)));
    int64_t count = divide(of, all, since, stretches);
    for (int64_t p = 0; p < P; p += SPAN) {
      int64_t channels = std::min<int64_t>(SPAN, P - p);
      float* of_state = state.in<float>(a) + ((sequence * heads + head) * P + p) * N;
      int64_t slot = course.batch * heads * P * N;
      turn(of_state + course.source * slot, channels, h);
      for (int64_t j = 0; j < all; j++)
        for (int v = 0; v < SPAN; v += W)
          store(fed + j * SPAN + v, load(of.x + j * wide + p + v) * (of.delta[j] / since[j]));
      std::memset(out, 0, size_t(all * SPAN) * sizeof(float));
      for (int64_t tile = 0; tile < tiles; tile++)
        through(tiled + tile * all * 2 * COLUMNS, stretches, count, since, fed,
                h + tile * COLUMNS * SPAN, out);
      if (course.store == 2) turn_back(h, channels, of_state + course.target * slot);
      for (int64_t t = 0; t < course.tokens; t++)
        std::memcpy(read + t * wide + p, out + (course.pending + t) * SPAN, SPAN * sizeof(float));
    }
    write(a, course, sequence, head, of, read);
  }

  // Divides the tokens into stretches, the last of which is empty and restores h, and writes c_t.
  int64_t divide(const HeadTokens& of, int64_t all, float* since, Stretch* stretches) const {
    int64_t count = 0;
    float product = 1.f;
    for (int64_t j = 0; j < all; j++) {
      float next = product * of.decay[j];
      if (j == 0 || !(next >= SMALL)) {  // or it is no number
        stretches[count++] = {j, next};
        next = 1.f;
      }
      since[j] = product = next;
    }
    stretches[count] = {all, product};
    return count;
  }

  // Takes COLUMNS columns of the state through all tokens, and adds C·h to `out`.
  void through(const float* bc, const Stretch* stretches, int64_t count, const float* since,
               const float* fed, float* h, float* out) const {
    vf g[COLUMNS][ACROSS];
    for (int n = 0; n < COLUMNS; n++)
      for (int v = 0; v < ACROSS; v++) g[n][v] = load(h + n * SPAN + v * W);
    for (int64_t k = 0; k < count; k++) {
      multiply(g, stretches[k].before);
      for (int64_t j = stretches[k].first; j < stretches[k + 1].first; j++) {
        const float *B = bc + j * 2 * COLUMNS, *C = B + COLUMNS;
        vf u[ACROSS], seen[2][ACROSS] = {};  // two sums, which need not wait for each other
        for (int v = 0; v < ACROSS; v++) u[v] = load(fed + j * SPAN + v * W);
#pragma GCC unroll 8
        for (int n = 0; n < COLUMNS; n++) {
          vf b = splat(B[n]), c = splat(C[n]);
          for (int v = 0; v < ACROSS; v++) {
            g[n][v] += u[v] * b;
            seen[n % 2][v] += g[n][v] * c;
          }
        }
        for (int v = 0; v < ACROSS; v++) {
          float* to = out + j * SPAN + v * W;
          store(to, load(to) + since[j] * (seen[0][v] + seen[1][v]));
        }
      }
    }
    multiply(g, stretches[count].before);
    for (int n = 0; n < COLUMNS; n++)
      for (int v = 0; v < ACROSS; v++) store(h + n * SPAN + v * W, g[n][v]);
  }
  static void multiply(vf (*g)[ACROSS], float by) {
    for (int n = 0; n < COLUMNS; n++)
      for (int v = 0; v < ACROSS; v++) g[n][v] *= by;
  }

  // Transposes channels' states, rows of N, to rows of SPAN channels, and back. Columns beyond N and
  // channels beyond `channels` stay 0.
  void turn(const float* from, int64_t channels, float* h) const {
    for (int64_t p = 0; p < SPAN; p += W)
      for (int64_t n = 0; n < N; n += W) {
        vf block[W];
        for (int i = 0; i < W; i++)
          block[i] = p + i < channels
                         ? load_some(from + (p + i) * N + n, (int)std::min<int64_t>(W, N - n))
                         : vf{};
        transpose(block);
        for (int i = 0; i < W && n + i < N; i++) store(h + (n + i) * SPAN + p, block[i]);
      }
    for (int64_t n = N; n % COLUMNS; n++) std::memset(h + n * SPAN, 0, SPAN * sizeof(float));
  }
  void turn_back(const float* h, int64_t channels, float* to) const {
    for (int64_t p = 0; p < channels; p += W)
      for (int64_t n = 0; n < N; n += W) {
        vf block[W];
        for (int i = 0; i < W; i++) block[i] = n + i < N ? load(h + (n + i) * SPAN + p) : vf{};
        transpose(block);
        for (int i = 0; i < W && p + i < channels; i++)
          store_some(to + (p + i) * N + n, block[i], (int)std::min<int64_t>(W, N - n));
      }
  }
};

// `states` computes the outputs too, and needs no terms.
KERNEL("scan_chunks.states", ScanChunks)
KERNEL("scan_chunked.scan", ScanChunks)  // of older plans
KERNEL("scan_terms.prepare", NoScan)
KERNEL("scan_chunks.outputs", NoScan)
