/* edge.h: run a bundle from C or C++, without Python. The guide is docs/use/c.md.
 *
 * Conventions
 * - A function that can fail returns an edge_status, EDGE_OK (0) on success, and fills `error`
 *   unless that is NULL. A failed call changes nothing unless stated otherwise; it leaves an
 *   output handle as it was or sets it to NULL.
 * - "Fails with" names the errors specific to a function. Each may also return EDGE_ERROR_INPUT
 *   for a NULL argument or a structure of unknown size, EDGE_ERROR_MEMORY, and EDGE_ERROR_ENGINE
 *   for an internal failure.
 * - Option structures begin with their size. Initialize them with their macro, as in
 *   `edge_session_options o = EDGE_SESSION_OPTIONS;`, and set the fields that matter. A NULL
 *   pointer to options selects the defaults.
 * - Freeing or closing NULL does nothing.
 * - One thread at a time uses a session. A second thread gets EDGE_ERROR_ENGINE from the functions
 *   that return a status; of the others it may call only edge_session_cancel and
 *   edge_session_resume. Sessions of one model may be used on different threads; their runs take
 *   turns. Bundles and models never change, so threads may share them.
 * - A session owns all the memory that its runs need: see edge_session_prepare.
 * - The library keeps no global state, starts no thread unless `threads` is more than one, writes
 *   no log and reads no environment variable. Two things outlive a model: a thread that has run one
 *   keeps its kernels' buffers until it ends, and where the CPU has AMX, the first edge_model_load
 *   asks Linux to let the whole process use it.
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

/* Version of the binary interface, also the number in the library's SONAME. It goes up when
 * programs compiled with an older header would break. New functions, and new fields at the end of
 * structures, do not change it. */
#define EDGE_API_VERSION 1
/* Returns the EDGE_API_VERSION that the library was built with. */
EDGE_API int32_t edge_api_version(void);

typedef enum edge_status {
  EDGE_OK = 0,
  EDGE_ERROR_BUNDLE = 1,       /* the bundle is incomplete, altered, or of another version */
  EDGE_ERROR_STATE = 2,        /* a saved state, or the session's state, does not allow the call */
  EDGE_ERROR_INPUT = 3,        /* an argument is invalid */
  EDGE_ERROR_CONTEXT_FULL = 4, /* the KV caches have no room for the tokens */
  EDGE_ERROR_ENGINE = 5,       /* cannot run here, a run failed, or the session is in use */
  EDGE_ERROR_MEMORY = 6        /* not enough memory */
} edge_status;

/* Description of a failure; all zero after a success. Strings are zero-terminated and
 * truncated if they are too long. */
typedef struct edge_error {
  edge_status status;
  char file[512];     /* file or folder, or "" */
  char field[256];    /* field, tensor or argument, or "" */
  char message[1024]; /* what is wrong; several faults are listed as far as they fit */
} edge_error;

/* Bundles: models exported to a folder. */

typedef struct edge_bundle edge_bundle;

/* Opens a folder made by `edge export`. Reads and checks manifest.json, the list of files and the
 * launch plan, but no weights.
 * Fails with EDGE_ERROR_BUNDLE if the folder or a file is missing, altered, not listed in the
 * manifest, or of another version. */
EDGE_API edge_status edge_bundle_open(const char *folder, edge_bundle **bundle, edge_error *error);
/* Frees the bundle. Models and decoders made from it keep what they need. */
EDGE_API void edge_bundle_close(edge_bundle *bundle);
/* Checks the size and SHA-256 of every listed file, including files that this library does not use.
 * Fails with EDGE_ERROR_BUNDLE, naming the first file that differs. */
EDGE_API edge_status edge_bundle_verify(const edge_bundle *bundle, edge_error *error);

/* Facts about a bundle. Strings and lists live as long as the bundle. */
typedef struct edge_info {
  size_t size;
  int32_t vocab_size;  /* number of logits; ids from `token_count` on are padding without text */
  int32_t token_count; /* number of tokens in the tokenizer */
  int32_t layers;      /* number of layers */
  int32_t chunk;       /* maximum number of tokens of a run with EDGE_RUN_COMMIT */
  int32_t max_context; /* trained context in tokens; 0 if unknown, or unlimited without attention */
  int32_t bos;         /* id that begins a text; -1 for none */
  int32_t add_bos;     /* 1: prompts begin with `bos` */
  size_t eos_count;
  const int32_t *eos;            /* ids that end an answer */
  const char *family;            /* mamba, mamba2, bamba, ... */
  const char *quantization;      /* name of the recipe */
  const char *tokenizer;         /* "tokenizer.json", "sentencepiece" or "bytes" */
  const char *tokenizer_file;    /* path within the folder; "" for bytes */
  const char *chat_template;     /* path within the folder; "" for none */
  const char *fingerprint;       /* SHA-256 of manifest.json, which has all other hashes */
} edge_info;
#define EDGE_INFO \
  {sizeof(edge_info), 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
/* Fills `info`, which must be initialized with EDGE_INFO. */
EDGE_API edge_status edge_bundle_info(const edge_bundle *bundle, edge_info *info, edge_error *error);

typedef struct edge_session_options {
  size_t size;
  int32_t window;   /* maximum number of tokens that can be rewound, 1 to 256 */
  int32_t capacity; /* tokens that the KV caches hold; 0: the trained context, at most 4096 */
  int32_t history;  /* tokens reserved in the list of tokens run, 1 to 2^28 */
  int32_t has_seed; /* 1: `seed` seeds the random numbers; 0: the system does */
  uint64_t seed;
} edge_session_options;
#define EDGE_SESSION_OPTIONS {sizeof(edge_session_options), 8, 0, 65536, 0, 0}

/* Memory by purpose, in bytes. */
typedef struct edge_memory {
  size_t size;
  int64_t weights;   /* shared by a model's sessions */
  int64_t state;     /* per session: recurrent states and the logs of the last tokens */
  int64_t kv_cache;  /* per session */
  int64_t logits;    /* per session */
  int64_t workspace; /* intermediate values, shared by a model's sessions, and inputs per session */
  int64_t total;     /* sum of the above, for one session */
  int64_t snapshot;  /* one snapshot with full KV caches; not part of the total */
} edge_memory;
#define EDGE_MEMORY {sizeof(edge_memory), 0, 0, 0, 0, 0, 0, 0}
/* Computes the memory of a model with one session, before anything is loaded. Not included are the
 * plan and the kernels' buffers, a few megabytes. `memory` must be initialized with EDGE_MEMORY.
 * Fails with EDGE_ERROR_INPUT if an option is out of range, and with EDGE_ERROR_BUNDLE if the plan
 * does not allow these sizes. */
EDGE_API edge_status edge_bundle_memory(const edge_bundle *bundle, const edge_session_options *options,
                                        edge_memory *memory, edge_error *error);

/* Models: loaded weights and kernels, shared by sessions. */

typedef struct edge_model edge_model;

typedef struct edge_model_options {
  size_t size;
  int32_t threads;             /* threads of a run including the caller, 1 to 1024; 1 starts none */
  const char *instruction_set; /* "plain", "avx2", ...; NULL: the best one of this machine */
  int32_t pin; /* 1: thread i stays on the i-th CPU that the caller may use, counted from 0; the
                * caller itself, thread 0, is left as it is. Linux only */
} edge_model_options;
#define EDGE_MODEL_OPTIONS {sizeof(edge_model_options), 1, NULL, 0}

/* Loads and hashes the weights, and prepares the plan's kernels. The bundle may be closed
 * afterwards.
 * Fails with EDGE_ERROR_BUNDLE if a file was altered or the plan cannot be run, EDGE_ERROR_INPUT
 * if `threads` is out of range, or above the number of CPUs with `pin`, or the machine lacks the
 * instruction set, EDGE_ERROR_MEMORY if the weights exceed the available memory, and
 * EDGE_ERROR_ENGINE if threads cannot be started or pinned. */
EDGE_API edge_status edge_model_load(const edge_bundle *bundle, const edge_model_options *options,
                                     edge_model **model, edge_error *error);
/* Frees the model. Its sessions may outlive it. */
EDGE_API void edge_model_close(edge_model *model);
/* Returns the name of the instruction set in use, "" for NULL. Valid as long as the model. */
EDGE_API const char *edge_model_instruction_set(const edge_model *model);

/* Sessions: one text each, with its state, the tokens that led to it, and random numbers. */

typedef struct edge_session edge_session;

/* Makes an empty session and allocates its memory.
 * Fails as edge_bundle_memory does, with EDGE_ERROR_MEMORY if the memory is not available, and with
 * EDGE_ERROR_ENGINE if the system has no random numbers for a seed. */
EDGE_API edge_status edge_session_new(const edge_model *model, const edge_session_options *options,
                                      edge_session **session, edge_error *error);
EDGE_API void edge_session_free(edge_session *session);
/* Rehearses the longest run and a step without changing the session, so that later runs on this
 * thread allocate nothing. One exception: a text longer than `history` doubles the list of tokens.
 * Takes as long as the prefill of a chunk. Fails with EDGE_ERROR_STATE after the first token. */
EDGE_API edge_status edge_session_prepare(edge_session *session, edge_error *error);

enum {
  EDGE_RUN_COMMIT = 1,  /* run up to a chunk of tokens, none of which can be rewound */
  EDGE_RUN_ALL_ROWS = 2 /* logits after each token, for at most a window of tokens */
};
/* Runs `count` tokens after the session's last one. Without EDGE_RUN_COMMIT, at most a window of
 * tokens, all of which can be rewound.
 * `parents`: NULL for a chain. Otherwise the tokens are a tree: parents[t] < t is the index of the
 *   token before token t, -1 the session's last token. edge_session_select must follow. A tree
 *   cannot be committed.
 * `flags`: EDGE_RUN_COMMIT, EDGE_RUN_ALL_ROWS, both, or 0.
 * `logits`: NULL, or receives the address of `vocab_size` floats for the last token, or for each
 *   token in turn with EDGE_RUN_ALL_ROWS. The session owns them until its next run.
 * Fails with EDGE_ERROR_INPUT for a wrong number of tokens, id, parent or flag,
 * EDGE_ERROR_CONTEXT_FULL if the KV caches have no room, EDGE_ERROR_STATE if a tree awaits
 * edge_session_select, and EDGE_ERROR_ENGINE if logits are not finite or the process was forked
 * after the model was loaded. The session's position is then unchanged. */
EDGE_API edge_status edge_session_run(edge_session *session, const int32_t *tokens, size_t count,
                                      const int32_t *parents, uint32_t flags, const float **logits,
                                      edge_error *error);
/* Keeps the path to `node` of the tree that was run, and drops its other nodes; -1 drops all.
 * Fails with EDGE_ERROR_STATE if no tree was run, and with EDGE_ERROR_INPUT if it has no such
 * node. */
EDGE_API edge_status edge_session_select(edge_session *session, int32_t node, edge_error *error);
/* Rewinds the session by `count` tokens, as if they had never been run.
 * Fails with EDGE_ERROR_STATE if `count` exceeds edge_session_reach, or a tree awaits
 * edge_session_select. */
EDGE_API edge_status edge_session_rewind(edge_session *session, size_t count, edge_error *error);
/* Drops all tokens. The random numbers continue. */
EDGE_API edge_status edge_session_clear(edge_session *session, edge_error *error);
/* Makes an independent copy of the session, with the same reach. Nothing is run.
 * Fails with EDGE_ERROR_STATE if a tree awaits edge_session_select. */
EDGE_API edge_status edge_session_fork(edge_session *session, edge_session **copy, edge_error *error);

/* Returns the number of tokens run, 0 for NULL. */
EDGE_API int64_t edge_session_position(const edge_session *session);
/* Returns the number of tokens that edge_session_rewind can take back now, 0 for NULL. */
EDGE_API int64_t edge_session_reach(const edge_session *session);
/* Returns the tokens run, their number in `count` unless that is NULL. After loading a file that
 * does not list its tokens, only those run since are known. Valid until the session changes. */
EDGE_API const int32_t *edge_session_tokens(const edge_session *session, size_t *count);
/* Returns the token that was sampled but not yet run, or -1. edge_generate runs it first. */
EDGE_API int32_t edge_session_pending(const edge_session *session);

/* A copy of a session at one moment: one recurrent state and the KV rows in use. It may outlive the
 * session. */
typedef struct edge_snapshot edge_snapshot;
/* Takes a snapshot. Fails with EDGE_ERROR_STATE if a tree awaits edge_session_select. */
EDGE_API edge_status edge_session_snapshot(edge_session *session, edge_snapshot **snapshot,
                                           edge_error *error);
/* Replaces the session's content with a snapshot of any session of the same model. Tokens before
 * it cannot be rewound.
 * Fails with EDGE_ERROR_STATE if the snapshot belongs to another model or has more pending tokens
 * than this session's window, and with EDGE_ERROR_CONTEXT_FULL if it exceeds the capacity. */
EDGE_API edge_status edge_session_restore(edge_session *session, const edge_snapshot *snapshot,
                                          edge_error *error);
/* Returns the size of a snapshot in bytes, 0 for NULL. */
EDGE_API int64_t edge_snapshot_bytes(const edge_snapshot *snapshot);
EDGE_API void edge_snapshot_free(edge_snapshot *snapshot);

/* Saves the session as Python's Session.save does; either loads what the other saved. The file is
 * replaced atomically, and the previous one is kept as `path` with ~ added. The messages of a chat
 * that was loaded from a file are saved unchanged.
 * Fails with EDGE_ERROR_STATE if the file cannot be written, the state is not finite, or a tree
 * awaits edge_session_select. */
EDGE_API edge_status edge_session_save(edge_session *session, const char *path, edge_error *error);
/* Replaces the session's content with a saved one, without running its tokens. The whole file is
 * checked first.
 * Fails with EDGE_ERROR_STATE if the file cannot be read, is damaged, belongs to another model, or
 * holds more tokens than the capacity. */
EDGE_API edge_status edge_session_load(edge_session *session, const char *path, edge_error *error);

/* Generation. */

typedef struct edge_sampling {
  size_t size;
  double temperature; /* divides the logits, 0 to 100; 0 is greedy and ignores the filters */
  int32_t top_k;     /* keep the k most likely tokens, ties included; 0: off */
  double top_p;       /* keep the fewest most likely tokens whose probabilities sum to p; 1: off */
  double min_p;       /* drop tokens below this fraction of the highest probability; 0: off */
  double repetition_penalty;  /* divides positive and multiplies negative logits of recent tokens,
                               * above 0 to 100; 1: off */
  int32_t repetition_window; /* number of recent tokens that are penalized, at most 2^20 */
  int32_t has_seed;          /* 1: `seed` reseeds the random numbers for this answer */
  uint64_t seed;
  size_t forbidden_count;
  const int32_t *forbidden; /* ids that are never sampled */
  size_t allowed_words;     /* words of `allowed`; later ids are not sampled */
  const uint32_t *allowed;  /* ids that may be sampled: bit id % 32 of word id / 32; NULL: all */
} edge_sampling;
#define EDGE_SAMPLING {sizeof(edge_sampling), 0.7, 0, 1.0, 0.0, 1.0, 64, 0, 0, 0, NULL, 0, NULL}
/* Fills `sampling` with the bundle's defaults, and with those of EDGE_SAMPLING where the bundle has
 * none. `sampling` must be initialized with EDGE_SAMPLING. */
EDGE_API edge_status edge_bundle_sampling(const edge_bundle *bundle, edge_sampling *sampling,
                                          edge_error *error);

/* Samples a token from the last logits, with the session's random numbers. `has_seed` is ignored.
 * Nothing is run.
 * Fails with EDGE_ERROR_INPUT if there are no logits, a parameter is out of range or no id is
 * allowed, and with EDGE_ERROR_ENGINE if no logit is finite. */
EDGE_API edge_status edge_session_sample(edge_session *session, const edge_sampling *sampling,
                                         int32_t *token, edge_error *error);

typedef enum edge_finish {
  EDGE_FINISH_STOP = 0,      /* an eos token or an id in `stop` */
  EDGE_FINISH_LENGTH = 1,    /* max_tokens */
  EDGE_FINISH_CANCELLED = 2, /* edge_session_cancel, or the callback */
  EDGE_FINISH_DEADLINE = 3,  /* deadline_s */
  EDGE_FINISH_CONTEXT = 4    /* the KV caches are full */
} edge_finish;

/* The form of an answer, such as a grammar, a schema or a list of texts. edge_choices is one; a
 * library of grammars, such as llguidance or xgrammar, can be another. The callbacks must not use
 * the session, except to cancel it. They return 0, EDGE_CONSTRAINT_DONE, or any other value, which
 * fails the answer with EDGE_ERROR_INPUT. */
typedef struct edge_constraint {
  size_t size;
  /* Called before each token is sampled: sets bit id % 32 of mask[id / 32] for each id that may
   * follow. All `words` words are 0 before. EDGE_CONSTRAINT_DONE: nothing may follow. */
  int (*allow)(void *user, uint32_t *mask, size_t words);
  /* Called with each sampled token, before on_token. EDGE_CONSTRAINT_DONE: nothing may follow. */
  int (*accept)(void *user, int32_t token);
  void *user; /* passed to both */
} edge_constraint;
#define EDGE_CONSTRAINT {sizeof(edge_constraint), NULL, NULL, NULL}
#define EDGE_CONSTRAINT_DONE 1 /* ends the answer with EDGE_FINISH_STOP */

typedef struct edge_generation {
  size_t size;
  const edge_sampling *sampling; /* NULL: EDGE_SAMPLING */
  int64_t max_tokens; /* maximum number of tokens to sample, at least 1 */
  double deadline_s; /* seconds after which generation ends; 0: never */
  size_t stop_count;
  const int32_t *stop; /* ids that end the answer, in addition to the bundle's eos */
  int32_t ignore_eos;  /* 1: the bundle's eos does not end the answer */
  /* Called with each token as it is sampled, including the last one; any value other than 0 ends
   * the answer. Must not use the session, except to cancel it. May be NULL. */
  int (*on_token)(void *user, int32_t token);
  void *user; /* passed to on_token */
  const edge_constraint *constraint; /* form of the answer; NULL: none */
} edge_generation;
#define EDGE_GENERATION {sizeof(edge_generation), NULL, 256, 0.0, 0, NULL, 0, NULL, NULL, NULL}

typedef struct edge_result {
  size_t size;
  edge_finish finish;
  int64_t tokens;        /* tokens sampled */
  int64_t prompt_tokens; /* tokens run before the first one was sampled */
  double prompt_s, total_s; /* seconds until the prompt was run, and in all */
} edge_result;
#define EDGE_RESULT {sizeof(edge_result), EDGE_FINISH_STOP, 0, 0, 0.0, 0.0}

/* Generates an answer: runs the pending token and the prompt in chunks, then samples and steps.
 * The last sampled token is pending afterwards. With neither a prompt nor a pending token,
 * sampling continues from the last logits. `result` may be NULL; it is filled after failures too.
 * Fails with EDGE_ERROR_INPUT if a parameter or id is out of range, there is nothing to continue
 * from, or a constraint fails or allows no id, EDGE_ERROR_CONTEXT_FULL if the prompt does not fit, EDGE_ERROR_STATE if a tree awaits
 * edge_session_select, and EDGE_ERROR_ENGINE if a run fails. The session then holds the tokens run
 * so far, as edge_session_tokens lists them. */
EDGE_API edge_status edge_generate(edge_session *session, const int32_t *prompt, size_t count,
                                   const edge_generation *options, edge_result *result,
                                   edge_error *error);
/* Ends the answer in progress within one step or chunk, otherwise the next answer as it begins. May
 * be called from any thread while the session exists; async-signal-safe. */
EDGE_API void edge_session_cancel(edge_session *session);
/* Withdraws a cancellation that has not yet ended an answer. May be called like
 * edge_session_cancel. */
EDGE_API void edge_session_resume(edge_session *session);

/* Text.
 *
 * Supported are byte tokenizers; SentencePiece BPE models whose normalizer does not change the
 * text (Llama's form, the demonstration models); and byte-level BPE of a tokenizer.json with the
 * words of GPT-2, Llama 3, Qwen 2 or Qwen 3.5. Functions fail with EDGE_ERROR_INPUT for other
 * tokenizers and say why: give the bundle a tokenizer of your own by edge_bundle_use_tokenizer. They
 * fail with EDGE_ERROR_BUNDLE if the file was altered; it is read on first use. Threads may call the
 * functions of a bundle concurrently; one thread at a time uses a decoder. */

/* A special token, such as a mark between turns, and how a prompt spells it. */
typedef struct edge_special {
  const char *text; /* UTF-8 of 1 to 1024 bytes */
  int32_t id;
} edge_special;

/* A tokenizer of the program's own, such as a library that reads `tokenizer_file`. The callbacks
 * return 0; any other value fails the call with EDGE_ERROR_INPUT. */
typedef struct edge_tokenizer {
  size_t size;
  /* Encodes `bytes` bytes of UTF-8, at least one, without special tokens and without `bos`. Writes the
   * ids to `tokens` and their number to `count`. If that exceeds `capacity`, `tokens` is not read,
   * and the callback is called again with room for `count`. `first`: 1 if nothing precedes the text
   * in the prompt; a tokenizer that puts a space before texts does so only then. Called during
   * edge_bundle_prompt, edge_bundle_encode and edge_choices_new, on the thread that calls them. */
  int (*encode)(void *user, const char *text, size_t bytes, int32_t first, int32_t *tokens,
                size_t capacity, size_t *count);
  /* Sets the bytes that a token stands for, at most 16384, which are copied: parts of a character for
   * some tokens, none for tokens that answers do not show. Called for each id below `token_count`
   * during edge_bundle_use_tokenizer, and never again. */
  int (*token)(void *user, int32_t token, const char **text, size_t *bytes);
  size_t special_count;
  const edge_special *specials; /* tokens that only trusted text may contain; they are copied */
  int32_t strips_space; /* 1: `encode` puts a space before a first word, and answers drop one */
  void *user; /* passed to the callbacks; must exist until the bundle is closed */
} edge_tokenizer;
#define EDGE_TOKENIZER {sizeof(edge_tokenizer), NULL, NULL, 0, NULL, 0, NULL}
/* Gives the bundle the program's tokenizer, instead of the one that this library reads. Call it
 * before other functions for text, choices and decoders, and before other threads use the bundle.
 * The bundle's `bos`, `eos` and `pad` have no bytes and never come from typed text, whatever the
 * tokenizer says.
 * Fails with EDGE_ERROR_INPUT if the bundle has used a tokenizer before, a callback is missing or
 * fails, or a special token is not valid, and with EDGE_ERROR_BUNDLE if the tokenizer's file was
 * altered. */
EDGE_API edge_status edge_bundle_use_tokenizer(edge_bundle *bundle, const edge_tokenizer *tokenizer,
                                               edge_error *error);
/* Reads a file of the bundle, such as its `tokenizer_file`, and checks its SHA-256. `bytes` receives
 * its size; if it exceeds `capacity`, nothing is written to `data`, and the call succeeds.
 * Fails with EDGE_ERROR_BUNDLE if the manifest does not list the file, it was altered, or it exceeds
 * 64 MiB. */
EDGE_API edge_status edge_bundle_read(const edge_bundle *bundle, const char *file, char *data,
                                      size_t capacity, size_t *bytes, edge_error *error);

/* A part of a prompt. In a trusted part, which a chat template made, special tokens written as text
 * become their ids. In other parts, such as user input, they never do. */
typedef struct edge_part {
  const char *text; /* UTF-8 */
  size_t bytes;     /* length of `text` */
  int32_t trusted;  /* 1: trusted */
} edge_part;
/* Encodes a prompt given in parts, without `bos`. `count` receives the number of ids; if it exceeds
 * `capacity`, nothing is written to `tokens`, and the call succeeds.
 * Fails with EDGE_ERROR_INPUT if the text is not UTF-8, cannot be encoded, or exceeds 64 MiB. */
EDGE_API edge_status edge_bundle_prompt(const edge_bundle *bundle, const edge_part *parts,
                                        size_t part_count, int32_t *tokens, size_t capacity,
                                        size_t *count, edge_error *error);
/* Encodes one untrusted text of `bytes` bytes, as edge_bundle_prompt does. */
EDGE_API edge_status edge_bundle_encode(const edge_bundle *bundle, const char *text, size_t bytes,
                                        int32_t *tokens, size_t capacity, size_t *count,
                                        edge_error *error);
/* Looks up the id of the special token written as `text`, for use in `stop`.
 * Fails with EDGE_ERROR_INPUT if there is none; `token` is then -1. */
EDGE_API edge_status edge_bundle_token(const edge_bundle *bundle, const char *text, int32_t *token,
                                       edge_error *error);
/* Decodes tokens to bytes, which may begin or end inside a character. Special tokens have no bytes.
 * `bytes` receives the number of bytes; if it exceeds `capacity`, nothing is written to `text`, and
 * the call succeeds. No zero is appended.
 * Fails with EDGE_ERROR_INPUT if a token is out of range. */
EDGE_API edge_status edge_bundle_decode(const edge_bundle *bundle, const int32_t *tokens, size_t count,
                                        char *text, size_t capacity, size_t *bytes,
                                        edge_error *error);

/* Decodes an answer token by token, into whole characters that cannot belong to a stop text.
 * Invalid UTF-8 becomes U+FFFD. Allocates nothing per token. */
typedef struct edge_decoder edge_decoder;
typedef struct edge_decoder_options {
  size_t size;
  size_t stop_count;       /* at most 64 */
  const char *const *stop; /* texts of 1 to 4096 bytes that end the answer; they are copied */
  int32_t continued;       /* 1: other text precedes, so a leading space is kept */
} edge_decoder_options;
#define EDGE_DECODER_OPTIONS {sizeof(edge_decoder_options), 0, NULL, 0}
/* Makes a decoder. Fails with EDGE_ERROR_INPUT for invalid stop texts. */
EDGE_API edge_status edge_decoder_new(const edge_bundle *bundle, const edge_decoder_options *options,
                                      edge_decoder **decoder, edge_error *error);
EDGE_API void edge_decoder_free(edge_decoder *decoder);
/* Adds a token and returns the text that is now certain, possibly empty. The text ends with a zero
 * and is valid until the decoder's next call. `stopped` receives 1 once a stop text was found; no
 * more text follows. `text`, `bytes` and `stopped` may each be NULL.
 * Fails with EDGE_ERROR_INPUT if the token is out of range. */
EDGE_API edge_status edge_decoder_feed(edge_decoder *decoder, int32_t token, const char **text,
                                       size_t *bytes, int32_t *stopped, edge_error *error);
/* Returns the text held back at the end of an answer, as edge_decoder_feed does, and resets the
 * decoder. */
EDGE_API edge_status edge_decoder_finish(edge_decoder *decoder, const char **text, size_t *bytes,
                                         edge_error *error);

/* Answers that are exactly one of several texts, with the tokens that `choices` gives in Python. Where
 * all texts go on alike, only the tokenizer's usual tokens may follow. A tokenizer that puts a space
 * before a text may begin the answer with one, which edge_decoder does not show. Needs a tokenizer
 * that is supported, or the program's own. One thread at a time uses it. */
typedef struct edge_choices edge_choices;
/* Makes the form of `count` texts, which are UTF-8 and are copied.
 * Fails with EDGE_ERROR_INPUT for more than 1000 texts, and for one that is empty or longer than
 * 4096 bytes. */
EDGE_API edge_status edge_choices_new(const edge_bundle *bundle, const char *const *texts,
                                      size_t count, edge_choices **choices, edge_error *error);
EDGE_API void edge_choices_free(edge_choices *choices);
/* Begins an answer and fills in its constraint, which must be initialized with EDGE_CONSTRAINT. It
 * is valid until the choices are freed. Allocates nothing, nor do its callbacks; `accept` returns -1
 * for a token that goes on with no text. */
EDGE_API edge_status edge_choices_begin(edge_choices *choices, edge_constraint *constraint,
                                        edge_error *error);
/* Returns the index of the text that the answer is; -1 if it ended before one was complete, and for
 * NULL. */
EDGE_API int32_t edge_choices_found(const edge_choices *choices);

#ifdef __cplusplus
}
#endif
#endif
