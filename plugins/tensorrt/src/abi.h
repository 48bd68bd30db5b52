/* What the library offers a host besides its plugins, in C: `edge build` and `edge doctor` call it
 * by ctypes. A function that returns int returns 0, or -1 and says why in edge_tensorrt_last_error. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when a function here, or a field of the plugins, does. */
#define EDGE_TENSORRT_ABI 3
int edge_tensorrt_abi(void);

/* "10.3": the TensorRT whose headers it was compiled with. */
const char *edge_tensorrt_built_for(void);

/* The kernels that graphs parsed from now on are built with: bytes of `blob.pack`, which are copied.
 * No bytes: forgets them. */
int edge_tensorrt_set_kernels(const void *bytes, size_t size);

/* 1: plugins made from now on tell TensorRT which outputs are written in place of an input. */
int edge_tensorrt_set_aliased(int on);

/* What failed last, in any thread; "" where nothing did. Valid until this thread asks again. */
const char *edge_tensorrt_last_error(void);

#ifdef __cplusplus
}
#endif
