/* Streams, capture and graphs. What is issued waits in the stream until somebody asks. */
#include "fake.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Queue { Op *first, **last; } Queue;
struct Stream {
    Context *context;
    Queue waiting;
    Graph *recording;
    long asked;
    struct Stream *next;
};
typedef struct { void *data; void (*destroy)(void *); unsigned count; } Object;
enum { OBJECTS = 8, MOVE = 1 };
struct Graph { Queue ops; Object *kept[OBJECTS]; };

static Stream *streams;

static void append(Queue *queue, const Op *op) {
    Op *copy = malloc(sizeof *copy);
    *copy = *op;
    copy->next = NULL;
    if (!queue->last) queue->last = &queue->first;
    *queue->last = copy;
    queue->last = &copy->next;
}

static void clear(Queue *queue) {
    for (Op *op = queue->first; op;) {
        Op *next = op->next;
        free(op->staged);
        free(op);
        op = next;
    }
    *queue = (Queue){0};
}

int capturing(const Stream *stream) { return stream->recording != NULL; }

R issue(Stream *stream, const Op *op) {
    if (!stream || stream->context != current()) return INVALID_HANDLE;
    Op copy = *op;
    int pageable = op->kind == COPY && !inside(op->source, op->bytes) &&
                   !pinned(op->source, op->bytes);
    if (pageable && stream->recording) return CAPTURE_UNSUPPORTED;
    if (pageable) {
        copy.staged = malloc(op->bytes);
        memcpy(copy.staged, op->source, op->bytes);
    }
    append(stream->recording ? &stream->recording->ops : &stream->waiting, &copy);
    return OK;
}

static R perform(const Op *op) {
    const unsigned char *source = op->staged ? op->staged : op->source;
    switch (op->kind) {
    case COPY: memmove(op->target, source, op->bytes); return OK;
    case FILL: memset(op->target, op->byte, op->bytes); return OK;
    default: return execute(&op->launch);
    }
}

/* OK when nothing is left, NOT_READY when a kernel never ends, or what went wrong. */
static R drain(Stream *stream) {
    while (stream->waiting.first) {
        Op *op = stream->waiting.first;
        R code = perform(op);
        if (code == NOT_READY) return code;
        stream->waiting.first = op->next;
        if (!op->next) stream->waiting.last = NULL;
        free(op->staged);
        free(op);
        if (code) {
            clear(&stream->waiting);
            return fault(code);
        }
    }
    return OK;
}

static void block(void) { for (;;) sleep(1); }  /* what a driver does for a kernel that hangs */

void finish_all(void) {
    for (Stream *stream = streams; stream; stream = stream->next)
        if (drain(stream) == NOT_READY) block();
}

R cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    ENTER();
    (void)flags, (void)priority;
    if (!current()) return INVALID_CONTEXT;
    *stream = calloc(1, sizeof **stream);
    **stream = (Stream){.context = current(), .next = streams};
    streams = *stream;
    live_streams++;
    return OK;
}

R cuStreamCreate(Stream **stream, unsigned flags) {
    ENTER();
    return cuStreamCreateWithPriority(stream, flags, 0);
}

R cuStreamDestroy(Stream *stream) {
    ENTER();
    if (drain(stream) == NOT_READY) block();
    for (Stream **at = &streams; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            clear(&stream->waiting);
            free(stream);
            live_streams--;
            return OK;
        }
    return INVALID_HANDLE;
}

R cuStreamGetCtx(Stream *stream, Context **context) {
    ENTER();
    *context = (uintptr_t)stream > 2 ? stream->context : current();
    return OK;
}

R cuStreamGetFlags(Stream *stream, unsigned *flags) {
    ENTER();
    (void)stream;
    *flags = 1;
    return OK;
}

R cuStreamQuery(Stream *stream) {
    ENTER();
    if (stream->recording) return CAPTURE_UNSUPPORTED;
    if (stream->waiting.first && stream->asked++ < setting("FAKE_CUDA_LATENCY", 0))
        return NOT_READY;
    stream->asked = 0;
    return drain(stream);
}

R cuStreamSynchronize(Stream *stream) {
    ENTER();
    if (stream->recording) return CAPTURE_UNSUPPORTED;
    R code = drain(stream);
    if (code == NOT_READY) block();
    return code;
}

R cuStreamBeginCapture(Stream *stream, int mode) {
    ENTER();
    (void)mode;
    if ((uintptr_t)stream <= 1) return CAPTURE_UNSUPPORTED;
    if (stream->recording) return INVALID_VALUE;
    stream->recording = calloc(1, sizeof(Graph));
    live_graphs++;
    return OK;
}

R cuStreamEndCapture(Stream *stream, Graph **graph) {
    ENTER();
    if (!stream->recording) return CAPTURE_UNMATCHED;
    if (graph) *graph = stream->recording;
    stream->recording = NULL;
    return OK;
}

R cuStreamIsCapturing(Stream *stream, int *status) {
    ENTER();
    *status = stream->recording != NULL;
    return OK;
}

R cuStreamGetCaptureInfo_v2(Stream *stream, int *status, uint64_t *id, Graph **graph,
                            const void **before, size_t *count) {
    ENTER();
    if (status) *status = stream->recording != NULL;
    if (id) *id = 1;
    if (graph) *graph = stream->recording;
    if (before) *before = NULL;
    if (count) *count = 0;
    return OK;
}

R cuStreamGetCaptureInfo_v3(Stream *stream, int *status, uint64_t *id, Graph **graph,
                            const void **before, const void **edges, size_t *count) {
    if (edges) *edges = NULL;
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, before, count);
}

/* -- what lives as long as a graph ------------------------------------------------------------ */

R cuUserObjectCreate(Object **object, void *data, void (*destroy)(void *), unsigned count,
                     unsigned flags) {
    ENTER();
    (void)flags;
    *object = malloc(sizeof **object);
    **object = (Object){data, destroy, count};
    return OK;
}

static void let_go(Object *object, unsigned count) {
    object->count -= count;
    if (object->count) return;
    object->destroy(object->data);
    free(object);
}

R cuUserObjectRelease(Object *object, unsigned count) {
    ENTER();
    let_go(object, count);
    return OK;
}

static R keep(Graph *graph, Object *object) {
    for (int i = 0; i < OBJECTS; i++)
        if (!graph->kept[i]) return graph->kept[i] = object, OK;
    return INVALID_VALUE;
}

R cuGraphRetainUserObject(Graph *graph, Object *object, unsigned count, unsigned flags) {
    ENTER();
    if (count != 1) return INVALID_VALUE;
    if (!(flags & MOVE)) object->count++;
    return keep(graph, object);
}

R cuGraphReleaseUserObject(Graph *graph, Object *object, unsigned count) {
    ENTER();
    for (int i = 0; i < OBJECTS; i++)
        if (graph->kept[i] == object) {
            graph->kept[i] = NULL;
            return let_go(object, count), OK;
        }
    return INVALID_VALUE;
}

static void drop_graph(Graph *graph) {
    clear(&graph->ops);
    for (int i = 0; i < OBJECTS; i++)
        if (graph->kept[i]) let_go(graph->kept[i], 1);
    free(graph);
}

/* -- executable graphs ------------------------------------------------------------------------- */

static R copy_graph(Graph *to, const Graph *from) {
    for (const Op *op = from->ops.first; op; op = op->next) append(&to->ops, op);
    for (int i = 0; i < OBJECTS; i++) {
        if (!from->kept[i]) continue;
        from->kept[i]->count++;
        keep(to, from->kept[i]);
    }
    return OK;
}

typedef struct { uint64_t flags; Stream *upload; void *node; int result; } Instantiation;

R cuGraphInstantiateWithParams(Graph **executable, Graph *graph, Instantiation *parameters) {
    ENTER();
    parameters->result = 0;
    *executable = calloc(1, sizeof **executable);
    live_execs++;
    return copy_graph(*executable, graph);
}

R cuGraphUpload(Graph *executable, Stream *stream) {
    ENTER();
    (void)executable;
    return stream->recording ? CAPTURE_UNSUPPORTED : OK;
}

R cuGraphLaunch(Graph *executable, Stream *stream) {
    ENTER();
    if (stream->context != current()) return INVALID_HANDLE;
    Queue *queue = stream->recording ? &stream->recording->ops : &stream->waiting;
    for (const Op *op = executable->ops.first; op; op = op->next) append(queue, op);
    note("replay");
    return OK;
}

R cuGraphDestroy(Graph *graph) {
    ENTER();
    drop_graph(graph);
    live_graphs--;
    return OK;
}

R cuGraphExecDestroy(Graph *executable) {
    ENTER();
    drop_graph(executable);
    live_execs--;
    return OK;
}
