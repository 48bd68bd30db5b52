// Embedding lookups as fp32: the C++ counterpart of triton_embed.py.

struct Embed : Kernel {
  Argument tokens, table, y;
  Argument scale;
  int64_t D, scale_step;
  Embed(const Variant& v)
      : tokens(v, "tokens"), table(numbers(v, "table")), y(v, "y"),
        scale(Argument::optional(v, "scale")), D(v.integer("D")),
        scale_step(v.integer("SCALE_STEP")) {}
  int interleavable(Interleaved* out) const override {
    if (table.type == Type::i8 && !int8_interleaves(D)) return 0;
    out[0] = {table.place(), W, 0, D * size_of(table.type) / word(), word()};
    return 1;
  }
  int word() const { return table.type == Type::f16 ? 2 : 4; }  // bytes
  void run(const Value* a, const int64_t* grid, Pool&) const override {
    for (int64_t row = 0; row < grid[0]; row++) {
      int64_t token = tokens.in<const int32_t>(a)[row];
      float unit = scale ? scale.in<const float>(a)[token * scale_step] : 1.f;
      float* out = y.in<float>(a) + row * D;
      with_type(table.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const T* in = table.in<const T>(a) + token * D;
        if (interleaved) {
          T* whole = static_cast<T*>(thread_bytes(0, D * int64_t(sizeof(T))));
          row_beside(table.in<const T>(a), interleaved, token, D * int64_t(sizeof(T)) / word(),
                     word(), whole);
          in = whole;
        }
        blocks(D, [&](int64_t i, int n) { store_some(out + i, load_some(in + i, n) * unit, n); });
      });
    }
  }
};

// Unpacks a row of weights: subtracts the zero point and multiplies by the block's scale.
inline void unpack(const uint8_t* packed, const float* units, int64_t K, int64_t bits,
                   int64_t shared, float* out) {
  for (int64_t b = 0; b < K / shared; b++) {
    const uint8_t* in = packed + b * shared * bits / 8;
    float *to = out + b * shared, unit = units[b];
    if (bits == 4) {
      for (int64_t k = 0; k < shared; k++)
        to[k] = (float(in[k / 2] >> (k % 2 * 4) & 15) - 8.f) * unit;
    } else {
      for (int64_t k = 0; k < shared; k++) to[k] = (float(in[k]) - 128.f) * unit;
    }
  }
}

struct EmbedBits : Kernel {
  Argument tokens, packed, scales, y;
  int64_t D, bits, shared;
  EmbedBits(const Variant& v)
      : tokens(v, "tokens"), packed(v, "packed"), scales(v, "scales"), y(v, "y"),
        D(v.integer("D")), bits(bits_of(v)), shared(v.within("SHARED", 1)) {}
  int interleavable(Interleaved* out) const override {
    if (!BESIDE || D * bits % 32) return 0;
    out[0] = {packed.place(), W, 0, D * bits / 32, 4};
    out[1] = {scales.place(), W, 0, D / shared, 4};
    return 2;
  }
  void run(const Value* a, const int64_t* grid, Pool&) const override {
    int64_t bytes = D * bits / 8, count = D / shared;
    char* room = static_cast<char*>(thread_bytes(0, bytes + 4 * count));
    for (int64_t row = 0; row < grid[0]; row++) {
      int64_t token = tokens.in<const int32_t>(a)[row];
      const uint8_t* in = packed.in<const uint8_t>(a) + token * bytes;
      const float* unit = scales.in<const float>(a) + token * count;
      if (interleaved) {
        float* units = reinterpret_cast<float*>(room);
        uint8_t* whole = reinterpret_cast<uint8_t*>(room + 4 * count);
        row_beside(scales.in<const float>(a), interleaved, token, count, 4, units);
        row_beside(packed.in<const uint8_t>(a), interleaved, token, bytes / 4, 4, whole);
        in = whole, unit = units;
      }
      unpack(in, unit, D, bits, shared, y.in<float>(a) + row * D);
    }
  }
};

KERNEL("embed.embed", Embed)
KERNEL("embed.embed_bits", EmbedBits)
