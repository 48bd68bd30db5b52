// Issues a node's launches: its kernels in one context, and the calls of one program on a stream.
#pragma once

#include "kernels.h"
#include "launches.h"
#include "sizes.h"

#include <vector>

namespace edge {

struct Addresses {
    const void* const* inputs;
    void* const* outputs;
    void* workspace;
};

// The kernels of a node, loaded in the context that was current then.
class Runner {
public:
    // Throws Problem if there is no driver or context, or a kernel cannot be loaded or takes other
    // parameters.
    Runner(const Launches& launches, std::shared_ptr<Kernels> kernels);

    // Returns whether the kernels were loaded in the current context. Throws Problem.
    bool here() const;

    // Issues the launches of a run of `sizes`. Allocates nothing on the device and does not wait.
    // Throws Problem.
    void run(const Launches& launches, const Sizes& sizes, const Addresses& at, Stream stream) const;

private:
    std::shared_ptr<Kernels> kernels_;
    Context context_;
    std::vector<Loaded> loaded_;
};

// Throws Problem if an output that is written in place has another address than its input.
void check_in_place(const Launches& launches, const Addresses& at);

// Returns whether the stream is being captured. Throws Problem.
bool capturing(Stream stream);

}  // namespace edge
