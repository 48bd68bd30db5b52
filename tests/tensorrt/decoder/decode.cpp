/* Decodes what Python encoded and prints it back, one line for each item of the file that the
 * argument names: `L` (launches) or `B` (kernels), eight bytes of length, lowest first, the bytes.
 * What is refused becomes `refused: why`. Needs no header of NVIDIA's.
 */
#include "../../../plugins/tensorrt/src/blob.h"
#include "../../../plugins/tensorrt/src/launches.h"
#include "../../../plugins/tensorrt/src/problem.h"
#include "../../../plugins/tensorrt/src/sizes.h"

#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>

using namespace edge;

namespace {

constexpr const char *DTYPES[] = {"f32", "f16", "i8", "u8", "i32", "i64"};
constexpr const char *SPACES[] = {"input", "output", "workspace"};

std::string text(const Size &size) {
    std::ostringstream out;
    out << size.times << '*' << size.of << '/' << size.per;
    return out.str();
}

std::string text(const Argument &argument) {
    std::ostringstream out;
    if (const auto *place = std::get_if<Place>(&argument)) {
        out << SPACES[static_cast<std::size_t>(place->space)] << '.' << place->index << '+'
            << place->at;
    } else if (const auto *size = std::get_if<Size>(&argument)) {
        out << text(*size);
    } else {
        std::uint32_t bits;
        std::memcpy(&bits, &std::get<float>(argument), sizeof bits);
        out << "f" << bits;
    }
    return out.str();
}

std::string text(const Launches &launches) {
    std::ostringstream out;
    for (const Input &one : launches.inputs) {
        out << " in " << DTYPES[static_cast<std::size_t>(one.dtype)] << ' ' << one.rank;
    }
    for (const Output &one : launches.outputs) {
        out << " out " << DTYPES[static_cast<std::size_t>(one.dtype)] << ' ' << one.alias;
        for (const Dim &dim : one.dims) {
            out << ' ';
            if (dim.symbol) out << dim.symbol; else out << dim.number;
        }
    }
    for (const Symbol &one : launches.symbols) {
        out << ' ' << one.name << '=' << one.input << '.' << one.axis;
    }
    out << " rows " << launches.rows;
    for (const Buffer &one : launches.workspace) {
        out << " buffer " << one.row_bytes << ' ' << one.max_rows;
    }
    for (const Kernel &one : launches.kernels) {
        out << " kernel " << one.key << ' ' << one.threads;
    }
    for (const Call &one : launches.calls) {
        out << " call " << one.kernel << " grid";
        for (const Size &extent : one.grid) out << ' ' << text(extent);
        for (const Argument &argument : one.arguments) out << ' ' << text(argument);
    }
    for (const Program &one : launches.programs) {
        out << (one.tree ? " tree " : " chain ") << one.max_rows;
        for (const std::size_t call : one.calls) out << ' ' << call;
    }
    return out.str().substr(1);
}

/* What TensorRT would have a plugin do with them, for runs of some sizes: nothing of it may go
 * wrong in another way than by a Problem. */
void use(const Launches &launches) {
    for (const std::int64_t length : {std::int64_t{0}, std::int64_t{1}, std::int64_t{17},
                                      std::int64_t{1} << 40}) {
        try {
            const Sizes sizes(launches, [length](std::size_t, int) { return length; });
            workspace_bytes(launches, sizes);
            for (const std::size_t index : program_for(launches, sizes).calls) {
                const Call &call = launches.calls.at(index);
                launches.kernels.at(call.kernel);
                for (const Size &extent : call.grid) sizes.of(extent);
                for (const Argument &argument : call.arguments) {
                    if (const auto *size = std::get_if<Size>(&argument)) sizes.of(*size);
                }
            }
        } catch (const Problem &) {
        }
    }
}

std::string text(const Blob &blob) {
    std::ostringstream out;
    out << "sm " << blob.sm << " id " << hex(blob.identity);
    for (const auto &[key, one] : blob.kernels) {
        out << " kernel " << key << ' ' << one.symbol << ' ' << one.shared << ' ' << one.hidden
            << ' ' << one.cubin.size()
            << (reinterpret_cast<std::uintptr_t>(one.cubin.data()) % 8 ? " misaligned " : " ");
        for (const unsigned char byte : one.cubin) out << "0123456789abcdef"[byte >> 4] << "0123456789abcdef"[byte & 15];
    }
    return out.str();
}

std::string decoded(char kind, std::string_view bytes) {
    if (kind == 'B') return text(decode_blob(bytes));
    const Launches launches = decode_launches(bytes);
    use(launches);
    return text(launches);
}

}  // namespace

int main(int, char **arguments) {
    std::ifstream file(arguments[1], std::ios::binary);
    const std::string all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    for (std::size_t at = 0; at < all.size();) {
        const char kind = all[at];
        std::size_t size = 0;
        for (std::size_t i = 8; i > 0; --i) {
            size = size << 8 | static_cast<unsigned char>(all[at + i]);
        }
        /* a copy of exactly this size, so that a sanitizer sees what is read behind it */
        const std::unique_ptr<char[]> bytes(new char[size]);
        std::memcpy(bytes.get(), all.data() + at + 9, size);
        at += 9 + size;
        try {
            std::cout << decoded(kind, {bytes.get(), size}) << '\n';
        } catch (const Problem &problem) {
            std::cout << "refused: " << problem.what() << '\n';
        }
    }
}
