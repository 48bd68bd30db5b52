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

// The first that fits. Throws Problem where none does.
const Program& program_for(const Launches& launches, const Sizes& sizes);

// Where each workspace buffer begins, then where the last one ends.
std::vector<std::int64_t> workspace_places(const Launches& launches, const Sizes& sizes);

// Bytes to ask for, for runs of these sizes and of any smaller ones, with room to align the first
// buffer. 0: none.
std::size_t workspace_bytes(const Launches& launches, const Sizes& sizes);

}  // namespace edge
