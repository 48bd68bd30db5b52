#include "plugin.h"

#include "report.h"
#include "tensors.h"

namespace edge {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace {

PluginField field(const char* name, std::string_view bytes, PluginFieldType type) {
    return {name, bytes.data(), type, static_cast<std::int32_t>(bytes.size())};
}

}  // namespace

Plugin::Plugin(std::shared_ptr<const Node> node) : node_(std::move(node)) {
    const auto* id = reinterpret_cast<const char*>(node_->kernels_id.data());
    const bool brings = node_->carries != 0 && node_->kernels != nullptr;
    fields_ = {
        field("launches", node_->launches.bytes, PluginFieldType::kCHAR),
        PluginField("carries", &node_->carries, PluginFieldType::kINT32, 1),
        field("kernels_id", {id, node_->kernels_id.size()}, PluginFieldType::kUNKNOWN),
        field("kernels", brings ? node_->kernels->blob().bytes() : std::string_view(),
              PluginFieldType::kUNKNOWN),
    };
    // an engine contains the kernels once; the other plugins find them by identity
    collection_ = {brings ? 4 : 3, fields_.data()};
}

template <typename Result, typename Work>
Result Plugin::guard(Result failed, Work work) const noexcept {
    return guarded(failed, node_->layer.c_str(), true, recorder_, work);
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(
    nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
    return guard<Plugin*>(nullptr, [this] {
        auto copy = std::make_unique<Plugin>(node_);
        copy->recorder_ = recorder_;
        copy->runner_ = runner_;
        return copy.release();
    });
}

const char* Plugin::getPluginName() const noexcept { return node_->op; }

const char* Plugin::getPluginVersion() const noexcept { return VERSION; }

const char* Plugin::getPluginNamespace() const noexcept { return NAMESPACE; }

std::int32_t Plugin::configurePlugin(
    const nvinfer1::DynamicPluginTensorDesc*, std::int32_t inputs,
    const nvinfer1::DynamicPluginTensorDesc*, std::int32_t outputs) noexcept {
    return guard(-1, [&] {
        check_counts(node_->launches, inputs, outputs);
        return 0;
    });
}

std::int32_t Plugin::getOutputDataTypes(nvinfer1::DataType* out, std::int32_t outputs,
                                        const nvinfer1::DataType* in,
                                        std::int32_t inputs) const noexcept {
    return guard(-1, [&] {
        const Launches& launches = node_->launches;
        check_counts(launches, inputs, outputs);
        for (std::size_t i = 0; i < launches.inputs.size(); ++i) {
            if (in[i] != told_as(launches.inputs[i].dtype)) {
                refuse("input ", i, " has type ", static_cast<int>(in[i]), ", not ",
                       static_cast<int>(told_as(launches.inputs[i].dtype)));
            }
        }
        for (std::size_t i = 0; i < launches.outputs.size(); ++i) {
            out[i] = told_as(launches.outputs[i].dtype);
        }
        return 0;
    });
}

std::int32_t Plugin::getOutputShapes(const nvinfer1::DimsExprs* in, std::int32_t inputs,
                                     const nvinfer1::DimsExprs*, std::int32_t,
                                     nvinfer1::DimsExprs* out, std::int32_t outputs,
                                     nvinfer1::IExprBuilder& builder) noexcept {
    return guard(-1, [&] {
        const Launches& launches = node_->launches;
        check_counts(launches, inputs, outputs);
        for (std::size_t i = 0; i < launches.inputs.size(); ++i) {
            if (in[i].nbDims != launches.inputs[i].rank) {
                refuse("input ", i, " has rank ", in[i].nbDims, ", not ", launches.inputs[i].rank);
            }
        }
        std::array<const nvinfer1::IDimensionExpr*, 26> lengths{};
        for (const Symbol& one : launches.symbols) {
            lengths[static_cast<std::size_t>(one.name - 'A')] = in[one.input].d[one.axis];
        }
        for (std::size_t i = 0; i < launches.outputs.size(); ++i) {
            const std::vector<Dim>& dims = launches.outputs[i].dims;
            out[i].nbDims = static_cast<std::int32_t>(dims.size());
            for (std::size_t axis = 0; axis < dims.size(); ++axis) {
                const Dim& dim = dims[axis];
                out[i].d[axis] = dim.symbol ? lengths[static_cast<std::size_t>(dim.symbol - 'A')]
                                            : builder.constant(dim.number);
            }
        }
        return 0;
    });
}

bool Plugin::supportsFormatCombination(std::int32_t position,
                                       const nvinfer1::DynamicPluginTensorDesc* tensors,
                                       std::int32_t inputs, std::int32_t outputs) noexcept {
    return guard(false, [&] {
        const Launches& launches = node_->launches;
        check_counts(launches, inputs, outputs);
        if (position < 0 || position >= inputs + outputs) {
            refuse("there is no tensor ", position);
        }
        const auto at = static_cast<std::size_t>(position);
        const std::size_t first = launches.inputs.size();
        const DType dtype = at < first ? launches.inputs[at].dtype
                                       : launches.outputs[at - first].dtype;
        const nvinfer1::PluginTensorDesc& tensor = tensors[position].desc;
        return tensor.type == told_as(dtype) && tensor.format == nvinfer1::TensorFormat::kLINEAR;
    });
}

std::int32_t Plugin::getNbOutputs() const noexcept {
    return static_cast<std::int32_t>(node_->launches.outputs.size());
}

std::size_t Plugin::getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in,
                                     std::int32_t inputs, const nvinfer1::DynamicPluginTensorDesc*,
                                     std::int32_t outputs) const noexcept {
    return guard(std::size_t{0}, [&] {
        check_counts(node_->launches, inputs, outputs);
        return workspace_bytes(node_->launches, most_sizes_of(node_->launches, in));
    });
}

// There is only one tactic, which takes no time while building, so any name would do. With a name
// TensorRT may cache its timing.
const char* Plugin::getTimingCacheID() noexcept { return node_->op; }

std::int32_t Plugin::getFormatCombinationLimit() noexcept { return 1; }

std::int32_t Plugin::getAliasedInput(std::int32_t output) noexcept {
    const bool known = node_->aliased && output >= 0 && output < getNbOutputs();
    return known ? node_->launches.outputs[static_cast<std::size_t>(output)].alias : -1;
}

std::int32_t Plugin::onShapeChange(const nvinfer1::PluginTensorDesc* in, std::int32_t inputs,
                                   const nvinfer1::PluginTensorDesc* out,
                                   std::int32_t outputs) noexcept {
    return guard(-1, [&] {
        check_counts(node_->launches, inputs, outputs);
        check_tensors(node_->launches, in, out);
        return 0;
    });
}

std::int32_t Plugin::enqueue(const nvinfer1::PluginTensorDesc* in,
                             const nvinfer1::PluginTensorDesc*, const void* const* inputs,
                             void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    // The builder times plugins on uninitialized memory. Tokens, rows and taps would be wild
    // indices, and in-place outputs would overwrite other memory, so nothing is launched.
    if (node_->building) {
        return 0;
    }
    return guard(-1, [&] {
        const Launches& launches = node_->launches;
        const Addresses at{inputs, outputs, workspace};
        const auto on = reinterpret_cast<Stream>(stream);
        check_in_place(launches, at);
        if (!runner_ || !runner_->here()) {
            if (capturing(on)) {
                refuse("its kernels are not loaded, and cannot be while a graph is recorded: ",
                       "run it once before recording");
            }
            load();
        }
        runner_->run(launches, sizes_of(launches, in), at, on);
        return 0;
    });
}

void Plugin::load() {
    // the carrier may be created after the plugins that need its kernels
    std::shared_ptr<Kernels> kernels = node_->kernels ? node_->kernels
                                                      : find_kernels(node_->kernels_id);
    if (kernels == nullptr) {
        refuse("its kernels ", hex(node_->kernels_id),
               " are missing: the engine has no plugin that carries them");
    }
    runner_.emplace(node_->launches, std::move(kernels));
}

nvinfer1::IPluginV3* Plugin::attachToContext(
    nvinfer1::IPluginResourceContext* context) noexcept {
    return guard<Plugin*>(nullptr, [this, context] {
        auto attached = std::make_unique<Plugin>(node_);
        attached->recorder_ = context == nullptr ? nullptr : context->getErrorRecorder();
        if (!node_->building) {
            attached->load();
        }
        return attached.release();
    });
}

const nvinfer1::PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
    return &collection_;
}

}  // namespace edge
