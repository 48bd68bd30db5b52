// Helpers for kernels with a recurrent state.

// A tensor of f32, f16 or int8 rows, read as floats.
struct Rows {
  const void* base;
  Type type;
  int64_t stride;
  vf at(int64_t row, int64_t i, int n) const {
    int64_t place = row * stride + i;
    switch (type) {
      case Type::i8: return load_some((const int8_t*)base + place, n);
      case Type::f16: return load_some((const Half*)base + place, n);
      default: return load_some((const float*)base + place, n);
    }
  }
  float one_at(int64_t row, int64_t i) const {
    int64_t place = row * stride + i;
    switch (type) {
      case Type::i8: return ((const int8_t*)base)[place];
      case Type::f16: return one((const Half*)base + place);
      default: return ((const float*)base)[place];
    }
  }
};
inline void store_as_type(void* base, Type type, int64_t place, vf v, int n) {
  switch (type) {
    case Type::i8: return store_some((int8_t*)base + place, v, n);
    case Type::f16: return store_some((Half*)base + place, v, n);
    default: return store_some((float*)base + place, v, n);
  }
}

inline Rows rows_of(const Argument& x, const Value* a, int64_t stride) {
  return {x.in<const void>(a), x.type, stride};
}

// Returns h as the next token sees it: rounded to `kind` and converted back. `unit`: int8 scale.
inline vf kept(vf h, Type kind, vf unit, vf inverse) {
  if (kind == Type::i8) return round8(h * inverse) * unit;
  if (kind == Type::f16) return half_to_float(float_to_half(h));
  return h;
}
inline void store_state(void* state, Type kind, int64_t at, vf h, vf inverse, int n) {
  store_as_type(state, kind, at, kind == Type::i8 ? round_even(h * inverse) : h, n);
}

// The processor does not fetch a state by itself fast enough: floats of it to fetch ahead. Stores to
// one of so many elements bypass the caches, because the next step reads it from memory in any case.
constexpr int64_t AHEAD_OF_STATE = 1024, LARGE_STATE = 1 << 14;

// What a run does to a recurrent state: see RUN_FIELDS of edge/launch.py.
struct Course {
  int64_t pending, advance, source, target, store, tokens, batch;
  const int32_t *replay, *slots, *ancestors;
  Course() = default;
  Course(const int32_t* run, int64_t tokens_, int64_t batch_, const int32_t* replay_,
         const int32_t* slots_, const int32_t* ancestors_)
      : pending(run[PENDING]), advance(run[STORE] == 1 ? run[ADVANCE] : 0), source(run[SOURCE]),
        target(run[TARGET]), store(run[STORE]), tokens(tokens_), batch(batch_), replay(replay_),
        slots(slots_), ancestors(ancestors_) {}
};

// A launch of a scan in chunks that a CPU does not need.
struct NoScan : Kernel {
  explicit NoScan(const Variant&) {}
  void run(const Value*, const int64_t*, Pool&) const override {}
};
