// aarch64 with int8 products (since Cortex-A76, including the A78AE of an Orin).
#if defined(__aarch64__)
#include "std.h"
#pragma GCC target("arch=armv8.2-a+dotprod+fp16")
#include <arm_neon.h>
#define EDGE_ISA dotprod
#define EDGE_ISA_REST plain
#define EDGE_ISA_NEON 1
#define EDGE_ISA_DOTPROD 1
#include "isa.h"
#endif
