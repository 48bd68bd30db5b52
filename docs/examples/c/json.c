/* Has a model answer with JSON of a schema, by llguidance's C library.
 *
 *   json BUNDLE PROMPT SCHEMA
 *   json apps/bundles/demo '<|user|>Go left for two metres.<|end|><|assistant|>' '{"type": "object",
 *     "properties": {"go": {"enum": ["left", "right"]}, "metres": {"type": "integer", "minimum": 0,
 *     "maximum": 9}}, "required": ["go", "metres"], "additionalProperties": false,
 *     "x-guidance": {"whitespace_flexible": false}}'
 *
 * With white space where the model likes, a small model may write nothing else: `x-guidance` rules
 * that out. The prompt is the whole prompt, with special tokens written out. Exits with 0 if the JSON is
 * complete, with 1 if max_tokens or the deadline came first, and with 2 if something failed.
 *
 * llguidance is a library in Rust: in its checkout, `cargo build --release -p llguidance` makes
 * target/release/libllguidance.a, and parser/llguidance.h is its header.
 *
 * cc json.c $(pkg-config --cflags --libs edge) -I$LLG/parser -L$LLG/target/release -lllguidance \
 *    -lpthread -ldl -lm -o json
 */
#include <edge.h>
#include <llguidance.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* file and field may be empty. */
static int fail(const edge_error *error) {
  fprintf(stderr, "%s%s%s%s%s\n", error->file, *error->file ? ": " : "", error->field,
          *error->field ? ": " : "", error->message);
  return 2;
}

/* llguidance needs the usual tokens of text where the schema leaves no choice. */
static size_t tokenize(const void *bundle, const uint8_t *text, size_t bytes, uint32_t *tokens,
                       size_t capacity) {
  size_t count = 0;
  edge_bundle_encode(bundle, (const char *)text, bytes, (int32_t *)tokens, capacity, &count, NULL);
  return count;
}

/* Describes a bundle's tokenizer to llguidance. Returns NULL after printing why. Make it once. */
static LlgTokenizer *vocabulary(const edge_bundle *bundle) {
  edge_info info = EDGE_INFO;
  LlgTokenizer *out = NULL;
  char problem[256] = "not enough memory";
  edge_bundle_info(bundle, &info, NULL);
  /* llguidance needs an end token: without one, it is behind the vocabulary and never sampled. */
  int32_t size = info.vocab_size + !info.eos_count;
  size_t room = 64 * (size_t)size + 4096, used = 0;
  uint32_t *lengths = calloc((size_t)size, sizeof *lengths);
  char *bytes = malloc(room);
  for (int32_t id = 0; lengths && bytes && id < size && used + 4096 < room; id++) {
    size_t length = 0;
    if (id < info.token_count)
      edge_bundle_decode(bundle, &id, 1, bytes + used, 4096, &length, NULL);
    if (!length) /* a special token, or none: llguidance marks them by a byte that no text has */
      length = (size_t)sprintf(bytes + used, "\xff<%d>", (int)id);
    lengths[id] = (uint32_t)length;
    used += length;
  }
  if (lengths && bytes) {
    LlgTokenizerInitV2 init;
    memset(&init, 0, sizeof init);
    init.struct_size = sizeof init;
    init.vocab_size = (uint32_t)size;
    init.tok_eos = (uint32_t)(info.eos_count ? info.eos[0] : size - 1);
    if (info.eos_count > 1) {
      init.tok_eos_extra = (const uint32_t *)info.eos + 1;
      init.tok_eos_extra_count = (uint32_t)info.eos_count - 1;
    }
    init.token_lens = lengths;
    init.token_bytes = (const uint8_t *)bytes;
    init.tokenize_fn = tokenize;
    init.tokenize_user_data = bundle;
    init.tokenize_assumes_string = true;
    out = llg_new_tokenizer_v2(&init, problem, sizeof problem);
  }
  if (!out) fprintf(stderr, "tokenizer: %s\n", problem);
  free(lengths);
  free(bytes);
  return out;
}

/* The two callbacks of edge_constraint. */
static int allow(void *matcher, uint32_t *mask, size_t words) {
  if (llg_matcher_is_stopped(matcher))
    return llg_matcher_is_error(matcher) ? -1 : EDGE_CONSTRAINT_DONE;
  if (llg_matcher_compute_mask(matcher)) return -1;
  memcpy(mask, llg_matcher_get_mask(matcher), 4 * words); /* llguidance's may have more words */
  return 0;
}
static int accept(void *matcher, int32_t token) {
  return llg_matcher_consume_token(matcher, (uint32_t)token) ? -1 : 0;
}

/* Prints text as it becomes certain. */
static int print(void *decoder, int32_t token) {
  const char *text = "";
  if (edge_decoder_feed(decoder, token, &text, NULL, NULL, NULL)) return 1;
  fputs(text, stdout);
  fflush(stdout);
  return 0;
}

int main(int count, char **words) {
  edge_error error;
  edge_generation how = EDGE_GENERATION;
  edge_sampling greedy = EDGE_SAMPLING;
  edge_constraint form = EDGE_CONSTRAINT;
  edge_result result = EDGE_RESULT;
  edge_bundle *bundle = NULL;
  edge_model *model = NULL;
  edge_session *session = NULL;
  edge_decoder *decoder = NULL;
  int32_t prompt[4096];
  size_t length = 0;

  if (count != 4) return fprintf(stderr, "usage: json BUNDLE PROMPT SCHEMA\n"), 2;
  if (edge_bundle_open(words[1], &bundle, &error)) return fail(&error);
  if (edge_model_load(bundle, NULL, &model, &error)) return fail(&error);
  if (edge_session_new(model, NULL, &session, &error)) return fail(&error);
  if (edge_decoder_new(bundle, NULL, &decoder, &error)) return fail(&error);
  edge_part whole = {words[2], strlen(words[2]), 1};
  if (edge_bundle_prompt(bundle, &whole, 1, prompt, 4096, &length, &error)) return fail(&error);
  if (length > 4096) return fprintf(stderr, "the prompt is too long\n"), 2;

  LlgTokenizer *tokens = vocabulary(bundle);
  if (!tokens) return 2;
  LlgConstraintInit init;
  llg_constraint_init_set_defaults(&init, tokens);
  /* For another answer of the same schema, llg_matcher_reset begins again. */
  LlgMatcher *matcher = llg_new_matcher(&init, "json_schema", words[3]);
  if (llg_matcher_is_error(matcher))
    return fprintf(stderr, "schema: %s\n", llg_matcher_get_error(matcher)), 2;

  greedy.temperature = 0;
  form.allow = allow, form.accept = accept, form.user = matcher;
  how.sampling = &greedy;
  how.constraint = &form;
  how.on_token = print, how.user = decoder;
  how.deadline_s = 30;
  if (edge_generate(session, prompt, length, &how, &result, &error)) return fail(&error);
  const char *rest = "";
  edge_decoder_finish(decoder, &rest, NULL, NULL);
  printf("%s\n", rest);

  llg_free_matcher(matcher);
  llg_free_tokenizer(tokens);
  edge_decoder_free(decoder);
  edge_session_free(session);
  edge_model_close(model);
  edge_bundle_close(bundle);
  return result.finish == EDGE_FINISH_STOP ? 0 : 1;
}
