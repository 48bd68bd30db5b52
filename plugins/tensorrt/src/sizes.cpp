#include "sizes.h"

#include "problem.h"
#include "words.h"

#include <algorithm>

namespace edge {

namespace {

std::int64_t times(std::int64_t a, std::int64_t b) {
    std::int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) {
        refuse("a size of ", a, " times ", b, " is too large");
    }
    return product;
}

std::vector<std::int64_t> places_of(const Launches& launches, std::int64_t rows) {
    std::vector<std::int64_t> places = {0};
    places.reserve(launches.workspace.size() + 1);
    for (const Buffer& one : launches.workspace) {
        const bool used = one.max_rows == 0 || rows <= one.max_rows;
        const std::int64_t bytes = used ? times(one.row_bytes, rows) : 0;
        if (bytes > MOST || places.back() > MOST) {
            refuse("a workspace of ", bytes, " bytes is too large");
        }
        places.push_back((places.back() + bytes + ALIGNED - 1) / ALIGNED * ALIGNED);
    }
    return places;
}

}  // namespace

void Sizes::set(const Symbol& symbol, std::int64_t length) {
    if (length < 0 || length > MOST) {
        refuse("axis ", symbol.axis, " of input ", symbol.input, " has length ", length);
    }
    lengths_[static_cast<std::size_t>(symbol.name - 'A')] = length;
}

std::int64_t Sizes::of(const std::string& symbols) const {
    std::int64_t product = 1;
    for (const char symbol : symbols) {
        product = times(product, of(symbol));
    }
    return product;
}

std::int64_t Sizes::of(const Size& size) const {
    const std::int64_t whole = times(size.times, of(size.of));
    return whole / size.per + (whole % size.per != 0);
}

void check_places(const Launches& launches, const std::vector<std::int64_t>& input_bytes) {
    for (const Call& call : launches.calls) {
        for (const Argument& argument : call.arguments) {
            const auto* place = std::get_if<Place>(&argument);
            if (place == nullptr || place->space != Space::input || place->at == 0) {
                continue;
            }
            const std::int64_t bytes = input_bytes[place->index];
            if (bytes != 0 && place->at >= bytes) {
                refuse("a launch begins ", place->at, " bytes into input ", place->index,
                       ", which has ", bytes);
            }
        }
    }
}

const Program& program_for(const Launches& launches, const Sizes& sizes) {
    const auto is_tree = [](const Program& one) { return one.tree; };
    // a node that runs trees and chains alike has only programs for chains
    const bool tree = sizes.tree()
        && std::any_of(launches.programs.begin(), launches.programs.end(), is_tree);
    const std::int64_t rows = sizes.of(launches.rows);
    for (const Program& one : launches.programs) {
        if (one.tree == tree && (one.max_rows == 0 || rows <= one.max_rows)) {
            return one;
        }
    }
    refuse("no program runs a ", tree ? "tree" : "chain", " of ", rows, " rows");
}

std::vector<std::int64_t> workspace_places(const Launches& launches, const Sizes& sizes) {
    return places_of(launches, sizes.of(launches.rows));
}

std::size_t workspace_bytes(const Launches& launches, const Sizes& sizes) {
    const std::int64_t rows = sizes.of(launches.rows);
    std::int64_t most = places_of(launches, rows).back();
    // it grows with the rows, except where a buffer becomes unused
    for (const Buffer& one : launches.workspace) {
        if (one.max_rows != 0 && one.max_rows < rows) {
            most = std::max(most, places_of(launches, one.max_rows).back());
        }
    }
    return most == 0 ? 0 : static_cast<std::size_t>(most + ALIGNED - 1);
}

}  // namespace edge
