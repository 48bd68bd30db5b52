#include "driver.h"

#include "problem.h"

#include <dlfcn.h>

namespace edge {

namespace {

constexpr const char* LIBRARY = "libcuda.so.1";

template <typename Type>
void find(void* library, const char* name, Type& found) {
    found = reinterpret_cast<Type>(dlsym(library, name));
}

template <typename Type>
void need(void* library, const char* name, Type& found) {
    find(library, name, found);
    if (found == nullptr) {
        refuse("the NVIDIA driver has no ", name, ": CUDA 12 or later is needed");
    }
}

Driver open() {
    // never closed: its kernels may be in use until the process ends
    void* library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = dlerror();
        refuse("there is no NVIDIA driver: ", reason == nullptr ? LIBRARY : reason);
    }
    Driver found{};
    need(library, "cuGetErrorName", found.cuGetErrorName);
    need(library, "cuCtxGetCurrent", found.cuCtxGetCurrent);
    need(library, "cuCtxGetDevice", found.cuCtxGetDevice);
    need(library, "cuStreamIsCapturing", found.cuStreamIsCapturing);
    need(library, "cuLibraryLoadData", found.cuLibraryLoadData);
    need(library, "cuLibraryUnload", found.cuLibraryUnload);
    need(library, "cuLibraryGetKernel", found.cuLibraryGetKernel);
    need(library, "cuKernelGetFunction", found.cuKernelGetFunction);
    need(library, "cuKernelSetAttribute", found.cuKernelSetAttribute);
    need(library, "cuLaunchKernel", found.cuLaunchKernel);
    find(library, "cuKernelGetParamInfo", found.cuKernelGetParamInfo);
    return found;
}

}  // namespace

const Driver& driver() {
    // if this throws, the next call tries again
    static const Driver found = open();
    return found;
}

void check(int result, const char* doing, const char* what) {
    if (result == 0) {
        return;
    }
    const char* name = nullptr;
    if (driver().cuGetErrorName(result, &name) != 0 || name == nullptr) {
        name = "an unknown error";
    }
    refuse(doing, what, ": ", name, " (", result, ")");
}

}  // namespace edge
