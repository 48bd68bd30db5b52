// Memory that is taken once, starts on 256 bytes and holds zeros.
#pragma once

#include <cstdint>
#include <utility>

namespace edge_lib {

constexpr int64_t ALIGNMENT = 256;

// Small ones are taken where they are touched: a prompt fills the beginning of every head's cache.
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
  void touch();  // so that no run has to wait for a page

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

// Refuses what the system has no room for now, before pages are touched: it would end the process
// instead. Throws Fault.
void check_room(int64_t bytes);

}  // namespace edge_lib
