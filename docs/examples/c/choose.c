/* Has a model choose one of several actions.
 *
 *   choose BUNDLE PROMPT ACTION ACTION...
 *   choose apps/bundles/demo '<|user|>The ball is on your left. Which way?<|end|><|assistant|>' \
 *       left right stop
 *
 * The prompt is the whole prompt, with special tokens written out. Prints the action; exits with
 * its number, counted from 0, or with 125 if something failed.
 *
 * cc choose.c $(pkg-config --cflags --libs edge) -o choose
 */
#include <edge.h>
#include <stdio.h>
#include <string.h>

/* file and field may be empty. */
static int fail(const edge_error *error) {
  fprintf(stderr, "%s%s%s%s%s\n", error->file, *error->file ? ": " : "", error->field,
          *error->field ? ": " : "", error->message);
  return 125;
}

int main(int count, char **words) {
  edge_error error;
  edge_generation how = EDGE_GENERATION;
  edge_sampling greedy = EDGE_SAMPLING;
  edge_constraint form = EDGE_CONSTRAINT;
  edge_bundle *bundle = NULL;
  edge_model *model = NULL;
  edge_session *session = NULL;
  edge_choices *choices = NULL;
  int32_t prompt[4096];
  size_t length = 0;
  int found;

  if (count < 5) return fprintf(stderr, "usage: choose BUNDLE PROMPT ACTION ACTION...\n"), 125;
  if (edge_bundle_open(words[1], &bundle, &error)) return fail(&error);
  if (edge_model_load(bundle, NULL, &model, &error)) return fail(&error);
  if (edge_session_new(model, NULL, &session, &error)) return fail(&error);
  if (edge_choices_new(bundle, (const char *const *)words + 3, (size_t)count - 3, &choices, &error))
    return fail(&error);

  edge_part whole = {words[2], strlen(words[2]), 1};
  if (edge_bundle_prompt(bundle, &whole, 1, prompt, 4096, &length, &error)) return fail(&error);
  if (length > 4096) return fprintf(stderr, "the prompt is too long\n"), 125;

  /* A robot asks again and again with the same choices: this only begins an answer. */
  if (edge_choices_begin(choices, &form, &error)) return fail(&error);
  greedy.temperature = 0;
  how.sampling = &greedy;
  how.constraint = &form;
  how.deadline_s = 30;
  if (edge_generate(session, prompt, length, &how, NULL, &error)) return fail(&error);
  found = (int)edge_choices_found(choices); /* -1: the deadline came first */
  if (found >= 0) printf("%s\n", words[3 + found]);

  edge_choices_free(choices);
  edge_session_free(session);
  edge_model_close(model);
  edge_bundle_close(bundle);
  return found < 0 ? 125 : found;
}
