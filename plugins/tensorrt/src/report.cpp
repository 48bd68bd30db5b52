#include "report.h"

#include <atomic>
#include <mutex>
#include <string>

namespace edge {

namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

struct Last {
    std::mutex mutex;
    std::string text;
};

// never destroyed: plugins may report after the library's static objects are destroyed
Last& last() {
    static Last* const one = new Last;
    return *one;
}

void log(const std::string& text) {
    nvinfer1::ILoggerFinder* const finder = logger_finder.load();
    nvinfer1::ILogger* const logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger != nullptr) {
        logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
    }
}

void record(nvinfer1::IErrorRecorder* recorder, std::string text) {
    if (recorder != nullptr) {
        text.resize(std::min(text.size(), nvinfer1::IErrorRecorder::kMAX_DESC_LENGTH));
        recorder->reportError(nvinfer1::ErrorCode::kFAILED_EXECUTION, text.c_str());
    }
}

}  // namespace

void log_by(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder = finder; }

void report(const char* where, const char* what, bool in_tensorrt,
            nvinfer1::IErrorRecorder* recorder) noexcept {
    try {
        std::string text = where;
        text += text.empty() ? "" : ": ";
        text += what;
        {
            const std::lock_guard<std::mutex> lock(last().mutex);
            last().text = text;
        }
        if (in_tensorrt) {
            log("edge.device: " + text);
        }
        record(recorder, text);
    } catch (...) {
        // out of memory while reporting; the failure itself is still returned
    }
}

const char* last_report() noexcept {
    thread_local std::string text;
    try {
        const std::lock_guard<std::mutex> lock(last().mutex);
        text = last().text;
    } catch (...) {
        return "out of memory";
    }
    return text.c_str();
}

}  // namespace edge
