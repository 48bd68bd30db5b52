// Rows of a table as floats: the C++ face of triton_embed.py.

struct Embed : Kernel {
  Argument tokens, table, y;
  Argument scale;
  int64_t D, scale_step;
  Embed(const Variant& v)
      : tokens(v, "tokens"), table(numbers(v, "table")), y(v, "y"),
        scale(Argument::optional(v, "scale")), D(v.integer("D")),
        scale_step(v.integer("SCALE_STEP")) {}
  void run(const Value* a, const int64_t* grid, Pool&) const override {
    for (int64_t row = 0; row < grid[0]; row++) {
      int64_t token = tokens.in<const int32_t>(a)[row];
      float unit = scale ? scale.in<const float>(a)[token * scale_step] : 1.f;
      float* out = y.in<float>(a) + row * D;
      with_type(table.type, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const T* in = table.in<const T>(a) + token * D;
        blocks(D, [&](int64_t i, int n) { store_some(out + i, load_some(in + i, n) * unit, n); });
      });
    }
  }
};

// A row of weights as floats less their zero point, times the scale of their block.
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
  void run(const Value* a, const int64_t* grid, Pool&) const override {
    for (int64_t row = 0; row < grid[0]; row++) {
      int64_t token = tokens.in<const int32_t>(a)[row];
      const uint8_t* in = packed.in<const uint8_t>(a) + token * (D * bits / 8);
      const float* unit = scales.in<const float>(a) + token * (D / shared);
      unpack(in, unit, D, bits, shared, y.in<float>(a) + row * D);
    }
  }
};

KERNEL("embed.embed", Embed)
KERNEL("embed.embed_bits", EmbedBits)
