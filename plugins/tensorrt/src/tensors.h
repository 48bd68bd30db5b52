// Checks of a node's tensors against TensorRT's descriptions.
#pragma once

#include "launches.h"
#include "sizes.h"

#include <NvInferRuntime.h>

namespace edge {

// Returns TensorRT's name of a type. u8 is passed as int8, with the same bits.
nvinfer1::DataType told_as(DType dtype);

// Throws Problem if the numbers of tensors are not the node's.
void check_counts(const Launches& launches, std::int32_t inputs, std::int32_t outputs);

// Throws Problem if a tensor has another type, rank or format, an output has another length, or a
// pointer starts beyond its input.
void check_tensors(const Launches& launches, const nvinfer1::PluginTensorDesc* in,
                   const nvinfer1::PluginTensorDesc* out);

// Returns the sizes of a run with these inputs. Throws Problem.
Sizes sizes_of(const Launches& launches, const nvinfer1::PluginTensorDesc* in);

// Returns the sizes of the optimization profile's largest run. Throws Problem.
Sizes most_sizes_of(const Launches& launches, const nvinfer1::DynamicPluginTensorDesc* in);

}  // namespace edge
