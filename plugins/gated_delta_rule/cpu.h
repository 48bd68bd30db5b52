// The gated delta rule (arXiv 2412.06464, equation 10), token by token: the C++ counterpart of
// triton_delta_rule.py, and of triton_delta_chunks.py.

struct DeltaRule : Kernel {
  Argument x, dt, B, C, A, dt_bias, state, log_x, log_dt, log_B, y, run_fields, replay, slots,
      ancestors, tokens, batch;
  int64_t heads, P, N, groups, x_stride, dt_stride, B_stride, C_stride;
  float beta_max;
  bool tree;
  static constexpr int64_t LIMIT = 256;  // maximum of N
  static constexpr int PAIR = 2;         // channels at a time, which share a token's key and query

  DeltaRule(const Variant& v)
      : x(v, "x"), dt(v, "dt"), B(v, "B"), C(v, "C"), A(v, "A"), dt_bias(v, "dt_bias"),
        state(v, "state"), log_x(v, "log_x"), log_dt(v, "log_dt"), log_B(v, "log_B"), y(v, "y"),
        run_fields(v, "run"), replay(v, "replay"), slots(v, "slots"),
        ancestors(Argument::optional(v, "ancestors")), tokens(v, "tokens"), batch(v, "batch"),
        heads(v.within("HEADS", 1)), P(v.within("P", 1)), N(v.within("N", 1, LIMIT)),
        groups(v.within("GROUPS", 1)), x_stride(v.integer("X_STRIDE")),
        dt_stride(v.integer("DT_STRIDE")), B_stride(v.integer("B_STRIDE")),
        C_stride(v.integer("C_STRIDE")), beta_max((float)v.number("BETA_MAX")),
        tree(v.integer("TREE", 0) != 0) {
    if (heads % groups) refuse("HEADS must be a multiple of GROUPS");
    if (tree && !ancestors) refuse("ancestors is None");
  }

  void run(const Value* a, const int64_t*, Pool& pool) const override {
    Course course(run_fields.in<const int32_t>(a), tokens.integer(a), batch.integer(a),
                  replay.in<const int32_t>(a), slots.in<const int32_t>(a),
                  tree ? ancestors.in<const int32_t>(a) : nullptr);
    int64_t all = course.pending + course.tokens;
    pool.each(heads * course.batch, items_a_piece(8 * P * N * (1 + all)),
              [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++)
        Head(*this, a, course, each / heads, each % heads).all_channels();
      drain();
    });
  }

  // The channels of one head of one sequence.
  struct Head {
    const DeltaRule& s;
    const Value* a;
    const Course& course;
    int64_t sequence, head, padded;
    float *decay, *beta, *keys, *queries;

    Head(const DeltaRule& s_, const Value* a_, const Course& course_, int64_t sequence_,
         int64_t head_)
        : s(s_), a(a_), course(course_), sequence(sequence_), head(head_),
          padded((s_.N + W - 1) / W * W) {
      int64_t all = course.pending + course.tokens;
      decay = local(2 * (all + W) + (all + course.tokens) * padded);
      beta = decay + all + W;
      keys = beta + all + W;
      queries = keys + all * padded;
      for (int64_t j = 0; j < all; j++) read(j);
      float rate = s.A.in<const float>(a)[head];
      blocks(all, [&](int64_t j, int n) {
        store_some(decay + j, expv(softplus(load(decay + j)) * rate), n);
        store_some(beta + j, s.beta_max * sigmoid(load(beta + j)), n);
      });
    }

    int64_t row_of(int64_t j) const {  // a log row for a pending token, otherwise a row of the run
      int64_t t = j - course.pending;
      return (t < 0 ? course.replay[j] : t) * course.batch + sequence;
    }
    // Reads the head's inputs of a token, and logs those of the run's tokens.
    void read(int64_t j) {
      int64_t t = j - course.pending, row = row_of(j), group = head / (s.heads / s.groups);
      bool logged = t < 0;
      const float* gate = logged ? s.log_dt.in<const float>(a) + row * 2 * s.heads
                                 : s.dt.in<const float>(a) + row * s.dt_stride;
      const float* key = logged ? s.log_B.in<const float>(a) + row * s.groups * s.N
                                : s.B.in<const float>(a) + row * s.B_stride;
      key += group * s.N;
      decay[j] = gate[head] + s.dt_bias.in<const float>(a)[head];
      beta[j] = gate[s.heads + head];
      std::memcpy(keys + j * padded, key, size_t(s.N) * sizeof(float));
      if (logged) return;
      std::memcpy(queries + t * padded, s.C.in<const float>(a) + row * s.C_stride + group * s.N,
                  size_t(s.N) * sizeof(float));
      if (course.slots[t] < 0) return;
      int64_t slot = course.slots[t] * course.batch + sequence;
      float* kept = s.log_dt.in<float>(a) + slot * 2 * s.heads;
      kept[head] = gate[head];
      kept[s.heads + head] = beta[j];
      if (head % (s.heads / s.groups) == 0)
        std::memcpy(s.log_B.in<float>(a) + (slot * s.groups + group) * s.N, key,
                    size_t(s.N) * sizeof(float));
      std::memcpy(s.log_x.in<float>(a) + (slot * s.heads + head) * s.P, values(j),
                  size_t(s.P) * sizeof(float));
    }
    const float* values(int64_t j) const {
      int64_t row = row_of(j);
      return j < course.pending ? s.log_x.in<const float>(a) + (row * s.heads + head) * s.P
                                : s.x.in<const float>(a) + row * s.x_stride + head * s.P;
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

    float* state_of(int64_t slot, int64_t p) const {
      int64_t place = ((slot * course.batch + sequence) * s.heads + head) * s.P + p;
      return s.state.in<float>(a) + place * s.N;
    }
    int some_of(int64_t v) const { return (int)std::min<int64_t>(W, s.N - v * W); }

    template <int V> void channels(int64_t p, int some) const {
      const int64_t vectors = V ? V : padded / W;
      vf h[PAIR][V ? V : LIMIT / W];
      for (int i = 0; i < some; i++)
        for (int64_t v = 0; v < vectors; v++) {
          const float* from = state_of(course.source, p + i) + v * W;
          h[i][v] = load_some(from, some_of(v));
          __builtin_prefetch(from + AHEAD_OF_STATE, 0, 2);
        }
      for (int64_t j = 0; j < course.pending; j++) {
        advance<V>(h, j, p, some);
        if (j + 1 == course.advance) store_all<V>(h, p, some);
      }
      if (course.ancestors) return branches<V>(h, p, some);
      for (int64_t t = 0; t < course.tokens; t++) token<V>(h, t, p, some);
      if (course.store == 2) store_all<V>(h, p, some);
    }

    template <int V>
    void advance(vf (*h)[V ? V : LIMIT / W], int64_t j, int64_t p, int some) const {
      const int64_t vectors = V ? V : padded / W;
      const float *key = keys + j * padded, *x = values(j) + p;
      const float fade = decay[j];
      vf known[PAIR] = {};
      for (int64_t v = 0; v < vectors; v++)
        for (int i = 0; i < some; i++) {
          h[i][v] = fade * h[i][v];
          known[i] = fused(h[i][v], load(key + v * W), known[i]);
        }
      float written[PAIR];
      for (int i = 0; i < some; i++) written[i] = beta[j] * (x[i] - sum(known[i]));
      for (int64_t v = 0; v < vectors; v++)
        for (int i = 0; i < some; i++)
          h[i][v] = fused(splat(written[i]), load(key + v * W), h[i][v]);
    }

    template <int V> void store_all(const vf (*h)[V ? V : LIMIT / W], int64_t p, int some) const {
      const int64_t vectors = V ? V : padded / W;
      const bool past = course.batch * s.heads * s.P * s.N >= LARGE_STATE;
      for (int i = 0; i < some; i++)
        for (int64_t v = 0; v < vectors; v++) {
          float* to = state_of(course.target, p + i) + v * W;
          past && some_of(v) == W ? store_past(to, h[i][v]) : store_some(to, h[i][v], some_of(v));
        }
    }

    // Runs token t from h and writes its output.
    template <int V>
    void token(vf (*h)[V ? V : LIMIT / W], int64_t t, int64_t p, int some) const {
      const int64_t vectors = V ? V : padded / W;
      advance<V>(h, course.pending + t, p, some);
      const float* query = queries + t * padded;
      vf out[PAIR] = {};
      for (int64_t v = 0; v < vectors; v++)
        for (int i = 0; i < some; i++) out[i] += h[i][v] * load(query + v * W);
      float* to = s.y.in<float>(a) + ((t * course.batch + sequence) * s.heads + head) * s.P + p;
      for (int i = 0; i < some; i++) to[i] = sum(out[i]);
    }

    template <int V>
    void branches(const vf (*start)[V ? V : LIMIT / W], int64_t p, int some) const {
      const int64_t vectors = V ? V : padded / W;
      vf h[PAIR][V ? V : LIMIT / W];
      for (int64_t t = 0; t < course.tokens; t++) {
        for (int i = 0; i < some; i++)
          for (int64_t v = 0; v < vectors; v++) h[i][v] = start[i][v];
        for (int64_t j = 0; j < t; j++)
          if (course.ancestors[t * course.tokens + j])
            advance<V>(h, course.pending + j, p, some);
        token<V>(h, t, p, some);
      }
    }
  };
};

// Runs of any length: FEW is for GPUs, which run longer prompts in chunks.
KERNEL("delta_rule.scan", DeltaRule)
KERNEL("delta_terms.prepare", NoScan)
KERNEL("delta_chunks.scan", NoScan)
