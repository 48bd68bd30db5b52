// The compiled kernels in this process, found by the identity of their blob and loaded on first
// use. An engine's plugins name that identity; one of them, the carrier, contains the blob.
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
    std::vector<std::size_t> sizes;  // bytes of each parameter; empty if the driver does not say
};

class Kernels {
public:
    explicit Kernels(Blob blob) : blob_(std::move(blob)) {}
    ~Kernels();
    Kernels(const Kernels&) = delete;
    Kernels& operator=(const Kernels&) = delete;

    const Blob& blob() const { return blob_; }

    // Returns the compiled kernel of a key. Throws Problem if there is none.
    const Compiled& compiled(const std::string& key) const;

    // Loads a kernel into the current context. Throws Problem. Must not be called while a stream is
    // captured: loading may synchronize, which ends the capture.
    Loaded load(const std::string& key);

private:
    KernelHandle kernel(const std::string& key, const Compiled& compiled);

    const Blob blob_;
    std::mutex mutex_;
    // libraries are independent of contexts; cubins shared by kernels are loaded once
    std::map<const char*, Library> libraries_;
};

// Returns the kernels of a blob, shared with equal blobs in use. Throws Problem.
std::shared_ptr<Kernels> kernels_of(std::string_view blob);

// Returns the kernels of this identity if they are in use, otherwise null.
std::shared_ptr<Kernels> find_kernels(const Digest& identity);

}  // namespace edge
