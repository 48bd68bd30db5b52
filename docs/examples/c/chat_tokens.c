/* Continues from token ids, or from a prompt given as text.
 *
 *   chat_tokens BUNDLE ID...                    ids in, ids out
 *   printf '<|user|>Hello<|end|><|assistant|>' | chat_tokens BUNDLE     text in, text out
 *
 * The text is the whole prompt, with special tokens written out. User input belongs in an
 * untrusted part (robot_speech.cpp).
 *
 * cc chat_tokens.c $(pkg-config --cflags --libs edge) -o chat_tokens
 */
#include <edge.h>
#include <stdio.h>
#include <stdlib.h>

/* file and field may be empty. */
static int fail(const edge_error *error) {
  if (*error->file) fprintf(stderr, "%s: ", error->file);
  if (*error->field) fprintf(stderr, "%s: ", error->field);
  fprintf(stderr, "%s\n", error->message);
  return 1;
}

static int print_id(void *user, int32_t token) {
  (void)user;
  printf("%d ", (int)token);
  fflush(stdout);
  return 0; /* any other value ends the answer */
}

static int print_text(void *user, int32_t token) {
  const char *text;
  if (edge_decoder_feed((edge_decoder *)user, token, &text, NULL, NULL, NULL)) return 1;
  fputs(text, stdout);
  fflush(stdout);
  return 0;
}

int main(int count, char **words) {
  edge_error error;
  edge_memory memory = EDGE_MEMORY;
  edge_generation how = EDGE_GENERATION;
  edge_sampling greedy = EDGE_SAMPLING;
  edge_bundle *bundle = NULL;
  edge_model *model = NULL;
  edge_session *session = NULL;
  int32_t prompt[4096];
  size_t length = 0;
  int i, failed = 0;

  if (count < 2) return fprintf(stderr, "usage: chat_tokens BUNDLE [ID...]\n"), 2;
  if (edge_bundle_open(words[1], &bundle, &error)) return fail(&error);
  if (edge_bundle_memory(bundle, NULL, &memory, &error)) return fail(&error);
  fprintf(stderr, "needs %.1f MB\n", (double)memory.total / 1e6);
  if (edge_model_load(bundle, NULL, &model, &error)) return fail(&error);
  if (edge_session_new(model, NULL, &session, &error)) return fail(&error);

  greedy.temperature = 0;
  how.sampling = &greedy;
  how.max_tokens = 64;
  how.deadline_s = 30;
  if (count > 2) {
    for (i = 2; i < count && length < 4096; i++) {
      char *end;
      prompt[length++] = (int32_t)strtol(words[i], &end, 10);
      if (end == words[i] || *end) return fprintf(stderr, "%s: is not a token id\n", words[i]), 2;
    }
    how.on_token = print_id;
    failed = edge_generate(session, prompt, length, &how, NULL, &error) && fail(&error);
  } else {
    char text[4096];
    const char *rest = "";
    edge_decoder *decoder = NULL;
    edge_part whole = {text, fread(text, 1, sizeof text, stdin), 1};
    how.on_token = print_text;
    failed = (edge_decoder_new(bundle, NULL, &decoder, &error) ||
              edge_bundle_prompt(bundle, &whole, 1, prompt, 4096, &length, &error) ||
              ((how.user = decoder), edge_generate(session, prompt, length, &how, NULL, &error)) ||
              edge_decoder_finish(decoder, &rest, NULL, &error)) &&
             fail(&error);
    fputs(rest, stdout);
    edge_decoder_free(decoder);
  }
  putchar('\n');
  edge_session_free(session);
  edge_model_close(model);
  edge_bundle_close(bundle);
  return failed;
}
