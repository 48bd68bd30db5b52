/* edge.h: run a bundle from C or C++, without Python. docs/use/c.md says how.
 *
 * Conventions
 * - A function that can fail returns an edge_status, EDGE_OK (0) for success, and fills `error` where
 *   that is not NULL. What it was to make is then NULL and nothing has changed, unless it says so.
 * - Option structures begin with their size: `edge_session_options o = EDGE_SESSION_OPTIONS;` and then
 *   the fields that matter. NULL stands for the defaults.
 * - One thread uses a session at a time; a second one gets EDGE_ERROR_ENGINE from what returns a
 *   status, and may call edge_session_cancel and edge_session_resume alone of the rest. Sessions of
 *   one model may be used on threads of their own: their runs follow one another. Bundles and models
 *   are never changed.
 * - A session holds all the memory that its runs need: see edge_session_prepare.
 * - The library keeps no global state, starts no thread unless `threads` asks for more than one,
 *   writes no log and reads no environment variable.
 */
#ifndef EDGE_H
#define EDGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define EDGE_API __attribute__((visibility("default")))
#else
#define EDGE_API
#endif

/* Goes up where a program compiled with an older header would no longer run; the library's SONAME
 * has it too. Functions and fields at the end of structures are added without that. */
#define EDGE_API_VERSION 1
EDGE_API int32_t edge_api_version(void);

typedef enum edge_status {
  EDGE_OK = 0,
  EDGE_ERROR_BUNDLE = 1,       /* the bundle is missing something, altered, or of another version */
  EDGE_ERROR_STATE = 2,        /* a saved or live state does not fit what is asked of it */
  EDGE_ERROR_INPUT = 3,        /* an argument is out of range */
  EDGE_ERROR_CONTEXT_FULL = 4, /* the KV caches have no room for the tokens */
  EDGE_ERROR_ENGINE = 5,       /* the machine cannot run this, or a run failed */
  EDGE_ERROR_MEMORY = 6        /* not enough memory */
} edge_status;

/* Where a fault lies and what it is. Each text ends with a zero; long ones are cut. */
typedef struct edge_error {
  edge_status status;
  char file[512];     /* the file or folder, or "" */
  char field[256];    /* the field, tensor or argument, or "" */
  char message[1024]; /* what is wrong; of several faults, all that fit */
} edge_error;

/* -- bundles ------------------------------------------------------------------------------------ */

typedef struct edge_bundle edge_bundle;

/* Opens a folder made by `edge export`: reads and checks manifest.json, that the folder holds what it
 * lists and nothing else, and the launch plan. Weights are not read yet. */
EDGE_API edge_status edge_bundle_open(const char *folder, edge_bundle **bundle, edge_error *error);
EDGE_API void edge_bundle_close(edge_bundle *bundle); /* NULL is allowed, as in all that free */
/* Checks size and SHA-256 of every listed file now, also of those that this library does not use. */
EDGE_API edge_status edge_bundle_verify(const edge_bundle *bundle, edge_error *error);

/* Facts of a bundle. Texts and lists live as long as the bundle. */
typedef struct edge_info {
  size_t size;
  int32_t vocab_size;  /* rows of logits; ids from `token_count` on stand for nothing */
  int32_t token_count; /* of the tokenizer */
  int32_t layers;
  int32_t chunk;       /* most tokens of one committing run */
  int32_t max_context; /* tokens that attention was trained for; 0 without attention: no end */
  int32_t bos;         /* begins a text; -1 for none */
  int32_t add_bos;     /* 1: prompts begin with it */
  size_t eos_count;
  const int32_t *eos;            /* end an answer */
  const char *family;            /* mamba, mamba2, bamba, ... */
  const char *quantization;      /* the recipe */
  const char *tokenizer;         /* "tokenizer.json", "sentencepiece" or "bytes" */
  const char *tokenizer_file;    /* in the folder; "" for bytes */
  const char *chat_template;     /* in the folder; "" for none */
  const char *fingerprint;       /* SHA-256 of manifest.json, which pins every other byte */
} edge_info;
#define EDGE_INFO \
  {sizeof(edge_info), 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
EDGE_API edge_status edge_bundle_info(const edge_bundle *bundle, edge_info *info, edge_error *error);

typedef struct edge_session_options {
  size_t size;
  int32_t window;   /* most tokens of a run that can be taken back, 1 to 256 */
  int32_t capacity; /* tokens the KV caches hold; 0 is the trained context, at most 4096 */
  int32_t history;  /* tokens that room is kept for in the list of what was run */
  int32_t has_seed; /* 1: `seed` begins the random numbers; 0: the system does */
  uint64_t seed;
} edge_session_options;
#define EDGE_SESSION_OPTIONS {sizeof(edge_session_options), 8, 0, 65536, 0, 0}

/* Bytes by purpose. */
typedef struct edge_memory {
  size_t size;
  int64_t weights;   /* once for a model */
  int64_t state;     /* of a session: recurrent states, and logs of its last tokens */
  int64_t kv_cache;  /* of a session */
  int64_t logits;    /* of a session */
  int64_t workspace; /* values and inputs of runs; the values once for a model */
  int64_t total;     /* of these */
  int64_t snapshot;  /* one snapshot with full KV caches; no part of the total */
} edge_memory;
#define EDGE_MEMORY {sizeof(edge_memory), 0, 0, 0, 0, 0, 0, 0}
/* What a model with one session takes, before anything is loaded. Beside it lie the plan itself and
 * the kernels' own buffers, a few megabytes. */
EDGE_API edge_status edge_bundle_memory(const edge_bundle *bundle, const edge_session_options *options,
                                        edge_memory *memory, edge_error *error);

/* -- models ------------------------------------------------------------------------------------- */

typedef struct edge_model edge_model;

typedef struct edge_model_options {
  size_t size;
  int32_t threads;             /* that share the work, the caller included; 1: none is started */
  const char *instruction_set; /* "plain", "avx2", ...; NULL is the best one of this machine */
} edge_model_options;
#define EDGE_MODEL_OPTIONS {sizeof(edge_model_options), 1, NULL}

/* Loads the weights, which are hashed on the way, and the plan's kernels. The bundle may be closed
 * afterwards, and the model before its sessions: what is in use stays. */
EDGE_API edge_status edge_model_load(const edge_bundle *bundle, const edge_model_options *options,
                                     edge_model **model, edge_error *error);
EDGE_API void edge_model_close(edge_model *model);
/* The instruction set that runs. Lives as long as the model. */
EDGE_API const char *edge_model_instruction_set(const edge_model *model);

/* -- sessions ------------------------------------------------------------------------------------ */

/* One text that goes on: the state, the tokens that led to it, and random numbers. */
typedef struct edge_session edge_session;

EDGE_API edge_status edge_session_new(const edge_model *model, const edge_session_options *options,
                                      edge_session **session, edge_error *error);
EDGE_API void edge_session_free(edge_session *session);
/* Makes the longest run and a step that change nothing, so that runs on this thread allocate nothing
 * from now on. (One exception: a text longer than `history` doubles that list.) Only before the
 * first token; takes as long as reading a chunk of a prompt. */
EDGE_API edge_status edge_session_prepare(edge_session *session, edge_error *error);

enum {
  EDGE_RUN_COMMIT = 1,  /* up to a chunk of tokens, of which only the state after the last is kept */
  EDGE_RUN_ALL_ROWS = 2 /* logits after each token, of at most a window */
};
/* Runs tokens from where the session is. Without EDGE_RUN_COMMIT at most a window of them, all of
 * which can be taken back. `parents` makes them a tree: parents[t] < t is the token before t, -1 the
 * session's last one; edge_session_select must follow. NULL is a chain.
 * `logits` gets the address of `vocab_size` floats for the last token, or for each; they are the
 * session's, and valid until its next run. On an error the session is where it was. */
EDGE_API edge_status edge_session_run(edge_session *session, const int32_t *tokens, size_t count,
                                      const int32_t *parents, uint32_t flags, const float **logits,
                                      edge_error *error);
/* After a tree: keeps the path to `node` and forgets its other nodes; -1 keeps none. */
EDGE_API edge_status edge_session_select(edge_session *session, int32_t node, edge_error *error);
/* As if the last `count` tokens had never been run. */
EDGE_API edge_status edge_session_rewind(edge_session *session, size_t count, edge_error *error);
/* Back to before any token. */
EDGE_API edge_status edge_session_clear(edge_session *session, edge_error *error);
/* A second session that goes its own way, with the same reach. Nothing is run for it. */
EDGE_API edge_status edge_session_fork(edge_session *session, edge_session **copy, edge_error *error);

EDGE_API int64_t edge_session_position(const edge_session *session); /* tokens run */
EDGE_API int64_t edge_session_reach(const edge_session *session);    /* tokens rewind can take back */
/* The tokens run; `count` gets how many. Fewer than the position, the last ones, where the session
 * was loaded from a file that does not list them. Valid until the next run. */
EDGE_API const int32_t *edge_session_tokens(const edge_session *session, size_t *count);
/* A sampled token that has not been run: edge_generate begins with it. -1 for none. */
EDGE_API int32_t edge_session_pending(const edge_session *session);

/* A copy of a session at one moment: one recurrent state, and the KV rows in use. */
typedef struct edge_snapshot edge_snapshot;
EDGE_API edge_status edge_session_snapshot(edge_session *session, edge_snapshot **snapshot,
                                           edge_error *error);
/* Back to a snapshot of a session of the same model; nothing before it can be rewound. */
EDGE_API edge_status edge_session_restore(edge_session *session, const edge_snapshot *snapshot,
                                          edge_error *error);
EDGE_API int64_t edge_snapshot_bytes(const edge_snapshot *snapshot);
EDGE_API void edge_snapshot_free(edge_snapshot *snapshot);

/* Writes a file whole or not at all, as Session.save does in Python; either loads what the other
 * saved. Of a chat that Python saved, the messages are kept as they were. */
EDGE_API edge_status edge_session_save(edge_session *session, const char *path, edge_error *error);
/* Goes on from a file without running its tokens. Every byte of it is checked first. */
EDGE_API edge_status edge_session_load(edge_session *session, const char *path, edge_error *error);

/* -- generation ----------------------------------------------------------------------------------- */

typedef struct edge_sampling {
  size_t size;
  double temperature; /* divides the logits; 0 is greedy, and the filters below then change nothing */
  int32_t top_k;     /* keep the k likeliest, ties included; 0 is off */
  double top_p;       /* keep the fewest likeliest whose probabilities sum to p; 1 is off */
  double min_p;       /* drop what is less likely than this share of the likeliest; 0 is off */
  double repetition_penalty;  /* divides positive logits of recent tokens; 1 is off */
  int32_t repetition_window; /* how many recent tokens that concerns */
  int32_t has_seed;          /* 1: `seed` begins the random numbers of this answer anew */
  uint64_t seed;
  size_t forbidden_count;
  const int32_t *forbidden; /* ids that are never sampled */
} edge_sampling;
#define EDGE_SAMPLING {sizeof(edge_sampling), 0.7, 0, 1.0, 0.0, 1.0, 64, 0, 0, 0, NULL}
/* The defaults, and what the bundle says otherwise. `sampling` begins with its size. */
EDGE_API edge_status edge_bundle_sampling(const edge_bundle *bundle, edge_sampling *sampling,
                                          edge_error *error);

/* The next token from the logits of the session's last run, by its random numbers (`has_seed` is for
 * edge_generate). Nothing is run. */
EDGE_API edge_status edge_session_sample(edge_session *session, const edge_sampling *sampling,
                                         int32_t *token, edge_error *error);

typedef enum edge_finish {
  EDGE_FINISH_STOP = 0,      /* an eos token or one of `stop` */
  EDGE_FINISH_LENGTH = 1,    /* max_tokens */
  EDGE_FINISH_CANCELLED = 2, /* edge_session_cancel, or the callback */
  EDGE_FINISH_DEADLINE = 3,
  EDGE_FINISH_CONTEXT = 4    /* the KV caches are full */
} edge_finish;

typedef struct edge_generation {
  size_t size;
  const edge_sampling *sampling; /* NULL is the defaults, EDGE_SAMPLING */
  int64_t max_tokens;
  double deadline_s; /* seconds after which the answer ends with what there is; 0 is never */
  size_t stop_count;
  const int32_t *stop; /* ids that end the answer, besides the bundle's eos */
  int32_t ignore_eos;  /* 1: those of the bundle do not */
  /* Called for each token as it is sampled, the one that ends the answer included; another value
   * than 0 ends it. It must not use the session. NULL is allowed. */
  int (*on_token)(void *user, int32_t token);
  void *user;
} edge_generation;
#define EDGE_GENERATION {sizeof(edge_generation), NULL, 256, 0.0, 0, NULL, 0, NULL, NULL}

typedef struct edge_result {
  size_t size;
  edge_finish finish;
  int64_t tokens;        /* sampled */
  int64_t prompt_tokens; /* run before the first of them */
  double prompt_s, total_s;
} edge_result;
#define EDGE_RESULT {sizeof(edge_result), EDGE_FINISH_STOP, 0, 0, 0.0, 0.0}

/* Runs the pending token and the prompt in chunks, then samples and steps. The last token sampled is
 * pending afterwards. Without prompt and pending token it goes on from the last run's logits.
 * On an error the session holds what had been run, and agrees with edge_session_tokens. */
EDGE_API edge_status edge_generate(edge_session *session, const int32_t *prompt, size_t count,
                                   const edge_generation *options, edge_result *result,
                                   edge_error *error);
/* Ends the answer that is being made within one step or chunk, or else the next one as it begins.
 * From any thread, at any time while the session lives; async-signal-safe. */
EDGE_API void edge_session_cancel(edge_session *session);
/* Takes back a cancellation that has ended no answer yet. From any thread, as above. */
EDGE_API void edge_session_resume(edge_session *session);

/* -- text ------------------------------------------------------------------------------------------- */

/* Read here are tokenizers of bytes, SentencePiece models of the kind BPE that leave the text as it is
 * (Llama's, the demonstrations'), and byte-level BPE of a tokenizer.json with the words of GPT-2,
 * Llama 3 or Qwen 2. Others get EDGE_ERROR_INPUT, which says why: use the tokenizer's own library
 * with `tokenizer_file`. The file is read when it is first needed. These functions may be called from
 * several threads at once; a decoder is used by one. */

/* A part of a prompt. In a trusted one, which a chat template made, special tokens that are written
 * out become their ids. In other parts, which people typed, they never do. */
typedef struct edge_part {
  const char *text; /* UTF-8 */
  size_t bytes;
  int32_t trusted;
} edge_part;
/* The ids of a prompt, without `bos`. `count` gets what there is, also beyond `capacity`; then
 * nothing is written. */
EDGE_API edge_status edge_bundle_prompt(const edge_bundle *bundle, const edge_part *parts,
                                        size_t part_count, int32_t *tokens, size_t capacity,
                                        size_t *count, edge_error *error);
/* The same of one part that is not trusted. */
EDGE_API edge_status edge_bundle_encode(const edge_bundle *bundle, const char *text, size_t bytes,
                                        int32_t *tokens, size_t capacity, size_t *count,
                                        edge_error *error);
/* The special token that is written so, to stop at it. */
EDGE_API edge_status edge_bundle_token(const edge_bundle *bundle, const char *text, int32_t *token,
                                       edge_error *error);
/* The bytes that tokens stand for, which may begin and end inside a character. Special tokens stand
 * for none. `bytes` is as `count` above. */
EDGE_API edge_status edge_bundle_decode(const edge_bundle *bundle, const int32_t *tokens, size_t count,
                                        char *text, size_t capacity, size_t *bytes,
                                        edge_error *error);

/* The text of an answer while it is made: whole characters, and none that may belong to a stop text.
 * What is no UTF-8 becomes U+FFFD. Nothing is allocated per token. */
typedef struct edge_decoder edge_decoder;
typedef struct edge_decoder_options {
  size_t size;
  size_t stop_count;       /* at most 64 */
  const char *const *stop; /* texts that end the answer, of at most 4096 bytes; they are copied */
  int32_t continued;       /* 1: other text precedes, and a space at the beginning stays */
} edge_decoder_options;
#define EDGE_DECODER_OPTIONS {sizeof(edge_decoder_options), 0, NULL, 0}
EDGE_API edge_status edge_decoder_new(const edge_bundle *bundle, const edge_decoder_options *options,
                                      edge_decoder **decoder, edge_error *error);
EDGE_API void edge_decoder_free(edge_decoder *decoder);
/* The text that is certain after this token, perhaps none; it ends with a zero and is valid until the
 * next call. `stopped` gets 1 once a stop text was found: no more text comes. */
EDGE_API edge_status edge_decoder_feed(edge_decoder *decoder, int32_t token, const char **text,
                                       size_t *bytes, int32_t *stopped, edge_error *error);
/* What was held back, where the answer has ended otherwise. The decoder then begins anew. */
EDGE_API edge_status edge_decoder_finish(edge_decoder *decoder, const char **text, size_t *bytes,
                                         edge_error *error);

#ifdef __cplusplus
}
#endif
#endif
