/* Counts the allocations of libedge per token: none, once a session is prepared. And its memory.
 *
 *   libedge_memory BUNDLE [THREADS]    prints the allocations of 200 tokens, the process's peak
 *                                      memory in kB above edge_bundle_memory, and the status of a
 *                                      new session without memory
 */
#define _GNU_SOURCE
#include <edge.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static long allocations; /* of all threads */

static void counted(void) { __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED); }

void *malloc(size_t size) { return counted(), __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return counted(), __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return counted(), __libc_realloc(old, size); }
void *aligned_alloc(size_t on, size_t size) { return counted(), __libc_memalign(on, size); }
int posix_memalign(void **out, size_t on, size_t size) {
  counted();
  *out = __libc_memalign(on, size);
  return *out == NULL;
}

static edge_error error;

static void must(edge_status status) {
  if (!status) return;
  fprintf(stderr, "%s: %s\n", error.field, error.message);
  exit(1);
}

/* Not ru_maxrss, which a process has from the one that started it. */
static long peak(void) {
  char line[256];
  long kilobytes = -1;
  FILE *file = fopen("/proc/self/status", "r");
  while (file && fgets(line, sizeof line, file))
    if (!strncmp(line, "VmHWM:", 6)) kilobytes = atol(line + 6);
  if (file) fclose(file);
  return kilobytes;
}

int main(int count, char **words) {
  edge_bundle *bundle;
  edge_model *model;
  edge_session *session;
  edge_model_options options = EDGE_MODEL_OPTIONS;
  edge_info info = EDGE_INFO;
  edge_memory memory = EDGE_MEMORY;
  edge_sampling sampling = EDGE_SAMPLING;
  edge_generation how = EDGE_GENERATION;
  edge_result result = EDGE_RESULT;
  struct rlimit limit = {1 << 20, 1 << 20};
  const float *logits;
  int32_t tokens[300], token;
  long before;
  size_t i;

  if (count != 2 && count != 3) return 2;
  if (count == 3) options.threads = atoi(words[2]);
  must(edge_bundle_open(words[1], &bundle, &error));
  must(edge_bundle_info(bundle, &info, &error));
  must(edge_bundle_memory(bundle, NULL, &memory, &error));
  must(edge_model_load(bundle, &options, &model, &error));
  edge_bundle_close(bundle);
  must(edge_session_new(model, NULL, &session, &error));
  must(edge_session_prepare(session, &error));
  for (i = 0; i < 300; i++) tokens[i] = (int32_t)(i % 200);
  sampling.temperature = 1;
  sampling.top_k = 1000;
  sampling.top_p = 0.99;
  sampling.min_p = 0.001;
  sampling.repetition_penalty = 1.2;
  how.sampling = &sampling;
  how.max_tokens = 60;
  how.ignore_eos = 1;

  before = allocations;
  must(edge_generate(session, tokens, 90, &how, &result, &error)); /* prompt, steps, sampling */
  for (i = 0; i < 20; i++) {
    must(edge_session_run(session, tokens, 1 + i % 8, NULL, EDGE_RUN_ALL_ROWS, &logits, &error));
    must(edge_session_sample(session, &sampling, &token, &error));
    must(edge_session_rewind(session, i % 2, &error));
  }
  printf("%ld\n", allocations - before);
  printf("%ld\n", peak() - (long)(memory.total / 1024));
  setrlimit(RLIMIT_AS, &limit);
  printf("%d\n", (int)edge_session_new(model, NULL, &session, &error));
  return 0;
}
