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
 * forms.h says where to get llguidance.
 *
 * cc json.c $(pkg-config --cflags --libs edge) -I$LLG/parser -L$LLG/target/release -lllguidance \
 *    -lpthread -ldl -lm -o json
 */
#include "forms.h"

/* file and field may be empty. */
static int fail(const edge_error *error) {
  fprintf(stderr, "%s%s%s%s%s\n", error->file, *error->file ? ": " : "", error->field,
          *error->field ? ": " : "", error->message);
  return 2;
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

  char problem[1024];
  LlgTokenizer *tokens = forms_tokenizer(bundle, problem, sizeof problem);
  if (!tokens) return fprintf(stderr, "tokenizer: %s\n", problem), 2;
  LlgMatcher *matcher = forms_matcher(tokens, "json_schema", words[3], problem, sizeof problem);
  if (!matcher) return fprintf(stderr, "schema: %s\n", problem), 2;

  greedy.temperature = 0;
  form.allow = forms_allow, form.accept = forms_accept, form.user = matcher;
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
