// A node's launches, issued: its kernels in one context, and the calls of one program on a stream.
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

// The kernels of a node in the context that was current when they were loaded.
class Runner {
public:
    // Throws Problem: no driver, no context, kernels that cannot be loaded or take other parameters.
    Runner(const Launches& launches, std::shared_ptr<Kernels> kernels);

    // Throws Problem. Whether they are for the current context.
    bool here() const;

    // Issues the launches for a run of `sizes`; allocates nothing on the device, waits for nothing.
    // Throws Problem.
    void run(const Launches& launches, const Sizes& sizes, const Addresses& at, Stream stream) const;

private:
    std::shared_ptr<Kernels> kernels_;
    Context context_;
    std::vector<Loaded> loaded_;
};

// Throws Problem where an output that is written in place is not where its input is.
void check_in_place(const Launches& launches, const Addresses& at);

bool capturing(Stream stream);

}  // namespace edge
