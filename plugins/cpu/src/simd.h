// Vectors of one instruction set. Included inside namespace EDGE_ISA by each isa_*.cpp after its
// choice of target: the same source is compiled once for every instruction set.
//
// W is the number of floats in a vector. Arithmetic uses the compiler's vector extensions; only
// conversions and int8 products need intrinsics.

#if EDGE_ISA_AVX512
constexpr int W = 16, REGISTERS = 32;
#elif EDGE_ISA_AVX2
constexpr int W = 8, REGISTERS = 16;
#else
constexpr int W = 4, REGISTERS = 32;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef int8_t vb __attribute__((vector_size(W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

template <class V, class T> inline V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T> inline void store_as(T* p, V v) { std::memcpy(p, &v, sizeof v); }

inline vf splat(float x) {  // 0 + x would be an addition
#if EDGE_ISA_AVX512
  return vf(_mm512_set1_ps(x));
#elif EDGE_ISA_AVX2
  return vf(_mm256_set1_ps(x));
#else
  return vf{x, x, x, x};
#endif
}
// a·b + c, rounded once or twice, but the same way wherever it is compiled: the compiler's own choice
// differs between copies of an expression, and replayed tokens must have the bits of those run before.
inline vf fused(vf a, vf b, vf c) {
#if EDGE_ISA_AVX512
  return vf(_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c));
#elif EDGE_ISA_AVX2
  return vf(_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c));
#elif EDGE_ISA_NEON
  return vf(vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b));
#else
  return a * b + c;
#endif
}
// A lane of `where` is all ones to choose a, or all zeros to choose b.
inline vf choose(vi where, vf a, vf b) {
  return vf((vi(a) & where) | (vi(b) & ~where));
}
// The minimum or maximum of a bound and x, lane by lane; a NaN in x stays. `larger` returns b for
// a NaN in a.
#if EDGE_ISA_AVX512
inline vf least(float bound, vf x) { return vf(_mm512_min_ps(_mm512_set1_ps(bound), (__m512)x)); }
inline vf most(float bound, vf x) { return vf(_mm512_max_ps(_mm512_set1_ps(bound), (__m512)x)); }
inline vf larger(vf a, vf b) { return vf(_mm512_max_ps((__m512)a, (__m512)b)); }
#elif EDGE_ISA_AVX2
inline vf least(float bound, vf x) { return vf(_mm256_min_ps(_mm256_set1_ps(bound), (__m256)x)); }
inline vf most(float bound, vf x) { return vf(_mm256_max_ps(_mm256_set1_ps(bound), (__m256)x)); }
inline vf larger(vf a, vf b) { return vf(_mm256_max_ps((__m256)a, (__m256)b)); }
#elif EDGE_ISA_NEON
inline vf least(float bound, vf x) { return vf(vminq_f32(vdupq_n_f32(bound), (float32x4_t)x)); }
inline vf most(float bound, vf x) { return vf(vmaxq_f32(vdupq_n_f32(bound), (float32x4_t)x)); }
inline vf larger(vf a, vf b) { return vf(vmaxnmq_f32((float32x4_t)a, (float32x4_t)b)); }
#else
inline vf least(float bound, vf x) { return choose(x > bound, splat(bound), x); }
inline vf most(float bound, vf x) { return choose(x < bound, splat(bound), x); }
inline vf larger(vf a, vf b) { return choose(a > b, a, b); }
#endif

// -- conversions ------------------------------------------------------------------------------------

inline vf half_to_float(vh h) {
#if EDGE_ISA_AVX512
  return vf(_mm512_cvtph_ps((__m256i)h));
#elif EDGE_ISA_AVX2
  return vf(_mm256_cvtph_ps((__m128i)h));
#elif EDGE_ISA_NEON
  return vf(vcvt_f32_f16((float16x4_t)h));
#else
  vf out;
  for (int i = 0; i < W; i++) out[i] = half_value(h[i]);
  return out;
#endif
}

inline vh float_to_half(vf x) {  // nearest, ties to even
#if EDGE_ISA_AVX512
  return vh(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif EDGE_ISA_AVX2
  return vh(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif EDGE_ISA_NEON
  return vh(vcvt_f16_f32((float32x4_t)x));
#else
  vh out;
  for (int i = 0; i < W; i++) out[i] = half_bits(x[i]);
  return out;
#endif
}

inline vf bytes_to_float(vb b) {
#if EDGE_ISA_AVX512
  return vf(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b)));
#elif EDGE_ISA_AVX2
  __m128i wide;
  std::memcpy(&wide, &b, 8);
  return vf(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(wide)));
#else
  return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
#endif
}

inline vb float_to_bytes(vf x) {  // integers from -128 to 127
#if EDGE_ISA_AVX512
  return vb(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x)));
#else
  return __builtin_convertvector(__builtin_convertvector(x, vi), vb);
#endif
}

// Loads and stores floats, whatever their type in memory.
inline vf load(const float* p) { return load_as<vf>(p); }
inline vf load(const Half* p) { return half_to_float(load_as<vh>(p)); }
inline vf load(const int8_t* p) { return bytes_to_float(load_as<vb>(p)); }
inline void store(float* p, vf x) { store_as(p, x); }
inline void store(Half* p, vf x) { store_as(p, float_to_half(x)); }
inline void store(int8_t* p, vf x) { store_as(p, float_to_bytes(x)); }

// Bypasses the caches if `p` is aligned to a vector, so that no line is read first; other threads
// see the write after `drain`.
inline void store_past(float* p, vf x) {
#if EDGE_ISA_AVX512
  if (uintptr_t(p) % sizeof x == 0) return _mm512_stream_ps(p, (__m512)x);
#elif EDGE_ISA_AVX2
  if (uintptr_t(p) % sizeof x == 0) return _mm256_stream_ps(p, (__m256)x);
#endif
  store(p, x);
}
inline void drain() {
#if EDGE_ISA_AVX512 || EDGE_ISA_AVX2
  _mm_sfence();
#endif
}

inline float one(const float* p) { return *p; }
inline float one(const Half* p) { return half_value(p->bits); }
inline float one(const int8_t* p) { return *p; }
inline void put(float* p, float x) { *p = x; }
inline void put(Half* p, float x) { p->bits = half_bits(x); }
inline void put(int8_t* p, float x) { *p = (int8_t)x; }

// The first `count` of W values, followed by zeros.
template <class T> inline vf load_some(const T* p, int count) {
  if (count >= W) return load(p);
  vf v{};
  for (int i = 0; i < count; i++) v[i] = one(p + i);
  return v;
}
template <class T> inline void store_some(T* p, vf v, int count) {
  if (count >= W) return store(p, v);
  for (int i = 0; i < count; i++) put(p + i, v[i]);
}
#if EDGE_ISA_AVX512
inline __mmask16 first_lanes(int count) { return __mmask16(count >= W ? 0xffff : (1 << count) - 1); }
inline vf load_some(const float* p, int count) {
  return vf(_mm512_maskz_loadu_ps(first_lanes(count), p));
}
inline vf load_some(const Half* p, int count) {
  return half_to_float(vh(_mm256_maskz_loadu_epi16(first_lanes(count), p)));
}
inline vf load_some(const int8_t* p, int count) {
  return bytes_to_float(vb(_mm_maskz_loadu_epi8(first_lanes(count), p)));
}
inline void store_some(float* p, vf v, int count) {
  _mm512_mask_storeu_ps(p, first_lanes(count), __m512(v));
}
inline void store_some(Half* p, vf v, int count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), __m256i(float_to_half(v)));
}
inline void store_some(int8_t* p, vf v, int count) {
  _mm_mask_storeu_epi8(p, first_lanes(count), __m128i(float_to_bytes(v)));
}
#else
#if EDGE_ISA_AVX2
inline vf load_some(const float* p, int count) {
  if (count >= W) return load(p);
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return vf(_mm256_maskload_ps(p, __m256i(lane < count)));
}
#endif
inline vf load_some(const Half* p, int count) {
  if (count >= W) return load(p);
  vh few{};
  switch (count) {  // copies of constant size become moves
    case 1: std::memcpy(&few, p, 2); break;
    case 2: std::memcpy(&few, p, 4); break;
    default: std::memcpy(&few, p, 2 * size_t(count));
  }
  return half_to_float(few);
}
#endif
inline vf splat(const float* p) { return splat(*p); }
inline vf splat(const Half* p) { return half_to_float(vh{} + p->bits); }

// -- rounding ---------------------------------------------------------------------------------------

// Nearest integer, ties to even, |x| < 2^22.
inline vf round_even(vf x) {
#if EDGE_ISA_AVX512
  return vf(_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif EDGE_ISA_AVX2
  return vf(_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif EDGE_ISA_NEON
  return vf(vrndnq_f32((float32x4_t)x));
#else
  return (x + 12582912.0f) - 12582912.0f;  // fp32 has no fraction left above 2^23
#endif
}

// clip(x, -128, 127) rounded, as a float; NaN becomes -128, as in the Triton kernels.
inline vf round8(vf x) { return round_even(least(127.f, larger(x, splat(-128.f)))); }

// -- sums -------------------------------------------------------------------------------------------

inline float sum(vf v) {
#if EDGE_ISA_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#elif EDGE_ISA_AVX2
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// The largest lane of a vector without NaN.
inline float largest(vf v) {
#if EDGE_ISA_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#elif EDGE_ISA_AVX2
  __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  return std::max(std::max(v[0], v[2]), std::max(v[1], v[3]));
#endif
}

// -- exp and functions of it ------------------------------------------------------------------------

// p·2^n for integers n from -126 to 127 and p near 1. AVX-512 takes any n and uses its floor.
inline vf scaled_by(vf p, vf n) {
#if EDGE_ISA_AVX512
  return vf(_mm512_scalef_ps((__m512)p, (__m512)n));
#else
  return vf(vi(p) + (__builtin_convertvector(n, vi) << 23));
#endif
}

inline vf floor_of(vf x) {  // |x| < 2^22
#if EDGE_ISA_AVX2
  return vf(_mm256_floor_ps((__m256)x));
#elif EDGE_ISA_NEON
  return vf(vrndmq_f32((float32x4_t)x));
#else
  vf near = round_even(x);
  return near - choose(near > x, splat(1.f), vf{});
#endif
}

// 2^x, relative error 2e-7; NaN stays NaN. Clamps x to -126 ... 127.4, except with AVX-512.
inline vf exp2v(vf x) {
#if EDGE_ISA_AVX512
  // scalef takes the floor itself and needs no bounds
  vf whole = x, f = vf(_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
#else
  x = least(127.4f, most(-126.f, x));
  vf whole = floor_of(x), f = x - whole;
#endif
  vf p = splat(1.8671305e-3f);  // 2^f for f in 0 ... 1, minimax in relative error
  p = p * f + 9.0170294e-3f;
  p = p * f + 5.5799914e-2f;
  p = p * f + 2.4016445e-1f;
  p = p * f + 6.9315131e-1f;
  p = p * f + 1.0f;
  return scaled_by(p, whole);
}
// e^x, relative error 1e-7, for x clamped to -87 ... 88. ln(2) is split in two,
// because its rounding would otherwise show at e^-80.
inline vf expv(vf x) {
  x = least(88.f, most(-87.f, x));
  vf whole = round_even(x * 1.44269504f);
  vf f = (x - whole * 0.693145751953125f) - whole * 1.42860682030941723212e-6f;
  vf p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  return scaled_by(p, whole);
}
inline float exp1(float x) { return expv(splat(x))[0]; }

inline vf absolute(vf x) { return vf(vi(x) & 0x7fffffff); }

// 1 / x for x from 1 to 2^127, relative error 7e-8.
inline vf reciprocal(vf x) {
#if EDGE_ISA_AVX512
  // a division of 16 lanes takes as long as 8 products of them
  vf r = vf(_mm512_rcp14_ps((__m512)x));
  return r + r * (1.f - x * r);
#else
  return 1.f / x;
#endif
}

// expv is bounded, so its sum with 1 is finite and the quotient is right at both ends.
inline vf sigmoid(vf x) { return reciprocal(1.f + expv(-x)); }
// Uses exp(-2|x|) or, near 0, where 1 - exp(-2|x|) would lose digits, its series. NaN stays NaN.
inline vf tanhv(vf x) {
  vf size = absolute(x), small = expv(-2.f * size), s = x * x;
  vf far = (1.f - small) / (1.f + small);
  vf near = x * (1.f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
  for (int k = 0; k < W; k++) near[k] = size[k] > 0.25f ? (x[k] < 0.f ? -far[k] : far[k]) : near[k];
  return near;
}
inline vf soft_cap(vf x, float cap) { return cap * tanhv(x / splat(cap)); }
inline vf silu(vf x) { return x * sigmoid(x); }

// log(1 + exp(x)). log1p(u) = 2·atanh(u / (2 + u)): its series converges fast for u in 0 ... 1, and
// keeps all digits of a small u.
inline vf softplus(vf x) {
  vf u = expv(-absolute(x));
  vf s = u * reciprocal(2.f + u);
  vf q = s * s;
  vf p = splat(0.0666666667f);
  p = p * q + 0.0769230769f;
  p = p * q + 0.0909090909f;
  p = p * q + 0.111111111f;
  p = p * q + 0.142857143f;
  p = p * q + 0.2f;
  p = p * q + 0.333333333f;
  p = p * q + 1.f;
  return most(0.f, x) + 2.f * s * p;
}
inline float softplus1(float x) { return softplus(splat(x))[0]; }

// -- products of int8 -------------------------------------------------------------------------------

// acc[l] += Σ of bytes w·x, BYTES at a time. If BIASED, `dot` takes w + 128: the sums are 128·Σx
// too large.
#if EDGE_ISA_AVX512
constexpr int BYTES = 64;
constexpr bool BIASED = true;
typedef __m512i Packed;
inline Packed load_weight(const int8_t* p) {
  return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
inline Packed load_row(const int8_t* p) { return _mm512_loadu_si512(p); }
inline vi dot(vi acc, Packed w, Packed x) { return vi(_mm512_dpbusd_epi32((__m512i)acc, w, x)); }
#elif EDGE_ISA_AVXVNNI
constexpr int BYTES = 32;
constexpr bool BIASED = true;
typedef __m256i Packed;
inline Packed load_weight(const int8_t* p) {
  return _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi8(-128));
}
inline Packed load_row(const int8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline vi dot(vi acc, Packed w, Packed x) {
  return vi(_mm256_dpbusd_avx_epi32((__m256i)acc, w, x));
}
#elif EDGE_ISA_AVX2
constexpr int BYTES = 16;
constexpr bool BIASED = false;
typedef __m256i Packed;  // widened to 16 bits: sums of u8·i8 pairs would saturate
inline Packed load_weight(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
inline Packed load_row(const int8_t* p) { return load_weight(p); }
inline Packed load_row(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline vi dot(vi acc, Packed w, Packed x) {
  return acc + vi(_mm256_madd_epi16(w, x));
}
#elif EDGE_ISA_DOTPROD
constexpr int BYTES = 16;
constexpr bool BIASED = false;
typedef int8x16_t Packed;
inline Packed load_weight(const int8_t* p) { return vld1q_s8(p); }
inline Packed load_row(const int8_t* p) { return vld1q_s8(p); }
inline vi dot(vi acc, Packed w, Packed x) { return vi(vdotq_s32((int32x4_t)acc, w, x)); }
#elif EDGE_ISA_NEON
constexpr int BYTES = 16;
constexpr bool BIASED = false;
typedef int8x16_t Packed;
inline Packed load_weight(const int8_t* p) { return vld1q_s8(p); }
inline Packed load_row(const int8_t* p) { return vld1q_s8(p); }
inline vi dot(vi acc, Packed w, Packed x) {
  // four neighbours a lane, as blocks smaller than a vector require
  int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
  return acc + vi(vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(w, x))));
}
#else
constexpr int BYTES = 16;
constexpr bool BIASED = false;
struct Packed {
  int8_t of[16];
};
inline Packed load_weight(const int8_t* p) { return load_as<Packed>(p); }
inline Packed load_row(const int8_t* p) { return load_as<Packed>(p); }
// Not inlined: unrolled in every product, it takes a third of the time to compile this set.
__attribute__((noinline)) inline vi dot(vi acc, const Packed& w, const Packed& x) {
  for (int i = 0; i < 16; i++) acc[i / 4] += w.of[i] * x.of[i];
  return acc;
}
#endif

// The last `count` bytes of a row, followed by zeros.
#if EDGE_ISA_AVX512
inline Packed load_row_rest(const int8_t* p, int64_t count) {
  return _mm512_maskz_loadu_epi8((1ull << count) - 1, p);
}
inline Packed load_weight_rest(const int8_t* p, int64_t count) {
  return _mm512_xor_si512(load_row_rest(p, count), _mm512_set1_epi8(-128));
}
#else
inline Packed load_row_rest(const int8_t* p, int64_t count) {
  int8_t rest[BYTES] = {};
  std::memcpy(rest, p, size_t(count));
  return load_row(rest);
}
inline Packed load_weight_rest(const int8_t* p, int64_t count) {
  int8_t rest[BYTES] = {};
  std::memcpy(rest, p, size_t(count));
  return load_weight(rest);
}
#endif

// Weights with zero point 128, as `dot` takes them. If BIASED, sums are again 128·Σx too large.
inline Packed load_unsigned(const uint8_t* p) {
#if EDGE_ISA_AVX512 || EDGE_ISA_AVXVNNI
  return load_row((const int8_t*)p);
#elif EDGE_ISA_AVX2
  return _mm256_cvtepi8_epi16(_mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8(-128)));
#elif EDGE_ISA_NEON
  return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128)));
#else
  Packed w = load_weight((const int8_t*)p);
  for (int i = 0; i < BYTES; i++) w.of[i] = int8_t(w.of[i] ^ -128);
  return w;
#endif
}
inline Packed load_unsigned_rest(const uint8_t* p, int64_t count) {
  if (BIASED) return load_row_rest((const int8_t*)p, count);
  uint8_t rest[BYTES];
  std::memset(rest, 128, sizeof rest);
  std::memcpy(rest, p, size_t(count));
  return load_unsigned(rest);
}

// acc[l] += Σ of bytes w·x for w from 0 to 15, SMALL at a time: no sum of pairs saturates.
#if EDGE_ISA_AVX512
constexpr int SMALL = 64;
typedef __m512i Small;
inline Small load_small(const void* p) { return _mm512_loadu_si512(p); }
inline Small low_nibbles(Small w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Small high_nibbles(Small w) {
  return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15));
}
inline vi dot_small(vi acc, Small w, Small x) {
  return vi(_mm512_dpbusd_epi32((__m512i)acc, w, x));
}
#elif EDGE_ISA_AVX2
constexpr int SMALL = 32;
typedef __m256i Small;
inline Small load_small(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Small low_nibbles(Small w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline Small high_nibbles(Small w) {
  return _mm256_and_si256(_mm256_srli_epi16(w, 4), _mm256_set1_epi8(15));
}
inline vi dot_small(vi acc, Small w, Small x) {
#if EDGE_ISA_AVXVNNI
  return vi(_mm256_dpbusd_avx_epi32((__m256i)acc, w, x));
#else
  return acc + vi(_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
#endif
}
#elif EDGE_ISA_NEON
constexpr int SMALL = 16;
typedef int8x16_t Small;
inline Small load_small(const void* p) { return vld1q_s8((const int8_t*)p); }
inline Small low_nibbles(Small w) { return vandq_s8(w, vdupq_n_s8(15)); }
inline Small high_nibbles(Small w) {
  return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(w), 4));
}
inline vi dot_small(vi acc, Small w, Small x) { return dot(acc, w, x); }
#else
constexpr int SMALL = 16;
typedef Packed Small;
inline Small load_small(const void* p) { return load_as<Small>((const char*)p); }
inline Small low_nibbles(Small w) {
  for (int i = 0; i < 16; i++) w.of[i] &= 15;
  return w;
}
inline Small high_nibbles(Small w) {
  for (int i = 0; i < 16; i++) w.of[i] = int8_t(uint8_t(w.of[i]) >> 4);
  return w;
}
inline vi dot_small(vi acc, Small w, Small x) { return dot(acc, w, x); }
#endif

inline Small load_small_rest(const void* p, int64_t count) {
  char rest[SMALL] = {};
  std::memcpy(rest, p, size_t(count));
  return load_small(rest);
}

// Spreads `count` numbers over a vector, W / count lanes each.
struct SpreadLanes {
  int count;
  vi index;
  explicit SpreadLanes(int64_t count_) : count((int)count_), index{} {
    for (int i = 0; i < W; i++) index[i] = i * count / W;
  }
  template <class T> EDGE_INLINE vf operator()(const T* p) const { return some(p, count); }
  // zeros beyond the first `left` numbers
  template <class T> EDGE_INLINE vf some(const T* p, int64_t left) const {
    if (count == 1) return splat(p);
    vf few = load_some(p, (int)std::min<int64_t>(count, left));
#if EDGE_ISA_AVX512
    return vf(_mm512_permutexvar_ps(__m512i(index), __m512(few)));
#elif EDGE_ISA_AVX2
    return vf(_mm256_permutevar8x32_ps(__m256(few), __m256i(index)));
#else
    vf out;
    for (int i = 0; i < W; i++) out[i] = few[index[i]];
    return out;
#endif
  }
};

inline int sum(vi v) {
#if EDGE_ISA_AVX512
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
#endif
}

// Sums the lanes of each of four vectors.
template <class V, class S> inline void sums4(const V* v, S* out) {
#if EDGE_ISA_AVX512
  if constexpr (std::is_same_v<V, vi>) {
    __m512i t0 = _mm512_add_epi32(_mm512_unpacklo_epi32((__m512i)v[0], (__m512i)v[1]),
                                  _mm512_unpackhi_epi32((__m512i)v[0], (__m512i)v[1]));
    __m512i t1 = _mm512_add_epi32(_mm512_unpacklo_epi32((__m512i)v[2], (__m512i)v[3]),
                                  _mm512_unpackhi_epi32((__m512i)v[2], (__m512i)v[3]));
    __m512i t = _mm512_add_epi32(_mm512_unpacklo_epi64(t0, t1), _mm512_unpackhi_epi64(t0, t1));
    __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(t), _mm512_extracti64x4_epi64(t, 1));
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    std::memcpy(out, &q, 16);
  } else {
    __m512 t0 = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v[0], (__m512)v[1]),
                              _mm512_unpackhi_ps((__m512)v[0], (__m512)v[1]));
    __m512 t1 = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v[2], (__m512)v[3]),
                              _mm512_unpackhi_ps((__m512)v[2], (__m512)v[3]));
    __m512d a = _mm512_castps_pd(t0), b = _mm512_castps_pd(t1);
    __m512 t = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(t),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(t), 1)));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    std::memcpy(out, &q, 16);
  }
#else
  for (int i = 0; i < 4; i++) out[i] = sum(v[i]);
#endif
}
