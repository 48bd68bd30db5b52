#include "blob.h"

#include "problem.h"
#include "words.h"

#include <algorithm>
#include <cstring>

namespace edge {

namespace {

constexpr std::string_view MAGIC = "EDGEKRN2";
constexpr std::int64_t KERNEL = 8;  // numbers per kernel
constexpr std::int64_t MOST_SHARED = 1 << 20;
constexpr std::int64_t MOST_HIDDEN = 8;

// The CRC-32 of zlib.
std::uint32_t crc32(std::string_view bytes) {
    std::uint32_t crc = 0xffffffff;
    for (const char byte : bytes) {
        crc ^= static_cast<unsigned char>(byte);
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
        }
    }
    return ~crc;
}

std::uint64_t number(std::string_view bytes) {
    std::uint64_t found = 0;
    for (std::size_t i = 8; i-- > 0;) {
        found = found << 8 | static_cast<unsigned char>(bytes[i]);
    }
    return found;
}

Compiled compiled(Words& words) {
    Compiled found;
    found.symbol = words.text("a kernel's name");
    found.cubin = words.text("a cubin");
    found.shared = static_cast<unsigned>(words.between("shared memory", 0, MOST_SHARED));
    found.hidden = static_cast<int>(words.between("hidden parameters", 0, MOST_HIDDEN));
    if (found.symbol.empty() || found.cubin.empty()) {
        refuse("kernels: one has no ", found.symbol.empty() ? "name" : "code");
    }
    return found;
}

}  // namespace

Blob decode_blob(std::string_view bytes) {
    constexpr std::size_t name = MAGIC.size() + 8, header = name + sizeof(Digest);
    if (bytes.size() < header || bytes.substr(0, MAGIC.size()) != MAGIC) {
        refuse("kernels do not begin with ", MAGIC, ": wrong version, or not kernels");
    }
    Blob found;
    std::memcpy(found.identity.data(), bytes.data() + name, sizeof(Digest));
    if (crc32(bytes.substr(name)) != number(bytes.substr(MAGIC.size()))) {
        refuse("kernels are damaged: they do not match their checksum");
    }
    found.size = bytes.size();
    found.memory = std::make_unique<char[]>(bytes.size());
    std::memcpy(found.memory.get(), bytes.data(), bytes.size());
    Words words(found.bytes().substr(header), Words::Form::int64, "kernels");
    found.sm = static_cast<int>(words.between("the SM", 50, 999));
    for (std::int64_t left = words.count("kernels", KERNEL); left > 0; --left) {
        const std::string key(words.text("a key"));
        if (!found.kernels.emplace(key, compiled(words)).second) {
            refuse("kernels: ", key, " appears twice");
        }
    }
    words.end();
    return found;
}

std::string hex(const Digest& digest) {
    std::string found;
    for (const unsigned char byte : digest) {
        found += "0123456789abcdef"[byte >> 4];
        found += "0123456789abcdef"[byte & 15];
    }
    return found;
}

}  // namespace edge
