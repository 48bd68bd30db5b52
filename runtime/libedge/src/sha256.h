// SHA-256 (FIPS 180-4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace edge_lib {

class Sha256 {
 public:
  Sha256();
  void add(const void* data, size_t size);
  void end(uint8_t digest[32]);
  std::string hexadecimal();  // ends the hash and returns its digest

 private:
  uint32_t state_[8];
  uint8_t block_[64];
  uint64_t size_ = 0;
};

std::string sha256(std::string_view data);

}  // namespace edge_lib
