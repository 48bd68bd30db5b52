// The plugin class of all device ops, which differ only in their nodes' launches.
#pragma once

#include "kernels.h"
#include "launches.h"
#include "run.h"

#include <NvInferRuntime.h>

#include <array>
#include <memory>
#include <optional>
#include <string>

namespace edge {

inline constexpr const char* NAMESPACE = "edge.device";
inline constexpr const char* VERSION = "1";

// Immutable data shared by a plugin and its clones.
struct Node {
    const char* op;      // the creator's name; lives as long as the process
    std::string layer;   // for messages
    Launches launches;
    std::int32_t carries;  // 1: this node's plugin contains the kernels
    Digest kernels_id;
    std::shared_ptr<Kernels> kernels;  // at run time null in all nodes but the carrier
    bool building;
    bool aliased;  // whether TensorRT is told which outputs are written in place
};

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
public:
    explicit Plugin(std::shared_ptr<const Node> node);

    // IPluginV3
    nvinfer1::IPluginCapability* getCapabilityInterface(
        nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    // IPluginV3OneCore
    const char* getPluginName() const noexcept override;
    const char* getPluginVersion() const noexcept override;
    const char* getPluginNamespace() const noexcept override;

    // IPluginV3OneBuildV2
    std::int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, std::int32_t inputs,
                                 const nvinfer1::DynamicPluginTensorDesc* out,
                                 std::int32_t outputs) noexcept override;
    std::int32_t getOutputDataTypes(nvinfer1::DataType* out, std::int32_t outputs,
                                    const nvinfer1::DataType* in,
                                    std::int32_t inputs) const noexcept override;
    std::int32_t getOutputShapes(const nvinfer1::DimsExprs* in, std::int32_t inputs,
                                 const nvinfer1::DimsExprs* shapes, std::int32_t shape_inputs,
                                 nvinfer1::DimsExprs* out, std::int32_t outputs,
                                 nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(std::int32_t position,
                                   const nvinfer1::DynamicPluginTensorDesc* tensors,
                                   std::int32_t inputs, std::int32_t outputs) noexcept override;
    std::int32_t getNbOutputs() const noexcept override;
    std::size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, std::int32_t inputs,
                                 const nvinfer1::DynamicPluginTensorDesc* out,
                                 std::int32_t outputs) const noexcept override;
    const char* getTimingCacheID() noexcept override;
    std::int32_t getFormatCombinationLimit() noexcept override;
    std::int32_t getAliasedInput(std::int32_t output) noexcept override;

    // IPluginV3OneRuntime
    std::int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, std::int32_t inputs,
                               const nvinfer1::PluginTensorDesc* out,
                               std::int32_t outputs) noexcept override;
    std::int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out,
                         const void* const* inputs, void* const* outputs, void* workspace,
                         cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(
        nvinfer1::IPluginResourceContext* context) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

private:
    template <typename Result, typename Work>
    Result guard(Result failed, Work work) const noexcept;

    void load();

    const std::shared_ptr<const Node> node_;
    nvinfer1::IErrorRecorder* recorder_ = nullptr;
    std::optional<Runner> runner_;  // set when attached, or by the first run
    std::array<nvinfer1::PluginField, 4> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

// Makes a node from a creator's arguments. Throws Problem.
std::shared_ptr<const Node> make_node(const char* op, const char* layer,
                                      const nvinfer1::PluginFieldCollection* fields,
                                      nvinfer1::TensorRTPhase phase);

}  // namespace edge
