// Any machine. On aarch64 this is NEON, which all of them have.
#include "std.h"
#define EDGE_ISA plain
#if defined(__aarch64__)
#include <arm_neon.h>
#define EDGE_ISA_NEON 1
#endif
#include "isa.h"
