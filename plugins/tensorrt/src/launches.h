// The launches of one node of the graph. `../launches.py` describes the format and each part.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace edge {

enum class DType { f32, f16, i8, u8, i32, i64 };
std::int64_t item_bytes(DType dtype);

enum class Space { input, output, workspace };

struct Input {
    DType dtype;
    int rank;
};

// A dimension: the length named by `symbol`, or a number if `symbol` is 0.
struct Dim {
    char symbol;
    std::int64_t number;
};

struct Output {
    DType dtype;
    int alias;  // input whose memory is updated in place, or -1 for memory of its own
    std::vector<Dim> dims;
};

struct Symbol {
    char name;
    int input;
    int axis;
};

// ceil(times · product of symbols / per)
struct Size {
    std::int64_t times;
    std::string of;
    std::int64_t per;
};

// A workspace buffer with a row for each row of the run. Unused in runs of more than `max_rows`
// rows (0: any number).
struct Buffer {
    std::int64_t row_bytes;
    std::int64_t max_rows;
};

struct Kernel {
    std::string key;
    unsigned threads;
};

// The address `at` bytes after the start of a tensor or of a workspace buffer.
struct Place {
    Space space;
    std::size_t index;
    std::int64_t at;
};

using Argument = std::variant<Place, Size, float>;

struct Call {
    std::size_t kernel;
    std::array<Size, 3> grid;
    std::vector<Argument> arguments;
};

struct Program {
    bool tree;
    std::int64_t max_rows;  // 0: any number
    std::vector<std::size_t> calls;
};

struct Launches {
    std::vector<Input> inputs;
    std::vector<Output> outputs;
    std::vector<Symbol> symbols;
    std::string rows;
    std::vector<Buffer> workspace;
    std::vector<Kernel> kernels;
    std::vector<Call> calls;
    std::vector<Program> programs;
    std::string bytes;  // encoded form, without the zero that parsers append to strings
};

// Decodes launches. Throws Problem if the bytes are malformed or refer to something undefined.
Launches decode_launches(std::string_view bytes);

}  // namespace edge
