/* Errors asked for, errors that stick, the log, and cuGetProcAddress. */
#define _GNU_SOURCE
#include "fake.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NEWEST = 13000 };
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static R stuck;
static int initialized;
static pid_t initialized_by;
static struct { char name[64]; long count; } calls[256];
long live_memory, live_host, live_streams, live_graphs, live_execs, live_libraries;

long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

void note(const char *format, ...) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (!log) return;
    va_list list;
    va_start(list, format);
    vfprintf(log, format, list);
    va_end(list);
    fputc('\n', log);
    fclose(log);
}

static long counted(const char *name) {
    for (int i = 0; i < 256; i++) {
        if (!calls[i].name[0]) strncpy(calls[i].name, name, sizeof calls[i].name - 1);
        if (!strcmp(calls[i].name, name)) return ++calls[i].count;
    }
    abort();
}

static R asked(const char *name, long call) {
    const char *text = getenv("FAKE_CUDA_FAIL");
    while (text && *text) {
        char found[64];
        long number;
        int code;
        if (sscanf(text, "%63[^:]:%ld:%d", found, &number, &code) == 3 && !strcmp(found, name) &&
            number == call)
            return code;
        text = strchr(text, ',');
        if (text) text++;
    }
    return OK;
}

static int sticks(R code) {
    return code == 214 || code == 220 || code == ILLEGAL_ADDRESS || code == 702 || code == 710 ||
           (code >= 714 && code <= 719) || code == 999;
}

R fault(R code) {
    if (sticks(code)) stuck = code;
    return code;
}

R enter(const char *name) {
    pthread_mutex_lock(&lock);
    long call = counted(name);
    R code = stuck;
    if (!code) code = fault(asked(name, call));
    if (!code && strcmp(name, "cuInit")) {
        if (!initialized || initialized_by != getpid()) code = NOT_INITIALIZED;
    }
    if (code) note("failed %s %d", name, code);
    return code;
}

void leave(int *unused) {
    (void)unused;
    pthread_mutex_unlock(&lock);
}

R cuInit(unsigned flags) {
    ENTER();
    if (flags) return INVALID_VALUE;
    if (initialized && initialized_by != getpid()) return NOT_INITIALIZED;
    initialized = 1;
    initialized_by = getpid();
    return setting("FAKE_CUDA_DEVICES", 1) ? OK : NO_DEVICE;
}

R cuDriverGetVersion(int *version) {
    *version = (int)setting("FAKE_CUDA_VERSION", NEWEST);
    return OK;
}

static const struct { R code; const char *name; } NAMES[] = {
    {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "CUDA_ERROR_NOT_INITIALIZED"}, {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"}, {200, "CUDA_ERROR_INVALID_IMAGE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"}, {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
    {500, "CUDA_ERROR_NOT_FOUND"}, {600, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"}, {716, "CUDA_ERROR_MISALIGNED_ADDRESS"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}, {999, "CUDA_ERROR_UNKNOWN"}};

R cuGetErrorName(R code, const char **text) {
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (NAMES[i].code == code) return *text = NAMES[i].name, OK;
    return *text = NULL, INVALID_VALUE;
}

R cuGetErrorString(R code, const char **text) {
    R found = cuGetErrorName(code, text);
    if (!found) *text = "an error the fake driver was asked for";
    return found;
}

/* Symbols with several signatures: which is meant by the version that is asked for. */
static const struct { const char *name; int from, until; const char *function; } SIGNATURES[] = {
    {"cuCtxCreate", 0, 11040, "cuCtxCreate_v2"}, {"cuCtxCreate", 11040, 12050, ""},
    {"cuCtxCreate", 12050, 99999, "cuCtxCreate_v4"},
    {"cuCtxGetDevice", 13000, 99999, ""}, {"cuStreamGetCtx", 12050, 99999, ""},
    {"cuStreamGetCaptureInfo", 0, 11030, ""},
    {"cuStreamGetCaptureInfo", 11030, 12030, "cuStreamGetCaptureInfo_v2"},
    {"cuStreamGetCaptureInfo", 12030, 99999, "cuStreamGetCaptureInfo_v3"}};

R cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    (void)flags;
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)cuDriverGetVersion, &info))
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    const char *function = strcmp(name, "cuGetProcAddress") ? name : "cuGetProcAddress_v2";
    for (size_t i = 0; i < sizeof SIGNATURES / sizeof *SIGNATURES; i++)
        if (!strcmp(name, SIGNATURES[i].name) && version >= SIGNATURES[i].from &&
            version < SIGNATURES[i].until)
            function = SIGNATURES[i].function;
    if (version > setting("FAKE_CUDA_VERSION", NEWEST)) function = "";
    *found = self && *function ? dlsym(self, function) : NULL;
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}

R cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}

__attribute__((destructor)) static void report(void) {
    if (initialized && initialized_by == getpid())
        note("live memory=%ld host=%ld streams=%ld graphs=%ld execs=%ld libraries=%ld", live_memory,
             live_host, live_streams, live_graphs, live_execs, live_libraries);
}
