// Sizes of a run, and what depends on them: lengths, the program to run, places of buffers.
#pragma once

#include "launches.h"

#include <array>
#include <cstdint>
#include <vector>

namespace edge {

// Alignment of workspace buffers in bytes.
inline constexpr std::int64_t ALIGNED = 256;

// The length of each symbol, by its letter.
class Sizes {
public:
    // `length(input, axis)` returns the length of an axis. Throws Problem if one is negative.
    template <typename Length>
    Sizes(const Launches& launches, Length length) {
        for (const Symbol& one : launches.symbols) {
            set(one, length(static_cast<std::size_t>(one.input), one.axis));
        }
    }

    std::int64_t of(char symbol) const { return lengths_[static_cast<std::size_t>(symbol - 'A')]; }

    // Throws Problem if the size exceeds an int64.
    std::int64_t of(const Size& size) const;

    // The product of the lengths.
    std::int64_t of(const std::string& symbols) const;

    // Returns whether the run is a tree, whose tokens have ancestors of their own.
    bool tree() const { return of('A') > 1; }

private:
    void set(const Symbol& symbol, std::int64_t length);

    std::array<std::int64_t, 26> lengths_{};
};

// Throws Problem if a pointer starts beyond the end of an input of this size. Empty inputs are not
// checked. Pointers into other operands are checked when launches are decoded.
void check_places(const Launches& launches, const std::vector<std::int64_t>& input_bytes);

// The same, with `length(input, axis)` as in `Sizes`.
template <typename Length>
void check_places(const Launches& launches, Length length) {
    std::vector<std::int64_t> bytes;
    for (std::size_t input = 0; input < launches.inputs.size(); ++input) {
        bytes.push_back(item_bytes(launches.inputs[input].dtype));
        for (int axis = 0; axis < launches.inputs[input].rank; ++axis) {
            if (__builtin_mul_overflow(bytes.back(), length(input, axis), &bytes.back())) {
                bytes.back() = INT64_MAX;
            }
        }
    }
    check_places(launches, bytes);
}

// Returns the first program that fits. Throws Problem if none does.
const Program& program_for(const Launches& launches, const Sizes& sizes);

// Returns the offsets of the workspace buffers, then the end of the last one.
std::vector<std::int64_t> workspace_places(const Launches& launches, const Sizes& sizes);

// Returns the workspace size in bytes for runs of these sizes or any smaller ones, with room to
// align the first buffer; 0 without buffers.
std::size_t workspace_bytes(const Launches& launches, const Sizes& sizes);

}  // namespace edge
