/* The library's C functions besides its plugins, which `edge build` and `edge doctor` call through
 * ctypes. Setters return 0, or -1 after a failure that edge_tensorrt_last_error describes. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of these functions and of the plugins' fields. */
#define EDGE_TENSORRT_ABI 3
/* Returns the EDGE_TENSORRT_ABI that the library was built with. */
int edge_tensorrt_abi(void);

/* Returns the TensorRT version of the headers it was compiled with, such as "10.3". */
const char *edge_tensorrt_built_for(void);

/* Sets the kernels for graphs parsed from now on: bytes of `blob.pack`, which are copied. Size 0
 * removes them. */
int edge_tensorrt_set_kernels(const void *bytes, size_t size);

/* 1: plugins created from now on tell TensorRT which outputs are written in place of an input. */
int edge_tensorrt_set_aliased(int on);

/* Returns the last failure in any thread, or "". Valid until the same thread calls this again. */
const char *edge_tensorrt_last_error(void);

#ifdef __cplusplus
}
#endif
