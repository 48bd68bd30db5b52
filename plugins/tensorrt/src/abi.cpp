#pragma GCC visibility push(default)
#include "abi.h"
#pragma GCC visibility pop

#include "report.h"
#include "settings.h"

#define EDGE_TEXT(value) #value
#define EDGE_VERSION(major, minor) EDGE_TEXT(major) "." EDGE_TEXT(minor)

int edge_tensorrt_abi(void) { return EDGE_TENSORRT_ABI; }

const char* edge_tensorrt_built_for(void) {
    return EDGE_VERSION(NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR);
}

int edge_tensorrt_set_kernels(const void* bytes, size_t size) {
    return edge::guarded(-1, "edge_tensorrt_set_kernels", false, nullptr, [&] {
        if (bytes == nullptr && size != 0) {
            edge::refuse("no bytes");
        }
        edge::build_with_kernels({static_cast<const char*>(bytes), size});
        return 0;
    });
}

int edge_tensorrt_set_aliased(int on) {
    edge::set_aliased(on != 0);
    return 0;
}

const char* edge_tensorrt_last_error(void) { return edge::last_report(); }
