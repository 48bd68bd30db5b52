#include "run.h"

#include "problem.h"

#include <cstring>
#include <limits>
#include <utility>

namespace edge {

namespace {

Context current() {
    Context found = nullptr;
    check(driver().cuCtxGetCurrent(&found), "querying the current context");
    return found;
}

std::size_t parameter_bytes(const Argument& argument) {
    return std::holds_alternative<Place>(argument) ? sizeof(void*) : 4;
}

// The driver reads as many parameters as the kernel has, so their number and sizes must match.
void check_parameters(const Launches& launches, const std::vector<Loaded>& loaded) {
    for (const Call& call : launches.calls) {
        const Loaded& kernel = loaded[call.kernel];
        std::vector<std::size_t> sizes;
        for (const Argument& one : call.arguments) {
            sizes.push_back(parameter_bytes(one));
        }
        sizes.insert(sizes.end(), static_cast<std::size_t>(kernel.hidden), sizeof(void*));
        if (!kernel.sizes.empty() && kernel.sizes != sizes) {
            refuse(launches.kernels[call.kernel].key, " takes ", kernel.sizes.size(),
                   " parameters, the graph passes ", sizes.size(), ", or other sizes");
        }
    }
}

// Parameters as the driver takes them: the address of each, stored in eight bytes.
class Parameters {
public:
    explicit Parameters(std::size_t count) {
        values_.reserve(count);
        addresses_.reserve(count);
    }

    template <typename Value>
    void add(Value value) {
        std::uint64_t bits = 0;
        static_assert(sizeof value <= sizeof bits);
        std::memcpy(&bits, &value, sizeof value);
        values_.push_back(bits);  // reserved, so earlier addresses stay valid
        addresses_.push_back(&values_.back());
    }

    void** data() { return addresses_.data(); }

private:
    std::vector<std::uint64_t> values_;
    std::vector<void*> addresses_;
};

std::int32_t i32(std::int64_t value) {
    if (value > std::numeric_limits<std::int32_t>::max()) {
        refuse("a size of ", value, " does not fit a kernel's i32");
    }
    return static_cast<std::int32_t>(value);
}

unsigned extent(std::int64_t value, std::int64_t most) {
    if (value > most) {
        refuse("a grid of ", value, " blocks exceeds the maximum of ", most);
    }
    // CUDA has no empty grid; kernels detect that they have nothing to do
    return value == 0 ? 1 : static_cast<unsigned>(value);
}

std::uint64_t aligned(const void* workspace) {
    const auto start = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(workspace));
    return (start + ALIGNED - 1) / ALIGNED * ALIGNED;
}

class Issue {
public:
    Issue(const Launches& launches, const Sizes& sizes, const Addresses& at)
        : sizes_(sizes), at_(at), places_(workspace_places(launches, sizes)) {
        if (places_.back() != 0 && at.workspace == nullptr) {
            refuse("there is no workspace, but ", places_.back(), " bytes are needed");
        }
    }

    void call(const Call& call, const Loaded& kernel, unsigned threads, Stream stream) const {
        constexpr std::int64_t WIDE = std::numeric_limits<std::int32_t>::max(), HIGH = 65535;
        Parameters parameters(call.arguments.size() + static_cast<std::size_t>(kernel.hidden));
        for (const Argument& one : call.arguments) {
            if (const auto* place = std::get_if<Place>(&one)) {
                parameters.add(address(*place));
            } else if (const auto* size = std::get_if<Size>(&one)) {
                parameters.add(i32(sizes_.of(*size)));
            } else {
                parameters.add(std::get<float>(one));
            }
        }
        for (int i = 0; i < kernel.hidden; ++i) {
            parameters.add(std::uint64_t{0});
        }
        const int result = driver().cuLaunchKernel(
            kernel.function, extent(sizes_.of(call.grid[0]), WIDE),
            extent(sizes_.of(call.grid[1]), HIGH), extent(sizes_.of(call.grid[2]), HIGH), threads, 1,
            1, kernel.shared, stream, parameters.data(), nullptr);
        check(result, "launching");
    }

private:
    std::uint64_t address(const Place& place) const {
        const auto at = static_cast<std::uint64_t>(place.at);
        if (place.space == Space::workspace) {
            return aligned(at_.workspace) + static_cast<std::uint64_t>(places_[place.index]) + at;
        }
        const void* start = place.space == Space::input ? at_.inputs[place.index]
                                                        : at_.outputs[place.index];
        return reinterpret_cast<std::uintptr_t>(start) + at;
    }

    const Sizes& sizes_;
    const Addresses& at_;
    const std::vector<std::int64_t> places_;
};

}  // namespace

Runner::Runner(const Launches& launches, std::shared_ptr<Kernels> kernels)
    : kernels_(std::move(kernels)), context_(current()) {
    if (context_ == nullptr) {
        refuse("no CUDA context is current");
    }
    for (const Kernel& one : launches.kernels) {
        loaded_.push_back(kernels_->load(one.key));
    }
    check_parameters(launches, loaded_);
}

bool Runner::here() const { return current() == context_; }

void Runner::run(
    const Launches& launches, const Sizes& sizes, const Addresses& at, Stream stream) const {
    const Issue issue(launches, sizes, at);
    for (const std::size_t index : program_for(launches, sizes).calls) {
        const Call& call = launches.calls[index];
        const Kernel& kernel = launches.kernels[call.kernel];
        try {
            issue.call(call, loaded_[call.kernel], kernel.threads, stream);
        } catch (const Problem& problem) {
            refuse(kernel.key, ": ", problem.what());
        }
    }
}

void check_in_place(const Launches& launches, const Addresses& at) {
    for (std::size_t i = 0; i < launches.outputs.size(); ++i) {
        const int alias = launches.outputs[i].alias;
        if (alias >= 0 && at.outputs[i] != at.inputs[alias]) {
            refuse("TensorRT moved output ", i, ", which is written in place of input ", alias,
                   ": both must be bound to the same address, and neither may be copied");
        }
    }
}

bool capturing(Stream stream) {
    int status = CAPTURE_NONE;
    check(driver().cuStreamIsCapturing(stream, &status), "querying the stream's capture status");
    return status != CAPTURE_NONE;
}

}  // namespace edge
