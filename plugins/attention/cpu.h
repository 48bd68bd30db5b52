// Attention over KV caches, and RoPE of queries and keys: the C++ counterpart of
// triton_attention.py and triton_rope.py.

struct RopeAppend : Kernel {
  Argument q, k, v, cos, sin, run_fields, turned, keys, values, B, C;
  int64_t heads, kv, P, dim, q_stride, k_stride, v_stride;
  RopeAppend(const Variant& v_)
      : q(Argument::optional(v_, "q")), k(v_, "k"), v(v_, "v"),
        cos(Argument::optional(v_, "cos")), sin(Argument::optional(v_, "sin")),
        run_fields(v_, "run"), turned(Argument::optional(v_, "turned")), keys(numbers(v_, "keys")),
        values(numbers(v_, "values")), B(v_, "B"), C(v_, "C"),
        heads(v_.integer("HEADS")), kv(v_.integer("KV")), P(v_.integer("P")),
        dim(v_.integer("DIM")), q_stride(v_.integer("Q_STRIDE")),
        k_stride(v_.integer("K_STRIDE")), v_stride(v_.integer("V_STRIDE")) {
    if (dim && !(cos && sin)) refuse("angles are None");
    if (q && !turned) refuse("turned is None");
  }

  // Rotates the first `dim` values of a head by the token's angles. Products are rounded before
  // sums, as in the reference.
  __attribute__((optimize("fp-contract=off"))) void turn(const float* in, const float* c,
                                                         const float* s, float* out) const {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
      out[i] = in[i] * c[i] - in[half + i] * s[i];
      out[half + i] = in[half + i] * c[i] + in[i] * s[i];
    }
    std::memcpy(out + dim, in + dim, size_t(P - dim) * sizeof(float));
  }

  void keep(const float* row, const Argument& cache, const Value* a, int64_t to) const {
    blocks(P, [&](int64_t i, int n) {
      store_as_type(cache.in<void>(a), cache.type, to + i, load_some(row + i, n), n);
    });
  }

  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    int64_t batch = B.integer(a), capacity = C.integer(a);
    int64_t past = run_fields.in<const int32_t>(a)[PAST];
    pool.each(grid[0], items_a_piece(4 * (heads + 2 * kv) * P), [&](int64_t first, int64_t last) {
      float* turned_key = local(P);
      for (int64_t row = first; row < last; row++) {
        int64_t t = row / batch, b = row % batch;
        const float* c = cos ? cos.in<const float>(a) + t * (dim / 2) : nullptr;
        const float* s = sin ? sin.in<const float>(a) + t * (dim / 2) : nullptr;
        if (q)
          for (int64_t h = 0; h < heads; h++)
            turn(q.in<const float>(a) + row * q_stride + h * P, c, s,
                 turned.in<float>(a) + (row * heads + h) * P);
        for (int64_t h = 0; h < kv; h++) {
          int64_t to = ((b * kv + h) * capacity + past + t) * P;
          turn(k.in<const float>(a) + row * k_stride + h * P, c, s, turned_key);
          keep(turned_key, keys, a, to);
          keep(v.in<const float>(a) + row * v_stride + h * P, values, a, to);
        }
      }
    });
  }
};

// Attention over tiles of slots with a running softmax (FlashAttention, arXiv 2205.14135,
// algorithm 1). The heads that share keys and values read a tile together, and so do some tokens of
// a run. A token's tiles begin at its first slot, and its sums do not depend on other tokens, so a
// run has the bits of its steps.
struct Attend : Kernel {
  Argument q, keys, values, ancestors, run_fields, y, mixes, peaks, T, B, C;
  int64_t kv, group, P, q_stride, splits, block_n, window;
  float scale, softcap;
  static constexpr int TILE = 32;
  static constexpr int HEADS = REGISTERS == 32 ? 4 : 2;  // read a tile together; 4 sums each
  static constexpr int64_t QUERIES = 16;  // at most, unless the heads of one token are more
  Attend(const Variant& v)
      : q(v, "q"), keys(numbers(v, "keys")), values(numbers(v, "values")),
        ancestors(Argument::optional(v, "ancestors")), run_fields(v, "run"),
        y(Argument::optional(v, "y")), mixes(Argument::optional(v, "mixes")),
        peaks(Argument::optional(v, "peaks")), T(v, "T"), B(v, "B"), C(v, "C"),
        kv(v.integer("KV")), group(v.within("GROUP", 1)), P(v.integer("P")),
        q_stride(v.integer("Q_STRIDE")), splits(v.within("SPLITS", 1)),
        block_n(v.within("BLOCK_N", 1)), window(window_of(v)), scale((float)v.number("SCALE")),
        softcap((float)v.number("SOFTCAP", 0)) {
    if (splits == 1 ? !y : !(mixes && peaks)) refuse("an output is None");
    if (keys.type != values.type || keys.type == Type::i8)
      refuse("keys and values must have the same float type");
  }

  // Plans of models without windows lack the constant: 0, all of the past.
  static int64_t window_of(const Variant& v) { return std::max<int64_t>(v.integer("WINDOW", 0), 0); }

  // First slot that any token of the run attends to.
  static int64_t base_of(int64_t past, int64_t window) {
    return window ? std::max<int64_t>(past + 1 - window, 0) : 0;
  }

  // First slot that token t attends to. Its window ends the past followed by its path in the tree.
  int64_t first_seen(int64_t t, int64_t past, const int32_t* leads) const {
    if (!window) return 0;
    if (!leads) return past + t + 1 - window;
    int64_t left = window;
    for (int64_t j = t; j >= 0; j--)
      if (leads[j] && --left == 0) return past + j;
    return past - left;
  }

  static int64_t part_size(int64_t slots, int64_t splits, int64_t block) {
    int64_t tiles = (slots + block - 1) / block;
    return (tiles + splits - 1) / splits * block;
  }

  void run(const Value* a, const int64_t*, Pool& pool) const override {
    keys.type == Type::f16 ? run_of<Half>(a, pool) : run_of<float>(a, pool);
  }

 private:
  // What a run has in common; `wide` is P rounded up to whole vectors.
  struct Run {
    const Value* a;
    int64_t tokens, batch, capacity, past, base, chunk, parts, wide;
  };
  // Room of one thread: `queries` rows of `wide` floats each, and the peaks and totals of theirs.
  // `ahead`: keys and values of the next tile, of `row` bytes a slot, to be fetched while this one
  // is computed. All at once would wait for the memory.
  struct Room {
    float *keys, *values, *query, *mix, *shares, *peaks, *totals;
    const char* ahead[2];
    int64_t row;
  };

  template <class Kept> void run_of(const Value* a, Pool& pool) const {
    int64_t past = run_fields.in<const int32_t>(a)[PAST], tokens = T.integer(a);
    int64_t base = base_of(past, window), slots = past + tokens - base;
    int64_t chunk = part_size(slots, splits, block_n);
    const Run r{a,    tokens, B.integer(a), C.integer(a),                    past,
                base, chunk,  (slots + chunk - 1) / chunk, (P + W - 1) / W * W};
    // with a window every token has its own first slot, where its tiles begin
    int64_t together = window ? 1 : std::min(tokens, std::max<int64_t>(1, QUERIES / group));
    int64_t pieces = (tokens + together - 1) / together;
    int64_t work = 4 * std::min(slots, chunk) * P * group * together;
    pool.each(r.batch * kv * r.parts * pieces, items_a_piece(work),
              [&](int64_t first, int64_t last) {
      Room room = room_for(together * group, r.wide);
      for (int64_t each = first; each < last; each++) {
        int64_t t = each % pieces * together, rest = each / pieces;
        one_part<Kept>(r, rest / r.parts / kv, rest / r.parts % kv, rest % r.parts, t,
                       std::min(t + together, tokens), room);
      }
    });
  }

  Room room_for(int64_t queries, int64_t wide) const {
    float* at = static_cast<float*>(thread_bytes(
        0, (2 * TILE * wide + 2 * queries * wide + HEADS * TILE + 2 * queries + W) * int64_t(sizeof(float))));
    Room room;
    auto take = [&](float*& part, int64_t count) { part = at, at += count; };
    take(room.keys, TILE * wide), take(room.values, TILE * wide);
    take(room.query, queries * wide), take(room.mix, queries * wide);
    take(room.shares, HEADS * TILE), take(room.peaks, queries), take(room.totals, queries);
    return room;
  }

  // Tokens first ... last of sequence b, the heads of one kv head, one part of the slots.
  template <class Kept>
  void one_part(const Run& r, int64_t b, int64_t head, int64_t part, int64_t first, int64_t last,
                Room& room) const {
    int64_t start = r.base + part * r.chunk;
    const int64_t end = std::min(start + r.chunk, r.past + r.tokens);
    if (window) start = std::max(start, first_seen(first, r.past, leads_of(r, first)));
    const int64_t from = (b * kv + head) * r.capacity * P;
    for (int64_t t = first; t < last; t++) begin(r, t * r.batch + b, head, (t - first) * group, room);
    for (int64_t low = start; low < end; low += TILE) {
      int64_t high = std::min(low + TILE, end);
      const float *k = nullptr, *v = nullptr;  // of slot `low`
      for (int64_t t = first; t < last; t++) {
        const int32_t* leads = leads_of(r, t);
        int64_t stop = leads ? high : std::min(high, r.past + t + 1);
        if (low >= stop) continue;
        if (!k) {
          const Kept* of_keys = keys.in<const Kept>(r.a) + from + low * P;
          const Kept* of_values = values.in<const Kept>(r.a) + from + low * P;
          room.ahead[0] = high < end ? (const char*)(of_keys + (high - low) * P) : nullptr;
          room.ahead[1] = (const char*)(of_values + (high - low) * P);
          room.row = P * int64_t(sizeof(Kept));
          k = floats(of_keys, high - low, r.wide, room.keys);
          v = floats(of_values, high - low, r.wide, room.values);
        }
        const int32_t* hidden = stop > r.past ? leads : nullptr;
        for (int64_t h = 0; h < group; h += HEADS)
          some_heads(k, v, (int)(stop - low), hidden, low - r.past, r.wide,
                     (t - first) * group + h, (int)std::min<int64_t>(HEADS, group - h), room);
      }
    }
    for (int64_t t = first; t < last; t++)
      finish(r, t * r.batch + b, head, part, (t - first) * group, room);
  }

  const int32_t* leads_of(const Run& r, int64_t t) const {
    return ancestors ? ancestors.in<const int32_t>(r.a) + t * r.tokens : nullptr;
  }

  // Copies the queries of a token, scaled, from place `to` on.
  void begin(const Run& r, int64_t row, int64_t head, int64_t to, Room& room) const {
    const float* in = q.in<const float>(r.a) + row * q_stride + head * group * P;
    for (int64_t h = 0; h < group; h++, to++) {
      blocks(P, [&](int64_t i, int n) {
        store(room.query + to * r.wide + i, load_some(in + h * P + i, n) * scale);
        store(room.mix + to * r.wide + i, vf{});
      });
      room.peaks[to] = -INFINITY, room.totals[to] = 0;
    }
  }

  // Returns rows of P values as floats, `wide` apart with zeros between.
  template <class Kept>
  const float* floats(const Kept* rows, int64_t count, int64_t wide, float* room) const {
    if constexpr (std::is_same_v<Kept, float>)
      if (P == wide) return rows;
    for (int64_t i = 0; i < count; i++, rows += P) {
      int64_t p = 0;
      for (; p + W <= P; p += W) store(room + i * wide + p, load(rows + p));
      if (p < P) store(room + i * wide + p, load_some(rows + p, int(P - p)));
    }
    return room;
  }

  // Adds `count` slots to `heads` queries from place `at` on. In a tree, `leads` says which tokens
  // of the run the query sees; slot 0 is `offset` behind the first of them.
  void some_heads(const float* k, const float* v, int count, const int32_t* leads, int64_t offset,
                  int64_t wide, int64_t at, int heads, Room& room) const {
    switch (heads) {
      case 1: return add_slots<1>(k, v, count, leads, offset, wide, at, room);
      case 2: return add_slots<2>(k, v, count, leads, offset, wide, at, room);
      case 3: return add_slots<3>(k, v, count, leads, offset, wide, at, room);
      default: return add_slots<4>(k, v, count, leads, offset, wide, at, room);
    }
  }

  template <int H>
  __attribute__((noinline)) void add_slots(const float* k, const float* v, int count,
                                           const int32_t* leads, int64_t offset, int64_t wide,
                                           int64_t at, Room& room) const {
    auto sees = [&](int i) { return offset + i < 0 || leads[offset + i]; };
    scores<H>(room.query + at * wide, k, count, wide, room);
    room.ahead[0] = nullptr;
    float fades[H];
    for (int h = 0; h < H; h++) {
      float* score = room.shares + h * TILE;
      if (leads)
        for (int i = 0; i < count; i++)
          if (!sees(i)) score[i] = -INFINITY;
      for (int i = count; i % W; i++) score[i] = -INFINITY;
      if (softcap > 0) cap(score, count);
      fades[h] = exponents(score, count, room.peaks[at + h], room.totals[at + h]);
    }
    float* mix = room.mix + at * wide;
    if (leads)
      add_values<H>(v, count, wide, room.shares, fades, mix, sees);
    else
      add_values<H>(v, count, wide, room.shares, fades, mix, [](int) { return true; });
  }

  // shares[h][i] = query[h] · k[i]
  template <int H>
  static EDGE_INLINE void scores(const float* query, const float* k, int count, int64_t wide,
                                 const Room& room) {
    for (int i = 0; i < count; i += 4) {
      if (room.ahead[0])
        for (const char* next : room.ahead) fetch(next + i * room.row, 4 * room.row);
      const float* of[4];
      for (int j = 0; j < 4; j++) of[j] = k + std::min(i + j, count - 1) * wide;
      vf sums[H][4] = {};
      for (int64_t p = 0; p < wide; p += W) {
        vf key[4];
        for (int j = 0; j < 4; j++) key[j] = load(of[j] + p);
        for (int h = 0; h < H; h++) {
          vf x = load(query + h * wide + p);
          for (int j = 0; j < 4; j++) sums[h][j] += x * key[j];
        }
      }
      for (int h = 0; h < H; h++) sums4(sums[h], room.shares + h * TILE + i);
    }
  }

  // Soft-caps the scores that are not -inf.
  void cap(float* score, int count) const {
    blocks(count, [&](int64_t i, int) {
      vf before = load(score + i);
      store(score + i, choose(before == splat(-INFINITY), before, soft_cap(before, softcap)));
    });
  }

  // Turns scores into e^(score - peak) for the new peak and adds them to the total. Returns the
  // factor of what was summed before.
  static EDGE_INLINE float exponents(float* score, int count, float& peak, float& total) {
    vf tops = splat(peak);
    blocks(count, [&](int64_t i, int) { tops = larger(load(score + i), tops); });
    float top = largest(tops);
    if (top == -INFINITY) {
      blocks(count, [&](int64_t i, int) { store(score + i, vf{}); });
      return 1.f;
    }
    float fade = peak == -INFINITY ? 0.f : exp1(peak - top);
    vf sums{};
    blocks(count, [&](int64_t i, int) {
      vf before = load(score + i);
      vf share = choose(before == splat(-INFINITY), vf{}, expv(before - top));
      store(score + i, share);
      sums += share;
    });
    total = total * fade + sum(sums);
    peak = top;
    return fade;
  }

  // mix[h] = mix[h] · fade[h] + Σ share[h][i] · v[i]
  template <int H, class Sees>
  static EDGE_INLINE void add_values(const float* v, int count, int64_t wide, const float* shares,
                                     const float* fades, float* mix, Sees sees) {
    auto columns = [&](int64_t p, auto vectors) {
      constexpr int N = decltype(vectors)::value;
      vf sums[H][N];
      for (int h = 0; h < H; h++)
        for (int j = 0; j < N; j++) sums[h][j] = load(mix + h * wide + p + j * W) * fades[h];
      for (int i = 0; i < count; i++) {
        if (!sees(i)) continue;
        vf value[N];
        for (int j = 0; j < N; j++) value[j] = load(v + i * wide + p + j * W);
        for (int h = 0; h < H; h++)
          for (int j = 0; j < N; j++) sums[h][j] += shares[h * TILE + i] * value[j];
      }
      for (int h = 0; h < H; h++)
        for (int j = 0; j < N; j++) store(mix + h * wide + p + j * W, sums[h][j]);
    };
    int64_t p = 0;
    for (; p + 2 * W <= wide; p += 2 * W) columns(p, std::integral_constant<int, 2>());
    if (p < wide) columns(p, std::integral_constant<int, 1>());
  }

  // Writes the mixes of a token, from place `at` on.
  void finish(const Run& r, int64_t row, int64_t head, int64_t part, int64_t at,
              Room& room) const {
    for (int64_t h = head * group; h < (head + 1) * group; h++, at++) {
      const float* mix = room.mix + at * r.wide;
      if (splits == 1) {
        float* out = y.in<float>(r.a) + (row * kv * group + h) * P;
        vf total = splat(room.totals[at]);
        blocks(P, [&](int64_t p, int n) { store_some(out + p, load(mix + p) / total, n); });
      } else {
        int64_t to = (row * kv * group + h) * splits + part;
        std::memcpy(mixes.in<float>(r.a) + to * P, mix, size_t(P) * sizeof(float));
        peaks.in<float>(r.a)[2 * to] = room.peaks[at];
        peaks.in<float>(r.a)[2 * to + 1] = room.totals[at];
      }
    }
  }
};

// Joins the softmaxes of all parts of the slots (FlashDecoding).
struct Join : Kernel {
  Argument mixes, peaks, run_fields, y, T;
  int64_t heads, P, splits, block_n, window;
  Join(const Variant& v)
      : mixes(v, "mixes"), peaks(v, "peaks"), run_fields(v, "run"), y(v, "y"), T(v, "T"),
        heads(v.integer("HEADS")), P(v.integer("P")), splits(v.within("SPLITS", 1, PARTS)),
        block_n(v.within("BLOCK_N", 1)), window(Attend::window_of(v)) {}
  static constexpr int64_t PARTS = 64;
  void run(const Value* a, const int64_t* grid, Pool&) const override {
    int64_t past = run_fields.in<const int32_t>(a)[PAST];
    int64_t slots = past + T.integer(a) - Attend::base_of(past, window);
    int64_t chunk = Attend::part_size(slots, splits, block_n), parts = (slots + chunk - 1) / chunk;
    for (int64_t each = 0; each < grid[0] * heads; each++) {
      const float* of = peaks.in<const float>(a) + each * splits * 2;
      const float* mix = mixes.in<const float>(a) + each * splits * P;
      float top = -INFINITY, total = 0, weight[PARTS];
      for (int64_t i = 0; i < parts; i++)
        if (!(of[2 * i] <= top)) top = of[2 * i];
      for (int64_t i = 0; i < parts; i++) {
        weight[i] = of[2 * i] == -INFINITY ? 0.f : std::exp(of[2 * i] - top);
        total += of[2 * i + 1] * weight[i];
      }
      blocks(P, [&](int64_t p, int n) {
        vf sums{};
        for (int64_t i = 0; i < parts; i++) sums += weight[i] * load_some(mix + i * P + p, n);
        store_some(y.in<float>(a) + each * P + p, sums / splat(total), n);
      });
    }
  }
};

KERNEL("rope.append", RopeAppend)
KERNEL("attention.attend", Attend)
KERNEL("attention.join", Join)
