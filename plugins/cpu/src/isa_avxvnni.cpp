// x86-64 with int8 products but without AVX-512 (Alder Lake).
#if defined(__x86_64__)
#include "std.h"
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,bmi2,avxvnni")
#define EDGE_ISA avxvnni
#define EDGE_ISA_REST avx2
#define EDGE_ISA_AVX2 1
#define EDGE_ISA_AVXVNNI 1
#include "isa.h"
#endif
