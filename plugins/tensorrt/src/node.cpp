// Makes a node from a creator's fields.
#include "plugin.h"

#include "problem.h"
#include "settings.h"

#include <cstring>
#include <limits>

namespace edge {

namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

const PluginField* find(const nvinfer1::PluginFieldCollection& fields, const char* name) {
    for (std::int32_t i = 0; i < fields.nbFields; ++i) {
        const PluginField& one = fields.fields[i];
        if (one.name != nullptr && std::strcmp(one.name, name) == 0) {
            return &one;
        }
    }
    return nullptr;
}

// Returns the bytes of a field, empty if it is missing.
std::string_view bytes(const nvinfer1::PluginFieldCollection& fields, const char* name) {
    const PluginField* found = find(fields, name);
    if (found == nullptr) {
        return {};
    }
    const PluginFieldType type = found->type;
    if (type != PluginFieldType::kCHAR && type != PluginFieldType::kUNKNOWN
        && type != PluginFieldType::kINT8) {
        refuse("field ", name, " must hold bytes, but has type ", static_cast<int>(type));
    }
    if (found->length < 0 || (found->data == nullptr && found->length > 0)) {
        refuse("field ", name, " has no data");
    }
    return {static_cast<const char*>(found->data), static_cast<std::size_t>(found->length)};
}

std::int32_t carries(const nvinfer1::PluginFieldCollection& fields) {
    const PluginField* found = find(fields, "carries");
    if (found == nullptr) {
        return 0;
    }
    std::int32_t value = 0;
    if (found->type != PluginFieldType::kINT32 || found->length != 1 || found->data == nullptr) {
        refuse("field carries is not one int32");
    }
    std::memcpy(&value, found->data, sizeof value);
    if (value != 0 && value != 1) {
        refuse("field carries is ", value, ", not 0 or 1");
    }
    return value;
}

Digest digest(std::string_view bytes) {
    Digest found;
    if (bytes.size() != found.size()) {
        refuse("field kernels_id has ", bytes.size(), " bytes, not ", found.size());
    }
    std::memcpy(found.data(), bytes.data(), found.size());
    return found;
}

// Checks that no kernel is missing, which otherwise shows only in the engine's first run.
void check_kernels(const Node& node) {
    for (const Kernel& one : node.launches.kernels) {
        static_cast<void>(node.kernels->compiled(one.key));
    }
}

void build(Node& node) {
    node.kernels = kernels_to_build_with();
    node.kernels_id = node.kernels->blob().identity;
    node.aliased = aliased();
    // a field's length is an int32
    if (node.kernels->blob().size > std::numeric_limits<std::int32_t>::max()) {
        refuse("an engine cannot carry kernels of ", node.kernels->blob().size, " bytes");
    }
    check_kernels(node);
}

void deserialize(Node& node, const nvinfer1::PluginFieldCollection& fields) {
    node.kernels_id = digest(bytes(fields, "kernels_id"));
    const std::string_view blob = bytes(fields, "kernels");
    if (node.carries == 0) {
        return;
    }
    if (blob.empty()) {
        refuse("field kernels is missing, though the node carries them");
    }
    node.kernels = kernels_of(blob);
    if (node.kernels->blob().identity != node.kernels_id) {
        refuse("field kernels_id does not match the field kernels");
    }
    check_kernels(node);
}

}  // namespace

std::shared_ptr<const Node> make_node(const char* op, const char* layer,
                                      const nvinfer1::PluginFieldCollection* fields,
                                      nvinfer1::TensorRTPhase phase) {
    if (fields == nullptr || (fields->nbFields > 0 && fields->fields == nullptr)) {
        refuse("there are no fields");
    }
    auto node = std::make_shared<Node>();
    node->op = op;
    node->layer = layer == nullptr || *layer == '\0' ? op : layer;
    node->carries = carries(*fields);
    node->building = phase == nvinfer1::TensorRTPhase::kBUILD;
    node->aliased = false;
    if (find(*fields, "launches") == nullptr) {
        refuse("field launches is missing: the graph was not made for these plugins");
    }
    node->launches = decode_launches(bytes(*fields, "launches"));
    if (node->building) {
        build(*node);
    } else {
        deserialize(*node, *fields);
    }
    return node;
}

}  // namespace edge
