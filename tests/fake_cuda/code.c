/* Libraries, kernels and launches.
 *
 * A library is an ELF cubin as ptxas makes it, of which the kernels' names, parameter sizes and
 * static shared memory are read; or text, for kernels that only exist here:
 *   FAKE CUBIN\nNAME SHARED SIZE SIZE ...\n    one line a kernel
 */
#include "fake.h"
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Kernel {
    char name[256];
    int count, sizes[ARGUMENTS], offsets[ARGUMENTS];
    int shared, most_dynamic, loaded;
    struct Kernel *next;
};
typedef struct { Kernel *kernels; } Library;

enum { DEFAULT_SHARED = 49152, OPT_IN = 166912, KPARAM_INFO = 0x17 };

const char *kernel_name(const Kernel *kernel) { return kernel->name; }

static Kernel *kernel_of(Library *library, const char *name) {
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next)
        if (!strcmp(kernel->name, name)) return kernel;
    Kernel *kernel = calloc(1, sizeof *kernel);
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    kernel->most_dynamic = DEFAULT_SHARED;
    kernel->next = library->kernels;
    return library->kernels = kernel;
}

static void parameter(Kernel *kernel, int index, int offset, int size) {
    if (index >= ARGUMENTS || size > ARGUMENT_BYTES) abort();
    kernel->sizes[index] = size;
    kernel->offsets[index] = offset;
    if (index >= kernel->count) kernel->count = index + 1;
}

static R read_text(Library *library, const char *text) {
    for (const char *line = strchr(text, '\n'); line && line[1]; line = strchr(line + 1, '\n')) {
        char name[256];
        int shared, length, size, offset = 0;
        if (sscanf(line + 1, "%255s %d%n", name, &shared, &length) != 2) return INVALID_IMAGE;
        Kernel *kernel = kernel_of(library, name);
        kernel->shared = shared;
        const char *at = line + 1 + length;
        for (int i = 0; *at == ' ' && sscanf(at, " %d%n", &size, &length) == 1; i++) {
            offset = (offset + size - 1) / size * size;
            parameter(kernel, i, offset, size);
            offset += size;
            at += length;
        }
    }
    return OK;
}

/* Entries of .nv.info.NAME: a format and an attribute byte, then two bytes of value (format 1 to 3)
 * or of length (format 4); KPARAM_INFO holds index, ordinal, offset and, from bit 18 on, size. */
static void read_info(Kernel *kernel, const unsigned char *data, size_t bytes) {
    for (size_t at = 0; at + 4 <= bytes;) {
        uint16_t length, ordinal, offset;
        uint32_t flags;
        memcpy(&length, data + at + 2, 2);
        if (data[at] != 4) length = 0;
        if (data[at] == 4 && data[at + 1] == KPARAM_INFO && length >= 12) {
            memcpy(&ordinal, data + at + 8, 2);
            memcpy(&offset, data + at + 10, 2);
            memcpy(&flags, data + at + 12, 4);
            parameter(kernel, ordinal, offset, (int)(flags >> 18));
        }
        at += 4 + length;
    }
}

/* 87 for sm_87: in the low byte of e_flags, from version 8 of the ABI on in the one above. */
static int architecture(const Elf64_Ehdr *head) {
    return (int)(head->e_flags >> (head->e_ident[EI_ABIVERSION] >= 8 ? 8 : 0) & 0xff);
}

static R read_elf(Library *library, const unsigned char *image) {
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)image;
    int sm = (int)setting("FAKE_CUDA_SM", 87), made_for = architecture(head);
    if (made_for / 10 != sm / 10 || made_for > sm) return NO_BINARY;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + head->e_shoff);
    const char *names = (const char *)image + sections[head->e_shstrndx].sh_offset;
    for (int i = 0; i < head->e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        if (!strncmp(name, ".nv.info.", 9))
            read_info(kernel_of(library, name + 9), image + sections[i].sh_offset,
                      sections[i].sh_size);
        if (!strncmp(name, ".nv.shared.", 11) && strncmp(name + 11, "reserved", 8))
            kernel_of(library, name + 11)->shared = (int)sections[i].sh_size;
    }
    return OK;
}

R cuLibraryLoadData(Library **library, const void *code, void *a, void *b, unsigned c, void *d,
                    void *e, unsigned f) {
    ENTER();
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    Library *made = calloc(1, sizeof *made);
    R result = INVALID_IMAGE;
    if (!strncmp(code, "FAKE CUBIN", 10)) result = read_text(made, code);
    else if (!memcmp(code, ELFMAG, SELFMAG)) result = read_elf(made, code);
    if (result) return free(made), result;
    live_libraries++;
    *library = made;
    return OK;
}

R cuLibraryUnload(Library *library) {
    ENTER();
    live_libraries--;
    free(library);  /* its kernels stay, so that their use is harmless */
    return OK;
}

R cuLibraryGetKernel(Kernel **found, Library *library, const char *name) {
    ENTER();
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next)
        if (!strcmp(kernel->name, name)) return *found = kernel, OK;
    return NOT_FOUND;
}

/* Loads it into the current context; until then it is as good as not there. */
R cuKernelGetFunction(void **function, Kernel *kernel) {
    ENTER();
    if (!current()) return INVALID_CONTEXT;
    kernel->loaded = 1;
    *function = kernel;
    return OK;
}

R cuKernelGetParamInfo(Kernel *kernel, size_t index, size_t *offset, size_t *size) {
    ENTER();
    if ((int)index >= kernel->count) return INVALID_VALUE;
    if (offset) *offset = (size_t)kernel->offsets[index];
    if (size) *size = (size_t)kernel->sizes[index];
    return OK;
}

R cuKernelGetParamCount(Kernel *kernel, size_t *count) {
    ENTER();
    *count = (size_t)kernel->count;
    return OK;
}

R cuKernelGetAttribute(int *value, int attribute, Kernel *kernel, int device) {
    ENTER();
    (void)device;
    switch (attribute) {
    case 0: *value = 1024; return OK;
    case 1: *value = kernel->shared; return OK;
    case 8: *value = kernel->most_dynamic; return OK;
    default: *value = 0; return OK;
    }
}

R cuKernelSetAttribute(int attribute, int value, Kernel *kernel, int device) {
    ENTER();
    (void)device;
    if (attribute != 8 || value < 0 || value + kernel->shared > OPT_IN) return INVALID_VALUE;
    kernel->most_dynamic = value;
    return OK;
}

void describe(const char *what, const Launch *launch) {
    char text[ARGUMENTS * (2 * ARGUMENT_BYTES + 1) + 1], *at = text;
    for (int i = 0; i < launch->count; i++) {
        *at++ = i ? ',' : ' ';
        for (int j = 0; j < launch->kernel->sizes[i]; j++)
            at += sprintf(at, "%02x", launch->bytes[i][j]);
    }
    *at = 0;
    note("%s %s grid=%u,%u,%u block=%u,%u,%u shared=%u arguments=%s", what, launch->kernel->name,
         launch->grid[0], launch->grid[1], launch->grid[2], launch->block[0], launch->block[1],
         launch->block[2], launch->shared, text);
}

typedef struct {
    unsigned grid[3], block[3], shared;
    Stream *stream;
    void *attributes;
    unsigned attribute_count;
} Config;

R cuLaunchKernelEx(const Config *config, Kernel *kernel, void **arguments, void **extra) {
    ENTER();
    const unsigned *grid = config->grid, *block = config->block;
    if (extra || !grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535)
        return INVALID_VALUE;
    if (!block[0] || block[0] * block[1] * block[2] > 1024) return INVALID_VALUE;
    if ((int)config->shared > kernel->most_dynamic) return INVALID_VALUE;
    if (!kernel->loaded && capturing(config->stream)) return CAPTURE_UNSUPPORTED;
    kernel->loaded = 1;
    Op op = {.kind = LAUNCH, .launch = {.kernel = kernel, .count = kernel->count,
                                        .shared = config->shared}};
    memcpy(op.launch.grid, grid, sizeof config->grid);
    memcpy(op.launch.block, block, sizeof config->block);
    for (int i = 0; i < kernel->count; i++)
        memcpy(op.launch.bytes[i], arguments[i], (size_t)kernel->sizes[i]);
    describe("launch", &op.launch);
    return issue(config->stream, &op);
}

R cuLaunchKernel(Kernel *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                 unsigned bz, unsigned shared, Stream *stream, void **arguments, void **extra) {
    ENTER();
    Config config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};
    return cuLaunchKernelEx(&config, kernel, arguments, extra);
}
