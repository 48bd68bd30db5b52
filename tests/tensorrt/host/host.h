/* A host for plugins in place of TensorRT: a plain interface for ctypes.
 *
 * It loads a plugin library, gets plugins from its creators, and makes the calls of a builder or an
 * engine, in the same order and through the interfaces of TensorRT's headers. Shapes are passed on
 * unchecked: checking them is up to the plugin.
 */
#ifndef EDGE_HOST_H
#define EDGE_HOST_H

#include <cstddef>
#include <cstdint>

extern "C" {

/* `type`: a DataType; `dims` beyond `rank` are ignored; `data` is used only by enqueue. */
struct EdgeTensor {
    int32_t type, rank;
    int64_t dims[8];
    void *data;
};

/* A PluginField. `type`: a PluginFieldType; `length`: number of elements. */
struct EdgeField {
    char const *name;
    void const *data;
    int32_t type, length;
};

/* TensorRT's version in the headers: 100300 for 10.3.0. */
int32_t edge_host_version();
/* The messages logged since the last call. */
char const *edge_host_log();

/* 0, or -1 with a line in the log. */
int32_t edge_host_open(char const *library);
/* The name of a creator, "NAMESPACE NAME VERSION"; null after the last. */
char const *edge_host_creator(int32_t index);
/* Writes the fields that a creator takes. Returns their number. */
int32_t edge_host_fields(char const *creator, EdgeField *fields, int32_t room);
/* Any exported function, or null. */
void *edge_host_symbol(char const *name);

/* Returns a new plugin, or null. Phase 0: while building, 1: while running. */
void *edge_host_create(char const *creator, int32_t phase, EdgeField const *fields, int32_t count);
void *edge_host_clone(void *plugin);
/* Returns a running plugin's copy for one execution context. */
void *edge_host_attach(void *plugin);
void edge_host_destroy(void *plugin);
/* "NAMESPACE NAME VERSION" as the plugin reports it. */
char const *edge_host_name(void *plugin);
/* Writes the fields to restore the plugin from; it owns their memory. Returns their number. */
int32_t edge_host_serialize(void *plugin, EdgeField *fields, int32_t room);

/* While building. */
int32_t edge_host_outputs(void *plugin);
/* Writes `type` of the outputs. */
int32_t edge_host_types(void *plugin, EdgeTensor const *in, int32_t inputs, EdgeTensor *out,
                        int32_t outputs);
/* Writes `rank` and `dims` of the outputs. */
int32_t edge_host_shapes(void *plugin, EdgeTensor const *in, int32_t inputs, EdgeTensor *out,
                         int32_t outputs);
/* Whether the plugin takes tensor `position` of inputs and outputs in linear format. */
int32_t edge_host_format(void *plugin, int32_t position, EdgeTensor const *all, int32_t inputs,
                         int32_t outputs);
/* The input whose memory an output shares, -1 for none, -2 if the interface does not say. */
int32_t edge_host_alias(void *plugin, int32_t output);
/* Calls configurePlugin with the largest shapes. Returns bytes of workspace, -1 if refused. */
int64_t edge_host_workspace(void *plugin, EdgeTensor const *in, int32_t inputs,
                            EdgeTensor const *out, int32_t outputs);

/* While running. */
int32_t edge_host_shape_change(void *plugin, EdgeTensor const *in, int32_t inputs,
                               EdgeTensor const *out, int32_t outputs);
int32_t edge_host_enqueue(void *plugin, EdgeTensor const *in, int32_t inputs,
                          EdgeTensor const *out, int32_t outputs, void *workspace, void *stream);
}

#endif
