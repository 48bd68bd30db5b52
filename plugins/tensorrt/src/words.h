// Reader of the formats of `launches.py` and `blob.py`: a number n, n numbers, then bytes that
// strings point into. Every number and string is checked.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace edge {

// Maximum of any size, count or offset. Products are checked where they are computed.
inline constexpr std::int64_t MOST = std::int64_t{1} << 48;

class Words {
public:
    // Encoding of numbers: unsigned LEB128 (DWARF 5, appendix C), or eight bytes, little-endian.
    enum class Form { leb128, int64 };

    // `bytes` starts with n; `what` names the data in messages. Throws Problem.
    Words(std::string_view bytes, Form form, const char* what);

    // Returns the next number, called `name` in messages. Throws Problem if there is none.
    std::int64_t any(const char* name);

    // Returns the next number, which must be from `least` to `most`.
    std::int64_t between(const char* name, std::int64_t least, std::int64_t most);

    // Returns the length of a list. Throws Problem if fewer than `item` numbers per item are left.
    std::int64_t count(const char* name, std::int64_t item);

    // Returns the string given by the next two numbers, its start and length.
    std::string_view text(const char* name);

    // Throws Problem if numbers are left.
    void end() const;

    // Returns the bytes after the numbers and after the last string read.
    std::string_view rest() const { return text_.substr(used_); }

    const char* what() const { return what_; }

private:
    const char* what_;
    std::vector<std::int64_t> words_;
    std::string_view text_;
    std::size_t at_ = 0;
    std::size_t used_ = 0;
};

}  // namespace edge
