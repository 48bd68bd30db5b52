// Compiled kernels in this process: found by the identity of their blob, loaded when first asked
// for. An engine's plugins name them by identity; one of them, the carrier, brings the blob.
#pragma once

#include "blob.h"
#include "driver.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace edge {

// A kernel in one context, ready to launch.
struct Loaded {
    Function function;
    unsigned shared;
    int hidden;
    std::vector<std::size_t> sizes;  // bytes of its parameters; empty where the driver does not say
};

class Kernels {
public:
    explicit Kernels(Blob blob) : blob_(std::move(blob)) {}
    ~Kernels();
    Kernels(const Kernels&) = delete;
    Kernels& operator=(const Kernels&) = delete;

    const Blob& blob() const { return blob_; }

    // Throws Problem where there is none of this key.
    const Compiled& compiled(const std::string& key) const;

    // The kernel in the current context. Throws Problem. Never while a stream is being captured:
    // loading may synchronize, which ends the capture.
    Loaded load(const std::string& key);

private:
    KernelHandle kernel(const std::string& key, const Compiled& compiled);

    const Blob blob_;
    std::mutex mutex_;
    // a library belongs to no context; equal cubins, which the blob has once, are loaded once
    std::map<const char*, Library> libraries_;
};

// The kernels of a blob: those of an equal one, while somebody has them. Throws Problem.
std::shared_ptr<Kernels> kernels_of(std::string_view blob);

// Those of this identity, if somebody has them.
std::shared_ptr<Kernels> find_kernels(const Digest& identity);

}  // namespace edge
