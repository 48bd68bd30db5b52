/* Answers of a form by llguidance's C library: JSON of a schema, text that matches a regex, a grammar.
 *
 * llguidance is a library in Rust: in its checkout LLG, `cargo build --release -p llguidance` makes
 * target/release/libllguidance.a, and parser/llguidance.h is its header. Link with
 *
 *   -I$LLG/parser $LLG/target/release/libllguidance.a -lpthread -ldl -lm
 *
 * Without Rust: the file _lib.abi3.so of its Python package has the same functions, and needs a shared
 * libpython. Link with -I$LLG/parser PATH/_lib.abi3.so $(python3-config --embed --ldflags)
 */
#ifndef FORMS_H
#define FORMS_H

#include <edge.h>
#include <llguidance.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* llguidance needs the usual tokens of text where a form leaves no choice. */
static size_t forms_tokenize(const void *bundle, const uint8_t *text, size_t bytes, uint32_t *tokens,
                             size_t capacity) {
  size_t count = 0;
  edge_bundle_encode((const edge_bundle *)bundle, (const char *)text, bytes, (int32_t *)tokens,
                     capacity, &count, NULL);
  return count;
}

/* Describes a bundle's tokenizer to llguidance. Make it once; the bundle stays open. Returns NULL
 * with the reason in `problem`. */
static LlgTokenizer *forms_tokenizer(const edge_bundle *bundle, char *problem, size_t room) {
  edge_info info = EDGE_INFO;
  LlgTokenizer *out = NULL;
  snprintf(problem, room, "not enough memory");
  edge_bundle_info(bundle, &info, NULL);
  /* llguidance needs an end token: without one, it is behind the vocabulary and never sampled. */
  int32_t size = info.vocab_size + !info.eos_count;
  size_t most = 64 * (size_t)size + 4096, used = 0;
  uint32_t *lengths = (uint32_t *)calloc((size_t)size, sizeof *lengths);
  char *bytes = (char *)malloc(most);
  for (int32_t id = 0; lengths && bytes && id < size && used + 4096 < most; id++) {
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
    init.tokenize_fn = forms_tokenize;
    init.tokenize_user_data = bundle;
    init.tokenize_assumes_string = true;
    out = llg_new_tokenizer_v2(&init, problem, room);
  }
  free(lengths);
  free(bytes);
  return out;
}

/* Reads a form. `kind`: "json_schema", "regex" or "lark". For another answer of the same form,
 * llg_matcher_reset begins again. Returns NULL with the reason in `problem`. */
static LlgMatcher *forms_matcher(const LlgTokenizer *tokenizer, const char *kind, const char *form,
                                 char *problem, size_t room) {
  LlgConstraintInit init;
  llg_constraint_init_set_defaults(&init, tokenizer);
  LlgMatcher *matcher = llg_new_matcher(&init, kind, form);
  if (!llg_matcher_is_error(matcher)) return matcher;
  snprintf(problem, room, "%s", llg_matcher_get_error(matcher));
  llg_free_matcher(matcher);
  return NULL;
}

/* The two callbacks of edge_constraint. */
static int forms_allow(void *user, uint32_t *mask, size_t words) {
  LlgMatcher *matcher = (LlgMatcher *)user;
  if (llg_matcher_is_stopped(matcher))
    return llg_matcher_is_error(matcher) ? -1 : EDGE_CONSTRAINT_DONE;
  if (llg_matcher_compute_mask(matcher)) return -1;
  memcpy(mask, llg_matcher_get_mask(matcher), 4 * words); /* llguidance's may have more words */
  return 0;
}
static int forms_accept(void *user, int32_t token) {
  return llg_matcher_consume_token((LlgMatcher *)user, (uint32_t)token) ? -1 : 0;
}

#endif
