/* What TensorRT does with a plugin, without TensorRT: a plain interface for ctypes.
 *
 * It loads a plugin library, asks its creators for plugins, and calls what a builder or an engine
 * would call, in their order and through the interfaces of TensorRT's headers. Shapes are handed on
 * as they are given: whether they are right is for the plugin to say.
 */
#ifndef EDGE_HOST_H
#define EDGE_HOST_H

#include <cstddef>
#include <cstdint>

extern "C" {

/* DataType's number; `dims` beyond `rank` are not looked at; `data` is for enqueue alone. */
struct EdgeTensor {
    int32_t type, rank;
    int64_t dims[8];
    void *data;
};

/* As PluginField: PluginFieldType's number, `length` elements. */
struct EdgeField {
    char const *name;
    void const *data;
    int32_t type, length;
};

/* TensorRT's version in the headers: 100300 for 10.3.0. */
int32_t edge_host_version();
/* What was logged since the last time. */
char const *edge_host_log();

/* 0, or -1 with a line in the log. */
int32_t edge_host_open(char const *library);
/* The name of a creator, "NAMESPACE NAME VERSION"; null behind the last. */
char const *edge_host_creator(int32_t index);
/* The fields that a creator asks for; how many there are. */
int32_t edge_host_fields(char const *creator, EdgeField *fields, int32_t room);
/* Any exported function, or null. */
void *edge_host_symbol(char const *name);

/* A plugin, or null. Phase 0: while building, 1: while running. */
void *edge_host_create(char const *creator, int32_t phase, EdgeField const *fields, int32_t count);
void *edge_host_clone(void *plugin);
/* A running plugin's own copy for one execution context. */
void *edge_host_attach(void *plugin);
void edge_host_destroy(void *plugin);
/* "NAMESPACE NAME VERSION" as the plugin itself says. */
char const *edge_host_name(void *plugin);
/* What it would be restored from; how many fields. The memory is the plugin's. */
int32_t edge_host_serialize(void *plugin, EdgeField *fields, int32_t room);

/* While building. */
int32_t edge_host_outputs(void *plugin);
/* Fills `type` of the outputs. */
int32_t edge_host_types(void *plugin, EdgeTensor const *in, int32_t inputs, EdgeTensor *out,
                        int32_t outputs);
/* Fills `rank` and `dims` of the outputs. */
int32_t edge_host_shapes(void *plugin, EdgeTensor const *in, int32_t inputs, EdgeTensor *out,
                         int32_t outputs);
/* Whether it takes tensor `position` of inputs and outputs, in linear format. */
int32_t edge_host_format(void *plugin, int32_t position, EdgeTensor const *all, int32_t inputs,
                         int32_t outputs);
/* The input whose memory an output is; -1 for none, -2: this interface cannot say. */
int32_t edge_host_alias(void *plugin, int32_t output);
/* configurePlugin, then bytes of workspace; -1 when it is refused. Shapes are the largest. */
int64_t edge_host_workspace(void *plugin, EdgeTensor const *in, int32_t inputs,
                            EdgeTensor const *out, int32_t outputs);

/* While running. */
int32_t edge_host_shape_change(void *plugin, EdgeTensor const *in, int32_t inputs,
                               EdgeTensor const *out, int32_t outputs);
int32_t edge_host_enqueue(void *plugin, EdgeTensor const *in, int32_t inputs,
                          EdgeTensor const *out, int32_t outputs, void *workspace, void *stream);
}

#endif
