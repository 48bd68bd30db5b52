#include "tensors.h"

#include "problem.h"

namespace edge {

namespace {

void check_tensor(const char* kind, std::size_t index, DType dtype, int rank,
                  const nvinfer1::PluginTensorDesc& tensor) {
    if (tensor.type != told_as(dtype) || tensor.dims.nbDims != rank) {
        refuse(kind, " ", index, " has type ", static_cast<int>(tensor.type), " and rank ",
               tensor.dims.nbDims, ", not type ", static_cast<int>(told_as(dtype)),
               " and rank ", rank);
    }
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR) {
        refuse(kind, " ", index, " is not linear");
    }
}

}  // namespace

nvinfer1::DataType told_as(DType dtype) {
    using nvinfer1::DataType;
    switch (dtype) {
    case DType::f32: return DataType::kFLOAT;
    case DType::f16: return DataType::kHALF;
    case DType::i8:
    case DType::u8: return DataType::kINT8;
    case DType::i32: return DataType::kINT32;
    case DType::i64: return DataType::kINT64;
    }
    refuse("unknown dtype ", static_cast<int>(dtype));
}

void check_counts(const Launches& launches, std::int32_t inputs, std::int32_t outputs) {
    const auto are = [](std::int32_t count, std::size_t wanted) {
        return count >= 0 && static_cast<std::size_t>(count) == wanted;
    };
    if (!are(inputs, launches.inputs.size()) || !are(outputs, launches.outputs.size())) {
        refuse("the node has ", inputs, " inputs and ", outputs, " outputs, its launches are for ",
               launches.inputs.size(), " and ", launches.outputs.size());
    }
}

void check_tensors(const Launches& launches, const nvinfer1::PluginTensorDesc* in,
                   const nvinfer1::PluginTensorDesc* out) {
    for (std::size_t i = 0; i < launches.inputs.size(); ++i) {
        check_tensor("input", i, launches.inputs[i].dtype, launches.inputs[i].rank, in[i]);
    }
    const Sizes sizes = sizes_of(launches, in);
    for (std::size_t i = 0; i < launches.outputs.size(); ++i) {
        const Output& output = launches.outputs[i];
        const auto rank = static_cast<int>(output.dims.size());
        check_tensor("output", i, output.dtype, rank, out[i]);
        for (int axis = 0; axis < rank; ++axis) {
            const Dim& dim = output.dims[static_cast<std::size_t>(axis)];
            const std::int64_t length = dim.symbol ? sizes.of(dim.symbol) : dim.number;
            if (out[i].dims.d[axis] != length) {
                refuse("output ", i, " has length ", out[i].dims.d[axis], " on axis ", axis,
                       ", not ", length);
            }
        }
    }
    check_places(launches, [in](std::size_t input, int axis) {
        return std::int64_t{in[input].dims.d[axis]};
    });
}

Sizes sizes_of(const Launches& launches, const nvinfer1::PluginTensorDesc* in) {
    return Sizes(launches, [in](std::size_t input, int axis) {
        return std::int64_t{in[input].dims.d[axis]};
    });
}

Sizes most_sizes_of(const Launches& launches, const nvinfer1::DynamicPluginTensorDesc* in) {
    return Sizes(launches, [in](std::size_t input, int axis) {
        return std::int64_t{in[input].max.d[axis]};
    });
}

}  // namespace edge
