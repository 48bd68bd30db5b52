// What goes wrong in this library. It is thrown inside, and never leaves: every function that
// TensorRT or a host calls catches it (`guarded` in report.h).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace edge {

class Problem : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// Throws a Problem of its arguments, written one after the other.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Problem(text.str());
}

}  // namespace edge
