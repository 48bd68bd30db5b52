// Reading the forms of `launches.py` and `blob.py`: a number n, n numbers, then bytes that strings
// are cut from. Every number and every string is checked.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace edge {

// The most that any size, count or place may be: products of them are checked where they are made.
inline constexpr std::int64_t MOST = std::int64_t{1} << 48;

class Words {
public:
    // How numbers are written: unsigned LEB128 (DWARF 5, appendix C), or eight bytes each, the
    // lowest first.
    enum class Form { leb128, int64 };

    // `bytes` begins at n; `what` names it in messages. Throws Problem.
    Words(std::string_view bytes, Form form, const char* what);

    // The next number, called `name` in messages; Problem if there is none.
    std::int64_t any(const char* name);

    // The next number, from `least` to `most`, both included.
    std::int64_t between(const char* name, std::int64_t least, std::int64_t most);

    // The length of a list of items of at least `item` numbers each, which are all there.
    std::int64_t count(const char* name, std::int64_t item);

    // Two numbers: the first byte and the length of a string.
    std::string_view text(const char* name);

    // Problem if numbers are left.
    void end() const;

    // Bytes behind the numbers, and behind the last string that was cut from them.
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
