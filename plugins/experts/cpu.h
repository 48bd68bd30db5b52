// A mixture of experts: the C++ counterpart of triton_route.py and triton_experts.py. Each chosen
// expert is multiplied with all its rows at once, by the products of ../linear.

// A row's choice among E scores is made by a single thread.
struct Route : Kernel {
  Argument logits, bias, chosen, gates;
  int64_t E, k, stride, groups, top_groups;
  bool sigmoid, normalise;
  float scale;
  Route(const Variant& v)
      : logits(v, "logits"), bias(v, "bias"), chosen(v, "chosen"), gates(v, "gates"),
        E(v.within("E", 1)), k(v.within("SLOTS", 1, E)), stride(v.integer("STRIDE")),
        groups(v.within("GROUPS", 1, E)), top_groups(v.within("TOP_GROUPS", 1, groups)),
        sigmoid(v.integer("SIGMOID") != 0), normalise(v.integer("NORMALISE") != 0),
        scale(float(v.number("SCALE"))) {
    if (E % groups || top_groups * (E / groups) < k) refuse("GROUPS leave too few experts");
  }
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(40 * E), [&](int64_t first, int64_t last) {
      float* score = local(2 * E + groups);
      for (int64_t row = first; row < last; row++) {
        scores(logits.in<const float>(a) + row * stride, score);
        float* ranked = score + E;
        for (int64_t e = 0; e < E; e++) ranked[e] = score[e] + bias.in<const float>(a)[e];
        if (groups > 1) close(ranked, ranked + E);
        choose_best(score, ranked, chosen.in<int32_t>(a) + row * k, gates.in<float>(a) + row * k);
      }
    });
  }

 private:
  void scores(const float* x, float* out) const {
    float top = x[0], total = 0;
    for (int64_t e = 1; e < E; e++) top = std::max(top, x[e]);
    for (int64_t e = 0; e < E; e++) {
      out[e] = sigmoid ? 1.f / (1.f + exp1(-x[e])) : exp1(x[e] - top);
      total += out[e];
    }
    if (!sigmoid)
      for (int64_t e = 0; e < E; e++) out[e] /= total;
  }
  // Sets experts outside the best groups to -inf.
  void close(float* ranked, float* worth) const {
    const float low = -std::numeric_limits<float>::infinity();
    int64_t members = E / groups;
    for (int64_t g = 0; g < groups; g++) {
      float best = low, second = low;
      for (int64_t i = g * members; i < (g + 1) * members; i++) {
        second = std::max(second, std::min(best, ranked[i]));
        best = std::max(best, ranked[i]);
      }
      worth[g] = members > 1 ? best + second : best;
    }
    for (int64_t g = 0; g < groups; g++) {
      int64_t ahead = 0;
      for (int64_t other = 0; other < groups; other++)
        ahead += worth[other] > worth[g] || (worth[other] == worth[g] && other < g);
      if (ahead >= top_groups) std::fill_n(ranked + g * members, members, low);
    }
  }
  // Of equal experts the first is chosen. No expert is chosen twice, even with NaN.
  void choose_best(const float* score, float* ranked, int32_t* out, float* worth) const {
    float total = 0;
    for (int64_t slot = 0; slot < k; slot++) {
      int64_t best = -1;
      for (int64_t e = 0; e < E; e++) {
        if (std::find(out, out + slot, int32_t(e)) != out + slot) continue;
        if (best < 0 || ranked[e] > ranked[best]) best = e;
      }
      out[slot] = int32_t(best);
      total += worth[slot] = score[best];
    }
    for (int64_t slot = 0; slot < k; slot++)
      worth[slot] = (normalise ? worth[slot] / total : worth[slot]) * scale;
  }
};

// Sorts the pairs (row, slot) by their expert.
struct ExpertOrder : Kernel {
  Argument chosen, order, pairs;
  int64_t E;
  ExpertOrder(const Variant& v)
      : chosen(v, "chosen"), order(v, "order"), pairs(v, "P"), E(v.within("E", 1)) {}
  void run(const Value* a, const int64_t*, Pool& pool) const override {
    int64_t* next = pool.scratch<int64_t>(3, E + 1);
    std::fill_n(next, E + 1, 0);
    const int32_t* expert = chosen.in<const int32_t>(a);
    for (int64_t p = 0; p < pairs.integer(a); p++) next[expert[p] + 1]++;
    for (int64_t e = 0; e < E; e++) next[e + 1] += next[e];
    for (int64_t p = 0; p < pairs.integer(a); p++)
      order.in<int32_t>(a)[next[expert[p]]++] = int32_t(p);
  }
};

// Base of the products with chosen experts.
struct OfExperts : Kernel {
  Argument x, chosen, order, y, pairs;
  int64_t N, K, slots, x_stride, part;
  bool own;
  OfExperts(const Variant& v)
      : x(v, "x"), chosen(v, "chosen"), order(v, "order"), y(v, "y"), pairs(v, "P"),
        N(v.within("N", 1)), K(v.within("K", 1)), slots(v.within("SLOTS", 1)),
        x_stride(v.integer("X_STRIDE")), part(N / v.within("PARTS", 1, N)),
        own(v.integer("OWN") != 0) {
    if (N % part) refuse("PARTS must divide N");
  }
  // Calls product(expert, in, rows, store) for each chosen expert with its rows of x, [rows, K].
  // `store` takes (m, n, sums, count).
  template <class F> void each(const Value* a, Pool& pool, F product) const {
    int64_t count = pairs.integer(a);
    const int32_t* at = order.in<const int32_t>(a);
    const int32_t* expert = chosen.in<const int32_t>(a);
    float* in = pool.scratch<float>(4, count * K + W);
    for (int64_t i = 0; i < count; i++) {
      int64_t row = at[i] / slots, slot = own ? at[i] % slots : 0;
      std::memcpy(in + i * K, x.in<const float>(a) + row * x_stride + slot * K,
                  size_t(K) * sizeof(float));
    }
    for (int64_t first = 0, last; first < count; first = last) {
      for (last = first + 1; last < count && expert[at[last]] == expert[at[first]];) last++;
      product(expert[at[first]], in + first * K, last - first,
              [&](int64_t m, int64_t n, vf sums, int some) {
                store(y.in<float>(a), at[first + m], n, sums, some);
              });
    }
  }

 private:
  // Stores columns of a pair from n on, which may span two parts.
  void store(float* to, int64_t pair, int64_t n, vf sums, int count) const {
    to += pair / slots * slots * N + pair % slots * part;
    int64_t of_part = n / part, column = n % part;
    if (column + count <= part)
      return store_some(to + of_part * slots * part + column, sums, count);
    for (int i = 0; i < count; i++, n++) to[n / part * slots * part + n % part] = sums[i];
  }
};

struct ExpertsFloat : OfExperts {
  Argument weight;
  ExpertsFloat(const Variant& v) : OfExperts(v), weight(numbers(v, "weight")) {}
  void run(const Value* a, const int64_t*, Pool& pool) const override {
    int64_t size = N * K * size_of(weight.type);
    each(a, pool, [&](int64_t e, const float* in, int64_t rows, auto store) {
      multiply_float(in, K, rows, weight.type, weight.in<const char>(a) + e * size, N, K, pool,
                     false, store);
    });
  }
};

struct ExpertsInt8 : OfExperts {
  Argument weight, scale;
  ExpertsInt8(const Variant& v) : OfExperts(v), weight(v, "weight"), scale(v, "weight_scale") {}
  void run(const Value* a, const int64_t*, Pool& pool) const override {
    each(a, pool, [&](int64_t e, const float* in, int64_t rows, auto store) {
      int8_t* q = pool.scratch<int8_t>(2, rows * K + BYTES);
      float* step = pool.scratch<float>(1, rows);
      pool.each(rows, items_a_piece(8 * K), [&](int64_t first, int64_t last) {
        for (int64_t m = first; m < last; m++) step[m] = round_block(in + m * K, K, q + m * K);
      });
      const float* unit = scale.in<const float>(a) + e * N;
      multiply_int8(q, K, rows, weight.in<const int8_t>(a) + e * N * K, N, K, pool, false,
                    [&](int64_t m, int64_t n, vf sums, int count) {
                      store(m, n, sums * (step[m] * load_some(unit + n, count)), count);
                    });
    });
  }
};

// Rows are rounded to int8, by block or as a whole.
struct ExpertsBits : OfExperts {
  Argument packed, scales, minimums;
  Blocked blocked;
  bool whole;
  ExpertsBits(const Variant& v)
      : OfExperts(v), packed(v, "packed"), scales(v, "scales"),
        minimums(Argument::optional(v, "minimums")), blocked(v, bits_of(v), bool(minimums)),
        whole(v.integer("WHOLE") != 0) {
    if (minimums && minimums.type != scales.type) refuse("minimums must have the type of scales");
  }
  void run(const Value* a, const int64_t*, Pool& pool) const override {
    scales.type == Type::f16 ? multiply<Half>(a, pool) : multiply<float>(a, pool);
  }

 private:
  template <class S> void multiply(const Value* a, Pool& pool) const {
    int64_t shared = blocked.shared, count = blocked.blocks_a_row();
    each(a, pool, [&](int64_t e, const float* in, int64_t rows, auto store) {
      auto prepared = blocked.prepare(rows, false, pool, [&](int64_t m, int8_t* q, float* worth) {
        const float* row = in + m * K;
        if (whole)
          std::fill_n(worth, count, round_block(row, K, q));
        else
          for (int64_t b = 0; b < count; b++)
            worth[b] = round_block(row + b * shared, shared, q + b * shared);
      });
      int64_t at = e * N * count;
      Units<S> units{scales.in<const S>(a) + at, minimums ? minimums.in<const S>(a) + at : nullptr};
      blocked.multiply(prepared, packed.in<const uint8_t>(a) + e * N * blocked.bytes(), units, rows,
                       pool, false, store);
    });
  }
};

struct ExpertSum : Kernel {
  Argument x, gates, y;
  int64_t N, slots, x_stride;
  ExpertSum(const Variant& v)
      : x(v, "x"), gates(v, "gates"), y(v, "y"), N(v.integer("N")), slots(v.integer("SLOTS")),
        x_stride(v.integer("X_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(2 * slots * N), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        const float* in = x.in<const float>(a) + row * x_stride;
        const float* worth = gates.in<const float>(a) + row * slots;
        blocks(N, [&](int64_t i, int n) {
          vf total{};
          for (int64_t j = 0; j < slots; j++) total += worth[j] * load_some(in + j * N + i, n);
          store_some(y.in<float>(a) + row * N + i, total, n);
        });
      }
    });
  }
};

KERNEL("route.route", Route)
KERNEL("route.order", ExpertOrder)
KERNEL("route.weigh", ExpertSum)
KERNEL("experts.floats", ExpertsFloat)
KERNEL("experts.int8", ExpertsInt8)
KERNEL("experts.bits", ExpertsBits)
