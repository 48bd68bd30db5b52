// The library as a plan's engine sees it, Python's and the C library's: library.cpp has the bodies.
#pragma once

#include "kernel.h"

#if defined(EDGE_LIBEDGE)
#define EDGE_CPU_API
#else
#define EDGE_CPU_API __attribute__((visibility("default")))
#endif

extern "C" {

struct EdgeCpuCall {
  const void* kernel;
  const edge_cpu::Value* values;
  int64_t grid[3];
  int64_t states;  // 0, or how many states' values the addresses in `values` are of
};

// What the functions below take, by `VERSION` of library.py: both go up where one of them, or what a
// kernel's values mean, changes.
EDGE_CPU_API int edge_cpu_version();
// Names of the instruction sets that this machine has, best last, separated by spaces.
EDGE_CPU_API int edge_cpu_sets(char* out, int size);
EDGE_CPU_API void* edge_cpu_pool(int threads, int finest);
EDGE_CPU_API void edge_cpu_pool_free(void* pool);
// A kernel for a variant, or null and why in `problem`. "copy" and "fill" are kernels as well.
EDGE_CPU_API void* edge_cpu_kernel(const char* set, const char* text, char* problem, int size);
EDGE_CPU_API void edge_cpu_kernel_free(void* kernel);
// An argument of a launch that points into weights; `argument` is -1 where it points behind their
// beginning.
struct EdgeCpuReader {
  void* kernel;
  int64_t argument;
  char* weight;
  int64_t bytes;  // of the whole weight
};
// Interleaves, in place, the rows of those weights whose readers all gain by it, and tells these
// kernels: to be called once, with all readers, before anything is run. 0; or 1 without memory, 2 where
// a kernel reads a weight as of more bytes than there can be: nothing is changed then.
EDGE_CPU_API int edge_cpu_interleave(const EdgeCpuReader* readers, int64_t count);
// Has `kernel` read its weights as `other` does, which reads the same.
EDGE_CPU_API void edge_cpu_read_alike(void* kernel, const void* other);
// Runs the calls in order. 0, or 1 where memory ran out. Nothing else is thrown: a kernel refuses
// what it cannot do when it is made.
EDGE_CPU_API int edge_cpu_run(void* pool, const EdgeCpuCall* calls, int64_t count);
}
