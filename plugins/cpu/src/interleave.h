// Weights repacked once at load, so that rows lie side by side as few rows of x want them.
#pragma once

#include "calls.h"

namespace edge_cpu {

// See edge_cpu_interleave. Throws std::bad_alloc and std::length_error, before anything is changed.
void interleave(const EdgeCpuReader* readers, int64_t count);

}  // namespace edge_cpu
