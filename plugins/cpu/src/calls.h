// The interface of the CPU kernels for the engines of Python and the C library: see library.cpp.
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
  int64_t states;  // 0, or the number of states whose values `values` points to
};

// The version of this interface, `VERSION` in library.py. Both go up when a function below or the
// meaning of a kernel's values changes.
EDGE_CPU_API int edge_cpu_version();
// Writes the names of this machine's instruction sets, best last, separated by spaces.
EDGE_CPU_API int edge_cpu_sets(char* out, int size);
// Returns the number of CPUs that the calling thread may use, or 0 if threads cannot be pinned.
EDGE_CPU_API int edge_cpu_pinnable(void);
// Starts threads, null on failure. See `Pool`.
EDGE_CPU_API void* edge_cpu_pool(int threads, int finest, int pin);
EDGE_CPU_API void edge_cpu_pool_free(void* pool);
// Gives every thread of the pool the memory that any of them has needed for kernels so far, so that
// no thread asks for more in runs that are no longer. Returns 0, or 1 if there is no memory.
EDGE_CPU_API int edge_cpu_level(void* pool);
// Returns a variant's kernel, or null with the reason in `problem`. "copy" and "fill" exist too.
EDGE_CPU_API void* edge_cpu_kernel(const char* set, const char* text, char* problem, int size);
EDGE_CPU_API void edge_cpu_kernel_free(void* kernel);
// A launch argument that points into a weight; `argument` is -1 if it does not point to the
// start of the weight.
struct EdgeCpuReader {
  void* kernel;
  int64_t argument;
  char* weight;
  int64_t bytes;  // of the whole weight
};
// Interleaves, in place, the rows of weights whose readers all gain from it, and tells the kernels.
// Call it once, with all readers, before any run. Returns 0; 1 if there is no memory; or 2 if a
// kernel reads a weight beyond the largest possible size. On failure, nothing has changed.
EDGE_CPU_API int edge_cpu_interleave(const EdgeCpuReader* readers, int64_t count);
// Makes `kernel` read weights in the layout that `other`, a kernel with the same weights, uses.
EDGE_CPU_API void edge_cpu_read_alike(void* kernel, const void* other);
// Runs the calls in order. Returns 0, or 1 if memory ran out. There are no other failures:
// unsupported variants are refused when the kernel is made.
EDGE_CPU_API int edge_cpu_run(void* pool, const EdgeCpuCall* calls, int64_t count);
}
