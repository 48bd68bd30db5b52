/* What docs/examples/c/forms.h uses of llguidance's C interface, declared for the tests: the library
 * itself is in llguidance's Python package, its own header only in its repository. Structures have its
 * layout, except that LlgConstraintInit is opaque and large enough. */
#ifndef LLGUIDANCE_H
#define LLGUIDANCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct LlgTokenizer LlgTokenizer;
typedef struct LlgMatcher LlgMatcher;

typedef size_t (*LlgTokenizeFn)(const void *user, const uint8_t *text, size_t bytes,
                                uint32_t *tokens, size_t capacity);

typedef struct LlgTokenizerInitV2 {
  size_t struct_size;
  uint32_t vocab_size, tok_eos;
  const uint32_t *token_lens;
  const uint8_t *token_bytes;
  const char *tokenizer_json;
  bool tokenize_assumes_string;
  LlgTokenizeFn tokenize_fn;
  bool use_approximate_greedy_tokenize_fn;
  const void *tokenize_user_data;
  const char *const *slices;
  const uint32_t *tok_eos_extra;
  uint32_t tok_eos_extra_count;
} LlgTokenizerInitV2;

typedef struct LlgConstraintInit {
  uint64_t opaque[64];
} LlgConstraintInit;

LlgTokenizer *llg_new_tokenizer_v2(const LlgTokenizerInitV2 *init, char *problem, size_t room);
void llg_free_tokenizer(LlgTokenizer *tokenizer);
void llg_constraint_init_set_defaults(LlgConstraintInit *init, const LlgTokenizer *tokenizer);
LlgMatcher *llg_new_matcher(const LlgConstraintInit *init, const char *kind, const char *form);
void llg_free_matcher(LlgMatcher *matcher);
bool llg_matcher_is_error(const LlgMatcher *matcher);
const char *llg_matcher_get_error(LlgMatcher *matcher);
bool llg_matcher_is_stopped(const LlgMatcher *matcher);
__attribute__((warn_unused_result)) int32_t llg_matcher_reset(LlgMatcher *matcher);
__attribute__((warn_unused_result)) int32_t llg_matcher_compute_mask(LlgMatcher *matcher);
const uint32_t *llg_matcher_get_mask(LlgMatcher *matcher);
__attribute__((warn_unused_result)) int32_t llg_matcher_consume_token(LlgMatcher *matcher,
                                                                      uint32_t token);

#ifdef __cplusplus
}
#endif

#endif
