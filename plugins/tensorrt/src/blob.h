// A blob of the compiled kernels of one architecture. `../blob.py` describes the format.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace edge {

using Digest = std::array<unsigned char, 32>;

// One compiled kernel. `cubin` points into the blob's bytes.
struct Compiled {
    std::string symbol;
    std::string_view cubin;
    unsigned shared;  // dynamic shared memory of a launch, in bytes
    int hidden;       // number of trailing pointer parameters, which are null
};

struct Blob {
    // Aligned to eight bytes, because drivers map the cubins, which are ELF files.
    std::unique_ptr<char[]> memory;
    std::size_t size;
    Digest identity;  // SHA-256, computed by Python
    int sm;
    std::map<std::string, Compiled, std::less<>> kernels;  // by key

    std::string_view bytes() const { return {memory.get(), size}; }
};

// Decodes and copies a blob. Throws Problem if the bytes are malformed or damaged.
Blob decode_blob(std::string_view bytes);

// Returns hexadecimal digits, as Python's `blob.identity` does.
std::string hex(const Digest& digest);

}  // namespace edge
