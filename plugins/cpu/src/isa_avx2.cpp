// x86-64 since 2013 (Haswell, Zen).
#if defined(__x86_64__)
#include "std.h"
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,bmi2")
#define EDGE_ISA avx2
#define EDGE_ISA_AVX2 1
#include "isa.h"
#endif
