// Mamba-2's scan (arXiv 2405.21060, equation 1), token by token: the C++ counterpart of
// triton_scan_heads.py.

struct ScanHeads : Kernel {
  Argument x, dt, B, C, A, D, dt_bias, A_scale, D_scale, dt_bias_scale;
  Scale x_scale, dt_scale, B_scale, C_scale, state_scale;
  Argument state, log_x, log_dt, log_B, y, run_fields, replay, slots, ancestors, tokens, batch;
  int64_t heads, P, N, groups, x_stride, dt_stride, B_stride, C_stride;
  float dt_min, dt_max;
  bool tree;
  static constexpr int64_t LIMIT = 256;  // maximum of N
  static constexpr int PAIR = 2, ACROSS = REGISTERS / 4;  // channels and vectors of a tile

  ScanHeads(const Variant& v)
      : x(numbers(v, "x")), dt(numbers(v, "dt")), B(numbers(v, "B")), C(numbers(v, "C")),
        A(numbers(v, "A")), D(numbers(v, "D")), dt_bias(numbers(v, "dt_bias")),
        A_scale(Argument::optional(v, "A_scale")), D_scale(Argument::optional(v, "D_scale")),
        dt_bias_scale(Argument::optional(v, "dt_bias_scale")),
        x_scale(v, "x_scale", "X_SCALES"), dt_scale(v, "dt_scale", "DT_SCALES"),
        B_scale(v, "B_scale", "B_SCALES"), C_scale(v, "C_scale", "C_SCALES"),
        state_scale(v, "state_scale", "STATE_SCALES"),
        state(numbers(v, "state")), log_x(numbers(v, "log_x")), log_dt(numbers(v, "log_dt")),
        log_B(numbers(v, "log_B")), y(v, "y"), run_fields(v, "run"), replay(v, "replay"),
        slots(v, "slots"), ancestors(Argument::optional(v, "ancestors")), tokens(v, "tokens"),
        batch(v, "batch"), heads(v.within("HEADS", 1)), P(v.integer("P")),
        N(v.within("N", 1, LIMIT)), groups(v.within("GROUPS", 1)), x_stride(v.integer("X_STRIDE")),
        dt_stride(v.integer("DT_STRIDE")), B_stride(v.integer("B_STRIDE")),
        C_stride(v.integer("C_STRIDE")), dt_min((float)v.number("DT_MIN")),
        dt_max((float)v.number("DT_MAX")), tree(v.integer("TREE", 0) != 0) {
    if (heads % groups) refuse("HEADS must be a multiple of GROUPS");
    if (tree && !ancestors) refuse("ancestors is None");
    if (A_scale && !(D_scale && dt_bias_scale)) refuse("D_scale or dt_bias_scale is None");
  }

  void run(const Value* a, const int64_t*, Pool& pool) const override {
    Course course(run_fields.in<const int32_t>(a), tokens.integer(a), batch.integer(a),
                  replay.in<const int32_t>(a), slots.in<const int32_t>(a),
                  tree ? ancestors.in<const int32_t>(a) : nullptr);
    int64_t padded = (N + W - 1) / W * W, all = course.pending + course.tokens;
    int64_t of_group = all * padded;
    float* wide = pool.scratch<float>(2, 2 * of_group * groups * course.batch + W);
    pool.each(groups * course.batch, items_a_piece(8 * of_group),
              [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++)
        widen(a, course, each / groups, each % groups, wide + 2 * each * of_group, padded);
    });
    pool.each(heads * course.batch, items_a_piece(6 * P * N * (1 + all)),
              [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++) {
        int64_t sequence = each / heads, head = each % heads;
        int64_t group = head / (heads / groups);
        const float* b = wide + 2 * (sequence * groups + group) * of_group;
        Head one(*this, a, course, sequence, head, b, b + of_group, padded);
        one.all_channels();
      }
      drain();
    });
  }

  // Converts B and C of a group of one sequence to scaled floats, and logs B of the run's tokens.
  void widen(const Value* a, const Course& course, int64_t sequence, int64_t group, float* out,
             int64_t padded) const {
    Rows of_B = rows_of(B, a, B_stride), of_C = rows_of(C, a, C_stride);
    Rows logged = rows_of(log_B, a, groups * N);
    int64_t all = course.pending + course.tokens;
    float* c = out + all * padded;
    for (int64_t j = 0; j < all; j++) {
      int64_t t = j - course.pending;
      const Rows& from = t < 0 ? logged : of_B;
      int64_t row = (t < 0 ? course.replay[j] : t) * course.batch + sequence;
      for (int64_t n = 0; n < padded; n += W) {
        int some = (int)std::min<int64_t>(W, N - n);
        int64_t at = group * N + n;
        vf raw = from.at(row, at, some);
        store(out + j * padded + n, raw * B_scale.at(a, at, some));
        if (t < 0) continue;
        store(c + j * padded + n, of_C.at(row, at, some) * C_scale.at(a, at, some));
        if (course.slots[t] >= 0)
          store_as_type(log_B.in<void>(a), log_B.type,
                        (course.slots[t] * course.batch + sequence) * groups * N + at, raw, some);
      }
    }
  }

  // The tokens of one head of one sequence, those to replay before those of the run. `x` has rows of
  // `wide` floats, scaled, with zeros beyond P.
  struct HeadTokens {
    float *delta, *decay, *x;
    float skip;
    int64_t wide;
  };

  // Computes them in `room` of `room_for` floats, and logs x and dt of the run's tokens.
  HeadTokens tokens_of(const Value* a, const Course& course, int64_t sequence, int64_t head,
                       int64_t wide, float* room) const {
    int64_t all = course.pending + course.tokens;
    HeadTokens of{room, room + all + W, room + 2 * (all + W), 0.f, wide};
    Rows of_dt = rows_of(dt, a, dt_stride), logged_dt = rows_of(log_dt, a, heads);
    Rows of_x = rows_of(x, a, x_stride), logged_x = rows_of(log_x, a, heads * P);
    bool scaled = bool(A_scale);
    float rate = rows_of(A, a, 0).one_at(0, head), bias = rows_of(dt_bias, a, 0).one_at(0, head);
    of.skip = rows_of(D, a, 0).one_at(0, head);
    if (scaled) {
      rate = -exp1(rate * *A_scale.in<const float>(a));
      of.skip *= *D_scale.in<const float>(a);
      bias *= *dt_bias_scale.in<const float>(a);
    }
    float unit = dt_scale.one(a, head);
    const int64_t beyond = (P + W - 1) / W * W;
    for (int64_t j = 0; j < all; j++) {
      int64_t t = j - course.pending, kept = t < 0 ? -1 : course.slots[t];
      int64_t row = (t < 0 ? course.replay[j] : t) * course.batch + sequence;
      float raw = (t < 0 ? logged_dt : of_dt).one_at(row, head);
      of.delta[j] = raw * unit + bias;
      if (kept >= 0)
        store_as_type(log_dt.in<void>(a), log_dt.type,
                      (kept * course.batch + sequence) * heads + head, splat(raw), 1);
      for (int64_t p = 0; p < P; p += W) {
        int some = (int)std::min<int64_t>(W, P - p);
        vf raw_x = (t < 0 ? logged_x : of_x).at(row, head * P + p, some);
        store(of.x + j * wide + p, raw_x * x_scale.at(a, head * P + p, some));
        if (kept >= 0)
          store_as_type(log_x.in<void>(a), log_x.type,
                        ((kept * course.batch + sequence) * heads + head) * P + p, raw_x, some);
      }
      std::memset(of.x + j * wide + beyond, 0, size_t(wide - beyond) * sizeof(float));
    }
    blocks(all, [&](int64_t j, int n) {
      vf d = softplus(load(of.delta + j));
      d = choose(d < dt_min, splat(dt_min), d);
      d = choose(d > dt_max, splat(dt_max), d);
      store_some(of.delta + j, d, n);
      store_some(of.decay + j, expv(d * rate), n);
    });
    return of;
  }
  int64_t room_for(int64_t all, int64_t wide) const { return 2 * (all + W) + all * wide; }

  // One head of one sequence, token by token: a vector is W columns of a channel's state. A tile of
  // PAIR channels and up to ACROSS vectors goes through all tokens before the next.
  struct Head {
    const ScanHeads& s;
    const Value* a;
    const Course& course;
    const int64_t sequence, head, padded;
    const float *b, *c;
    const Type kind;
    const Rows states;
    const int64_t state_size, wide;
    HeadTokens given;
    float* read;  // C·h, a row of `wide` floats for each token of the run
    vf* seen;     // C·h of the tiles so far, PAIR vectors for each token of the run

    Head(const ScanHeads& s_, const Value* a_, const Course& course_, int64_t sequence_,
         int64_t head_, const float* b_, const float* c_, int64_t padded_)
        : s(s_), a(a_), course(course_), sequence(sequence_), head(head_), padded(padded_), b(b_),
          c(c_), kind(s.state.type), states(rows_of(s.state, a, 0)),
          state_size(course.batch * s.heads * s.P * s.N), wide((s.P + W - 1) / W * W) {
      int64_t all = course.pending + course.tokens, of_seen = course.tokens * PAIR * W;
      int64_t size = of_seen + course.tokens * wide + s.room_for(all, wide);
      float* memory = static_cast<float*>(thread_bytes(0, size * int64_t(sizeof(float))));
      seen = reinterpret_cast<vf*>(memory);
      read = memory + of_seen;
      given = s.tokens_of(a, course, sequence, head, wide, read + course.tokens * wide);
    }

    void all_channels() const {
      for (int64_t p = 0; p < s.P; p += PAIR) {
        int some = (int)std::min<int64_t>(PAIR, s.P - p);
        std::memset(seen, 0, size_t(course.tokens * PAIR) * sizeof(vf));
        int64_t n = 0;
        tiles<ACROSS>(p, some, n);
        tiles<1>(p, some, n);
        for (int64_t t = 0; t < course.tokens; t++)
          for (int i = 0; i < some; i++) read[t * wide + p + i] = sum(seen[t * PAIR + i]);
      }
      s.write(a, course, sequence, head, given, read);
    }

    // Runs tiles of V vectors from column n on, as far as they fit.
    template <int V> void tiles(int64_t p, int some, int64_t& n) const {
      for (; n + V * W <= padded; n += V * W)
        if (kind == Type::f32 && some == PAIR && n + V * W <= s.N)
          Tile<V, true>(*this, p, some, n).run();
        else
          Tile<V, false>(*this, p, some, n).run();
    }
  };

  // V vectors of each of some channels from p on, from column n on. WHOLE: of floats, PAIR channels,
  // and no lane beyond N.
  template <int V, bool WHOLE> struct Tile {
    const Head& of;
    const Course& course;
    const int64_t p, n, padded;
    const int some;
    vf h[PAIR][V];
    vf unit[V];  // scale of the stored states

    Tile(const Head& head, int64_t p_, int some_, int64_t n_)
        : of(head), course(head.course), p(p_), n(n_), padded(head.padded),
          some(WHOLE ? PAIR : some_) {}

    EDGE_INLINE void run() {
      load_all();
      for (int64_t j = 0; j < course.pending; j++) {
        advance(j);
        if (j + 1 == course.advance) store_all();
      }
      if (course.ancestors) return branches();
      for (int64_t t = 0; t < course.tokens; t++) advance(course.pending + t, of.seen + t * PAIR);
      if (course.store == 2) store_all();
    }

   private:
    // Runs token j, and adds C·h, before h is rounded, to `seen` if given.
    EDGE_INLINE void advance(int64_t j, vf* seen = nullptr) {
      const float *now = of.b + j * padded + n, *c = of.c + j * padded + n;
      const float *x = of.given.x + j * of.wide + p, fade = of.given.decay[j];
      float fed[PAIR];
      for (int i = 0; i < some; i++) fed[i] = of.given.delta[j] * x[i];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        vf new_B = load(now + v * W);
        for (int i = 0; i < some; i++) h[i][v] = fused(splat(fed[i]), new_B, fade * h[i][v]);
        if (seen) {
          vf of_c = load(c + v * W);
          for (int i = 0; i < some; i++) seen[i] = fused(h[i][v], of_c, seen[i]);
        }
      }
      if (WHOLE || of.kind == Type::f32) return;
      for (int v = 0; v < V; v++)
        for (int i = 0; i < some; i++) h[i][v] = kept(h[i][v], of.kind, unit[v], 1.f / unit[v]);
    }

    int64_t place(int64_t slot, int i) const {
      return slot * of.state_size +
             ((of.sequence * of.s.heads + of.head) * of.s.P + p + i) * of.s.N + n;
    }
    int some_of(int v) const { return (int)std::min<int64_t>(W, of.s.N - n - v * W); }

    // The processor does not fetch a state by itself fast enough.
    EDGE_INLINE void load_all() {
      if (WHOLE) {
        for (int i = 0; i < PAIR; i++) {
          const float* from = of.s.state.in<const float>(of.a) + place(course.source, i);
#pragma GCC unroll 8
          for (int v = 0; v < V; v++) {
            h[i][v] = load(from + v * W);
            __builtin_prefetch(from + v * W + AHEAD_OF_STATE, 0, 2);
          }
        }
        return;
      }
      for (int v = 0; v < V; v++) {
        vf stored = of.s.state_scale.at(of.a, of.head * of.s.N + n + v * W, some_of(v));
        unit[v] = of.kind == Type::i8 ? choose(stored > 0.f, stored, splat(1.f)) : splat(1.f);
        for (int i = 0; i < some; i++)
          h[i][v] = of.states.at(0, place(course.source, i) + v * W, some_of(v)) * unit[v];
      }
    }
    EDGE_INLINE void store_all() const {
      const bool past = of.state_size >= LARGE_STATE;
      for (int i = 0; i < some; i++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
          int64_t at = place(course.target, i) + v * W;
          if (WHOLE) {
            float* to = of.s.state.in<float>(of.a) + at;
            past ? store_past(to, h[i][v]) : store(to, h[i][v]);
          } else {
            store_state(of.s.state.in<void>(of.a), of.kind, at, h[i][v], 1.f / unit[v], some_of(v));
          }
        }
    }

    // Runs each token of a tree along its own path.
    void branches() {
      vf start[PAIR][V];
      std::memcpy(start, h, sizeof h);
      for (int64_t t = 0; t < course.tokens; t++) {
        std::memcpy(h, start, sizeof h);
        for (int64_t k = 0; k < t; k++)
          if (course.ancestors[t * course.tokens + k]) advance(course.pending + k);
        advance(course.pending + t, of.seen + t * PAIR);
      }
    }
  };

  // y = C·h + D·x of the run's tokens; `read` has rows of `of.wide` floats.
  void write(const Value* a, const Course& course, int64_t sequence, int64_t head,
             const HeadTokens& of, const float* read) const {
    for (int64_t t = 0; t < course.tokens; t++)
      for (int64_t p = 0; p < P; p += W) {
        vf out = load(read + t * of.wide + p);
        out += of.skip * load(of.x + (course.pending + t) * of.wide + p);
        store_some(y.in<float>(a) + ((t * course.batch + sequence) * heads + head) * P + p, out,
                   (int)std::min<int64_t>(W, P - p));
      }
  }
};

KERNEL("scan_heads.scan", ScanHeads)
