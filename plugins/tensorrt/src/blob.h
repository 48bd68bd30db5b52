// Compiled kernels of one architecture in one piece. The bytes: `../blob.py`.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace edge {

using Digest = std::array<unsigned char, 32>;

// One compiled kernel. The views point into the blob's bytes.
struct Compiled {
    std::string symbol;
    std::string_view cubin;
    unsigned shared;  // dynamic shared bytes of a launch
    int hidden;       // trailing pointer parameters that get null
};

struct Blob {
    // Eight-byte aligned, as an ELF file that a driver maps has to be.
    std::unique_ptr<char[]> memory;
    std::size_t size;
    Digest identity;  // SHA-256, by Python
    int sm;
    std::map<std::string, Compiled, std::less<>> kernels;  // by key

    std::string_view bytes() const { return {memory.get(), size}; }
};

// Copies the bytes. Throws Problem where they are not such a thing, or not whole.
Blob decode_blob(std::string_view bytes);

// Digits, as Python's `blob.identity` writes them.
std::string hex(const Digest& digest);

}  // namespace edge
