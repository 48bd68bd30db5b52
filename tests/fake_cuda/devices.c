/* Devices and contexts: a stack of current contexts a thread, one primary context a device. */
#include "fake.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static Context primary[MAX_DEVICES];
static int retained[MAX_DEVICES];
static __thread Context *stack[16];
static __thread int depth;

static int devices(void) { return (int)setting("FAKE_CUDA_DEVICES", 1); }

Context *current(void) { return depth ? stack[depth - 1] : NULL; }

R cuDeviceGetCount(int *count) {
    ENTER();
    *count = devices();
    return OK;
}

R cuDeviceGet(int *device, int ordinal) {
    ENTER();
    if (ordinal < 0 || ordinal >= devices()) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

R cuDeviceGetName(char *name, int length, int device) {
    ENTER();
    snprintf(name, (size_t)length, "Fake %d", device);
    return OK;
}

R cuDeviceGetUuid(void *uuid, int device) {
    ENTER();
    memset(uuid, device, 16);
    return OK;
}

R cuDeviceTotalMem(size_t *bytes, int device) {
    ENTER();
    (void)device;
    *bytes = (size_t)setting("FAKE_CUDA_MEMORY", 1L << 30);
    return OK;
}

R cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER();
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    switch (attribute) {
    case 1: *value = 1024; break;
    case 5: *value = 0x7fffffff; break;
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;
    case 10: *value = 32; break;
    case 16: *value = 8; break;
    case 18: *value = (int)setting("FAKE_CUDA_INTEGRATED", 0); break;
    case 75: *value = (int)setting("FAKE_CUDA_SM", 87) / 10; break;
    case 76: *value = (int)setting("FAKE_CUDA_SM", 87) % 10; break;
    case 97: *value = 166912; break;
    case 102: *value = (int)setting("FAKE_CUDA_PIECES", 1); break;
    default: *value = 0;
    }
    return OK;
}

R cuDevicePrimaryCtxRetain(Context **context, int device) {
    ENTER();
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    if (!retained[device]++) primary[device] = (Context){device, 1, 1};
    *context = &primary[device];
    return OK;
}

R cuDevicePrimaryCtxRelease(int device) {
    ENTER();
    if (!retained[device]) return INVALID_CONTEXT;
    retained[device]--;
    return OK;
}

R cuCtxGetCurrent(Context **context) {
    ENTER();
    *context = current();
    return OK;
}

R cuCtxSetCurrent(Context *context) {
    ENTER();
    if (!context) depth -= depth > 0;
    else if (!context->alive) return CONTEXT_IS_DESTROYED;
    else stack[depth ? depth - 1 : depth++] = context;
    return OK;
}

R cuCtxPushCurrent(Context *context) {
    ENTER();
    if (!context) return INVALID_CONTEXT;
    if (!context->alive) return CONTEXT_IS_DESTROYED;
    if (depth == 16) abort();
    stack[depth++] = context;
    return OK;
}

R cuCtxPopCurrent(Context **context) {
    ENTER();
    if (!depth) return INVALID_CONTEXT;
    if (context) *context = current();
    depth--;
    return OK;
}

R cuCtxGetDevice(int *device) {
    ENTER();
    if (!current()) return INVALID_CONTEXT;
    *device = current()->device;
    return OK;
}

/* What PyCUDA's make_context does. */
R cuCtxCreate_v2(Context **context, unsigned flags, int device) {
    ENTER();
    (void)flags;
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    *context = malloc(sizeof **context);
    **context = (Context){device, 0, 1};
    stack[depth++] = *context;
    return OK;
}

R cuCtxCreate_v4(Context **context, void *parameters, unsigned flags, int device) {
    (void)parameters;
    return cuCtxCreate_v2(context, flags, device);
}

R cuCtxDestroy(Context *context) {
    ENTER();
    context->alive = 0;  /* kept, so that its use is noticed */
    if (current() == context) depth--;
    return OK;
}

R cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER();
    *least = 0;
    *greatest = -5;
    return OK;
}
