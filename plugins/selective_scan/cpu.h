// Mamba-1's scan (arXiv 2312.00752, algorithm 2), token by token: the C++ face of triton_scan.py.

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
    if (!dt && !(low_dt && dt_weight)) refuse("neither dt nor what makes it");
    if (bool(dt_weight_scale) != bool(low_dt_scale)) refuse("dt is made of one scale");
    if (A_scale && !(D_scale && dt_bias_scale)) refuse("A_scale without the others");
    if (!ends && !y) refuse("y is None");
    if (B_groups < 1 || C_groups < 1 || C_groups % B_groups || E % C_groups)
      refuse("B_GROUPS, C_GROUPS and E do not divide into each other");
  }
  static constexpr int64_t LIMIT = 256, AHEAD = 4;

  void run(const Value* a, const int64_t*, Pool& pool) const override {
    if (ends) return;  // a prompt is not cut into parts here
    Course course(run_fields.in<const int32_t>(a), tokens.integer(a), batch.integer(a),
                  replay.in<const int32_t>(a), slots.in<const int32_t>(a),
                  ancestors.in<const int32_t>(a));
    int64_t rows = course.tokens * course.batch;
    Rows steps = rows_of(dt, a, dt_stride);
    if (!dt) steps = {project(a, rows, pool), Type::f32, E};
    // B and C of the run's tokens, then B of those that are replayed, as floats
    int64_t of_B = B_groups * N, of_C = C_groups * N, waiting = course.pending * course.batch;
    float* wide = pool.scratch<float>(2, (rows + waiting) * of_B + rows * of_C);
    float *wide_C = wide + rows * of_B, *wide_replayed = wide_C + rows * of_C;
    pool.each(rows, items_a_piece(4 * (of_B + of_C)), [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; r++) {
        int64_t slot = course.slots[r / course.batch];
        int64_t kept = slot < 0 ? slot : slot * course.batch + r % course.batch;
        widen_B(a, rows_of(B, a, B_stride), r, wide + r * of_B, kept);
        widen_C(a, r, wide_C + r * of_C);
      }
    });
    for (int64_t j = 0; j < waiting; j++)
      widen_B(a, rows_of(log_B, a, of_B),
              course.replay[j / course.batch] * course.batch + j % course.batch,
              wide_replayed + j * of_B, -1);
    int64_t span = E / C_groups, tiles = (span + W - 1) / W, parts = C_groups * tiles;
    pool.each(parts * course.batch, items_a_piece(20 * W * N * (1 + course.tokens + course.pending)),
              [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++) {
        int64_t group = each % parts / tiles, inner = each % tiles * W;
        int64_t first_B = group / (C_groups / B_groups) * N;
        Block block(*this, a, course, each / parts, group * span + inner,
                    (int)std::min<int64_t>(W, span - inner), steps, wide + first_B,
                    wide_C + group * N, wide_replayed + first_B);
        if (N == 16)
          block.template work<16>();
        else
          block.template work<0>();
      }
    });
  }

  // A row of B times its scale, counted in steps of the state's, and kept in the log as it came.
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

  // dt = low_dt · dt_weight as it would be stored, [rows, E]
  const float* project(const Value* a, int64_t rows, Pool& pool) const {
    float* out = pool.scratch<float>(3, rows * E + W);
    if (!dt_weight_scale) {
      const float* in = low_dt.in<const float>(a);
      int64_t stride = low_stride;
      if (dt_weight.type == Type::f16) in = as_half(in, stride, rows, rank, pool), stride = rank;
      with_type(dt_weight.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        pool.each(E, columns_a_piece(rank * sizeof(T), rows), [&](int64_t first, int64_t last) {
          product_float(in, stride, rows, dt_weight.in<const T>(a), rank, first, last,
                        [&](int64_t m, int64_t n, const float(*sums)[NR], int r, int c) {
                          for (int i = 0; i < r; i++)
                            std::memcpy(out + (m + i) * E + n, sums[i], size_t(c) * sizeof(float));
                        });
        });
      });
      return out;
    }
    const int8_t* in = low_dt.in<const int8_t>(a);
    int32_t* bias = pool.scratch<int32_t>(0, rows);
    biases(in, low_stride, rows, rank, pool, bias);
    float x_unit = *low_dt_scale.in<const float>(a);
    const float *units = dt_weight_scale.in<const float>(a);
    pool.each(E, columns_a_piece(rank, rows), [&](int64_t first, int64_t last) {
      product_int8(in, low_stride, rows, dt_weight.in<const int8_t>(a), rank, bias, first, last,
                   [&](int64_t m, int64_t n, vf sums, int count) {
                     vf unit = x_unit * (dt_weight_scales > 1 ? load_some(units + n, count)
                                                              : splat(*units));
                     vf step = dt_scale.at(a, n, count);
                     store_some(out + m * E + n, round8(sums * unit / step), count);
                   });
    });
    return out;
  }

  // At most W channels of one sequence, all of one group; wide, … begin with their group's B or C.
  struct Block {
    const Scan& s;
    const Value* a;
    const Course& course;
    int64_t sequence, e;
    int some;
    Rows xs, steps, zs, log_xs, log_steps;
    const float *wide, *wide_C, *wide_replayed;
    vf x_unit, dt_unit, offset, skip, z_unit;
    vf rate[LIMIT];
    Type kind;
    int64_t state_size;

    Block(const Scan& s_, const Value* a_, const Course& course_, int64_t sequence_, int64_t e_,
          int some_, const Rows& steps_, const float* wide_, const float* wide_C_, const float* replayed_)
        : s(s_), a(a_), course(course_), sequence(sequence_), e(e_),
          some(some_), xs(rows_of(s.x, a, s.x_stride)),
          steps(steps_), zs(rows_of(s.z, a, s.z_stride)), log_xs(rows_of(s.log_x, a, s.E)),
          log_steps(rows_of(s.log_dt, a, s.E)), wide(wide_), wide_C(wide_C_),
          wide_replayed(replayed_), kind(s.state.type), state_size(course.batch * s.N * s.E) {
      Rows of_D = rows_of(s.D, a, 0), of_bias = rows_of(s.dt_bias, a, 0);
      bool scaled = bool(s.A_scale);
      float A_unit = scaled ? *s.A_scale.in<const float>(a) : 1.f;
      with_type(s.A.type, [&](auto* t) {
        const auto* A = s.A.in<std::remove_pointer_t<decltype(t)>>(a) + e;
        for (int64_t n = 0; n < s.N; n++) {
          vf of_n = load_some(A + n * s.E, some);
          rate[n] = (scaled ? -expv(of_n * A_unit) : of_n) * 1.4426950408889634f;
        }
      });
      x_unit = s.x_scale.at(a, e, some);
      dt_unit = s.dt_scale.at(a, e, some);
      z_unit = s.z_scale.at(a, e, some);
      skip = of_D.at(0, e, some) * (scaled ? *s.D_scale.in<const float>(a) : 1.f) * x_unit;
      offset = of_bias.at(0, e, some) * (scaled ? *s.dt_bias_scale.in<const float>(a) : 1.f);
    }

    vf step_size(vf dt) const { return softplus(dt * dt_unit + offset); }

    // h after one more token, not yet rounded; and C·h where C is asked for
    template <int COUNT, bool READ = false>
    EDGE_INLINE vf update(vf* h, vf x, vf delta, const float* B, const float* C = nullptr) const {
      const int64_t N = COUNT ? COUNT : s.N;
      vf fed = delta * (x * x_unit), out{};
#pragma GCC unroll 16
      for (int64_t n = 0; n < N; n++) {
        h[n] = exp2v(delta * rate[n]) * h[n] + fed * B[n];
        if (READ) out += h[n] * C[n];
      }
      return out;
    }
    template <int COUNT> EDGE_INLINE void round(vf* h) const {
      if (kind == Type::f32) return;
      const int64_t N = COUNT ? COUNT : s.N;
      for (int64_t n = 0; n < N; n++) h[n] = kept(h[n], kind, splat(1.f), splat(1.f));
    }
    // f(h[n], its place) for the states of a slot
    template <int COUNT, class F> EDGE_INLINE void each_state(vf* h, int64_t slot, F f) const {
      const int64_t N = COUNT ? COUNT : s.N, start = slot * state_size + sequence * s.N * s.E + e;
      with_type(kind, [&](auto* t) {
        auto* states = s.state.in<std::remove_pointer_t<decltype(t)>>(a) + start;
#pragma GCC unroll 16
        for (int64_t n = 0; n < N; n++) f(h[n], states + n * s.E);
      });
    }
    template <int COUNT> EDGE_INLINE void load_all(vf* h) const {
      each_state<COUNT>(h, course.source, [&](vf& of_n, const auto* from) {
        of_n = load_some(from, some);
        __builtin_prefetch(from + AHEAD * W, 0, 2);
      });
      // 2·N streams of memory are more than processors foresee
      if (course.store)
        each_state<COUNT>(h, course.target,
                          [&](vf&, const auto* to) { __builtin_prefetch(to + AHEAD * W, 1, 2); });
    }
    template <int COUNT> EDGE_INLINE void store_all(vf* h) const {
      each_state<COUNT>(h, course.target, [&](const vf& of_n, auto* to) {
        constexpr bool bytes = std::is_same_v<decltype(to), int8_t*>;
        store_some(to, bytes ? round_even(of_n) : of_n, some);
      });
    }
    void stash(int64_t t, vf x, vf dt) const {
      if (course.slots[t] < 0) return;
      int64_t row = (course.slots[t] * course.batch + sequence) * s.E + e;
      store_as_type(s.log_x.in<void>(a), s.log_x.type, row, x, some);
      store_as_type(s.log_dt.in<void>(a), s.log_dt.type, row, dt, some);
    }
    void store_out(int64_t row, vf y, vf x) const {
      vf out = (y + x * skip) * silu(zs.at(row, e, some) * z_unit);
      store_some(s.y.in<float>(a) + row * s.E + e, out, some);
    }

    template <int COUNT> void work() {
      vf h[COUNT ? COUNT : LIMIT];
      load_all<COUNT>(h);
      for (int64_t j = 0; j < course.pending; j++) {
        int64_t row = course.replay[j] * course.batch + sequence;
        update<COUNT>(h, log_xs.at(row, e, some), step_size(log_steps.at(row, e, some)),
                      wide_replayed + (j * course.batch + sequence) * s.B_groups * s.N);
        round<COUNT>(h);
        if (j + 1 == course.advance) store_all<COUNT>(h);
      }
      if (course.ancestors) return branches<COUNT>(h);
      for (int64_t t = 0; t < course.tokens; t++) {
        token<COUNT>(h, t);
        round<COUNT>(h);
      }
      if (course.store == 2) store_all<COUNT>(h);
    }

    // run token t from h on, with its output
    template <int COUNT> EDGE_INLINE void token(vf* h, int64_t t) const {
      int64_t row = t * course.batch + sequence;
      vf x = xs.at(row, e, some), dt = steps.at(row, e, some);
      stash(t, x, dt);
      vf y = update<COUNT, true>(h, x, step_size(dt), wide + row * s.B_groups * s.N,
                                 wide_C + row * s.C_groups * s.N);
      store_out(row, y, x);
    }

    // each token on its own path from h
    template <int COUNT> void branches(const vf* start) const {
      vf h[COUNT ? COUNT : LIMIT];
      for (int64_t t = 0; t < course.tokens; t++) {
        for (int64_t n = 0; n < s.N; n++) h[n] = start[n];
        for (int64_t j = 0; j < t; j++) {
          if (!course.ancestors[t * course.tokens + j]) continue;
          int64_t row = j * course.batch + sequence;
          update<COUNT>(h, xs.at(row, e, some), step_size(steps.at(row, e, some)),
                        wide + row * s.B_groups * s.N);
          round<COUNT>(h);
        }
        token<COUNT>(h, t);
      }
    }
  };
};

// scan.widen: int8 B and C side by side as floats
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
