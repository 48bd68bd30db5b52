// x·silu(z), its RMSNorm in groups, and the rotated norm: the C++ counterpart of
// triton_gated_norm.py.

// x·silu(z) for some channels of a row; z is float, or int8 with scales
struct Gate {
  Argument x, z;
  Scale z_scale;
  int64_t x_stride, z_stride;
  Gate(const Variant& v)
      : x(v, "x"), z(v, "z"), z_scale(v, "z_scale", "Z_SCALES"), x_stride(v.integer("X_STRIDE")),
        z_stride(v.integer("Z_STRIDE")) {}
  vf at(const Value* a, int64_t row, int64_t i, int n) const {
    int64_t place = row * z_stride + i;
    vf gate = z.type == Type::i8 ? load_some(z.in<const int8_t>(a) + place, n)
                                 : load_some(z.in<const float>(a) + place, n);
    if (z_scale.count) gate *= z_scale.at(a, i, n);
    return load_some(x.in<const float>(a) + row * x_stride + i, n) * silu(gate);
  }
};

using SiluGate = Product<silu, 40>;
using SigmoidGate = Product<sigmoid, 40>;

// Each head's values times the sigmoid of the head's gate
struct HeadGate : Kernel {
  Argument x, z, y;
  int64_t heads, width, x_stride, z_stride;
  HeadGate(const Variant& v)
      : x(v, "x"), z(v, "z"), y(v, "y"), heads(v.within("HEADS", 1)), width(v.integer("WIDTH")),
        x_stride(v.integer("X_STRIDE")), z_stride(v.integer("Z_STRIDE")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0], items_a_piece(heads * (2 * width + 40)), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        const float* gates = z.in<const float>(a) + row * z_stride;
        for (int64_t h = 0; h < heads; h++) {
          vf open = sigmoid(splat(gates[h]));
          const float* from = x.in<const float>(a) + row * x_stride + h * width;
          float* to = y.in<float>(a) + (row * heads + h) * width;
          blocks(width, [&](int64_t i, int n) {
            store_some(to + i, load_some(from + i, n) * open, n);
          });
        }
      }
    });
  }
};

// RMSNorm in groups of a gated row (Mamba-2, arXiv 2405.21060, section 7.1)
struct GatedNorm : Kernel {
  Gate gate;
  Argument weight, y;
  int64_t groups, width;
  float eps;
  GatedNorm(const Variant& v)
      : gate(v), weight(v, "weight"), y(v, "y"), groups(v.within("GROUPS", 1)),
        width(v.integer("WIDTH")), eps((float)v.number("EPS")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    pool.each(grid[0] * groups, items_a_piece(40 * width), [&](int64_t first, int64_t last) {
      float* g = local(width);
      for (int64_t each = first; each < last; each++) {
        int64_t row = each / groups, start = each % groups * width;
        normed(a, row, start, g);
        blocks(width, [&](int64_t i, int n) {
          store_some(y.in<float>(a) + row * groups * width + start + i, load(g + i), n);
        });
      }
    });
  }
  void normed(const Value* a, int64_t row, int64_t start, float* g) const {
    vf squares{};
    blocks(width, [&](int64_t i, int n) {
      vf v = gate.at(a, row, start + i, n);
      store(g + i, v);
      squares += v * v;
    });
    float inverse = 1.f / std::sqrt(sum(squares) / width + eps);
    const float* gain = weight.in<const float>(a) + start;
    blocks(width, [&](int64_t i, int n) {
      store(g + i, load_some(gain + i, n) * (load(g + i) * inverse));
    });
  }
};

struct GatedNormHadamard : Kernel {
  Rotation rotation;
  Gate gate;
  Argument weight;
  float eps;
  GatedNormHadamard(const Variant& v)
      : rotation(v), gate(v), weight(v, "weight"), eps((float)v.number("EPS")) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    int64_t width = rotation.P * rotation.Q;
    const float* gain = weight.in<const float>(a);
    Rotation::Parts parts = rotation.parts(a, pool);
    pool.each(grid[0], items_a_piece(rotation.operations(parts)), [&](int64_t first, int64_t last) {
      float* g = local(3 * width + 2 * W);
      float *mixed = g + width + W, *out = mixed + width;
      for (int64_t row = first; row < last; row++) {
        vf squares{};
        blocks(width, [&](int64_t i, int n) {
          vf v = gate.at(a, row, i, n);
          squares += v * v;
          store_some(g + i, load_some(gain + i, n) * v, n);
        });
        float inverse = 1.f / std::sqrt(sum(squares) / width + eps);
        for (int64_t i = 0; i < width; i++) g[i] *= inverse;
        rotation.store_row(a, row, parts, g, mixed, out);
      }
    });
  }
};

KERNEL("gated_norm.silu_gate", SiluGate)
KERNEL("gated_norm.sigmoid_gate", SigmoidGate)
KERNEL("gated_norm.head_gate", HeadGate)
KERNEL("gated_norm.gated_norm", GatedNorm)
KERNEL("gated_norm.gated_norm_hadamard", GatedNormHadamard)
