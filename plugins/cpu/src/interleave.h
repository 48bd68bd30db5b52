// Repacks weights once at load: rows lie side by side, which is faster for few rows of x.
#pragma once

#include "calls.h"

namespace edge_cpu {

// See edge_cpu_interleave. Throws std::bad_alloc and std::length_error, before anything is changed.
void interleave(const EdgeCpuReader* readers, int64_t count);

}  // namespace edge_cpu
