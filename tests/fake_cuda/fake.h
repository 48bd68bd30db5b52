/* A CUDA driver without a GPU: what cuda-core and cuda-bindings call, done in host memory.
 *
 * It proves how the API is used (order, arguments, lifetimes, what is done about errors), and
 * nothing about a GPU. As on a real one, what is issued to a stream is done later: here when the
 * stream is waited for or asked, so that whoever reads a result too early reads old bytes.
 *
 * Environment:
 *   FAKE_CUDA_LOG      file to append to, a line an event: calls that failed, allocations, launches,
 *                      replays; at the end `live`, what was never given back
 *   FAKE_CUDA_FAIL     name:n:code[,...]: call number n (from 1) of `name` fails with `code`
 *   FAKE_CUDA_DEVICES  how many (1); FAKE_CUDA_SM (87); FAKE_CUDA_INTEGRATED (0)
 *   FAKE_CUDA_VERSION  the CUDA it is for (13000): newer functions are not there
 *   FAKE_CUDA_MEMORY   bytes a device has (1 GiB); FAKE_CUDA_LARGEST: of one allocation (all)
 *   FAKE_CUDA_PIECES   virtual memory management is there (1)
 *   FAKE_CUDA_LATENCY  cuStreamQuery says "not ready" so often before it does the work (0)
 */
#ifndef FAKE_H
#define FAKE_H

#include <stddef.h>
#include <stdint.h>

typedef int R;
typedef struct Context Context;
typedef struct Stream Stream;
typedef struct Graph Graph;
typedef struct Kernel Kernel;

enum { ARGUMENTS = 64, ARGUMENT_BYTES = 8, MAX_DEVICES = 8 };
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209,
    INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709, LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903
};

typedef struct {  /* a launch, with the bytes that a kernel would find */
    Kernel *kernel;
    unsigned grid[3], block[3], shared;
    int count;
    unsigned char bytes[ARGUMENTS][ARGUMENT_BYTES];
} Launch;

typedef struct Op {  /* something issued to a stream */
    enum { COPY, FILL, LAUNCH } kind;
    unsigned char *target;
    const unsigned char *source;
    unsigned char *staged;  /* pageable memory is read when the copy is issued */
    size_t bytes;
    int byte;
    Launch launch;
    struct Op *next;
} Op;

struct Context { int device, primary, alive; };

/* control.c */
R enter(const char *name);
void leave(int *unused);
#define ENTER() \
    __attribute__((cleanup(leave))) int entered_ = 0; \
    do { (void)entered_; R e_ = enter(__func__); if (e_) return e_; } while (0)
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
long setting(const char *name, long otherwise);
R fault(R code);  /* from now on every call fails with it */
extern long live_memory, live_host, live_streams, live_graphs, live_execs, live_libraries;

/* devices.c */
Context *current(void);

/* memory.c */
int inside(const void *address, size_t bytes);  /* 1: within one device allocation */
int pinned(const void *address, size_t bytes);

/* streams.c */
R issue(Stream *stream, const Op *op);
int capturing(const Stream *stream);
void finish_all(void);  /* what cuMemFree waits for */

/* code.c */
void describe(const char *what, const Launch *launch);

/* kernels.c */
const char *kernel_name(const Kernel *kernel);
R execute(const Launch *launch);  /* OK, NOT_READY for a kernel that never ends, or a fault */

#endif
