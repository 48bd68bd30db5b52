// The exception of this library. It never leaves the library: every function that TensorRT or a
// host calls catches it (`guarded` in report.h).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace edge {

class Problem : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// Throws a Problem with the concatenated arguments as its message.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Problem(text.str());
}

}  // namespace edge
