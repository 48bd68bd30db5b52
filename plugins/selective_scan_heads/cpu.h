// Mamba-2's scan (arXiv 2405.21060, equation 1), token by token: the C++ counterpart of
// triton_scan_heads.py and triton_scan_chunks.py.

struct ScanHeads : Kernel {
  Argument x, dt, B, C, A, D, dt_bias, A_scale, D_scale, dt_bias_scale;
  Scale x_scale, dt_scale, B_scale, C_scale, state_scale;
  Argument state, log_x, log_dt, log_B, y, run_fields, replay, slots, ancestors, tokens, batch;
  int64_t heads, P, N, groups, x_stride, dt_stride, B_stride, C_stride;
  float dt_min, dt_max;
  bool tree;
  static constexpr int64_t LIMIT = 256;  // maximum of N
  static constexpr int PAIR = 2;         // channels at a time, which share a token's B and C

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

  // The channels of one head of one sequence.
  struct Head {
    const ScanHeads& s;
    const Value* a;
    const Course& course;
    int64_t sequence, head, padded;
    const float *b, *c;
    float *delta, *decay;
    float skip;
    Type kind;
    Rows xs, log_xs, states;
    int64_t state_size;

    Head(const ScanHeads& s_, const Value* a_, const Course& course_, int64_t sequence_,
         int64_t head_, const float* b_, const float* c_, int64_t padded_)
        : s(s_), a(a_), course(course_), sequence(sequence_), head(head_), padded(padded_), b(b_),
          c(c_), kind(s.state.type), xs(rows_of(s.x, a, s.x_stride)),
          log_xs(rows_of(s.log_x, a, s.heads * s.P)), states(rows_of(s.state, a, 0)),
          state_size(course.batch * s.heads * s.P * s.N) {
      int64_t all = course.pending + course.tokens;
      delta = local(2 * all + W);
      decay = delta + all + W;
      Rows of_dt = rows_of(s.dt, a, s.dt_stride), logged = rows_of(s.log_dt, a, s.heads);
      bool scaled = bool(s.A_scale);
      float A = rows_of(s.A, a, 0).one_at(0, head), bias = rows_of(s.dt_bias, a, 0).one_at(0, head);
      skip = rows_of(s.D, a, 0).one_at(0, head);
      if (scaled) {
        A = -exp1(A * *s.A_scale.in<const float>(a));
        skip *= *s.D_scale.in<const float>(a);
        bias *= *s.dt_bias_scale.in<const float>(a);
      }
      float unit = s.dt_scale.one(a, head);
      for (int64_t j = 0; j < all; j++) {
        int64_t t = j - course.pending;
        float raw = t < 0 ? logged.one_at(course.replay[j] * course.batch + sequence, head)
                          : of_dt.one_at(t * course.batch + sequence, head);
        delta[j] = raw * unit + bias;
        if (t >= 0 && course.slots[t] >= 0) {
          int64_t at = (course.slots[t] * course.batch + sequence) * s.heads + head;
          store_as_type(s.log_dt.in<void>(a), s.log_dt.type, at, splat(raw), 1);
        }
      }
      blocks(all, [&](int64_t j, int n) {
        vf d = softplus(load(delta + j));
        d = choose(d < s.dt_min, splat(s.dt_min), d);
        d = choose(d > s.dt_max, splat(s.dt_max), d);
        store_some(delta + j, d, n);
        store_some(decay + j, expv(d * A), n);
      });
    }

    void all_channels() {
      for (int64_t p = 0; p < s.P; p += PAIR) {
        int some = (int)std::min<int64_t>(PAIR, s.P - p);
        if (padded == 128 && W == 16 && some == PAIR)
          channels<8>(p, some);
        else
          channels<0>(p, some);
      }
    }

    int64_t state_at(int64_t slot, int64_t p) const {
      return slot * state_size + ((sequence * s.heads + head) * s.P + p) * s.N;
    }
    // Scale of the stored states; 1 in lanes beyond the last state.
    vf unit_of(int64_t n, int some) const {
      vf unit = s.state_scale.at(a, head * s.N + n, some);
      return choose(unit > 0.f, unit, splat(1.f));
    }
    int some_of(int64_t n) const { return (int)std::min<int64_t>(W, s.N - n); }

    template <int V> void channels(int64_t p, int some) const {
      const int64_t vectors = V ? V : padded / W;
      vf h[PAIR][V ? V : LIMIT / W];
      for (int i = 0; i < some; i++)
        for (int64_t v = 0; v < vectors; v++) {
          int n = some_of(v * W);
          h[i][v] = states.at(0, state_at(course.source, p + i) + v * W, n);
          if (kind == Type::i8) h[i][v] *= unit_of(v * W, n);
        }
      for (int64_t j = 0; j < course.pending; j++) {
        int64_t row = course.replay[j] * course.batch + sequence;
        for (int i = 0; i < some; i++) {
          float x = log_xs.one_at(row, head * s.P + p + i) * s.x_scale.one(a, head * s.P + p + i);
          advance<V>(h[i], j, x);
          round<V>(h[i]);
        }
        if (j + 1 == course.advance) store_all<V>(h, p, some);
      }
      if (course.ancestors) return branches<V>(h, p, some);
      for (int64_t t = 0; t < course.tokens; t++) {
        token<V>(h, t, p, some);
        if (kind != Type::f32)
          for (int i = 0; i < some; i++) round<V>(h[i]);
      }
      if (course.store == 2) store_all<V>(h, p, some);
    }

    template <int V> void advance(vf* h, int64_t j, float x) const {
      const int64_t vectors = V ? V : padded / W;
      const float* row = b + j * padded;
      float fed = delta[j] * x, fade = decay[j];
      for (int64_t v = 0; v < vectors; v++) h[v] = fade * h[v] + fed * load(row + v * W);
    }
    template <int V> void round(vf* h) const {
      if (kind == Type::f32) return;
      const int64_t vectors = V ? V : padded / W;
      for (int64_t v = 0; v < vectors; v++) {
        vf unit = kind == Type::i8 ? unit_of(v * W, some_of(v * W)) : splat(1.f);
        h[v] = kept(h[v], kind, unit, 1.f / unit);
      }
    }
    template <int V> void store_all(const vf (*h)[V ? V : LIMIT / W], int64_t p, int some) const {
      const int64_t vectors = V ? V : padded / W;
      for (int i = 0; i < some; i++)
        for (int64_t v = 0; v < vectors; v++) {
          int n = some_of(v * W);
          vf inverse = kind == Type::i8 ? 1.f / unit_of(v * W, n) : splat(1.f);
          store_state(s.state.in<void>(a), kind, state_at(course.target, p + i) + v * W, h[i][v],
                      inverse, n);
        }
    }

    // Runs token t from h, writes its output and logs its x.
    template <int V> void token(vf (*h)[V ? V : LIMIT / W], int64_t t, int64_t p, int some) const {
      const int64_t vectors = V ? V : padded / W, row = t * course.batch + sequence;
      const int64_t j = course.pending + t, channel = head * s.P + p;
      const float *of_b = b + j * padded, *of_c = c + j * padded;
      float x[PAIR], fed[PAIR], fade = decay[j];
      for (int i = 0; i < some; i++) {
        float raw = xs.one_at(row, channel + i);
        if (course.slots[t] >= 0)
          store_as_type(s.log_x.in<void>(a), s.log_x.type,
                        (course.slots[t] * course.batch + sequence) * s.heads * s.P + channel + i,
                        splat(raw), 1);
        x[i] = raw * s.x_scale.one(a, channel + i);
        fed[i] = delta[j] * x[i];
      }
      vf out[PAIR] = {};
      for (int64_t v = 0; v < vectors; v++) {
        vf now = load(of_b + v * W), read = load(of_c + v * W);
        for (int i = 0; i < some; i++) {
          h[i][v] = fade * h[i][v] + fed[i] * now;
          out[i] += h[i][v] * read;
        }
      }
      for (int i = 0; i < some; i++)
        s.y.in<float>(a)[row * s.heads * s.P + channel + i] = sum(out[i]) + skip * x[i];
    }

    template <int V> void branches(const vf (*start)[V ? V : LIMIT / W], int64_t p, int some) const {
      const int64_t vectors = V ? V : padded / W;
      vf h[PAIR][V ? V : LIMIT / W];
      for (int64_t t = 0; t < course.tokens; t++) {
        for (int i = 0; i < some; i++)
          for (int64_t v = 0; v < vectors; v++) h[i][v] = start[i][v];
        for (int64_t j = 0; j < t; j++) {
          if (!course.ancestors[t * course.tokens + j]) continue;
          for (int i = 0; i < some; i++) {
            int64_t channel = head * s.P + p + i;
            float x = xs.one_at(j * course.batch + sequence, channel) * s.x_scale.one(a, channel);
            advance<V>(h[i], course.pending + j, x);
            round<V>(h[i]);
          }
        }
        token<V>(h, t, p, some);
      }
    }
  };
};

KERNEL("scan_heads.scan", ScanHeads)
KERNEL("scan_chunked.scan", ScanHeads)  // of older plans

// Other launches of a scan in chunks: on a CPU `states` computes the outputs too.
KERNEL("scan_chunks.states", ScanHeads)
KERNEL("scan_terms.prepare", NoScan)
KERNEL("scan_chunks.outputs", NoScan)
