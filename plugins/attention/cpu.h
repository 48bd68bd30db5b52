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

// Attention of one query at a time over tiles of slots, with a running softmax (FlashAttention,
// arXiv 2205.14135, algorithm 1).
struct Attend : Kernel {
  Argument q, keys, values, ancestors, run_fields, y, mixes, peaks, T, B, C;
  int64_t kv, group, P, q_stride, splits, block_n, window;
  float scale, softcap;
  static constexpr int TILE = 32;
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
    int64_t tokens = T.integer(a), batch = B.integer(a), past = run_fields.in<const int32_t>(a)[PAST];
    int64_t slots = past + tokens - base_of(past, window);
    int64_t chunk = part_size(slots, splits, block_n);
    int64_t parts = (slots + chunk - 1) / chunk, heads = kv * group;
    int64_t work = slots * P;
    pool.each(tokens * batch * heads * parts, items_a_piece(4 * work),
              [&](int64_t first, int64_t last) {
      float* room = local(2 * P + 2 * W);
      for (int64_t each = first; each < last; each++) {
        int64_t part = each % parts, head = each / parts % heads, row = each / parts / heads;
        auto query = [&](auto* kind) {
          one_query(kind, a, row, head, part, chunk, past, tokens, batch, room, room + P + W);
        };
        keys.type == Type::f16 ? query((Half*)nullptr) : query((float*)nullptr);
      }
    });
  }

  template <class Kept>
  void one_query(Kept*, const Value* a, int64_t row, int64_t head, int64_t part, int64_t chunk,
                 int64_t past, int64_t tokens, int64_t batch, float* query, float* mix) const {
    int64_t t = row / batch, b = row % batch, capacity = C.integer(a);
    int64_t start = base_of(past, window) + part * chunk;
    int64_t end = std::min(start + chunk, past + tokens);
    const int32_t* leads = ancestors ? ancestors.in<const int32_t>(a) + t * tokens : nullptr;
    if (!leads) end = std::min(end, past + t + 1);
    start = std::max(start, first_seen(t, past, leads));
    const float* in = q.in<const float>(a) + row * q_stride + head * P;
    const Kept* k = keys.in<const Kept>(a) + (b * kv + head / group) * capacity * P;
    const Kept* v = values.in<const Kept>(a) + (b * kv + head / group) * capacity * P;
    blocks(P, [&](int64_t i, int n) {
      store(query + i, load_some(in + i, n) * scale);
      store(mix + i, vf{});
    });
    float peak = -INFINITY, total = 0;
    for (int64_t first = start; first < end; first += TILE) {
      int count = (int)std::min<int64_t>(TILE, end - first);
      float score[TILE], top = peak;
      for (int i = 0; i < count; i++) {
        int64_t slot = first + i;
        bool sees = !leads || slot < past || leads[slot - past];
        score[i] = sees ? product(query, k + slot * P) : -INFINITY;
        if (!(score[i] <= top)) top = score[i];  // keeps NaN
      }
      if (softcap > 0) top = capped(score, count, peak);
      if (top == -INFINITY) continue;
      float fade = peak == -INFINITY ? 0.f : std::exp(peak - top);
      total *= fade;
      for (int64_t p = 0; p < P; p += W) store(mix + p, load(mix + p) * fade);
      for (int i = 0; i < count; i++) {
        float share = score[i] == -INFINITY ? 0.f : std::exp(score[i] - top);
        if (share == 0.f) continue;
        total += share;
        const Kept* from = v + (first + i) * P;
        blocks(P, [&](int64_t p, int n) {
          store(mix + p, load(mix + p) + share * load_some(from + p, n));
        });
      }
      peak = top;
    }
    if (splits == 1) {
      float* out = y.in<float>(a) + row * kv * group * P + head * P;
      blocks(P, [&](int64_t p, int n) { store_some(out + p, load(mix + p) / splat(total), n); });
    } else {
      int64_t at = (row * kv * group + head) * splits + part;
      std::memcpy(mixes.in<float>(a) + at * P, mix, size_t(P) * sizeof(float));
      peaks.in<float>(a)[2 * at] = peak;
      peaks.in<float>(a)[2 * at + 1] = total;
    }
  }

  // Soft-caps the scores that are not -inf. Returns the largest of them and `top`.
  float capped(float* score, int count, float top) const {
    blocks(count, [&](int64_t i, int n) {
      vf before = load_some(score + i, n), after = soft_cap(before, softcap);
      for (int k = 0; k < n; k++)
        if (before[k] == -INFINITY) after[k] = -INFINITY;
      store_some(score + i, after, n);
    });
    for (int i = 0; i < count; i++)
      if (!(score[i] <= top)) top = score[i];
    return top;
  }

  template <class Kept> float product(const float* query, const Kept* key) const {
    vf s{};
    blocks(P, [&](int64_t i, int n) { s += load(query + i) * load_some(key + i, n); });
    return sum(s);
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
