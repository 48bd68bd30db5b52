// x86-64 with products of int8 but without AVX-512 (Alder Lake, Zen 5 laptops in 256 bits).
#include "std.h"
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,bmi2,avxvnni")
#define EDGE_ISA avxvnni
#define EDGE_ISA_AVX2 1
#define EDGE_ISA_AVXVNNI 1
#include "isa.h"
#endif
