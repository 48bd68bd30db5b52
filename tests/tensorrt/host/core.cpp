/* host.h without TensorRT's headers, for machines that lack them: the library's code between the
 * plugin interface and the driver. Any name is a plugin's, and `launches` is the only field.
 */
#include "host.h"

#include "../../../plugins/tensorrt/src/kernels.h"
#include "../../../plugins/tensorrt/src/problem.h"
#include "../../../plugins/tensorrt/src/run.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace {

constexpr int32_t CHARACTERS = 6;  // PluginFieldType::kCHAR
// DataType of NvInferRuntimeBase.h, indexed by edge::DType
constexpr int32_t TYPES[] = {0, 1, 2, 2, 3, 8};

std::string logged, told;
std::shared_ptr<edge::Kernels> kernels;

struct Node {
    std::string name;
    edge::Launches launches;
    std::optional<edge::Runner> runner;
};

Node &of(void *plugin) { return *static_cast<Node *>(plugin); }

/* Returns the result of `work`, or `otherwise` if it throws. */
template <class Answer, class Work>
Answer guarded(Answer otherwise, Work work) {
    try {
        return work();
    } catch (edge::Problem const &problem) {
        logged += problem.what();
        return otherwise;
    }
}

int32_t set_kernels(void const *data, size_t size) {
    return guarded<int32_t>(1, [&] {
        kernels = edge::kernels_of({static_cast<char const *>(data), size});
        return 0;
    });
}

edge::Sizes sizes_of(Node const &node, EdgeTensor const *in) {
    return edge::Sizes(node.launches, [&](size_t i, int axis) { return in[i].dims[axis]; });
}

void check(Node const &node, EdgeTensor const *in, int32_t inputs) {
    auto const &wanted = node.launches.inputs;
    bool right = wanted.size() == static_cast<size_t>(inputs);
    for (size_t i = 0; right && i < wanted.size(); i++)
        right = wanted[i].rank == in[i].rank &&
                TYPES[static_cast<size_t>(wanted[i].dtype)] == in[i].type;
    if (!right) edge::refuse("inputs have other types or ranks");
    edge::check_places(node.launches, [in](size_t input, int axis) {
        return static_cast<int64_t>(in[input].dims[axis]);
    });
}

}  // namespace

int32_t edge_host_version() { return 0; }

char const *edge_host_log() {
    told.swap(logged);
    logged.clear();
    return told.c_str();
}

int32_t edge_host_open(char const *) { return 0; }

char const *edge_host_creator(int32_t) { return nullptr; }

int32_t edge_host_fields(char const *, EdgeField *fields, int32_t) {
    fields[0] = {"launches", nullptr, CHARACTERS, 0};
    return 1;
}

void *edge_host_symbol(char const *name) {
    bool const known = std::string{"edge_tensorrt_set_kernels"} == name;
    return known ? reinterpret_cast<void *>(&set_kernels) : nullptr;
}

void *edge_host_create(char const *creator, int32_t, EdgeField const *fields, int32_t count) {
    return guarded<void *>(nullptr, [&]() -> void * {
        if (count != 1) edge::refuse("launches is the only field");
        std::string_view const bytes{static_cast<char const *>(fields[0].data),
                                     static_cast<size_t>(fields[0].length)};
        return new Node{creator, edge::decode_launches(bytes), {}};
    });
}

void *edge_host_clone(void *plugin) { return new Node{of(plugin).name, of(plugin).launches, {}}; }

void *edge_host_attach(void *plugin) {
    return guarded<void *>(nullptr, [&]() -> void * {
        return new Node{of(plugin).name, of(plugin).launches,
                        edge::Runner{of(plugin).launches, kernels}};
    });
}

void edge_host_destroy(void *plugin) { delete static_cast<Node *>(plugin); }

char const *edge_host_name(void *plugin) { return of(plugin).name.c_str(); }

int32_t edge_host_serialize(void *plugin, EdgeField *fields, int32_t) {
    std::string const &bytes = of(plugin).launches.bytes;
    fields[0] = {"launches", bytes.data(), CHARACTERS, static_cast<int32_t>(bytes.size())};
    return 1;
}

int32_t edge_host_outputs(void *plugin) {
    return static_cast<int32_t>(of(plugin).launches.outputs.size());
}

int32_t edge_host_types(void *plugin, EdgeTensor const *, int32_t, EdgeTensor *out, int32_t) {
    for (edge::Output const &output : of(plugin).launches.outputs)
        (out++)->type = TYPES[static_cast<size_t>(output.dtype)];
    return 0;
}

int32_t edge_host_shapes(void *plugin, EdgeTensor const *in, int32_t inputs, EdgeTensor *out,
                         int32_t) {
    return guarded<int32_t>(1, [&] {
        check(of(plugin), in, inputs);
        edge::Sizes const sizes = sizes_of(of(plugin), in);
        for (edge::Output const &output : of(plugin).launches.outputs) {
            out->rank = static_cast<int32_t>(output.dims.size());
            for (size_t i = 0; i < output.dims.size(); i++) {
                edge::Dim const &dim = output.dims[i];
                out->dims[i] = dim.symbol ? sizes.of(dim.symbol) : dim.number;
            }
            out++;
        }
        return 0;
    });
}

int32_t edge_host_format(void *plugin, int32_t position, EdgeTensor const *all, int32_t inputs,
                         int32_t) {
    edge::Launches const &launches = of(plugin).launches;
    auto const at = static_cast<size_t>(position < inputs ? position : position - inputs);
    edge::DType const wanted =
        position < inputs ? launches.inputs[at].dtype : launches.outputs[at].dtype;
    return all[position].type == TYPES[static_cast<size_t>(wanted)];
}

int32_t edge_host_alias(void *plugin, int32_t output) {
    return of(plugin).launches.outputs[static_cast<size_t>(output)].alias;
}

int64_t edge_host_workspace(void *plugin, EdgeTensor const *in, int32_t inputs, EdgeTensor const *,
                            int32_t) {
    return guarded<int64_t>(-1, [&] {
        check(of(plugin), in, inputs);
        return static_cast<int64_t>(
            edge::workspace_bytes(of(plugin).launches, sizes_of(of(plugin), in)));
    });
}

int32_t edge_host_shape_change(void *plugin, EdgeTensor const *in, int32_t inputs,
                               EdgeTensor const *, int32_t) {
    return guarded<int32_t>(1, [&] {
        check(of(plugin), in, inputs);
        return 0;
    });
}

int32_t edge_host_enqueue(void *plugin, EdgeTensor const *in, int32_t inputs,
                          EdgeTensor const *out, int32_t outputs, void *workspace, void *stream) {
    return guarded<int32_t>(1, [&] {
        Node const &node = of(plugin);
        check(node, in, inputs);
        std::vector<void const *> sources;
        std::vector<void *> targets;
        for (int32_t i = 0; i < inputs; i++) sources.push_back(in[i].data);
        for (int32_t i = 0; i < outputs; i++) targets.push_back(out[i].data);
        edge::Addresses const at{sources.data(), targets.data(), workspace};
        edge::check_in_place(node.launches, at);
        node.runner->run(node.launches, sizes_of(node, in), at,
                         static_cast<edge::Stream>(stream));
        return 0;
    });
}
