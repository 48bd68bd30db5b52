// The functions of CUDA's driver that this library calls. They are found on first use, since the
// library is also loaded, and its plugins created, on machines without a driver.
//
// They are declared here instead of in cuda.h, so that all of the library but the plugins compiles
// without NVIDIA's headers. The driver's binary interface does not change.
#pragma once

#include <cstddef>

namespace edge {

struct OpaqueContext;
struct OpaqueStream;
struct OpaqueLibrary;
struct OpaqueKernel;
struct OpaqueFunction;
using Context = OpaqueContext*;
using Stream = OpaqueStream*;
using Library = OpaqueLibrary*;
using KernelHandle = OpaqueKernel*;
using Function = OpaqueFunction*;

// CUfunction_attribute, CUstreamCaptureStatus, CUresult
inline constexpr int MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
inline constexpr int CAPTURE_NONE = 0;
inline constexpr int INVALID_VALUE = 1;

struct Driver {
    int (*cuGetErrorName)(int, const char**);
    int (*cuCtxGetCurrent)(Context*);
    int (*cuCtxGetDevice)(int*);
    int (*cuStreamIsCapturing)(Stream, int*);
    int (*cuLibraryLoadData)(
        Library*, const void*, int*, void**, unsigned, int*, void**, unsigned);
    int (*cuLibraryUnload)(Library);
    int (*cuLibraryGetKernel)(KernelHandle*, Library, const char*);
    int (*cuKernelGetFunction)(Function*, KernelHandle);
    int (*cuKernelSetAttribute)(int, int, KernelHandle, int);
    int (*cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, Stream, void**, void**);
    // since CUDA 12.4; null in older drivers
    int (*cuKernelGetParamInfo)(KernelHandle, std::size_t, std::size_t*, std::size_t*);
};

// Returns the driver. Throws Problem if there is none or it is older than CUDA 12.
const Driver& driver();

// Throws Problem unless `result` is CUDA_SUCCESS. `doing`: what failed, for the message.
void check(int result, const char* doing, const char* what = "");

}  // namespace edge
