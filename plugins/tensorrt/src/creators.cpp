// A creator for each device op, and the two functions through which TensorRT's registry loads them.
#include "plugin.h"
#include "report.h"

namespace edge {

namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// `ops.inc` is written by `python -m edge.plugins.tensorrt.creators`; "Edge" is PLUGIN_PREFIX of
// edge/ops.py
constexpr const char* OPS[] = {
#define EDGE_OP(name) "Edge" #name,
#include "ops.inc"
#undef EDGE_OP
};
constexpr std::size_t COUNT = sizeof OPS / sizeof *OPS;

class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    void name(const char* op) { op_ = op; }

    nvinfer1::IPluginV3* createPlugin(const char* layer,
                                      const nvinfer1::PluginFieldCollection* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override {
        const char* where = layer == nullptr || *layer == '\0' ? op_ : layer;
        return guarded<Plugin*>(nullptr, where, true, nullptr, [&]() -> Plugin* {
            return std::make_unique<Plugin>(make_node(op_, layer, fields, phase)).release();
        });
    }

    // The attributes of a graph's nodes; parsers pass no others.
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override {
        static const PluginField fields[] = {
            {"launches", nullptr, PluginFieldType::kCHAR, 1},
            {"carries", nullptr, PluginFieldType::kINT32, 1},
        };
        static const nvinfer1::PluginFieldCollection collection{2, fields};
        return &collection;
    }

    const char* getPluginName() const noexcept override { return op_; }
    const char* getPluginVersion() const noexcept override { return VERSION; }
    const char* getPluginNamespace() const noexcept override { return NAMESPACE; }

private:
    const char* op_ = nullptr;
};

struct Creators {
    std::array<Creator, COUNT> every;
    std::array<nvinfer1::IPluginCreatorInterface*, COUNT> pointers;

    Creators() {
        for (std::size_t i = 0; i < COUNT; ++i) {
            every[i].name(OPS[i]);
            pointers[i] = &every[i];
        }
    }
};

}  // namespace

}  // namespace edge

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count) {
    // never destroyed: the registry uses them until its own end, which may be later
    static edge::Creators* const creators = new edge::Creators;
    count = static_cast<std::int32_t>(edge::COUNT);
    return creators->pointers.data();
}

EXPORTED void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { edge::log_by(finder); }
