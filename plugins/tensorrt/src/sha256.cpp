#include "sha256.h"

#include <string>

namespace edge {

namespace {

using State = std::array<std::uint32_t, 8>;
constexpr std::size_t BLOCK = 64;

constexpr std::array<std::uint32_t, 64> ROUNDS = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr std::uint32_t turn(std::uint32_t x, unsigned by) {
    return (x >> by) | (x << (32 - by));
}

void step(State& state, const unsigned char* block) {
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i) {
        const unsigned char* at = block + 4 * i;
        w[i] = std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16
            | std::uint32_t{at[2]} << 8 | std::uint32_t{at[3]};
    }
    for (std::size_t i = 16; i < 64; ++i) {
        const std::uint32_t early = w[i - 15], late = w[i - 2];
        w[i] = w[i - 16] + (turn(early, 7) ^ turn(early, 18) ^ (early >> 3)) + w[i - 7]
            + (turn(late, 17) ^ turn(late, 19) ^ (late >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (std::size_t i = 0; i < 64; ++i) {
        const std::uint32_t first = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25))
            + ((e & f) ^ (~e & g)) + ROUNDS[i] + w[i];
        const std::uint32_t second = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22))
            + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + first;
        d = c, c = b, b = a, a = first + second;
    }
    const State by = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < state.size(); ++i) {
        state[i] += by[i];
    }
}

}  // namespace

Digest sha256(std::string_view bytes) {
    State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
    const std::size_t whole = bytes.size() / BLOCK * BLOCK;
    for (std::size_t at = 0; at < whole; at += BLOCK) {
        step(state, data + at);
    }
    // the rest, a one bit, zeros, and the number of bits in the last eight bytes
    std::string tail(bytes.substr(whole));
    tail += '\x80';
    while (tail.size() % BLOCK != BLOCK - 8) {
        tail += '\0';
    }
    for (unsigned i = 8; i-- > 0;) {
        tail += static_cast<char>(std::uint64_t{bytes.size()} * 8 >> (8 * i) & 0xff);
    }
    for (std::size_t at = 0; at < tail.size(); at += BLOCK) {
        step(state, reinterpret_cast<const unsigned char*>(tail.data()) + at);
    }
    Digest found;
    for (std::size_t i = 0; i < found.size(); ++i) {
        found[i] = static_cast<unsigned char>(state[i / 4] >> (24 - 8 * (i % 4)));
    }
    return found;
}

}  // namespace edge
