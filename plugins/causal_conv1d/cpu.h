// The causal convolution, alone or fused with the product that computes its input: the C++
// counterpart of triton_conv.py and triton_linear_conv.py.

struct Conv : Kernel {
  Argument x, weight, bias, state, log, y, run_fields, taps, state_taps, kept_slots;
  Argument tokens, batch, slots;
  Scale x_scale, weight_scale, bias_scale, y_scale;
  int64_t C, K, x_stride, start;
  bool plain;  // without SiLU

  // `fused`: the input is the output of a product, from column `start` on
  Conv(const Variant& v, bool fused)
      : x(v, fused ? "y" : "x"), weight(v, fused ? "tap_weight" : "weight"), bias(v, "bias"),
        state(v, "state"), log(v, "log"), y(v, fused ? "output" : "y"), run_fields(v, "run"),
        taps(v, "taps"), state_taps(v, "state_taps"), kept_slots(v, "kept"), tokens(v, "tokens"),
        batch(v, "batch"), slots(v, "slots"),
        x_scale(v, fused ? "input_scale" : "x_scale", fused ? "INPUT_SCALES" : "X_SCALES"),
        weight_scale(v, fused ? "tap_scale" : "weight_scale",
                     fused ? "TAP_SCALES" : "WEIGHT_SCALES"),
        bias_scale(v, "bias_scale", "BIAS_SCALES"),
        y_scale(v, fused ? "output_scale" : "y_scale", fused ? "OUTPUT_SCALES" : "Y_SCALES"),
        C(v.integer("C")), K(v.within(fused ? "WINDOW" : "K", 1, WIDEST)),
        x_stride(v.integer(fused ? "N" : "X_STRIDE")), start(fused ? v.integer("START") : 0),
        plain(v.integer("SILU", 1) == 0) {}
  static constexpr int64_t WIDEST = 16;
  Conv(const Variant& v) : Conv(v, false) {}

  void run(const Value* a, const int64_t*, Pool& pool) const override {
    if (x.type == Type::i8) return work<int8_t>(a, pool);
    work<float>(a, pool);
  }
  void run_all(const Value* each, int64_t states, const int64_t*, Pool& pool) const override {
    if (x.type == Type::i8) return all<int8_t>(each, states, pool);
    all<float>(each, states, pool);
  }

  template <class T> struct Window {  // rows [state: K-1 | log: slots | x] of each sequence
    const T *state, *log, *x;
    int64_t batch, slots, C, K, x_stride;
    const T* row(int64_t index, int64_t sequence) const {
      if (index < K - 1) return state + (index * batch + sequence) * C;
      index -= K - 1;
      if (index < slots) return log + (index * batch + sequence) * C;
      return x + ((index - slots) * batch + sequence) * x_stride;
    }
  };

  template <class T> Window<T> window(const Value* a) const {
    int64_t B = batch.integer(a), source = run_fields.in<const int32_t>(a)[SOURCE];
    return {state.in<T>(a) + source * B * (K - 1) * C, log.in<T>(a), x.in<const T>(a) + start,
            B, slots.integer(a), C, K, x_stride};
  }
  int64_t rows(const Value* a) const { return tokens.integer(a) * batch.integer(a); }
  int64_t operations() const { return (2 * K + 40) * C; }  // per row

  template <class T> void work(const Value* a, Pool& pool) const {
    pool.each(rows(a), items_a_piece(operations()), [&](int64_t first, int64_t last) {
      convolve<T>(a, first, last);
    });
    store<T>(a);
  }
  template <class T> void all(const Value* each, int64_t states, Pool& pool) const {
    int64_t of_state = rows(static_cast<const Value*>(each[0].address));
    pool.each(states, items_a_piece(of_state * operations()), [&](int64_t first, int64_t last) {
      for (; first < last; first++) {
        const Value* a = static_cast<const Value*>(each[first].address);
        convolve<T>(a, 0, rows(a));
        store<T>(a);
      }
    });
  }

  // Rows are independent: they write only free log slots, which no other row reads.
  template <class T> void convolve(const Value* a, int64_t first, int64_t last) const {
    const Window<T> window = this->window<T>(a);
    const int32_t *tap = taps.in<const int32_t>(a), *keep = kept_slots.in<const int32_t>(a);
    int64_t B = window.batch;
    T* logs = log.in<T>(a);
    for (int64_t row = first; row < last; row++) {
      int64_t token = row / B, sequence = row % B;
      const T* from[WIDEST];
      for (int64_t k = 0; k < K - 1; k++) from[k] = window.row(tap[token * K + k], sequence);
      from[K - 1] = window.x + row * x_stride;
      blocks(C, [&](int64_t c, int n) { one_block<T>(a, from, row, c, n); });
      if (keep[token] >= 0)
        std::memcpy(logs + (keep[token] * B + sequence) * C, from[K - 1], size_t(C) * sizeof(T));
    }
  }
  template <class T> void store(const Value* a) const {
    const int32_t* fields = run_fields.in<const int32_t>(a);
    if (fields[STORE] == 0) return;
    const Window<T> window = this->window<T>(a);
    int64_t B = window.batch;
    T* target = state.in<T>(a) + fields[TARGET] * B * (K - 1) * C;
    const int32_t* wanted = state_taps.in<const int32_t>(a);
    for (int64_t row = 0; row < (K - 1) * B; row++)
      std::memcpy(target + row * C, window.row(wanted[row / B], row % B), size_t(C) * sizeof(T));
  }

  template <class T>
  void one_block(const Value* a, const T* const* from, int64_t row, int64_t c, int n) const {
    vf total{};  // sums of int8 products are exact in fp32 too: fewer than 2^9 of at most 2^14
    const T* w = weight.in<const T>(a);
    for (int64_t k = 0; k < K; k++)
      total += load_some(from[k] + c, n) * load_some(w + k * C + c, n);
    vf offset = load_some(bias.in<const T>(a) + c, n);
    if (!y_scale.count)
      return store_some(y.in<float>(a) + row * C + c,
                        plain ? total + offset : silu(total + offset), n);
    vf unit = x_scale.at(a, c, n) * weight_scale.at(a, c, n);
    vf steps = 1.f / y_scale.at(a, c, n);
    vf out = silu(total * unit + offset * bias_scale.at(a, c, n)) * steps;
    store_some(y.in<int8_t>(a) + row * C + c, round8(out), n);
  }
};

// A product and the convolution of some of its columns.
struct LinearConv : Kernel {
  LinearInt8* int8 = nullptr;
  LinearFloat* floating = nullptr;
  Conv conv;
  LinearConv(const Variant& v) : conv(v, true) {
    if (Argument(v, "weight").type == Type::i8)
      int8 = new LinearInt8(v);
    else
      floating = new LinearFloat(v);
  }
  ~LinearConv() override {
    delete int8;
    delete floating;
  }
  int interleavable(Interleaved* out) const override {
    return int8 ? int8->interleavable(out) : floating->interleavable(out);
  }
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    int64_t rows = conv.tokens.integer(a) * conv.batch.integer(a);
    if (rows && int8)
      int8->multiply(a, rows, pool, interleaved != 0);
    else if (rows)
      floating->multiply(a, rows, pool, interleaved != 0);
    conv.run(a, grid, pool);
  }
};

// Only the convolution of such a pair, after a separate product.
struct ConvOfPair : Conv {
  ConvOfPair(const Variant& v) : Conv(v, true) {}
};

KERNEL("conv.conv", Conv)
KERNEL("linear_conv.conv", ConvOfPair)
KERNEL("linear_conv.few", LinearConv)
