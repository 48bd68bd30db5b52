#include "settings.h"

#include "problem.h"

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace edge {

namespace {

constexpr const char* VARIABLE = "EDGE_TENSORRT_KERNELS";

std::atomic<bool> is_aliased{false};

struct Chosen {
    std::mutex mutex;
    std::shared_ptr<Kernels> set;
    std::string path;  // file of `read`
    std::shared_ptr<Kernels> read;
};

// never destroyed: its kernels would use the driver, which may be unloaded by then
Chosen& chosen() {
    static Chosen* const one = new Chosen;
    return *one;
}

std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string found{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file) {
        refuse(VARIABLE, ": cannot read ", path);
    }
    return found;
}

}  // namespace

void build_with_kernels(std::string_view blob) {
    std::shared_ptr<Kernels> found = blob.empty() ? nullptr : kernels_of(blob);
    const std::lock_guard<std::mutex> lock(chosen().mutex);
    chosen().set = std::move(found);
}

std::shared_ptr<Kernels> kernels_to_build_with() {
    Chosen& from = chosen();
    const std::lock_guard<std::mutex> lock(from.mutex);
    if (from.set != nullptr) {
        return from.set;
    }
    const char* path = std::getenv(VARIABLE);
    if (path == nullptr || *path == '\0') {
        refuse("no kernels to build with: call edge_tensorrt_set_kernels, or name a kernel file ",
               "in ", VARIABLE);
    }
    // read once, not for every node
    if (from.read == nullptr || from.path != path) {
        from.read = kernels_of(contents(path));
        from.path = path;
    }
    return from.read;
}

void set_aliased(bool on) { is_aliased = on; }

bool aliased() { return is_aliased; }

}  // namespace edge
