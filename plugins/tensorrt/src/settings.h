// Settings that a host makes before it parses a graph to build an engine.
#pragma once

#include "kernels.h"

#include <memory>
#include <string_view>

namespace edge {

// Sets the kernels; empty bytes remove them. Throws Problem.
void build_with_kernels(std::string_view blob);

// Returns the kernels that were set, or those of the file $EDGE_TENSORRT_KERNELS. Throws Problem.
std::shared_ptr<Kernels> kernels_to_build_with();

// Whether plugins tell TensorRT which outputs are written in place of an input. TensorRT accepts
// this only with PreviewFeature::kALIASED_PLUGIN_IO_10_03.
void set_aliased(bool on);
bool aliased();

}  // namespace edge
