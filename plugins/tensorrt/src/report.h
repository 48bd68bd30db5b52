// Reports errors to TensorRT's logger and error recorder, and to `edge_tensorrt_last_error` for
// hosts that call the library directly.
#pragma once

#include "problem.h"

#include <NvInferRuntime.h>

#include <new>
#include <utility>

namespace edge {

// Sets the logger finder that `setLoggerFinder` received.
void log_by(nvinfer1::ILoggerFinder* finder) noexcept;

// Reports the failure `what` at `where`, which may be empty. `in_tensorrt`: TensorRT called, so its
// logger is available.
void report(const char* where, const char* what, bool in_tensorrt,
            nvinfer1::IErrorRecorder* recorder = nullptr) noexcept;

// Returns the last report of any thread, or "". Valid until the same thread calls this again.
const char* last_report() noexcept;

// Returns `work()`; if it throws, reports the exception and returns `failed`. No exception leaves
// the library.
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
