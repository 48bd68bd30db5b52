#include "words.h"

#include "problem.h"

#include <algorithm>

namespace edge {

namespace {

// Reads a LEB128 number from the front. Throws Problem if none is left or it exceeds an int64.
std::int64_t leb128(std::string_view& bytes, const char* what) {
    constexpr unsigned BITS = 63;
    std::uint64_t value = 0;
    for (unsigned shift = 0; !bytes.empty(); shift += 7) {
        const auto byte = static_cast<unsigned char>(bytes.front());
        bytes.remove_prefix(1);
        if (shift >= BITS) {
            refuse(what, ": a number is too large");
        }
        value |= std::uint64_t{byte & 0x7fU} << shift;
        if ((byte & 0x80U) == 0) {
            return static_cast<std::int64_t>(value);
        }
    }
    refuse(what, " end in the middle of their numbers");
}

// Reads an int64 from the front. Assembled from bytes, so that neither alignment nor the machine's
// byte order matters.
std::int64_t int64(std::string_view& bytes, const char* what) {
    constexpr std::size_t BYTES = 8;
    if (bytes.size() < BYTES) {
        refuse(what, " end in the middle of their numbers");
    }
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < BYTES; ++i) {
        value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    }
    bytes.remove_prefix(BYTES);
    return static_cast<std::int64_t>(value);
}

}  // namespace

Words::Words(std::string_view bytes, Form form, const char* what) : what_(what) {
    const auto next = form == Form::leb128 ? leb128 : int64;
    const std::int64_t count = next(bytes, what);
    // each number takes at least a byte, so a larger count must not reserve memory
    if (count < 0 || static_cast<std::uint64_t>(count) > bytes.size()) {
        refuse(what, " state ", count, " numbers in ", bytes.size(), " bytes");
    }
    words_.reserve(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
        words_.push_back(next(bytes, what));
    }
    text_ = bytes;
}

std::int64_t Words::any(const char* name) {
    if (at_ == words_.size()) {
        refuse(what_, " end before ", name);
    }
    return words_[at_++];
}

std::int64_t Words::between(const char* name, std::int64_t least, std::int64_t most) {
    const std::int64_t value = any(name);
    if (value < least || value > most) {
        refuse(what_, ": ", name, " is ", value, ", not in ", least, " to ", most);
    }
    return value;
}

std::int64_t Words::count(const char* name, std::int64_t item) {
    const std::int64_t value = any(name);
    const auto left = static_cast<std::int64_t>(words_.size() - at_);
    if (value < 0 || value > left / item) {
        refuse(what_, ": ", value, " ", name, " do not fit in the ", left, " numbers left");
    }
    return value;
}

std::string_view Words::text(const char* name) {
    const auto size = static_cast<std::int64_t>(text_.size());
    const std::int64_t start = between(name, 0, size);
    const std::int64_t length = between(name, 0, size - start);
    used_ = std::max(used_, static_cast<std::size_t>(start + length));
    return text_.substr(static_cast<std::size_t>(start), static_cast<std::size_t>(length));
}

void Words::end() const {
    if (at_ != words_.size()) {
        refuse(what_, ": ", words_.size() - at_, " numbers too many");
    }
}

}  // namespace edge
