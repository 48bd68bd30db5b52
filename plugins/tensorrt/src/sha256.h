// SHA-256 (FIPS 180-4), by which kernels are named and damaged ones are found.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace edge {

using Digest = std::array<unsigned char, 32>;

Digest sha256(std::string_view bytes);

}  // namespace edge
