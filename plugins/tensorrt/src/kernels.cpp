#include "kernels.h"

#include "problem.h"

#include <utility>

namespace edge {

namespace {

// shared memory available without an attribute (CUDA C++ Programming Guide, compute capability 7.x
// and later)
constexpr unsigned FREE_SHARED = 48 << 10;

struct Store {
    std::mutex mutex;
    std::map<Digest, std::weak_ptr<Kernels>> known;
};

// never destroyed: plugins may be destroyed after the library's static objects
Store& store() {
    static Store* const one = new Store;
    return *one;
}

std::vector<std::size_t> sizes_of(KernelHandle kernel) {
    std::vector<std::size_t> sizes;
    const auto ask = driver().cuKernelGetParamInfo;
    if (ask == nullptr) {
        return sizes;
    }
    for (std::size_t offset = 0, size = 0; ask(kernel, sizes.size(), &offset, &size) == 0;) {
        sizes.push_back(size);
    }
    return sizes;
}

}  // namespace

Kernels::~Kernels() {
    for (const auto& [code, library] : libraries_) {
        // nothing is left to report a failure to
        static_cast<void>(driver().cuLibraryUnload(library));
    }
}

const Compiled& Kernels::compiled(const std::string& key) const {
    const auto found = blob_.kernels.find(key);
    if (found == blob_.kernels.end()) {
        refuse("the kernels for sm_", blob_.sm, " have no ", key,
               ": they were compiled for another graph");
    }
    return found->second;
}

KernelHandle Kernels::kernel(const std::string& key, const Compiled& compiled) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Library& library = libraries_[compiled.cubin.data()];
    if (library == nullptr) {
        const int result = driver().cuLibraryLoadData(
            &library, compiled.cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
        if (result != 0) {
            libraries_.erase(compiled.cubin.data());
        }
        const std::string what = key + ", compiled for sm_" + std::to_string(blob_.sm);
        check(result, "loading ", what.c_str());
    }
    KernelHandle found = nullptr;
    check(driver().cuLibraryGetKernel(&found, library, compiled.symbol.c_str()), "finding ",
          key.c_str());
    return found;
}

Loaded Kernels::load(const std::string& key) {
    const Compiled& code = compiled(key);
    const KernelHandle handle = kernel(key, code);
    Loaded found{};
    found.shared = code.shared;
    found.hidden = code.hidden;
    if (code.shared > FREE_SHARED) {
        int device = 0;
        check(driver().cuCtxGetDevice(&device), "querying the GPU");
        const int result = driver().cuKernelSetAttribute(
            MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(code.shared), handle, device);
        check(result, "setting the shared memory of ", key.c_str());
    }
    // otherwise the driver would defer loading to the first launch
    check(driver().cuKernelGetFunction(&found.function, handle), "loading ", key.c_str());
    found.sizes = sizes_of(handle);
    return found;
}

std::shared_ptr<Kernels> kernels_of(std::string_view bytes) {
    Blob blob = decode_blob(bytes);
    const std::lock_guard<std::mutex> lock(store().mutex);
    std::weak_ptr<Kernels>& known = store().known[blob.identity];
    std::shared_ptr<Kernels> found = known.lock();
    if (found == nullptr) {
        found = std::make_shared<Kernels>(std::move(blob));
        known = found;
    }
    return found;
}

std::shared_ptr<Kernels> find_kernels(const Digest& identity) {
    const std::lock_guard<std::mutex> lock(store().mutex);
    const auto found = store().known.find(identity);
    return found == store().known.end() ? nullptr : found->second.lock();
}

}  // namespace edge
