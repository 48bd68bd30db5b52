// What a host that builds an engine sets before it parses a graph.
#pragma once

#include "kernels.h"

#include <memory>
#include <string_view>

namespace edge {

// Throws Problem. Empty bytes: forgets those that were set.
void build_with_kernels(std::string_view blob);

// Those that were set, else of the file that $EDGE_TENSORRT_KERNELS names. Throws Problem.
std::shared_ptr<Kernels> kernels_to_build_with();

// Whether plugins tell TensorRT which outputs are written in place of an input. It takes them at
// their word only with PreviewFeature::kALIASED_PLUGIN_IO_10_03.
void set_aliased(bool on);
bool aliased();

}  // namespace edge
