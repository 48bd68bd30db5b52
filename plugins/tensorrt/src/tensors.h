// A node's tensors against what TensorRT says of them.
#pragma once

#include "launches.h"
#include "sizes.h"

#include <NvInferRuntime.h>

namespace edge {

// What TensorRT calls a type; u8 is told as int8, of which it passes the bits on.
nvinfer1::DataType told_as(DType dtype);

// Throws Problem where there are not as many tensors as the node has.
void check_counts(const Launches& launches, std::int32_t inputs, std::int32_t outputs);

// Throws Problem where a tensor is of another type, rank or format, or an output's length differs.
void check_tensors(const Launches& launches, const nvinfer1::PluginTensorDesc* in,
                   const nvinfer1::PluginTensorDesc* out);

// Of a run with these inputs. Throws Problem.
Sizes sizes_of(const Launches& launches, const nvinfer1::PluginTensorDesc* in);

// Of the largest run of the optimization profile.
Sizes most_sizes_of(const Launches& launches, const nvinfer1::DynamicPluginTensorDesc* in);

}  // namespace edge
