/* Memory and copies. Device memory is host memory whose bounds are known. */
#include "fake.h"
#include <stdlib.h>
#include <string.h>

typedef struct Block {
    unsigned char *start;
    size_t bytes;
    int device;
    struct Block *next;
} Block;

static Block *blocks, *host_blocks;
static size_t used;

static Block *find(Block *list, const void *address, size_t bytes) {
    const unsigned char *p = address;
    for (; list; list = list->next)
        if (p >= list->start && bytes <= list->bytes &&
            (size_t)(p - list->start) <= list->bytes - bytes)
            return list;
    return NULL;
}

int inside(const void *address, size_t bytes) { return find(blocks, address, bytes) != NULL; }
int pinned(const void *address, size_t bytes) { return find(host_blocks, address, bytes) != NULL; }

static R add(Block **list, void **address, size_t bytes, size_t alignment) {
    Block *block = malloc(sizeof *block);
    void *start;
    if (!block || posix_memalign(&start, alignment, bytes)) abort();
    memset(start, 0xa5, bytes);  /* never zero: whoever needs zeros has to write them */
    *block = (Block){start, bytes, current()->device, *list};
    *list = block;
    *address = start;
    return OK;
}

static size_t drop(Block **list, void *address) {
    for (; *list; list = &(*list)->next)
        if ((*list)->start == address) {
            Block *block = *list;
            size_t bytes = block->bytes;
            *list = block->next;
            free(block->start);
            free(block);
            return bytes;
        }
    return 0;
}

R cuMemAlloc(void **address, size_t bytes) {
    ENTER();
    if (!current()) return INVALID_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    size_t all = (size_t)setting("FAKE_CUDA_MEMORY", 1L << 30);
    if (bytes > all - used || bytes > (size_t)setting("FAKE_CUDA_LARGEST", (long)all))
        return OUT_OF_MEMORY;
    used += bytes;
    live_memory++;
    note("alloc %zu", bytes);
    return add(&blocks, address, bytes, 256);
}

R cuMemFree(void *address) {
    ENTER();
    if (!current()) return INVALID_CONTEXT;
    finish_all();
    size_t bytes = drop(&blocks, address);
    if (!bytes) return INVALID_VALUE;
    used -= bytes;
    live_memory--;
    note("free %zu", bytes);
    return OK;
}

/* -- memory in pieces -------------------------------------------------------------------------- */

enum { UNIT = 2 << 20 };
typedef struct { size_t bytes; int mapped; } Piece;

R cuMemGetAllocationGranularity(size_t *unit, const void *properties, int option) {
    ENTER();
    (void)properties, (void)option;
    *unit = UNIT;
    return OK;
}

R cuMemAddressReserve(void **address, size_t bytes, size_t alignment, void *wish, uint64_t flags) {
    ENTER();
    (void)alignment, (void)wish, (void)flags;
    if (bytes % UNIT) return INVALID_VALUE;
    live_memory++;
    return posix_memalign(address, UNIT, bytes) ? OUT_OF_MEMORY : OK;
}

R cuMemAddressFree(void *address, size_t bytes) {
    ENTER();
    if (find(blocks, address, 1)) return INVALID_VALUE;
    (void)bytes;
    free(address);
    live_memory--;
    return OK;
}

R cuMemCreate(Piece **piece, size_t bytes, const void *properties, uint64_t flags) {
    ENTER();
    (void)properties, (void)flags;
    size_t all = (size_t)setting("FAKE_CUDA_MEMORY", 1L << 30);
    if (bytes % UNIT) return INVALID_VALUE;
    if (bytes > all - used || bytes > (size_t)setting("FAKE_CUDA_LARGEST", (long)all))
        return OUT_OF_MEMORY;
    *piece = malloc(sizeof **piece);
    **piece = (Piece){bytes, 0};
    used += bytes;
    note("piece %zu", bytes);
    return OK;
}

R cuMemRelease(Piece *piece) {
    ENTER();
    if (!piece->mapped) used -= piece->bytes;  /* else until it is unmapped */
    free(piece);
    return OK;
}

R cuMemMap(void *address, size_t bytes, size_t offset, Piece *piece, uint64_t flags) {
    ENTER();
    if (offset || flags || bytes != piece->bytes) return INVALID_VALUE;
    (void)address;
    piece->mapped = 1;
    return OK;
}

R cuMemSetAccess(void *address, size_t bytes, const void *access, size_t count) {
    ENTER();
    (void)access;
    if (count != 1) return INVALID_VALUE;
    Block *block = malloc(sizeof *block);
    *block = (Block){address, bytes, current()->device, blocks};
    memset(address, 0xa5, bytes);
    blocks = block;
    return OK;
}

R cuMemUnmap(void *address, size_t bytes) {
    ENTER();
    finish_all();
    for (Block **at = &blocks; *at; at = &(*at)->next)
        if ((*at)->start == address) {
            Block *block = *at;
            *at = block->next;
            free(block);
            break;
        }
    used -= bytes;
    return OK;
}

R cuMemGetInfo(size_t *available, size_t *total) {
    ENTER();
    if (!current()) return INVALID_CONTEXT;
    *total = (size_t)setting("FAKE_CUDA_MEMORY", 1L << 30);
    *available = *total - used;
    return OK;
}

R cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    ENTER();
    (void)flags;
    if (!current()) return INVALID_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    live_host++;
    note("host %zu", bytes);
    return add(&host_blocks, address, bytes, 4096);
}

R cuMemFreeHost(void *address) {
    ENTER();
    if (!current()) return INVALID_CONTEXT;
    finish_all();
    if (!drop(&host_blocks, address)) return INVALID_VALUE;
    live_host--;
    return OK;
}

R cuPointerGetAttribute(void *value, int attribute, void *address) {
    ENTER();
    Block *block = find(blocks, address, 1), *host = find(host_blocks, address, 1);
    if (!block && !host) return INVALID_VALUE;
    Block *found = block ? block : host;
    switch (attribute) {
    case 2: *(unsigned *)value = block ? 2 : 1; return OK;
    case 9: *(int *)value = found->device; return OK;
    case 11: *(void **)value = found->start; return OK;
    case 12: *(size_t *)value = found->bytes; return OK;
    default: return INVALID_VALUE;
    }
}

static R copied(Stream *stream, void *to, const void *from, size_t bytes) {
    Op op = {.kind = COPY, .target = to, .source = from, .bytes = bytes};
    return issue(stream, &op);
}

R cuMemcpyHtoDAsync(void *to, const void *from, size_t bytes, Stream *stream) {
    ENTER();
    return inside(to, bytes) ? copied(stream, to, from, bytes) : INVALID_VALUE;
}

R cuMemcpyDtoHAsync(void *to, const void *from, size_t bytes, Stream *stream) {
    ENTER();
    return inside(from, bytes) && pinned(to, bytes) ? copied(stream, to, from, bytes)
                                                    : INVALID_VALUE;
}

R cuMemcpyDtoDAsync(void *to, const void *from, size_t bytes, Stream *stream) {
    ENTER();
    return inside(to, bytes) && inside(from, bytes) ? copied(stream, to, from, bytes)
                                                    : INVALID_VALUE;
}

R cuMemsetD8Async(void *to, unsigned char byte, size_t bytes, Stream *stream) {
    ENTER();
    if (!inside(to, bytes)) return INVALID_VALUE;
    Op op = {.kind = FILL, .target = to, .bytes = bytes, .byte = byte};
    return issue(stream, &op);
}
