// What a run's sizes make of a node's launches: lengths, the program to run, places of buffers.
#pragma once

#include "launches.h"

#include <array>
#include <cstdint>
#include <vector>

namespace edge {

// Workspace buffers begin on multiples of it.
inline constexpr std::int64_t ALIGNED = 256;

// The length of each symbol, by its letter.
class Sizes {
public:
    // `length(input, axis)` is the length of that axis of that input. Problem where one is negative.
    template <typename Length>
    Sizes(const Launches& launches, Length length) {
        for (const Symbol& one : launches.symbols) {
            set(one, length(static_cast<std::size_t>(one.input), one.axis));
        }
    }

    std::int64_t of(char symbol) const { return lengths_[static_cast<std::size_t>(symbol - 'A')]; }

    // Throws Problem where it does not fit an int64.
    std::int64_t of(const Size& size) const;

    // The product of the lengths.
    std::int64_t of(const std::string& symbols) const;

    // A run is a tree where each token has ancestors of its own.
    bool tree() const { return of('A') > 1; }

private:
    void set(const Symbol& symbol, std::int64_t length);

    std::array<std::int64_t, 26> lengths_{};
};

// Throws Problem where a launch begins behind an input of so many bytes; what is empty is given as it
// is. Of other operands it is known without a run.
void check_places(const Launches& launches, const std::vector<std::int64_t>& input_bytes);

// Likewise. `length(input, axis)` as of `Sizes`.
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

// The first that fits. Throws Problem where none does.
const Program& program_for(const Launches& launches, const Sizes& sizes);

// Where each workspace buffer begins, then where the last one ends.
std::vector<std::int64_t> workspace_places(const Launches& launches, const Sizes& sizes);

// Bytes to ask for, for runs of these sizes and of any smaller ones, with room to align the first
// buffer. 0: none.
std::size_t workspace_bytes(const Launches& launches, const Sizes& sizes);

}  // namespace edge
