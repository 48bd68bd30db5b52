#include "memory.h"

#include <sys/mman.h>
#ifdef __linux__
#include <malloc.h>
#endif

#include <cstdio>
#include <new>

#include "fault.h"

namespace edge_lib {

namespace {
constexpr int64_t SPARE = 256;  // kernels may read a vector that extends beyond the end
constexpr int64_t MOST = int64_t(1) << 46;
}  // namespace

Memory::Memory(int64_t size, Pages pages) : size_(size) {
  if (size < 0 || size > MOST) throw std::bad_alloc();
  void* got = mmap(nullptr, size_t(size + SPARE), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(got);
#ifdef MADV_HUGEPAGE
  // large pages are read 1.7 times as fast, but are not essential
  int advice = pages == Pages::large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
  madvise(got, size_t(size + SPARE), advice);
#endif
}

Memory::~Memory() {
  if (data_) munmap(data_, size_t(size_ + SPARE));
}

void Memory::touch() {
  for (int64_t at = 0; at < size_; at += 4096) static_cast<volatile char*>(data_)[at] = 0;
}

void give_back() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void check_room(int64_t bytes) {
  long long kilobytes = -1;
  char line[128];
  FILE* file = std::fopen("/proc/meminfo", "re");
  while (file && kilobytes < 0 && std::fgets(line, sizeof line, file))
    if (std::sscanf(line, "MemAvailable: %lld", &kilobytes) != 1) kilobytes = -1;
  if (file) std::fclose(file);
  if (kilobytes >= 0 && bytes / 1024 > kilobytes)
    throw Fault{EDGE_ERROR_MEMORY,
                "needs " + std::to_string(bytes) + " bytes, " + std::to_string(kilobytes * 1024) +
                    " are available",
                "", "memory"};
}

}  // namespace edge_lib
