#include "host.h"

#include "expressions.h"

#include <NvInferRuntime.h>

#include <dlfcn.h>

#include <algorithm>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

std::string logged, told, named;
void *library = nullptr;
IPluginCreatorInterface *const *creators = nullptr;
int32_t creator_count = 0;

class Log final : public ILogger {
public:
    void log(Severity, AsciiChar const *message) noexcept override {
        logged += message;
        logged += '\n';
    }
} the_log;

class Finder final : public ILoggerFinder {
public:
    ILogger *findLogger() override { return &the_log; }
    ~Finder() override = default;
} the_finder;

class Context final : public IPluginResourceContext {
public:
    IGpuAllocator *getGpuAllocator() const noexcept override { return nullptr; }
    IErrorRecorder *getErrorRecorder() const noexcept override { return nullptr; }
    ~Context() noexcept override = default;
} the_context;

std::string full_name(char const *space, char const *name, char const *version) {
    return std::string{space} + ' ' + name + ' ' + version;
}

IPluginCreatorV3One *creator_at(int32_t index) {
    return static_cast<IPluginCreatorV3One *>(creators[index]);
}

std::string name_of(IPluginCreatorV3One &creator) {
    return full_name(creator.getPluginNamespace(), creator.getPluginName(),
                     creator.getPluginVersion());
}

IPluginCreatorV3One *creator_called(std::string const &name) {
    for (int32_t i = 0; i < creator_count; i++)
        if (name_of(*creator_at(i)) == name) return creator_at(i);
    logged += "no creator " + name + '\n';
    return nullptr;
}

template <class Capability>
Capability &of(void *plugin, PluginCapabilityType type) {
    return *static_cast<Capability *>(
        static_cast<IPluginV3 *>(plugin)->getCapabilityInterface(type));
}

IPluginV3OneBuild &built(void *plugin) {
    return of<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}

IPluginV3OneRuntime &running(void *plugin) {
    return of<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

Dims dims_of(EdgeTensor const &tensor) {
    Dims dims{};
    dims.nbDims = tensor.rank;
    std::copy(tensor.dims, tensor.dims + tensor.rank, dims.d);
    return dims;
}

PluginTensorDesc desc_of(EdgeTensor const &tensor) {
    PluginTensorDesc desc{};
    desc.dims = dims_of(tensor);
    desc.type = static_cast<DataType>(tensor.type);
    desc.format = TensorFormat::kLINEAR;
    desc.scale = 1.0F;
    return desc;
}

/* A tensor with dynamic dimensions, up to the given ones. */
DynamicPluginTensorDesc range_of(EdgeTensor const &tensor) {
    DynamicPluginTensorDesc desc{};
    desc.desc = desc_of(tensor);
    desc.max = desc.opt = desc.min = desc.desc.dims;
    for (int32_t i = 0; i < desc.max.nbDims; i++) {
        desc.min.d[i] = std::min<int64_t>(1, desc.max.d[i]);
        desc.desc.dims.d[i] = -1;
    }
    return desc;
}

template <class Made>
std::vector<Made> each(EdgeTensor const *tensors, int32_t count, Made (*made)(EdgeTensor const &)) {
    std::vector<Made> all;
    for (int32_t i = 0; i < count; i++) all.push_back(made(tensors[i]));
    return all;
}

int32_t copied(PluginFieldCollection const *found, EdgeField *fields, int32_t room) {
    if (found == nullptr) return -1;
    for (int32_t i = 0; i < std::min(room, found->nbFields); i++) {
        PluginField const &field = found->fields[i];
        fields[i] = {field.name, field.data, static_cast<int32_t>(field.type), field.length};
    }
    return found->nbFields;
}

}  // namespace

int32_t edge_host_version() { return NV_TENSORRT_MAJOR * 10000 + NV_TENSORRT_MINOR * 100; }

char const *edge_host_log() {
    told.swap(logged);
    logged.clear();
    return told.c_str();
}

int32_t edge_host_open(char const *path) {
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        logged += dlerror();
        return -1;
    }
    using Find = void (*)(ILoggerFinder *);
    if (auto set = reinterpret_cast<Find>(edge_host_symbol("setLoggerFinder"))) set(&the_finder);
    using Get = IPluginCreatorInterface *const *(*)(int32_t &);
    auto get = reinterpret_cast<Get>(edge_host_symbol("getCreators"));
    if (get == nullptr) {
        logged += "the library has no getCreators";
        return -1;
    }
    creators = get(creator_count);
    return 0;
}

char const *edge_host_creator(int32_t index) {
    if (index >= creator_count) return nullptr;
    named = name_of(*creator_at(index));
    return named.c_str();
}

int32_t edge_host_fields(char const *creator, EdgeField *fields, int32_t room) {
    IPluginCreatorV3One *found = creator_called(creator);
    return found == nullptr ? -1 : copied(found->getFieldNames(), fields, room);
}

void *edge_host_symbol(char const *name) { return dlsym(library, name); }

void *edge_host_create(char const *creator, int32_t phase, EdgeField const *fields, int32_t count) {
    IPluginCreatorV3One *found = creator_called(creator);
    if (found == nullptr) return nullptr;
    std::vector<PluginField> given;
    for (int32_t i = 0; i < count; i++)
        given.emplace_back(fields[i].name, fields[i].data,
                           static_cast<PluginFieldType>(fields[i].type), fields[i].length);
    PluginFieldCollection const collection{count, given.data()};
    return found->createPlugin("node", &collection, static_cast<TensorRTPhase>(phase));
}

void *edge_host_clone(void *plugin) { return static_cast<IPluginV3 *>(plugin)->clone(); }

void *edge_host_attach(void *plugin) { return running(plugin).attachToContext(&the_context); }

void edge_host_destroy(void *plugin) { delete static_cast<IPluginV3 *>(plugin); }

char const *edge_host_name(void *plugin) {
    auto &core = of<IPluginV3OneCore>(plugin, PluginCapabilityType::kCORE);
    named = full_name(core.getPluginNamespace(), core.getPluginName(), core.getPluginVersion());
    return named.c_str();
}

int32_t edge_host_serialize(void *plugin, EdgeField *fields, int32_t room) {
    return copied(running(plugin).getFieldsToSerialize(), fields, room);
}

int32_t edge_host_outputs(void *plugin) { return built(plugin).getNbOutputs(); }

int32_t edge_host_types(void *plugin, EdgeTensor const *in, int32_t inputs, EdgeTensor *out,
                        int32_t outputs) {
    std::vector<DataType> given, found(static_cast<size_t>(outputs));
    for (int32_t i = 0; i < inputs; i++) given.push_back(static_cast<DataType>(in[i].type));
    int32_t const code =
        built(plugin).getOutputDataTypes(found.data(), outputs, given.data(), inputs);
    for (DataType type : found) (out++)->type = static_cast<int32_t>(type);
    return code;
}

int32_t edge_host_shapes(void *plugin, EdgeTensor const *in, int32_t inputs, EdgeTensor *out,
                         int32_t outputs) {
    edge_host::Builder builder;
    std::vector<DimsExprs> given, found(static_cast<size_t>(outputs));
    for (int32_t i = 0; i < inputs; i++) {
        DimsExprs dims{};
        dims.nbDims = in[i].rank;
        for (int32_t j = 0; j < in[i].rank; j++) dims.d[j] = builder.open(in[i].dims[j]);
        given.push_back(dims);
    }
    int32_t const code = built(plugin).getOutputShapes(given.data(), inputs, nullptr, 0,
                                                       found.data(), outputs, builder);
    if (code != 0) return code;
    for (DimsExprs const &dims : found) {
        out->rank = dims.nbDims;
        for (int32_t j = 0; j < dims.nbDims; j++) out->dims[j] = edge_host::value_of(dims.d[j]);
        out++;
    }
    return 0;
}

int32_t edge_host_format(void *plugin, int32_t position, EdgeTensor const *all, int32_t inputs,
                         int32_t outputs) {
    auto descs = each(all, inputs + outputs, range_of);
    return built(plugin).supportsFormatCombination(position, descs.data(), inputs, outputs);
}

int32_t edge_host_alias(void *plugin, int32_t output) {
    InterfaceInfo const version = built(plugin).getInterfaceInfo();
    if (version.major < 2) return -2;
    // the later interface derives from the earlier one
    return of<v_2_0::IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD)
        .getAliasedInput(output);
}

int64_t edge_host_workspace(void *plugin, EdgeTensor const *in, int32_t inputs,
                            EdgeTensor const *out, int32_t outputs) {
    auto given = each(in, inputs, range_of), made = each(out, outputs, range_of);
    if (built(plugin).configurePlugin(given.data(), inputs, made.data(), outputs) != 0) return -1;
    return static_cast<int64_t>(
        built(plugin).getWorkspaceSize(given.data(), inputs, made.data(), outputs));
}

int32_t edge_host_shape_change(void *plugin, EdgeTensor const *in, int32_t inputs,
                               EdgeTensor const *out, int32_t outputs) {
    auto const given = each(in, inputs, desc_of), made = each(out, outputs, desc_of);
    return running(plugin).onShapeChange(given.data(), inputs, made.data(), outputs);
}

int32_t edge_host_enqueue(void *plugin, EdgeTensor const *in, int32_t inputs,
                          EdgeTensor const *out, int32_t outputs, void *workspace, void *stream) {
    auto const given = each(in, inputs, desc_of), made = each(out, outputs, desc_of);
    std::vector<void const *> sources;
    std::vector<void *> targets;
    for (int32_t i = 0; i < inputs; i++) sources.push_back(in[i].data);
    for (int32_t i = 0; i < outputs; i++) targets.push_back(out[i].data);
    return running(plugin).enqueue(given.data(), made.data(), sources.data(), targets.data(),
                                   workspace, static_cast<cudaStream_t>(stream));
}
