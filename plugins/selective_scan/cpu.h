// Mamba-1's selective scan (arXiv 2312.00752, algorithm 2), token by token: the C++ counterpart of
// triton_scan.py.

struct Scan : Kernel {
  Argument x, dt, B, C, z, low_dt, low_dt_scale, dt_weight, dt_weight_scale, A, D, dt_bias;
  Argument A_scale, D_scale, dt_bias_scale;
  Scale x_scale, dt_scale, B_scale, C_scale, z_scale, state_scale;
  Argument state, log_x, log_dt, log_B, y, run_fields, replay, slots, ancestors, tokens, batch;
  int64_t E, N, B_groups, C_groups, x_stride, dt_stride, B_stride, C_stride, z_stride;
  int64_t dt_weight_scales, low_stride, rank;
  bool ends;

  Scan(const Variant& v)
      : x(numbers(v, "x")), dt(optional_numbers(v, "dt")), B(numbers(v, "B")), C(numbers(v, "C")),
        z(numbers(v, "z")), low_dt(Argument::optional(v, "low_dt")),
        low_dt_scale(Argument::optional(v, "low_dt_scale")),
        dt_weight(optional_numbers(v, "dt_weight")),
        dt_weight_scale(Argument::optional(v, "dt_weight_scale")), A(numbers(v, "A")),
        D(numbers(v, "D")), dt_bias(numbers(v, "dt_bias")),
        A_scale(Argument::optional(v, "A_scale")), D_scale(Argument::optional(v, "D_scale")),
        dt_bias_scale(Argument::optional(v, "dt_bias_scale")),
        x_scale(v, "x_scale", "X_SCALES"), dt_scale(v, "dt_scale", "DT_SCALES"),
        B_scale(v, "B_scale", "B_SCALES"), C_scale(v, "C_scale", "C_SCALES"),
        z_scale(v, "z_scale", "Z_SCALES"), state_scale(v, "state_scale", "STATE_SCALES"),
        state(numbers(v, "state")), log_x(numbers(v, "log_x")), log_dt(numbers(v, "log_dt")),
        log_B(numbers(v, "log_B")), y(Argument::optional(v, "y")), run_fields(v, "run"),
        replay(v, "replay"), slots(v, "slots"), ancestors(Argument::optional(v, "ancestors")),
        tokens(v, "tokens"), batch(v, "batch"), E(v.integer("E")), N(v.within("N", 1, LIMIT)),
        B_groups(v.integer("B_GROUPS", 1)), C_groups(v.integer("C_GROUPS", 1)), x_stride(v.integer("X_STRIDE")), dt_stride(v.integer("DT_STRIDE")),
        B_stride(v.integer("B_STRIDE")), C_stride(v.integer("C_STRIDE")),
        z_stride(v.integer("Z_STRIDE")), dt_weight_scales(v.integer("DT_WEIGHT_SCALES")),
        low_stride(v.integer("LOW_STRIDE")), rank(v.integer("RANK")),
        ends(v.integer("ENDS", 0) != 0) {
    if (!dt && !(low_dt && dt_weight)) refuse("dt is None, and low_dt or dt_weight too");
    if (bool(dt_weight_scale) != bool(low_dt_scale)) refuse("one scale of dt is None");
    if (A_scale && !(D_scale && dt_bias_scale)) refuse("D_scale or dt_bias_scale is None");
    if (!ends && !y) refuse("y is None");
    if (B_groups < 1 || C_groups < 1 || C_groups % B_groups || E % C_groups)
      refuse("B_GROUPS must divide C_GROUPS, and C_GROUPS must divide E");
  }
  static constexpr int64_t LIMIT = 256;

  // The run of one state: its course, and its rows of dt, B and C.
  struct Part {
    const Value* a;
    Course course;
    Rows steps;
    const float *B, *C, *replayed_B;  // as floats
  };
  static constexpr int64_t MOST = 16;  // states per joint run
  // blocks of W channels that go through the tokens together, while the next ones are prefetched
  static constexpr int STRIP = 128 / W, AHEAD = STRIP * W;

  int interleavable(Interleaved* out) const override {
    if (!dt_weight || (dt_weight_scale && !int8_interleaves(rank))) return 0;
    out[0] = dt_weight_scale ? Interleaved{dt_weight.place(), W, E, rank / 4, 4}
                             : floats_beside(dt_weight, E, rank);
    return 1;
  }
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    Value one;
    one.address = const_cast<Value*>(a);
    run_all(&one, 1, grid, pool);
  }
  void run_all(const Value* each, int64_t states, const int64_t*, Pool& pool) const override {
    if (ends) return;  // the CPU does not cut prompts into parts
    for (int64_t first = 0; first < states; first += MOST)
      together(each + first, std::min(MOST, states - first), pool);
  }

  // Runs several states. What does not depend on the state is computed once per channel.
  void together(const Value* each, int64_t states, Pool& pool) const {
    Part some[MOST];
    int64_t rows = 0, waiting = 0;
    for (int64_t i = 0; i < states; i++) {
      const Value* a = static_cast<const Value*>(each[i].address);
      some[i].a = a;
      some[i].course = Course(run_fields.in<const int32_t>(a), tokens.integer(a), batch.integer(a),
                              replay.in<const int32_t>(a), slots.in<const int32_t>(a),
                              ancestors.in<const int32_t>(a));
      rows += some[i].course.tokens * some[i].course.batch;
      waiting += some[i].course.pending * some[i].course.batch;
    }
    steps_of(some, states, rows, pool);
    widen_all(some, states, rows, waiting, pool);
    int64_t span = E / C_groups, tiles = (span + W - 1) / W, parts = C_groups * tiles;
    int64_t done = rows + waiting + states;  // tokens, and the start-up cost of each state
    pool.each(parts * some[0].course.batch, items_a_piece(20 * W * N * done),
              [&](int64_t first, int64_t last) {
      const int64_t room = STRIP * N;
      vf* rates = static_cast<vf*>(thread_bytes(0, 3 * room * int64_t(sizeof(vf))));
      for (; first < last; first += STRIP) {
        int count = (int)std::min<int64_t>(STRIP, last - first);
        Channels strip[STRIP];
        for (int i = 0; i < count; i++) {
          int64_t at = first + i, group = at % parts / tiles, inner = at % tiles * W;
          strip[i].take(*this, some[0].a, at / parts, group, group * span + inner,
                        (int)std::min<int64_t>(W, span - inner), rates + i * N);
        }
        for (int64_t state = 0; state < states; state++)
          if (N == 16)
            Strip<16>(*this, some[state], strip, count).work(rates + room, rates + 2 * room);
          else
            Strip<0>(*this, some[state], strip, count).work(rates + room, rates + 2 * room);
      }
      drain();
    });
  }

  // Converts B and C of the runs' tokens, then B of the replayed tokens, to floats.
  void widen_all(Part* some, int64_t states, int64_t rows, int64_t waiting, Pool& pool) const {
    int64_t of_B = B_groups * N, of_C = C_groups * N;
    float* wide = pool.scratch<float>(2, (rows + waiting) * of_B + rows * of_C);
    for (int64_t i = 0; i < states; i++) {
      const Value* a = some[i].a;
      const Course& course = some[i].course;
      int64_t own = course.tokens * course.batch, before = course.pending * course.batch;
      float *wide_C = wide + own * of_B, *replayed = wide_C + own * of_C;
      pool.each(own, items_a_piece(4 * (of_B + of_C)), [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
          int64_t slot = course.slots[r / course.batch];
          int64_t kept = slot < 0 ? slot : slot * course.batch + r % course.batch;
          widen_B(a, rows_of(B, a, B_stride), r, wide + r * of_B, kept);
          widen_C(a, r, wide_C + r * of_C);
        }
      });
      for (int64_t j = 0; j < before; j++)
        widen_B(a, rows_of(log_B, a, of_B),
                course.replay[j / course.batch] * course.batch + j % course.batch,
                replayed + j * of_B, -1);
      some[i].B = wide, some[i].C = wide_C, some[i].replayed_B = replayed;
      wide = replayed + before * of_B;
    }
  }

  // Converts a row of B to units of the state's scale, and logs it unconverted.
  void widen_B(const Value* a, const Rows& from, int64_t row, float* out, int64_t kept) const {
    for (int64_t group = 0; group < B_groups; group++)
      blocks(N, [&](int64_t n, int some) {
        int64_t at = group * N + n;
        vf raw = from.at(row, at, some);
        store_some(out + at, raw * (B_scale.at(a, at, some) / state_scale.at(a, n, some)), some);
        if (kept >= 0)
          store_as_type(log_B.in<void>(a), log_B.type, kept * B_groups * N + at, raw, some);
      });
  }
  void widen_C(const Value* a, int64_t row, float* out) const {
    Rows from = rows_of(C, a, C_stride);
    for (int64_t group = 0; group < C_groups; group++)
      blocks(N, [&](int64_t n, int some) {
        int64_t at = group * N + n;
        vf unit = C_scale.at(a, at, some) * state_scale.at(a, n, some);
        store_some(out + at, from.at(row, at, some) * unit, some);
      });
  }

  // Finds or computes dt of all states. The weights of dt's product are read once for all states.
  void steps_of(Part* some, int64_t states, int64_t rows, Pool& pool) const {
    if (dt) {
      for (int64_t i = 0; i < states; i++) some[i].steps = rows_of(dt, some[i].a, dt_stride);
      return;
    }
    const Value* a = some[0].a;
    const char* in = low_dt.in<const char>(a);
    int64_t item = low_dt.type == Type::i8 ? 1 : 4, stride = low_stride;
    float* out = pool.scratch<float>(3, rows * E + W + (states > 1 ? rows * rank : 0));
    if (states > 1) {
      char* to = reinterpret_cast<char*>(out + rows * E + W);
      in = to, stride = rank;
      for (int64_t i = 0; i < states; i++)
        for (int64_t r = 0; r < some[i].course.tokens * some[i].course.batch; r++, to += rank * item)
          std::memcpy(to, low_dt.in<const char>(some[i].a) + r * low_stride * item,
                      size_t(rank * item));
    }
    if (dt_weight_scale)
      project_int8(a, reinterpret_cast<const int8_t*>(in), stride, rows, out, pool);
    else
      project_float(a, reinterpret_cast<const float*>(in), stride, rows, out, pool);
    for (int64_t i = 0; i < states; i++) {
      some[i].steps = {out, Type::f32, E};
      out += some[i].course.tokens * some[i].course.batch * E;
    }
  }

  // out = low_dt · dt_weight, rounded as if it were stored, [rows, E]
  void project_float(const Value* a, const float* in, int64_t stride, int64_t rows, float* out,
                     Pool& pool) const {
    multiply_float(in, stride, rows, dt_weight.type, dt_weight.in<const char>(a), E, rank, pool,
                   interleaved != 0, [&](int64_t m, int64_t n, vf sums, int count) {
                     store_some(out + m * E + n, sums, count);
                   });
  }
  void project_int8(const Value* a, const int8_t* in, int64_t stride, int64_t rows, float* out,
                    Pool& pool) const {
    float x_unit = *low_dt_scale.in<const float>(a);
    const float *units = dt_weight_scale.in<const float>(a);
    multiply_int8(in, stride, rows, dt_weight.in<const int8_t>(a), E, rank, pool,
                  interleaved != 0, [&](int64_t m, int64_t n, vf sums, int count) {
                    vf unit = x_unit * (dt_weight_scales > 1 ? load_some(units + n, count)
                                                             : splat(*units));
                    vf step = dt_scale.at(a, n, count);
                    store_some(out + m * E + n, round8(sums * unit / step), count);
                  });
  }

  // State-independent values of at most W channels of one sequence and one group.
  struct Channels {
    int64_t sequence, e, first_B, first_C;
    int some;
    vf x_unit, dt_unit, offset, skip, z_unit;
    const vf* rate;

    void take(const Scan& s, const Value* a, int64_t sequence_, int64_t group, int64_t e_,
              int some_, vf* rates) {
      sequence = sequence_, e = e_, some = some_, rate = rates;
      first_B = group / (s.C_groups / s.B_groups) * s.N, first_C = group * s.N;
      Rows of_D = rows_of(s.D, a, 0), of_bias = rows_of(s.dt_bias, a, 0);
      bool scaled = bool(s.A_scale);
      float A_unit = scaled ? *s.A_scale.in<const float>(a) : 1.f;
      with_type(s.A.type, [&](auto* t) {
        const auto* A = s.A.in<std::remove_pointer_t<decltype(t)>>(a) + e;
        for (int64_t n = 0; n < s.N; n++) {
          __builtin_prefetch(A + n * s.E + AHEAD, 0, 2);
          vf of_n = load_some(A + n * s.E, some);
          rates[n] = (scaled ? -expv(of_n * A_unit) : of_n) * 1.4426950408889634f;
        }
      });
      x_unit = s.x_scale.at(a, e, some);
      dt_unit = s.dt_scale.at(a, e, some);
      z_unit = s.z_scale.at(a, e, some);
      skip = of_D.at(0, e, some) * (scaled ? *s.D_scale.in<const float>(a) : 1.f) * x_unit;
      offset = of_bias.at(0, e, some) * (scaled ? *s.dt_bias_scale.in<const float>(a) : 1.f);
    }
  };

  // Up to STRIP blocks of channels of one state, which go through its tokens side by side, so that
  // dt and the gate of one block need not wait for the sums of another. A block's h is [N] vectors.
  template <int COUNT> struct Strip {
    const Scan& s;
    const Part& part;
    const Course& course;
    const Value* a;
    const Channels* of;
    const int count;
    const int64_t N, state_size;
    const Type kind;
    const Rows xs, zs, log_xs, log_steps;

    Strip(const Scan& s_, const Part& part_, const Channels* of_, int count_)
        : s(s_), part(part_), course(part.course), a(part.a), of(of_), count(count_),
          N(COUNT ? COUNT : s.N), state_size(course.batch * s.N * s.E), kind(s.state.type),
          xs(rows_of(s.x, a, s.x_stride)), zs(rows_of(s.z, a, s.z_stride)),
          log_xs(rows_of(s.log_x, a, s.E)), log_steps(rows_of(s.log_dt, a, s.E)) {}

    // `h` and `path`: memory for the states of all blocks
    void work(vf* h, vf* path) const {
      bool one = course.tokens == 1 && course.store == 2 && !course.pending && !course.ancestors;
      if (one && kind == Type::f32) return token(Through(*this), 0);
      load_all(h);
      for (int64_t j = 0; j < course.pending; j++) {
        feed(h, log_xs, log_steps, course.replay[j], part.replayed_B, j);
        if (j + 1 == course.advance) store_all(h);
      }
      if (course.ancestors) return branches(h, path);
      for (int64_t t = 0; t < course.tokens; t++) {
        token(Kept{h, N}, t);
        round(h);
      }
      if (course.store == 2) store_all(h);
    }

   private:
    static vf step_size(const Channels& c, vf dt) { return softplus(dt * c.dt_unit + c.offset); }

    // h of one block, held between tokens.
    struct Held {
      vf* h;
      EDGE_INLINE vf get(int64_t n) const { return h[n]; }
      EDGE_INLINE void put(int64_t n, vf of_n) const { h[n] = of_n; }
    };
    // h of one block for a single token: read from the source slot, written to the target slot.
    // WHOLE: it has W channels, and stores bypass the caches; to ask so for every n would take as
    // many instructions as the arithmetic.
    template <bool WHOLE> struct Moved {
      const float* source;
      float* target;
      int64_t apart;
      int some;
      bool past;
      EDGE_INLINE vf get(int64_t n) const {
        const float* from = source + n * apart;
        __builtin_prefetch(from + AHEAD, 0, 2);
        return WHOLE ? load(from) : load_some(from, some);
      }
      EDGE_INLINE void put(int64_t n, vf of_n) const {
        float* to = target + n * apart;
        if (WHOLE || (past && some == W)) return store_past(to, of_n);
        store_some(to, of_n, some);
      }
    };

    // All blocks' h. `of` calls f with those of SIDE blocks from i on.
    struct Kept {
      vf* h;
      int64_t N;
      template <int SIDE, class F> EDGE_INLINE void of(int i, F f) const {
        Held some[SIDE];
        for (int j = 0; j < SIDE; j++) some[j].h = h + (i + j) * N;
        f(some);
      }
    };
    struct Through {
      const Strip& strip;
      const float* source;
      float* target;
      bool past;
      explicit Through(const Strip& strip_)
          : strip(strip_), source(of_slot(strip.course.source)),
            target(of_slot(strip.course.target)), past(strip.past()) {}
      float* of_slot(int64_t slot) const {
        return strip.s.state.template in<float>(strip.a) + slot * strip.state_size;
      }
      template <int SIDE, class F> EDGE_INLINE void of(int i, F f) const {
        if (past && strip.of[i].some == W)
          f(moved<SIDE, true>(i).each);
        else
          f(moved<SIDE, false>(i).each);
      }

     private:
      template <int SIDE, bool WHOLE> struct Some { Moved<WHOLE> each[SIDE]; };
      template <int SIDE, bool WHOLE> EDGE_INLINE Some<SIDE, WHOLE> moved(int i) const {
        Some<SIDE, WHOLE> some;
        for (int j = 0; j < SIDE; j++) {
          const Channels& c = strip.of[i + j];
          int64_t at = (c.sequence * strip.N) * strip.s.E + c.e;
          some.each[j] = {source + at, target + at, strip.s.E, c.some, past};
        }
        return some;
      }
    };

    // Advances h of SIDE blocks by one token, without rounding it, and adds C·h to `out` if READ.
    template <bool READ, int SIDE, class H>
    EDGE_INLINE void update(const Channels* c, const H* h, const vf* x, const vf* delta,
                            const float* B, const float* C, vf* out) const {
      vf fed[SIDE];
      for (int j = 0; j < SIDE; j++) fed[j] = delta[j] * (x[j] * c[j].x_unit);
#pragma GCC unroll 16
      for (int64_t n = 0; n < (COUNT ? COUNT : N); n++)
        for (int j = 0; j < SIDE; j++) {
          vf now = fused(fed[j], splat(B[n]), exp2v(delta[j] * c[j].rate[n]) * h[j].get(n));
          h[j].put(n, now);
          if (READ) out[j] += now * C[n];
        }
    }

    // Blocks of a cache line. Stores that bypass the caches must fill it before they begin another,
    // or it is written in parts: then two blocks go side by side.
    static constexpr int LINE = sizeof(vf) < 64 ? int(64 / sizeof(vf)) : 1;
    bool fills_line(int i) const {
      if (i + LINE > count || of[i].e % (LINE * W)) return false;
      for (int j = 0; j < LINE; j++)
        if (of[i + j].some != W || of[i + j].sequence != of[i].sequence ||
            of[i + j].first_C != of[i].first_C || of[i + j].first_B != of[i].first_B)
          return false;
      return true;
    }
    void round(vf* h) const {
      if (kind == Type::f32) return;
      for (int64_t n = 0; n < count * N; n++) h[n] = kept(h[n], kind, splat(1.f), splat(1.f));
    }

    // Calls f(h[n], its address in the slot, number of channels) for all of h.
    template <class F> void each_state(vf* h, int64_t slot, F f) const {
      with_type(kind, [&](auto* t) {
        for (int i = 0; i < count; i++, h += N) {
          int64_t start = slot * state_size + of[i].sequence * N * s.E + of[i].e;
          auto* states = s.state.in<std::remove_pointer_t<decltype(t)>>(a) + start;
#pragma GCC unroll 16
          for (int64_t n = 0; n < (COUNT ? COUNT : N); n++) f(h[n], states + n * s.E, of[i].some);
        }
      });
    }
    // Whether stores bypass the processor's caches.
    bool past() const { return kind == Type::f32 && N * s.E >= LARGE_STATE; }
    void load_all(vf* h) const {
      each_state(h, course.source, [&](vf& of_n, const auto* from, int some) {
        of_n = load_some(from, some);
        __builtin_prefetch(from + AHEAD, 0, 2);
      });
      // 2·N streams are more than the hardware prefetches
      if (course.store && !past())
        each_state(h, course.target, [&](vf&, const auto* to, int) {
          __builtin_prefetch(to + AHEAD, 1, 2);
        });
    }
    void store_all(vf* h) const {
      if (past()) return store_past_all(h);
      each_state(h, course.target, [&](const vf& of_n, auto* to, int some) {
        constexpr bool bytes = std::is_same_v<decltype(to), int8_t*>;
        store_some(to, bytes ? round_even(of_n) : of_n, some);
      });
    }
    void store_past_all(const vf* h) const {
      float* target = s.state.in<float>(a) + course.target * state_size;
      for (int i = 0; i < count;) {
        int side = fills_line(i) ? LINE : 1;
        float* to = target + of[i].sequence * N * s.E + of[i].e;
        for (int64_t n = 0; n < N; n++)
          for (int j = 0; j < side; j++) {
            vf of_n = h[(i + j) * N + n];
            if (of[i].some == W)
              store_past(to + n * s.E + j * W, of_n);
            else
              store_some(to + n * s.E, of_n, of[i].some);
          }
        i += side;
      }
    }

    // Advances h by a token without output.
    void feed(vf* h, const Rows& x, const Rows& dt, int64_t at, const float* B, int64_t of_B) const {
      for (int i = 0; i < count; i++) {
        const Channels& c = of[i];
        int64_t row = at * course.batch + c.sequence;
        const float* from = B + (of_B * course.batch + c.sequence) * s.B_groups * N + c.first_B;
        vf of_x = x.at(row, c.e, c.some), delta = step_size(c, dt.at(row, c.e, c.some));
        Held held{h + i * N};
        update<false, 1>(&c, &held, &of_x, &delta, from, nullptr, nullptr);
      }
      round(h);
    }

    // Runs token t from h and writes its output.
    template <class H> void token(H h, int64_t t) const {
      vf x[STRIP], delta[STRIP], gate[STRIP];
      for (int i = 0; i < count; i++) {
        const Channels& c = of[i];
        int64_t row = t * course.batch + c.sequence;
        x[i] = xs.at(row, c.e, c.some);
        vf dt = part.steps.at(row, c.e, c.some);
        if (course.slots[t] >= 0) {
          int64_t at = (course.slots[t] * course.batch + c.sequence) * s.E + c.e;
          store_as_type(s.log_x.in<void>(a), s.log_x.type, at, x[i], c.some);
          store_as_type(s.log_dt.in<void>(a), s.log_dt.type, at, dt, c.some);
        }
        delta[i] = step_size(c, dt);
        gate[i] = silu(zs.at(row, c.e, c.some) * c.z_unit);
      }
      for (int i = 0; i < count;)
        if (LINE > 1 && fills_line(i)) {
          outputs<LINE>(h, t, i, x, delta, gate);
          i += LINE;
        } else {
          outputs<1>(h, t, i++, x, delta, gate);
        }
    }

    // Advances SIDE blocks from i on by token t, and writes their output.
    template <int SIDE, class H>
    EDGE_INLINE void outputs(H h, int64_t t, int i, const vf* x, const vf* delta,
                             const vf* gate) const {
      const Channels* c = of + i;
      int64_t row = t * course.batch + c->sequence;
      const float *B = part.B + row * s.B_groups * N + c->first_B,
                  *C = part.C + row * s.C_groups * N + c->first_C;
      vf y[SIDE]{};
      h.template of<SIDE>(i, [&](const auto* some) {
        update<true, SIDE>(c, some, x + i, delta + i, B, C, y);
      });
      for (int j = 0; j < SIDE; j++)
        store_some(s.y.in<float>(a) + row * s.E + c[j].e, (y[j] + x[i + j] * c[j].skip) * gate[i + j],
                   c[j].some);
    }

    // Runs each token of a tree along its own path from `start`.
    void branches(const vf* start, vf* h) const {
      for (int64_t t = 0; t < course.tokens; t++) {
        std::memcpy(h, start, size_t(count * N) * sizeof(vf));
        for (int64_t j = 0; j < t; j++)
          if (course.ancestors[t * course.tokens + j]) feed(h, xs, part.steps, j, part.B, j);
        token(Kept{h, N}, t);
      }
    }
  };
};

// scan.widen: converts int8 B and C to floats, side by side
struct Widen : Kernel {
  Argument B, C, wide, rows;
  int64_t N, B_stride, C_stride;
  Widen(const Variant& v)
      : B(v, "B"), C(v, "C"), wide(v, "wide"), rows(v, "rows"), N(v.integer("N")),
        B_stride(v.integer("B_STRIDE")), C_stride(v.integer("C_STRIDE")) {}
  void run(const Value* a, const int64_t*, Pool&) const override {
    for (int64_t r = 0; r < rows.integer(a); r++)
      for (int64_t n = 0; n < N; n++) {
        wide.in<float>(a)[r * 2 * N + n] = B.in<const int8_t>(a)[r * B_stride + n];
        wide.in<float>(a)[r * 2 * N + N + n] = C.in<const int8_t>(a)[r * C_stride + n];
      }
  }
};

KERNEL("scan.scan", Scan)
KERNEL("scan.widen", Widen)
