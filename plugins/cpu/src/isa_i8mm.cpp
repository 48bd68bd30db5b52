// aarch64 with products of int8 matrices (Neoverse V1, Cortex-X2; no Orin).
#include "std.h"
#if EDGE_COMPILES_I8MM
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm+fp16")
#include <arm_neon.h>
#define EDGE_ISA i8mm
#define EDGE_ISA_REST plain
#define EDGE_ISA_NEON 1
#define EDGE_ISA_DOTPROD 1
#define EDGE_ISA_I8MM 1
#include "isa.h"
#endif
