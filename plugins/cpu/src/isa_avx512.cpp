// x86-64 with AVX-512 and its int8 products (Ice Lake, Zen 4).
#if defined(__x86_64__)
#include "std.h"
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#define EDGE_ISA avx512
#define EDGE_ISA_AVX512 1
#include "isa.h"
#endif
