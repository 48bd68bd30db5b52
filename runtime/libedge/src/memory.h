// Zero-initialized memory, aligned to 256 bytes.
#pragma once

#include <cstdint>
#include <utility>

namespace edge_lib {

constexpr int64_t ALIGNMENT = 256;

// Small pages are committed only where they are touched, which suits KV caches: a prompt fills the
// beginning of every head's rows.
enum class Pages { large, small };

class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t size, Pages pages = Pages::large);  // throws std::bad_alloc
  Memory(Memory&& other) { *this = std::move(other); }
  Memory& operator=(Memory&& other) {
    std::swap(data_, other.data_), std::swap(size_, other.size_);
    return *this;
  }
  ~Memory();
  char* data() const { return data_; }
  int64_t size() const { return size_; }
  void touch();  // commits all pages, so that no run has to wait for one

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

// Returns freed pages of the heap to the system, where the C library can: it keeps those below
// anything that lives on. Not for the middle of a talk: it holds up other threads that allocate.
void give_back();

// Throws Fault if the system lacks this much free memory. To be called before pages are touched,
// since the system would otherwise kill the process.
void check_room(int64_t bytes);

}  // namespace edge_lib
