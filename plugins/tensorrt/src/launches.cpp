#include "launches.h"

#include "problem.h"
#include "words.h"

#include <cstring>

namespace edge {

namespace {

constexpr std::string_view MAGIC = "EDGEOP02";
constexpr std::int64_t MOST_DIMS = 8;      // nvinfer1::Dims::MAX_DIMS
constexpr std::int64_t MOST_THREADS = 1024;  // per block
constexpr std::int64_t MOST_LIST = 1 << 16;

// Minimum count of numbers in an item of each list.
constexpr std::int64_t INPUT = 2, OUTPUT = 3, DIM = 2, SYMBOL = 3, BUFFER = 2, KERNEL = 3;
constexpr std::int64_t CALL = 11, ARGUMENT = 2, PROGRAM = 3, INDEX = 1;

template <typename Read>
auto list(Words& words, const char* name, std::int64_t item, Read read) {
    std::vector<decltype(read(words))> found;
    const std::int64_t count = words.count(name, item);
    found.reserve(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
        found.push_back(read(words));
    }
    return found;
}

DType dtype(Words& words) {
    return static_cast<DType>(words.between("a dtype", 0, static_cast<int>(DType::i64)));
}

std::size_t index(Words& words, const char* name) {
    return static_cast<std::size_t>(words.between(name, 0, MOST_LIST));
}

// Decodes the capital letters in the bytes of a number, the first in the lowest byte.
std::string letters(Words& words, const char* name) {
    std::string found;
    auto value = static_cast<std::uint64_t>(words.any(name));
    for (; value != 0; value >>= 8) {
        const auto letter = static_cast<char>(value & 0xff);
        if (letter < 'A' || letter > 'Z') {
            refuse(words.what(), ": ", name, " has characters other than A to Z");
        }
        found += letter;
    }
    return found;
}

char letter(Words& words, const char* name, bool needed) {
    const std::string found = letters(words, name);
    if (found.size() > 1 || (needed && found.empty())) {
        refuse(words.what(), ": ", name, " is not one letter");
    }
    return found.empty() ? '\0' : found[0];
}

Size size(Words& words) {
    Size found;
    found.times = words.between("a size's factor", 0, MOST);
    found.of = letters(words, "a size's symbols");
    found.per = words.between("a size's divisor", 1, std::int64_t{1} << 31);
    return found;
}

Input input(Words& words) {
    const DType kind = dtype(words);
    return {kind, static_cast<int>(words.between("an input's rank", 0, MOST_DIMS))};
}

Dim dim(Words& words) {
    const char symbol = letter(words, "a dimension's symbol", false);
    return {symbol, words.between("a dimension", 0, symbol ? 0 : MOST)};
}

Output output(Words& words) {
    Output found;
    found.dtype = dtype(words);
    found.alias = static_cast<int>(words.between("an output's alias", 0, MOST_LIST)) - 1;
    found.dims = list(words, "dimensions", DIM, dim);
    if (found.dims.size() > static_cast<std::size_t>(MOST_DIMS)) {
        refuse(words.what(), ": an output has ", found.dims.size(), " dimensions");
    }
    return found;
}

Symbol symbol(Words& words) {
    const char name = letter(words, "a symbol", true);
    const auto from = static_cast<int>(words.between("a symbol's input", 0, MOST_LIST));
    return {name, from, static_cast<int>(words.between("a symbol's axis", 0, MOST_DIMS - 1))};
}

Buffer buffer(Words& words) {
    const std::int64_t row_bytes = words.between("a buffer's row", 1, MOST);
    return {row_bytes, words.between("a buffer's rows", 0, MOST)};
}

Kernel kernel(Words& words) {
    const std::string_view key = words.text("a kernel's key");
    if (key.empty()) {
        refuse(words.what(), ": a kernel has no key");
    }
    const std::int64_t threads = words.between("a block's threads", 1, MOST_THREADS);
    return {std::string(key), static_cast<unsigned>(threads)};
}

Argument argument(Words& words) {
    switch (words.between("an argument's tag", 0, 2)) {
    case 0: {
        const auto space = static_cast<Space>(words.between("a pointer's space", 0, 2));
        const std::size_t of = index(words, "a pointer's index");
        return Place{space, of, words.between("a pointer's place", 0, MOST)};
    }
    case 1:
        return size(words);
    default: {
        const auto bits = static_cast<std::uint32_t>(words.between("a float", 0, 0xffffffff));
        float value;
        static_assert(sizeof value == sizeof bits);
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    }
}

Call call(Words& words) {
    Call found;
    found.kernel = index(words, "a launch's kernel");
    for (Size& extent : found.grid) {
        extent = size(words);
    }
    found.arguments = list(words, "arguments", ARGUMENT, argument);
    return found;
}

Program program(Words& words) {
    Program found;
    found.tree = words.between("a program's kind", 0, 1) == 1;
    found.max_rows = words.between("a program's rows", 0, MOST);
    found.calls =
        list(words, "launches", INDEX, [](Words& from) { return index(from, "a launch"); });
    return found;
}

// Checks that every index and symbol refers to something defined.
class Check {
public:
    explicit Check(const Launches& launches) : of_(launches) {}

    void all() const {
        symbols();
        outputs();
        known(of_.rows);
        for (const Call& one : of_.calls) {
            call(one);
        }
        for (const Program& one : of_.programs) {
            for (const std::size_t launch : one.calls) {
                below("launch", launch, of_.calls.size());
            }
        }
        if (of_.programs.empty() || of_.outputs.empty()) {
            refuse("launches: a node without ", of_.outputs.empty() ? "outputs" : "programs");
        }
    }

private:
    static void below(const char* name, std::size_t index, std::size_t count) {
        if (index >= count) {
            refuse("launches: there is no ", name, " ", index, ", only ", count);
        }
    }

    void known(const std::string& letters) const {
        for (const char name : letters) {
            bool found = false;
            for (const Symbol& one : of_.symbols) {
                found = found || one.name == name;
            }
            if (!found) {
                refuse("launches: symbol ", name, " is not an axis of any input");
            }
        }
    }

    void symbols() const {
        std::string seen;
        for (const Symbol& one : of_.symbols) {
            const auto from = static_cast<std::size_t>(one.input);
            below("input", from, of_.inputs.size());
            if (one.axis >= of_.inputs[from].rank || seen.find(one.name) != std::string::npos) {
                refuse("launches: symbol ", one.name, " is not an axis of input ", from,
                       ", or appears twice");
            }
            seen += one.name;
        }
    }

    void outputs() const {
        std::vector<bool> taken(of_.inputs.size());
        for (const Output& one : of_.outputs) {
            for (const Dim& dim : one.dims) {
                known(dim.symbol ? std::string(1, dim.symbol) : std::string());
            }
            if (one.alias < 0) {
                continue;
            }
            const auto from = static_cast<std::size_t>(one.alias);
            below("input", from, of_.inputs.size());
            const Input& input = of_.inputs[from];
            const bool alike = input.dtype == one.dtype
                && input.rank == static_cast<int>(one.dims.size());
            if (!alike || taken[from]) {
                refuse("launches: an output is written in place of input ", from,
                       taken[from] ? ", as another is" : ", which has another shape");
            }
            taken[from] = true;
        }
    }

    void call(const Call& one) const {
        below("kernel", one.kernel, of_.kernels.size());
        for (const Size& extent : one.grid) {
            known(extent.of);
        }
        for (const Argument& argument : one.arguments) {
            if (const auto* size = std::get_if<Size>(&argument)) {
                known(size->of);
            } else if (const auto* place = std::get_if<Place>(&argument)) {
                const std::array<std::size_t, 3> counts = {
                    of_.inputs.size(), of_.outputs.size(), of_.workspace.size()};
                static constexpr std::array<const char*, 3> NAMES = {
                    "input", "output", "workspace buffer"};
                const auto space = static_cast<std::size_t>(place->space);
                below(NAMES[space], place->index, counts[space]);
                within(*place);
            }
        }
    }

    // Checks that a pointer starts inside its operand at the operand's minimum length. Lengths of
    // inputs are known only in a run: see `check_places`.
    void within(const Place& place) const {
        if (place.space == Space::input) {
            return;
        }
        std::int64_t bytes = 0;
        if (place.space == Space::workspace) {
            bytes = of_.workspace[place.index].row_bytes;
        } else {
            const Output& output = of_.outputs[place.index];
            bytes = item_bytes(output.dtype);
            for (const Dim& dim : output.dims) {
                if (!dim.symbol && __builtin_mul_overflow(bytes, dim.number, &bytes)) {
                    refuse("launches: output ", place.index, " is too large");
                }
            }
        }
        if (place.at != 0 && place.at >= bytes) {
            refuse("launches: a launch begins ", place.at, " bytes into an operand of ", bytes);
        }
    }

    const Launches& of_;
};

}  // namespace

std::int64_t item_bytes(DType dtype) {
    switch (dtype) {
    case DType::i8:
    case DType::u8: return 1;
    case DType::f16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::i64: return 8;
    }
    refuse("unknown dtype ", static_cast<int>(dtype));
}

Launches decode_launches(std::string_view bytes) {
    if (bytes.substr(0, MAGIC.size()) != MAGIC) {
        refuse("launches do not begin with ", MAGIC, ": the graph was made for another version of ",
               "the plugin library");
    }
    Words words(bytes.substr(MAGIC.size()), Words::Form::leb128, "launches");
    Launches found;
    found.inputs = list(words, "inputs", INPUT, input);
    found.outputs = list(words, "outputs", OUTPUT, output);
    found.symbols = list(words, "symbols", SYMBOL, symbol);
    found.rows = letters(words, "rows");
    found.workspace = list(words, "buffers", BUFFER, buffer);
    found.kernels = list(words, "kernels", KERNEL, kernel);
    found.calls = list(words, "launches", CALL, call);
    found.programs = list(words, "programs", PROGRAM, program);
    words.end();
    // onnx-tensorrt passes strings with a terminating zero
    const std::string_view rest = words.rest();
    if (!rest.empty() && rest != std::string_view("\0", 1)) {
        refuse("launches: ", rest.size(), " bytes too many");
    }
    found.bytes = bytes.substr(0, bytes.size() - rest.size());
    Check(found).all();
    return found;
}

}  // namespace edge
