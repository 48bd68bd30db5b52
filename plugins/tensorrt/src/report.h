// Where errors go: to the logger and the error recorder of TensorRT, and to
// `edge_tensorrt_last_error`, for hosts that called a function of this library themselves.
#pragma once

#include "problem.h"

#include <NvInferRuntime.h>

#include <new>
#include <utility>

namespace edge {

// What `setLoggerFinder` was given.
void log_by(nvinfer1::ILoggerFinder* finder) noexcept;

// Says what failed: `where` it did, may be empty. The logger is asked for when `in_tensorrt`: it is
// only to be had where TensorRT called.
void report(const char* where, const char* what, bool in_tensorrt,
            nvinfer1::IErrorRecorder* recorder = nullptr) noexcept;

// The last report of any thread, kept for this one until it asks again; empty where there is none.
const char* last_report() noexcept;

// `work()`, or `failed` after a report of what it threw: nothing thrown leaves the library.
template <typename Result, typename Work>
Result guarded(Result failed, const char* where, bool in_tensorrt,
               nvinfer1::IErrorRecorder* recorder, Work work) noexcept {
    try {
        return work();
    } catch (const std::exception& problem) {
        report(where, problem.what(), in_tensorrt, recorder);
    } catch (...) {
        report(where, "failed", in_tensorrt, recorder);
    }
    return failed;
}

}  // namespace edge
